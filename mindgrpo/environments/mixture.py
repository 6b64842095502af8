"""Several environments in one run: how often each is met, and which one a row meets."""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from mindgrpo.environments.contract import ENVIRONMENT, Opening, load_environment
from mindgrpo.errors import UserError

WEIGHTED = re.compile(r"(?:(\d+\.?\d*|\.\d+)\s*\*)?(.*)", re.DOTALL)
FOLDER = re.compile(r"https?://|.*/(?=[^/]*\.py\s*:)")
COLUMN = "environment"


@dataclass(frozen=True)
class Mixture:
    """Environments by their texts, and by names that metrics and rows have for them; weights need not sum to 1."""

    texts: tuple[str, ...]
    names: tuple[str, ...]
    weights: tuple[float, ...]

    @classmethod
    def read(cls, written: Sequence[str]) -> Mixture:
        """Reads texts such as "0.7 * gem:NAME"; without a number the weight is 1. Raises UserError."""
        matches = [WEIGHTED.fullmatch(text.strip()) for text in written]
        weights = tuple(float(match[1] or 1) for match in matches if match)
        texts = tuple(match[2].strip() for match in matches if match)
        # Without arguments and folders, where these do not tell two apart.
        short = [FOLDER.sub("", text.partition("(")[0].strip()) for text in texts]
        names = tuple(
            name if short.count(name) == 1 else text
            for name, text in zip(short, texts, strict=True)
        )
        if len(set(texts)) < len(texts) or 0.0 in weights:
            raise UserError(
                f"{ENVIRONMENT.key} is {', '.join(written)}, but must name each environment once, with a weight above "
                "0; leave out those that are not to be met"
            )
        return cls(texts, names, weights)

    @property
    def is_single(self) -> bool:
        return len(self.texts) == 1

    def number_of(self, opening: Opening) -> int:
        """Returns which environment a row meets: that of its column, or one drawn for the row. Raises UserError."""
        named = self.named_by(opening.row)
        if named is not None:
            return named
        *bounds, total = accumulate(self.weights)
        return bisect_right(bounds, total * random.Random(opening.draw).random())

    def named_by(self, row: Mapping[str, Any], where: str = "a row") -> int | None:
        """Returns which environment a row's column names, None where it names none. Raises UserError.

        `where` is the row's place for the error.
        """
        named = None if self.is_single else row.get(COLUMN)
        for known in (self.names, self.texts):
            if named in known:
                return known.index(named)
        if named is not None:
            raise UserError(
                f"{where}: the column {COLUMN} is {named!r}, but {ENVIRONMENT.key} has {', '.join(self.names)}; add "
                "it there or correct the row"
            )
        return None

    def load(self) -> Callable[[Opening], Any]:
        """Returns what makes the environment that a row meets. Raises UserError for one that cannot be loaded."""
        makes = [load_environment(text) for text in self.texts]
        return lambda opening: makes[self.number_of(opening)]()
