"""Knights and knaves: who tells the truth. Scores as in Logic-RL (arXiv:2502.14768, section 2.2).

It raises for no completion, and takes time linear in the text. An answer that calls one person both, or leaves one out,
is unreadable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from mindgrpo.rewards.builtin.formats import TAGS, opened
from mindgrpo.rewards.builtin.numerals import answer_content

FORMAT_RIGHT, FORMAT_WRONG = 1.0, -1.0
ANSWER_RIGHT, ANSWER_WRONG, ANSWER_UNREADABLE = 2.0, -1.5, -2.0
LONGEST_ANSWER = 10_000
WORD = re.compile(r"[^\W\d_]+")
ROLES = {"knight": "knight", "knights": "knight", "knave": "knave", "knaves": "knave"}


def kk_reward(
    completions: Sequence[str], answers: Sequence[str], prompts: Sequence[str] | None = None
) -> list[float | None]:
    """Returns 1 or -1 for the format, plus 2 (all right), -1.5 (someone wrong) or -2 (unreadable): -3 to 3.

    A gold answer reads "(1) Zoey is a knight (2) Ted is a knave", one per line or in a row. None where
    it names nobody. The tags <think></think><answer></answer> must each occur once, in this order.
    """
    return [
        score(text, roles_of(gold_text(gold)))
        for text, gold in zip(opened(completions, prompts), answers, strict=True)
    ]


def score(text: str, gold: Mapping[str, str]) -> float | None:
    if not gold:
        return None
    if not tags_in_order(text):
        return FORMAT_WRONG + ANSWER_UNREADABLE
    roles = roles_of((answer_content(text) or "")[-LONGEST_ANSWER:], set(gold))
    if roles.keys() != gold.keys():
        return FORMAT_RIGHT + ANSWER_UNREADABLE
    return FORMAT_RIGHT + (ANSWER_RIGHT if roles == gold else ANSWER_WRONG)


def gold_text(gold: object) -> str:
    """Returns the text of a gold answer, which may be in JSON under solution_text_format."""
    text = str(gold)[:LONGEST_ANSWER]
    if text.lstrip().startswith("{"):
        try:
            held = json.loads(text)
        except (ValueError, RecursionError):
            return text
        if isinstance(held, dict):
            return str(held.get("solution_text_format", text))
    return text


def tags_in_order(text: str) -> bool:
    positions = [text.find(tag) for tag in TAGS]
    return positions == sorted(positions) and all(text.count(tag) == 1 for tag in TAGS)


def roles_of(text: str, names: set[str] | None = None) -> dict[str, str]:
    """Returns roles by name (lower case). Without `names` a name is the last capitalised word before its role.

    A person who is given both roles, or told not to have one, is left out.
    """
    roles: dict[str, str] = {}
    contradicted: set[str] = set()
    waiting: list[str] = []
    for word in WORD.findall(text):
        role = ROLES.get(word.lower())
        if role is not None:
            for name in waiting:
                if roles.setdefault(name, role) != role:
                    contradicted.add(name)
            waiting = []
        elif word.lower() == "not":
            contradicted.update(waiting)  # who is not the one is the other, but was not said to be
            waiting = []
        elif names is None:
            waiting = [word.lower()] if word[0].isupper() else waiting
        elif word.lower() in names:
            # "Zoey and Ted are knights" gives both their role.
            waiting.append(word.lower())
    return {name: role for name, role in roles.items() if name not in contradicted}
