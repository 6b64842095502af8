"""Code in completions: what runs, what it may not do, and what it earns.

The locked-down process is tried for real. Does NOT prove that the kernel has no hole, nor that a program
cannot read its own asserts; tests by input and output are out of its reach.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from mindgrpo.rewards.builtin import sandbox
from mindgrpo.rewards.builtin.kernel_filter import MACHINES, FilterUnavailable, filter_code
from mindgrpo.rewards.builtin.program import code_reward, last_code_block

MIB = 1 << 20


def run(
    code: str, given: str = "", seconds: float = 5.0, memory: int = 512 * MIB
) -> sandbox.Ending:
    return sandbox.run_program(code, given, seconds, memory)


def refusals(*expressions: str) -> dict[str, str]:
    """What the sandboxed process gets when it evaluates each: an error's name, or "done"."""
    code = (
        "import json, os, sys\n"
        "def tried(text):\n"
        "    try:\n        eval(text)\n"
        "    except BaseException as error:\n        return type(error).__name__\n"
        "    return 'done'\n"
        f"print(json.dumps({{text: tried(text) for text in {list(expressions)!r}}}))\n"
    )
    ending = run(code)
    assert ending.status == 0, ending
    result: dict[str, str] = json.loads(ending.output)
    return result


def test_a_program_reads_its_input_and_prints_its_output() -> None:
    ending = run("import sys, math\nprint(sum(map(int, sys.stdin)), math.pi > 3)", "20\n22\n")
    assert (ending.status, ending.output) == (0, b"42 True\n")
    large = run("import sys\nprint(len(sys.stdin.read()))", "x" * 10**6)
    assert large.output == b"1000000\n"


def test_no_network_no_process_no_signal_no_file(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("here")
    refused = refusals(
        "__import__('socket').socket()",
        "__import__('socket').create_connection(('127.0.0.1', 1))",
        "__import__('socket').socketpair()",
        "os.fork()",
        "os.execv('/bin/ls', ['ls'])",
        "__import__('subprocess').run(['ls'])",
        "os.kill(os.getppid(), 9)",
        "os.kill(-1, 9)",
        "open('new', 'w')",
        "open('/tmp/mindgrpo-new', 'a')",
        "os.mkdir('new')",
        f"os.unlink({str(kept)!r})",
        f"os.truncate({str(kept)!r}, 0)",
        f"os.rename({str(kept)!r}, 'new')",
        f"os.chmod({str(kept)!r}, 0)",
        "os.memfd_create('new')",
        "os.setpriority(0, os.getppid(), 19)",
    )
    assert set(refused.values()) == {"PermissionError"}, refused
    assert kept.read_text() == "here"


def test_calls_behind_pythons_back_are_refused_too() -> None:
    call = "__import__('ctypes').CDLL(None).syscall"
    code = f"print([{call}(425, 1, 0), {call}(435, 0, 0), {call}(437, 0, 0, 0, 0)])"
    assert run(code).output == b"[-1, -1, -1]\n"


def test_reading_is_confined_to_what_python_needs_where_the_kernel_can() -> None:
    if not sandbox.check_available():
        pytest.skip("this kernel has no Landlock")
    refused = refusals("open('/etc/passwd')", f"open({__file__!r})", "os.listdir('/')")
    assert set(refused.values()) == {"PermissionError"}, refused
    assert refusals("__import__('json.decoder')", "os.listdir('.')") == {
        "__import__('json.decoder')": "done",
        "os.listdir('.')": "done",
    }
    assert run("import os\nprint(os.listdir('.'), sorted(os.environ))").output.startswith(b"[] ")


def test_threads_and_installed_packages_work() -> None:
    code = "import threading, numpy\nt = threading.Thread(target=print, args=(numpy.arange(4).sum(),))\nt.start()"
    assert run(code).output == b"6\n"


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\ntime.sleep(100)",
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(100)",
        "while True: print('x' * 1000)",
        "import os\nos.close(1)\nos.close(2)\nwhile True: pass",
    ],
)
def test_time_and_output_are_bounded(code: str) -> None:
    started = time.monotonic()
    ending = run(code, seconds=0.7)
    assert time.monotonic() - started < 2.0
    assert ending.status is None
    assert len(ending.output) <= sandbox.LONGEST_OUTPUT


