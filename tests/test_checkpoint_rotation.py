"""Which checkpoints go when there are more than the run keeps."""

from __future__ import annotations

import pytest

from mindgrpo.checkpoint.folders import to_delete


@pytest.mark.parametrize(
    ("steps", "keep", "best", "gone"),
    [
        ([1, 2, 3, 4], 2, None, [1, 2]),
        ([4, 1, 3, 2], 2, 1, [2]),  # the best one stays, however old it is
        ([1, 2], 0, None, [1]),  # and the newest, whatever is kept
        ([1, 2, 3], None, 1, []),
        ([], 3, None, []),
    ],
)
def test_all_go_but_the_newest_and_the_best(
    steps: list[int], keep: int | None, best: int | None, gone: list[int]
) -> None:
    assert to_delete(steps, keep, best) == gone
