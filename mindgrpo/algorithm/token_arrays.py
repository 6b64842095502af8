"""Declares the arrays with an entry for each of a sample's tokens, which engines make.

What is between engine and loss passes them on by their declarations: how they grow, which ranks hold them, and whether
the model reads them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


class RemoteSegment:
    """Entries [tokens, ...] that stay on the ranks that computed them, of which `owner` is the first.

    Elsewhere `values` is None (backend/remote_arrays.py).
    """

    def __init__(self, values: np.ndarray, owner: int) -> None:
        self.values: np.ndarray | None = values
        self.owner, self.shape, self.dtype = owner, values.shape, values.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None) -> np.ndarray:
        if self.values is None:
            raise ValueError(f"these entries are on rank {self.owner}")
        return np.asarray(self.values, dtype)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"values": None}


Segment = RemoteSegment | np.ndarray


@dataclass(frozen=True, eq=False, repr=False)
class RemoteArray:
    """A sample's entries in segments that follow each other, of which samples of one prompt share the first.

    Segments that are arrays are on every rank.
    """

    segments: tuple[Segment, ...] = ()

    def __len__(self) -> int:
        return sum(map(len, self.segments))

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.segments[0].shape[1:])

    @property
    def dtype(self) -> np.dtype:
        return self.segments[0].dtype

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return np.asarray(np.concatenate([np.asarray(segment) for segment in self.segments]), dtype)

    def __repr__(self) -> str:
        """Tells what every rank knows of it; ranks compare this."""
        return f"RemoteArray{list(map(len, self.segments))}"

    def held_by(self, owner: int, known: dict[int, RemoteSegment]) -> RemoteArray:
        """Returns it as it goes to other ranks; `known` has segments of other samples, by id, met before."""
        for segment in self.segments:
            if isinstance(segment, np.ndarray):
                known.setdefault(id(segment), RemoteSegment(segment, owner))
        return RemoteArray(tuple(known.get(id(segment), segment) for segment in self.segments))


@dataclass(frozen=True)
class TokenArray:
    """Declares an array with an entry for each token of a completion, which every rank holds.

    An entry has the shape `trailing`; `title` is for messages, `dump_name` its name in dumps, if not its own. Tokens
    that the policy did not write have `on_context` everywhere; None repeats the entry of the token before. An array
    that `is_input` is one of the inputs of a micro-batch, where prompts and padding have `on_context`, too.
    """

    title: str
    dtype: type[np.generic]
    trailing: tuple[int, ...] = ()
    on_context: float | None = 0
    is_input: bool = False
    dump_name: str | None = None

    def of(self, values: Any, num_tokens: int) -> Any:
        """Returns `values` with the declared dtype and shape. Raises ValueError where their number differs."""
        return np.asarray(values, self.dtype).reshape(num_tokens, *self.trailing)

    def num_bytes(self, num_tokens: int) -> int:
        return math.prod((num_tokens, *self.trailing)) * np.dtype(self.dtype).itemsize

    def is_whole(self, values: Any, num_inputs: int) -> bool:
        """Returns whether all entries are there of a sample of which the model reads `num_inputs` tokens."""
        return True

    def joined(self, values: Any, written: Any, num_inputs: int) -> Any:
        """Returns the entries of a sample that has grown, before and of what was `written`; None where some lack."""
        return None if values is None or written is None else np.concatenate([values, written])

    def with_context(self, values: Any, count: int) -> Any:
        """Appends the entries of `count` tokens that the policy did not write."""
        context = np.full((count, *self.trailing), self.on_context or 0, self.dtype)
        if self.on_context is None:
            context[...] = values[-1]
        return np.concatenate([values, context])


@dataclass(frozen=True)
class RemoteTokenArray(TokenArray):
    """Declares an array with an entry for each token that the model reads: of a prompt and its completion but the last.

    Its ranks hold it (RemoteArray), in dtype and shape that the engine chooses; it goes to others where they ask for
    it, and is whole on the first rank for files. An engine gives the entries of the last tokens or of all: those of an
    answer's tokens once the policy has continued, and those of a sample without an end again.
    """

    dtype: type[np.generic] = np.void

    def of(self, values: Any, num_tokens: int) -> RemoteArray:
        return RemoteArray(values if isinstance(values, tuple) else (np.asarray(values),))

    def is_whole(self, values: RemoteArray, num_inputs: int) -> bool:
        return bool(values.segments) and len(values) == num_inputs

    def joined(
        self, values: RemoteArray | None, written: RemoteArray | None, num_inputs: int
    ) -> RemoteArray | None:
        if written is None or len(written) == num_inputs:
            return written
        if values is None or len(values) + len(written) != num_inputs:
            return None
        return RemoteArray((*values.segments, *written.segments))

    def with_context(self, values: RemoteArray, count: int) -> RemoteArray:
        return values


# An engine gives the first two with every sample; one that some of a step's samples lack is left out of the step.
TOKEN_ARRAYS: dict[str, TokenArray] = {
    # In nats, at the sampling temperature, by the engine.
    "logps": TokenArray("the generator's log-probs", np.float32, dump_name="generator_logps"),
    # Of the weights that wrote the token, or that were there.
    "versions": TokenArray(
        "the versions of the generator's weights",
        np.int32,
        on_context=None,
        dump_name="weights_version",
    ),
    # The experts that the generator's routers chose, uint8 or uint16 [tokens, layers with experts, experts a token].
    "routes": RemoteTokenArray("the experts of tokens", dump_name="routed_experts"),
}