def test_memory_is_bounded() -> None:
    ending = run("x = []\nwhile True: x.append('x' * 10**6)", memory=128 * MIB)
    assert ending.status == 1
    assert run("x = 'x' * (900 << 20)").status == 1


@pytest.mark.parametrize(
    "code", ["def f(:", "raise SystemExit(3)", "1/0", "\ud800", "x = " + "(" * 9999]
)
def test_what_does_not_run_ends(code: str) -> None:
    assert run(code).status not in (0, None)


def test_the_parent_ignores_a_program_that_does_not_read() -> None:
    assert run("print(1)", "x" * 10**6).output == b"1\n"


def test_nothing_is_known_of_other_machines() -> None:
    assert all(len(filter_code(machine)) % 8 == 0 for machine in MACHINES)
    with pytest.raises(FilterUnavailable, match="riscv64"):
        filter_code("riscv64")


FENCED = "Here:\n```python\n{}\n```\nDone."
DOUBLE = FENCED.format("print(2 * int(input()))")


def test_the_share_of_tests_passed_is_the_reward() -> None:
    cases = [
        {"input": "1\n", "output": "2\n"},
        {"input": "2", "output": "4"},
        {"input": "3", "output": "7"},
    ]
    as_pairs = {"inputs": ["1", "2"], "outputs": ["2", "4"]}
    given = code_reward([DOUBLE] * 3, ["", "", ""], [cases, json.dumps(cases[:2]), as_pairs])
    assert given == pytest.approx([2 / 3, 1.0, 1.0])


def test_asserts_are_counted_and_cannot_be_left() -> None:
    add = FENCED.format("def add(a, b):\n    return a + b")
    leave = FENCED.format("import os\nprint('2')\nos._exit(0)")
    claims = [["assert add(1, 2) == 3", "assert add(1, 2) == one"]] * 3
    texts = [add, leave, FENCED.format("import sys\nsys.exit(0)")]
    given = code_reward(texts, ["", "", ""], None, claims, ["one = 1", "one = 1", ""])
    assert given == [0.5, 0.0, 0.0]


def test_without_tests_the_gold_answer_must_be_printed() -> None:
    texts = [
        FENCED.format("print(42)"),
        FENCED.format("print(41)"),
        "42",
        FENCED.format("print(42)"),
    ]
    assert code_reward(texts, ["42", "42", "42", ""]) == [1.0, 0.0, 0.0, None]


def test_all_tests_of_a_completion_share_its_seconds() -> None:
    cases = [{"input": "", "output": "1"}] * 5
    started = time.monotonic()
    (given,) = code_reward([FENCED.format("while True: pass")], [""], [cases], seconds=0.6)
    assert given == 0.0
    assert time.monotonic() - started < 3.0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n```\nand\n```\nb\n```", "b\n"),
        ("```python\na\n```\n```text\nb\n```", "a\n"),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("```python\nnever closed", "never closed"),
        ("no fence", None),
        ("```", None),
        ("```python\n\n```", None),
        ("```" * 10**5, None),
        (None, None),
    ],
)
def test_the_last_closed_block_is_run(text: str, code: str | None) -> None:
    assert last_code_block(text) == code


def test_the_sandbox_leaves_nothing(tmp_path: Path) -> None:
    before = set(os.listdir("/tmp"))
    run("import time\ntime.sleep(9)", seconds=0.3)
    assert {name for name in set(os.listdir("/tmp")) - before if "mindgrpo" in name} == set()
