"""Chooses the samples that a page shows: complete groups of some steps, with each token's text and arrays."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from mindgrpo.report.run_folder import RunFolder, RunRow, number_of

MAX_STEPS = 100
# Of a completion's tokens (of its characters, where tokens have no texts) these are shown, at its start and its end.
HEAD_TOKENS, TAIL_TOKENS = 1500, 500
HEAD_CHARACTERS, TAIL_CHARACTERS = 6000, 2000
ARRAYS = ("gap", "log_ratio", "entropy", "kl", "logprob")


@dataclass
class ShownSamples:
    """`by_step`: what a page shows of each step, as JSON."""

    by_step: dict[int, str] = field(default_factory=dict)
    num_shown: int = 0
    arrays: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Packer:
    run: RunFolder
    tokenizer: Tokenizer | None
    group_size: int

    def groups(self, step: int) -> list[Group]:
        return groups_of(self.run.completions.of_step(step), self.group_size)

    def arrays(self, step: int) -> dict[int, RunRow]:
        rows = self.run.per_token.of_step(step)
        return {row["sample"]: row for row in rows if row and type(row.get("sample")) is int}

    def mean(self, group: Group) -> float:
        totals = [total_of(row) for _, row in group]
        scored = [total for total in totals if total is not None]
        return sum(scored) / len(scored) if scored else 0.0

    def group(self, group: Group, arrays: Mapping[int, RunRow]) -> dict[str, Any]:
        first = group[0][1]
        samples = [self.sample(number, row, arrays.get(number, {})) for number, row in group]
        prompt = text_of(first, "prompt")
        for sample, (_, row) in zip(samples, group, strict=True):
            if (own := text_of(row, "prompt")) != prompt:
                sample["prompt"] = shortened(own)
        return {
            "prompt": shortened(prompt),
            "answer": shortened(text_of(first, "answer")),
            "samples": samples,
        }

    def sample(self, number: int, row: RunRow, arrays: RunRow) -> dict[str, Any]:
        ids = row.get("token_ids")
        is_ids = isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)
        texts = texts_of(self.tokenizer, ids or []) if is_ids and self.tokenizer else None
        sample: dict[str, Any] = {
            "number": number,
            "text": shortened(text_of(row, "completion")),
            "length": row.get("length"),
            "finish": text_of(row, "finish_reason"),
            "rewards": rewards_of(row),
            "total": total_of(row),
            "advantage": significant(row.get("advantage")),
        }
        if turns := turns_of(row):
            sample["turns"] = turns
        if texts is None:
            return sample
        sample["arrays"] = {
            name: cut for name in ARRAYS if (cut := cut_array(arrays.get(name), len(texts)))
        }
        if len(texts) > HEAD_TOKENS + TAIL_TOKENS:
            sample["omitted"] = len(texts) - HEAD_TOKENS - TAIL_TOKENS
            texts = texts[:HEAD_TOKENS] + texts[-TAIL_TOKENS:]
        sample |= {"text": "".join(texts), "lengths": packed_lengths(texts)}
        return sample


def choose_samples(run: RunFolder, budget: int) -> ShownSamples:
    """Of evenly spaced steps whole groups from all over the rewards, in at most `budget` bytes of JSON."""
    packer = _packer(run)
    shown = ShownSamples()
    steps = run.completions.steps
    if not steps:
        return shown
    largest = max(_group_bytes(packer, step) for step in (steps[0], steps[-1]))
    chosen = evenly(steps, min(MAX_STEPS, max(1, budget // largest)))
    for position, step in enumerate(chosen):
        # What a step leaves of its share goes to the steps after it.
        share = budget // (len(chosen) - position)
        packed, size = _pack_step(packer, step, share, shown)
        if packed:
            shown.by_step[step] = packed
            budget -= size
    return shown


def _packer(run: RunFolder) -> _Packer:
    size = int(number_of(run.values, "rl_config.num_generations", 0))
    return _Packer(run, tokenizer_of(run), max(0, size))


def _group_bytes(packer: _Packer, step: int) -> int:
    """What the largest group of a step takes."""
    arrays = packer.arrays(step)
    groups = (packer.group(group, arrays) for group in packer.groups(step))
    return max((num_bytes(data_text(group)) for group in groups), default=1)


def _pack_step(packer: _Packer, step: int, share: int, shown: ShownSamples) -> tuple[str, int]:
    """The step's JSON and its bytes; ("", 0) where no group fits."""
    groups, arrays = packer.groups(step), packer.arrays(step)
    packed: dict[int, str] = {}
    size = 0
    for index in stratified([packer.mean(group) for group in groups]):
        group = packer.group(groups[index], arrays)
        text = data_text(group)
        if size + num_bytes(text) > share:
            # Packing takes long, and the other groups are hardly smaller.
            if packed:
                break
            continue
        packed[index] = text
        size += num_bytes(text)
        shown.num_shown += len(group["samples"])
        for sample in group["samples"]:
            shown.arrays |= set(sample.get("arrays", ()))
    if not packed:
        return "", 0
    in_order = ",".join(packed[index] for index in sorted(packed))
    num_samples = packer.run.completions.count(step)
    head = f'"step":{step},"num_groups":{len(groups)},"num_samples":{num_samples}'
    return f'{{{head},"groups":[{in_order}]}}', size


