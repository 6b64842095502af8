"""The reward for programs: the last code block of a completion, run against its tests.

The program runs isolated (sandbox.py) and never in the process that judges it: expected outputs and
assertions stay outside.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import repeat
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.rewards.builtin import sandbox
from mindgrpo.rewards.builtin.sandbox import IsolationUnavailable
from mindgrpo.rewards.call import Score
from mindgrpo.rewards.load import WHERE

FENCE = "```"
LANGUAGES = ("python", "python3", "py", "")
LONGEST_CODE = 100_000


def code_reward(
    completions: Sequence[str],
    answers: Sequence[str] | None = None,
    test_cases: Sequence[Any] | None = None,
    test_list: Sequence[Any] | None = None,
    test_setup_code: Sequence[Any] | None = None,
    seconds: float = 5.0,
    memory_mb: int = 512,
) -> list[float | None]:
    """Returns the share of tests that the last code block passes; 0.0 where there is no code.

    Tests come from the columns `test_cases` (a list of {"input": stdin, "output": stdout}, or {"inputs":
    [...], "outputs": [...]}) or `test_list` (asserts, after `test_setup_code`), as lists or as JSON; without
    either, the program must print the gold answer. All tests of a completion together have `seconds`;
    those that are not reached are failed, and so are asserts that need more of the program than plain data,
    which are counted as `unjudgeable`. None where there is nothing to test with. Raises UserError where
    programs cannot be isolated.
    """
    try:
        sandbox.find_isolation()
    except IsolationUnavailable as error:
        raise UserError(
            f"code_reward runs code that a model wrote, and nothing on this machine can isolate it ({error}); "
            "install bubblewrap (apt-get install bubblewrap) or the extra (pip install 'mindgrpo[code]'), "
            f"or leave code_reward out of {WHERE}"
        ) from error
    columns = (
        repeat(None) if column is None else column
        for column in (test_cases, test_list, test_setup_code)
    )
    golds = repeat("") if answers is None else answers
    samples = zip(completions, golds, *columns, strict=False)
    return [score(sample, seconds, memory_mb << 20) for sample in samples]


def score(sample: tuple[Any, ...], seconds: float, memory: int) -> Score | None:
    """Scores a `sample`: a completion, its gold answer, test cases, assertions and their setup. `memory` in bytes."""
    text, gold, stored_cases, stored_assertions, setup = sample
    cases, assertions = tests_of(stored_cases, "output"), tests_of(stored_assertions, "")
    if not cases and not assertions:
        if not str(gold).strip():
            return None
        cases = [{"input": "", "output": str(gold)}]
    code = last_code_block(text)
    if code is None:
        return Score(0.0, {"unjudgeable": 0})
    deadline = time.monotonic() + seconds
    passed = sum(passes(code, case, deadline, memory) for case in cases)
    verdicts = ""
    if assertions:
        left = max(0.1, deadline - time.monotonic())
        words = list(map(str, assertions))
        verdicts = sandbox.judge_assertions(code, str(setup or ""), words, left, memory)
        passed += verdicts.count("p")
    share = passed / (len(cases) + len(assertions))
    return Score(share, {"unjudgeable": verdicts.count("u")})


def passes(code: str, case: dict[str, str], deadline: float, memory: int) -> bool:
    left = deadline - time.monotonic()
    if left <= 0:
        return False
    ending = sandbox.run_program(code, case["input"], left, memory)
    printed = ending.output.decode("utf-8", "replace")
    return ending.status == 0 and lines_of(printed) == lines_of(case["output"])


def lines_of(text: str) -> list[str]:
    """Splits text into lines without the white space at their ends and around the text, as judges compare."""
    return [line.rstrip() for line in text.strip().splitlines()]


def last_code_block(text: object) -> str | None:
    """Returns the last closed block of Python, else the only block if a cut text leaves it open; None without one."""
    if not isinstance(text, str) or FENCE not in text:
        return None
    blocks = text[-2 * LONGEST_CODE :].split(FENCE)
    # Between the first and second fence stands a block, between the second and third prose, and so on.
    if len(blocks) % 2 == 0:
        blocks = blocks[:-1] if len(blocks) > 2 else blocks
    for block in reversed(blocks[1::2]):
        language, _, code = block.partition("\n")
        if language.strip().lower() in LANGUAGES and code.strip():
            return code if len(code) <= LONGEST_CODE else None
    return None


def tests_of(tests: object, key: str) -> list[Any]:
    """Returns tests as a list, given a list, JSON, or inputs beside outputs; an empty one for anything else."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except (ValueError, RecursionError):
            return []
    if isinstance(tests, dict) and "inputs" in tests and "outputs" in tests:
        pairs = zip(tests["inputs"], tests["outputs"], strict=False)
        tests = [{"input": one, "output": other} for one, other in pairs]
    if not isinstance(tests, list):
        return []
    if not key:
        return tests
    return [
        {"input": text_of(case.get("input", "")), "output": text_of(case[key])}
        for case in tests
        if isinstance(case, dict) and key in case
    ]


def text_of(value: object) -> str:
    """Judges store input as text or as a list of its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
