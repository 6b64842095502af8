"""Rewards for the form of a completion: think and answer tags.

They raise for no completion, and take time linear in the text. Where the prompt itself ends with <think>, as with some
chat templates, that tag counts as the completion's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
OPENING = TAGS[0]
PROMPT_TAIL = 64


def format_reward(
    completions: Sequence[str], prompts: Sequence[str] | None = None
) -> list[float | None]:
    """Returns 1.0 for <think>something</think> <answer>something</answer> and nothing else, 0.0 otherwise."""
    return [float(has_strict_format(text)) for text in opened(completions, prompts)]


def soft_format_reward(
    completions: Sequence[str], prompts: Sequence[str] | None = None
) -> list[float | None]:
    """Returns 1.0 where filled think tags precede filled answer tags, whatever is around them, else 0.0."""
    return [float(has_soft_format(text)) for text in opened(completions, prompts)]


def tag_count_reward(
    completions: Sequence[str], prompts: Sequence[str] | None = None
) -> list[float | None]:
    """Counts a quarter for each of the four tags that occurs exactly once."""
    return [sum(text.count(tag) == 1 for tag in TAGS) / 4 for text in opened(completions, prompts)]


def think_format_reward(
    completions: Sequence[str], prompts: Sequence[str] | None = None
) -> list[float | None]:
    """Returns 1.0 where the text begins with <think>, closes it once, and opens no second one, else 0.0."""
    return [
        float(
            text.lstrip().startswith(OPENING)
            and text.count(OPENING) == 1
            and text.count("</think>") == 1
        )
        for text in opened(completions, prompts)
    ]


def opened(completions: Sequence[str], prompts: Sequence[str] | None) -> list[str]:
    """Returns the completions, with the think tag that their prompt ends with; "" for what is not text."""
    texts = []
    for text, prompt in zip(completions, prompts or repeat(""), strict=prompts is not None):
        whole = text if isinstance(text, str) else ""
        if isinstance(prompt, str) and prompt[-PROMPT_TAIL:].rstrip().endswith(OPENING):
            whole = OPENING + whole
        texts.append(whole)
    return texts


def has_strict_format(text: str) -> bool:
    stripped = text.strip()
    if any(stripped.count(tag) != 1 for tag in TAGS):
        return False
    if not (stripped.startswith("<think>") and stripped.endswith("</answer>")):
        return False
    thought, _, rest = stripped[len("<think>") :].partition("</think>")
    between, tag, answer = rest.partition("<answer>")
    filled = thought.strip() and answer[: -len("</answer>")].strip()
    return bool(tag and filled and not between.strip())


def has_soft_format(text: str) -> bool:
    _, _, rest = text.partition("<think>")
    thought, _, rest = rest.partition("</think>")
    _, _, rest = rest.partition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    return bool(closed and thought.strip() and answer.strip())
