"""What every way of giving the policy's weights to another role has in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mindgrpo.backend.contract import Pool
from mindgrpo.parallel.sharding import Layout


@dataclass(frozen=True)
class Traffic:
    """`bytes_received` of this rank only; `seconds` of the whole call."""

    bytes_received: int
    seconds: float

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes_received + other.bytes_received, self.seconds + other.seconds)


class WeightTransfer(Protocol):
    """Repeats one transfer, as after every update."""

    @property
    def layout(self) -> Layout:
        """The receiver's."""

    @property
    def copies(self) -> Sequence[Pool]:
        """What it needs on the device besides the weights on both sides."""

    @property
    def host_copies(self) -> Sequence[Pool]:
        """What it keeps in the host's memory."""

    def run(self, keeps_sums: bool = False) -> Traffic:
        """All ranks together, with the weights of both sides and `copies` on the device."""

    @property
    def has_sums(self) -> bool:
        """Whether `sums` can be had: of weights that are no longer at hand only where the last run kept them."""

    def sums(self) -> dict[str, int]:
        """What weights/checksum.py's `part_sums` gives for the receiver's weights on this rank."""