def turns_of(row: RunRow) -> list[dict[str, Any]]:
    """Of a conversation: who wrote what, which calls are in it, and why a tool's answer is a failure; all texts."""
    messages = row.get("messages")
    turns = []
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict):
            continue
        calls = message.get("tool_calls")
        turn: dict[str, Any] = {
            key: shortened(text_of(message, key)) for key in ("role", "name", "content", "failure")
        }
        turn["calls"] = [
            shortened(f"{text_of(call, 'name')} {text_of(call, 'arguments')}")
            for call in (calls if isinstance(calls, list) else [])
            if isinstance(call, dict)
        ]
        turns.append(turn)
    return turns


def rewards_of(row: RunRow) -> dict[str, float | None]:
    rewards = row.get("rewards")
    if not isinstance(rewards, dict):
        return {}
    return {str(name): significant(value) for name, value in rewards.items()}


def total_of(row: RunRow) -> float | None:
    """What the run trained with; None in the rows of runs that did not write it."""
    return significant(row.get("reward"))


def text_of(row: RunRow, key: str) -> str:
    value = row.get(key)
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def shortened(text: str) -> str:
    if len(text) <= HEAD_CHARACTERS + TAIL_CHARACTERS:
        return text
    left_out = len(text) - HEAD_CHARACTERS - TAIL_CHARACTERS
    return f"{text[:HEAD_CHARACTERS]}\n[… {left_out} …]\n{text[-TAIL_CHARACTERS:]}"


def significant(value: Any) -> float | None:
    """A whole number, or six digits of another one; None for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    number = value if isinstance(value, int) else float(f"{value:.6g}")
    return int(number) if number == int(number) and abs(number) < 2**53 else float(number)


def cut_array(text: Any, length: int) -> str | None:
    """An array of `length` float16 in base64, without what its tokens lose in the middle; None for another."""
    if not isinstance(text, str) or not length:
        return None
    try:
        values = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    if len(values) != 2 * length:
        return None
    if length <= HEAD_TOKENS + TAIL_TOKENS:
        return text
    return base64.b64encode(values[: 2 * HEAD_TOKENS] + values[-2 * TAIL_TOKENS :]).decode()


# In a script block only these could end it, or a comment in it; JSON reads the escapes as the characters.
_ESCAPES = {char: f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def data_text(value: Any) -> str:
    """JSON that can stand in a page's script block, whatever texts it holds."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char, escape in _ESCAPES.items():
        text = text.replace(char, escape)
    # Half of a surrogate pair cannot be written.
    return text.encode("utf-8", "replace").decode("utf-8")


def num_bytes(text: str) -> int:
    return len(text.encode("utf-8"))


Group = list[tuple[int, RunRow]]
"""ShownSamples that are compared with each other, with their numbers in the step."""


def evenly(items: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= limit:
        return list(items)
    if limit <= 1:
        return list(items[-1:])
    last = len(items) - 1
    return [items[round(i * last / (limit - 1))] for i in range(limit)]


def spread(count: int) -> Iterator[int]:
    """0 ... count - 1: the first, the last, then what is in the middle of the widest gaps."""
    yield from range(min(count, 1))
    if count > 1:
        yield count - 1
    gaps = [(0, count - 1)] if count > 2 else []
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if middle != low:
            yield middle
            gaps += [(low, middle), (middle, high)]


def groups_of(rows: Sequence[RunRow | None], group_size: int) -> list[Group]:
    """Consecutive samples, so many as the size says, or where that is not known (0) those of one prompt.

    An environment may give each sample of a group a prompt of its own.
    """

    def key(pair: tuple[int, RunRow | None]) -> int | str:
        number, row = pair
        return number // group_size if group_size else str((row or {}).get("prompt", ""))

    groups = [list(pairs) for _, pairs in groupby(enumerate(rows), key)]
    whole = [[(i, row) for i, row in group if row is not None] for group in groups]
    return [group for group in whole if group]


def stratified(means: Sequence[float]) -> list[int]:
    """All groups by their mean reward: the lowest, the highest, then evenly between them."""
    ranked = sorted(range(len(means)), key=lambda i: means[i])
    return [ranked[i] for i in spread(len(means))]


def tokenizer_of(run: RunFolder) -> Tokenizer | None:
    """Of the model that the run wrote, else of the one that it loaded; None where neither can be read."""
    for folder in _folders(run.path, run.values):
        try:
            return Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception:  # the library raises Exception itself
            continue
    return None


def _folders(path: Path, values: Mapping[str, Any]) -> list[Path]:
    keys = ("rl_config.tokenizer_dir", "actor_config.save", "actor_config.load")
    asked = [values.get(key) for key in keys]
    return [path / "hf", *(Path(folder) for folder in asked if isinstance(folder, str))]


def texts_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str] | None:
    """One text a token; a character of several tokens is with its last one. None where an id is unknown."""
    stream = DecodeStream(skip_special_tokens=False)
    try:
        return [stream.step(tokenizer, number) or "" for number in ids]
    except Exception:  # the library raises Exception itself
        return None


def packed_lengths(texts: Sequence[str]) -> str:
    """Lengths of texts as JavaScript counts them, a byte each in base64; 255 means that the next byte adds to it."""
    out = bytearray()
    for text in texts:
        # A character beyond the first 65536 counts twice.
        length = (
            len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2
        )
        while length >= 255:
            out.append(255)
            length -= 255
        out.append(length)
    return base64.b64encode(bytes(out)).decode()
