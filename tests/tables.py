"""Tests that go through a table in one case: a case per row costs more to hand out and to report than most rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest

Test = Callable[..., None]


def each_row(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Calls a test for every row, as `parametrize` would, and names those that fail. Rows share the test's fixtures."""
    columns = names if isinstance(names, tuple) else tuple(names.replace(" ", "").split(","))
    own = [dict(zip(columns, row if len(columns) > 1 else (row,), strict=True)) for row in rows]

    def decorate(test: Test) -> Test:
        # Of several tables every combination is a row.
        called, others = getattr(test, "table", (test, [{}]))
        table = [values | more for values in own for more in others]

        @wraps(called)
        def through(subtests: pytest.Subtests, **fixtures: Any) -> None:
            for values in table:
                with subtests.test(**values):
                    called(**fixtures, **values)

        given = inspect.signature(called).parameters.values()
        kept = [one for one in given if one.name not in table[0]]
        asked = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        vars(through).update(table=(called, table), __signature__=inspect.Signature([asked, *kept]))
        return through

    return decorate
