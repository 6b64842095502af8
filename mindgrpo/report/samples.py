"""Chooses the samples that a page shows: complete groups of some steps, with each token's text and arrays."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from mindgrpo.data.hub_names import Content, local_copy
from mindgrpo.data.images import THUMBNAIL_BYTES
from mindgrpo.report.run_folder import RunFolder, RunRow, number_of

MAX_STEPS = 100
# The first and the last tokens of a completion that are shown (characters, if the tokens have no texts).
HEAD_TOKENS, TAIL_TOKENS = 1500, 500
HEAD_CHARACTERS, TAIL_CHARACTERS = 6000, 2000
DIGEST = re.compile(r"[0-9a-f]{64}")
ARRAYS = ("gap", "log_ratio", "entropy", "kl", "logprob", "value")

Group = list[tuple[int, RunRow]]
"""Samples that are compared with each other, with their numbers in the step."""


@dataclass
class ShownSamples:
    """Holds the samples of a page: `by_step` is the JSON of each step."""

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
            "images": [*self.thumbnails(first)],
            "samples": samples,
        }

    def thumbnails(self, row: RunRow) -> Iterator[str]:
        """Yields those of a row's images of which the run's folder has one, as data URIs."""
        digests = row.get("images")
        for digest in digests if isinstance(digests, list) else []:
            if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
                continue
            path = self.run.path / "images" / f"{digest}.png"
            if path.is_file() and path.stat().st_size <= THUMBNAIL_BYTES:
                yield f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"

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
    """Chooses complete groups across the range of rewards, of evenly spaced steps: at most `budget` bytes of JSON."""
    size = int(number_of(run.values, "rl_config.num_generations", 0))
    packer = _Packer(run, tokenizer_of(run), max(0, size))
    shown = ShownSamples()
    steps = run.completions.steps
    if not steps:
        return shown
    largest = max(_group_bytes(packer, step) for step in (steps[0], steps[-1]))
    chosen = evenly(steps, min(MAX_STEPS, max(1, budget // largest)))
    for position, step in enumerate(chosen):
        # The unused part of a step's share goes to the steps after it.
        share = budget // (len(chosen) - position)
        packed, size = _pack_step(packer, step, share, shown)
        if packed:
            shown.by_step[step] = packed
            budget -= size
    return shown


def _group_bytes(packer: _Packer, step: int) -> int:
    """Returns the bytes of the largest group of a step."""
    arrays = packer.arrays(step)
    groups = (packer.group(group, arrays) for group in packer.groups(step))
    return max((num_bytes(data_text(group)) for group in groups), default=1)


def _pack_step(packer: _Packer, step: int, share: int, shown: ShownSamples) -> tuple[str, int]:
    """Returns the step's JSON and its bytes; ("", 0) if no group fits."""
    groups, arrays = packer.groups(step), packer.arrays(step)
    packed: dict[int, str] = {}
    size = 0
    for index in stratified([packer.mean(group) for group in groups]):
        group = packer.group(groups[index], arrays)
        text = data_text(group)
        if size + num_bytes(text) > share:
            # Packing is slow, and the other groups are hardly smaller.
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
    """Returns a conversation's turns: role, content, calls, and why a tool's answer is a failure, as texts."""
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
    """Returns the reward that the run trained with; None if the run did not write it."""
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
    """Returns an integer, or six digits of another number; None for anything but a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    number = value if isinstance(value, int) else float(f"{value:.6g}")
    return int(number) if number == int(number) and abs(number) < 2**53 else float(number)


def cut_array(text: Any, length: int) -> str | None:
    """Returns the shown part of `length` float16 in base64; None if `text` is not such an array."""
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


# Only these could end a script block, or a comment in it; JSON reads the escapes as the characters.
_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def data_text(value: Any) -> str:
    """Formats JSON that is safe in a page's script block, with any texts."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Half of a surrogate pair cannot be written.
    return text.translate(_ESCAPES).encode("utf-8", "replace").decode("utf-8")


def num_bytes(text: str) -> int:
    return len(text.encode("utf-8"))


def evenly(items: Sequence[int], limit: int) -> list[int]:
    """Returns at most `limit` of the items, evenly spaced, including the first and the last."""
    if len(items) <= limit:
        return list(items)
    if limit <= 1:
        return list(items[-1:])
    last = len(items) - 1
    return [items[round(i * last / (limit - 1))] for i in range(limit)]


def spread(count: int) -> Iterator[int]:
    """Yields 0 ... count - 1: the first, the last, then the middles of the widest gaps."""
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
    """Divides a step's samples in groups of `group_size`, or of equal prompts if that is not known (0).

    An environment may give each sample of a group its own prompt.
    """

    def key(pair: tuple[int, RunRow | None]) -> int | str:
        number, row = pair
        return number // group_size if group_size else str((row or {}).get("prompt", ""))

    groups = [list(pairs) for _, pairs in groupby(enumerate(rows), key)]
    present = [[(i, row) for i, row in group if row is not None] for group in groups]
    return [group for group in present if group]


def stratified(means: Sequence[float]) -> list[int]:
    """Orders groups by their mean reward: the lowest, the highest, then evenly between them."""
    ranked = sorted(range(len(means)), key=lambda i: means[i])
    return [ranked[i] for i in spread(len(means))]


def tokenizer_of(run: RunFolder) -> Tokenizer | None:
    """Reads the tokenizer of the model that the run wrote or loaded; returns None if neither is readable."""
    contents: dict[str, Content] = {
        "rl_config.tokenizer_dir": "tokenizer",
        "actor_config.save": "model",
        "actor_config.load": "model",
    }
    folders = [run.path / "hf"]
    for key, content in contents.items():
        if isinstance(value := run.values.get(key), str):
            folders.append(local_copy(value, content))
    for folder in folders:
        with suppress(Exception):  # the library raises Exception itself
            return Tokenizer.from_file(str(folder / "tokenizer.json"))
    return None


def texts_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str] | None:
    """Returns a text per token, a character of several tokens with its last one; None if an id is unknown."""
    stream = DecodeStream(skip_special_tokens=False)
    try:
        return [stream.step(tokenizer, number) or "" for number in ids]
    except Exception:  # the library raises Exception itself
        return None


def packed_lengths(texts: Sequence[str]) -> str:
    """Encodes the texts' lengths in UTF-16 units as bytes in base64; 255 means that the next byte is added to it."""
    lengths = (len(text.encode("utf-16-le", "surrogatepass")) // 2 for text in texts)
    out = b"".join(b"\xff" * (length // 255) + bytes([length % 255]) for length in lengths)
    return base64.b64encode(out).decode()
