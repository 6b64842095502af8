"""What isolated programs may not do, by each method of isolation that works on this machine.

The processes are real. Does NOT prove that the kernel has no hole.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindgrpo.rewards.builtin import sandbox
from mindgrpo.rewards.builtin.program import code_reward
from mindgrpo.rewards.builtin.sandbox import Isolation, IsolationUnavailable

MIB = 1 << 20
ROOT = Path(__file__).resolve().parent.parent
FENCED = "```python\n{}\n```"


@pytest.fixture(params=list(sandbox.METHODS), scope="module")
def method(request: pytest.FixtureRequest) -> Iterator[Isolation]:
    """The only method that there is, in turn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "METHODS", {request.param: sandbox.METHODS[request.param]})
        sandbox.find_isolation.cache_clear()
        try:
            yield sandbox.find_isolation()
        except IsolationUnavailable as error:
            pytest.skip(str(error))
        finally:
            sandbox.find_isolation.cache_clear()


def run(
    code: str, standard_input: str = "", seconds: float = 10.0, memory: int = 512 * MIB
) -> sandbox.Ending:
    return sandbox.run_program(code, standard_input, seconds, memory)


def what_becomes_of(*expressions: str) -> dict[str, str]:
    """Return for each an error's name, or what it evaluates to."""
    code = (
        "import ctypes, json, os, resource, signal, socket, subprocess\n"
        "def tried(text):\n"
        "    try:\n        return repr(eval(text))\n"
        "    except BaseException as error:\n        return type(error).__name__\n"
        f"print(json.dumps({{text: tried(text) for text in {list(expressions)!r}}}))\n"
    )
    ending = run(code)
    assert ending.status == 0, ending
    result: dict[str, str] = json.loads(ending.output)
    return result


def test_a_program_reads_its_input_and_prints_its_output(method: Isolation) -> None:
    ending = run("import sys, math\nprint(sum(map(int, sys.stdin)), math.pi > 3)", "20\n22\n")
    assert (ending.status, ending.output) == (0, b"42 True\n")
    large = run("import sys\nprint(len(sys.stdin.read()))\nexit()", "x" * 10**6)
    assert (large.status, large.output) == (0, b"1000000\n")
    assert run("print(1)", "x" * 10**6).output == b"1\n"


def test_threads_and_installed_packages_work(method: Isolation) -> None:
    code = "import threading, numpy\nt = threading.Thread(target=print, args=(numpy.arange(4).sum(),))\nt.start()"
    assert run(code).output == b"6\n"


def test_no_network_no_process_no_signal_no_file(method: Isolation, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("here")
    refused = what_becomes_of(
        "socket.create_connection(('127.0.0.1', 1), 1)",
        "os.fork()",
        "os.posix_spawn('/bin/ls', ['ls'], {})",
        "subprocess.run(['ls'])",
        f"os.kill({os.getpid()}, 9)",
        f"os.pidfd_open({os.getpid()})",
        "open('new', 'w')",
        "open('/tmp/mindgrpo-new', 'a')",
        "os.mkdir('new')",
        f"os.unlink({str(kept)!r})",
        f"os.truncate({str(kept)!r}, 0)",
        f"os.rename({str(kept)!r}, 'new')",
        f"os.chmod({str(kept)!r}, 0)",
        f"os.chmod({sys.executable!r}, 0)",
        "os.chmod('/usr', 0)",
        "os.utime('/usr')",
        "os.setxattr('/usr', 'user.x', b'y')",
        "os.mknod('new')",
        "os.chroot('/usr')",
        "os.setuid(1)",
        f"os.setpriority(0, {os.getpid()}, 19)",
        f"resource.prlimit({os.getpid()}, resource.RLIMIT_NOFILE, (9, 9))",
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    )
    errors = {"PermissionError", "OSError", "FileNotFoundError", "ProcessLookupError", "ValueError"}
    allowed = {
        what: how for what, how in refused.items() if how not in errors | {"ConnectionRefusedError"}
    }
    assert allowed == {}
    assert kept.read_text() == "here"


def test_calls_behind_pythons_back_are_refused_too(method: Isolation) -> None:
    call = "ctypes.CDLL(None).syscall"
    # clone3, vfork, unshare of users, shmget of new memory, ptrace of the parent, bpf.
    numbers = {"x86_64": (435, 58, 272, 29, 101, 321), "aarch64": (435, 220, 97, 194, 117, 280)}
    clone3, vfork, unshare, shmget, ptrace, bpf = numbers[os.uname().machine]
    refused = what_becomes_of(
        f"{call}({clone3}, 0, 0)",
        f"{call}({vfork}, 17, 0, 0, 0, 0)",
        f"{call}({unshare}, 0x10000000)",
        f"{call}({shmget}, 0, 1 << 20, 0o1600)",
        f"{call}({ptrace}, 16, os.getppid(), 0, 0)",
        f"{call}({bpf}, 0, 0, 0)",
    )
    assert set(refused.values()) == {"-1"}, refused


def test_only_pythons_own_files_and_no_process_can_be_read(method: Isolation) -> None:
    files = ["/etc/passwd", __file__, str(ROOT / "README.md"), str(ROOT / "mindgrpo/trainer.py")]
    of_processes = [f"/proc/self/{name}" for name in ("environ", "mem", "maps", "cmdline")]
    of_processes += [
        f"/proc/{os.getpid()}/{name}" for name in ("environ", "mem", "fd/0", "cwd/setup.py")
    ]
    listings = ["/proc", "/root", "/home", "/tmp", str(ROOT), f"/proc/{os.getpid()}/fd"]
    reads = [f"open({file!r}).read(1)" for file in files + of_processes]
    refused = what_becomes_of(*reads, *(f"os.listdir({folder!r})[9]" for folder in listings))
    assert set(refused.values()) <= {"PermissionError", "FileNotFoundError", "IndexError"}, refused
    allowed = what_becomes_of("__import__('json.decoder')", "sorted(os.environ)", "os.getcwd()")
    environment = {"LC_ALL", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PWD"}
    assert set(ast.literal_eval(allowed["sorted(os.environ)"])) <= environment
    assert allowed["os.getcwd()"] == "'/'"


def test_a_program_has_no_other_descriptor_than_its_streams(method: Isolation) -> None:
    held = os.pipe()
    for descriptor in held:
        os.set_inheritable(descriptor, True)
    code = "import os\nfor fd in range(99):\n    try: os.fstat(fd)\n    except OSError: continue\n    print(fd)"
    try:
        assert run(code).output.split() == [b"0", b"1", b"2"]
    finally:
        for descriptor in held:
            os.close(descriptor)


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\ntime.sleep(3600)",
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(3600)",
        "import os\nwhile True:\n    try: print('x' * 10**6)\n    except OSError: pass",
        "import os\nos.close(1)\nos.close(2)\nwhile True: pass",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(3600,)).start()\n"
        "    except RuntimeError: pass",
    ],
)
def test_time_and_output_are_bounded(method: Isolation, code: str) -> None:
    ending = run(code, seconds=0.7)
    assert ending.status is None
    assert len(ending.output) <= sandbox.MAX_OUTPUT_BYTES


def test_100_mb_of_output_end_the_program(method: Isolation) -> None:
    ending = run("for _ in range(100): print('x' * 10**6)")
    assert ending.status not in (0, None)
    assert len(ending.output) == sandbox.MAX_OUTPUT_BYTES


def test_memory_is_bounded(method: Isolation) -> None:
    ending = run("x = []\nwhile True: x.append('x' * 10**6)", memory=128 * MIB)
    assert ending.status == 1
    assert run("x = 'x' * (900 << 20)").status == 1


@pytest.mark.parametrize(
    "code", ["def f(:", "raise SystemExit(3)", "1/0", "\ud800", "x = " + "(" * 9999]
)
def test_what_does_not_run_ends(code: str) -> None:
    assert run(code).status not in (0, None)


def test_a_program_cannot_reach_the_judge(method: Isolation) -> None:
    """Beside it the judge waits in a call: every process whose number could be its is tried."""
    code = """
import ctypes, os, resource
def f(x):
    done = []
    for pid in (*range(1, 99), *range(os.getppid() - 9, os.getppid() + 99)):
        if pid in (0, os.getpid()): continue
        for act in (lambda: os.kill(pid, 9), lambda: open(f'/proc/{pid}/mem', 'rb'), lambda: os.pidfd_open(pid),
                    lambda: resource.prlimit(pid, resource.RLIMIT_CPU, (0, 0))):
            try: act()
            except (OSError, ValueError): continue
            done.append(pid)
    # Number 1 is bubblewrap's own in a world of two processes.
    return [pid for pid in done if pid > 1]
"""
    assertions = ["assert f(1) == []", "assert f(2) == []"]
    assert code_reward([FENCED.format(code)], [""], None, [assertions], seconds=10) == [1.0]


def test_processes_end_with_the_one_that_started_them(method: Isolation) -> None:
    """Even if that is killed."""
    seconds = f"3600.{os.getpid()}{len(method.name)}"
    code = (
        "from mindgrpo.rewards.builtin import sandbox\n"
        f"sandbox.METHODS = {{name: sandbox.METHODS[name] for name in {list(sandbox.METHODS)!r}}}\n"
        "method = sandbox.find_isolation()\n"
        f"method.start(['/bin/sleep', '{seconds}'], [], -3, -3)\n"
        "print('started', flush=True)\nimport time\ntime.sleep(3600)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert starter.stdout is not None and starter.stdout.readline() == b"started\n"
    sleeper = f"/bin/sleep\0{seconds}\0".encode()
    while not processes_with(sleeper):
        time.sleep(0.02)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    while processes_with(sleeper):
        time.sleep(0.02)


def processes_with(words: bytes) -> list[str]:
    commands = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands[str(path)] = path.read_bytes()
        except OSError:
            continue
    return [path for path, command in commands.items() if command == words]


def test_nothing_is_left_open(method: Isolation) -> None:
    run("print(1)")
    before = len(os.listdir("/proc/self/fd"))
    run("import time\ntime.sleep(3600)", seconds=0.3)
    sandbox.judge_assertions("def f(): pass", "", ["f()"], 5.0, 512 * MIB)
    assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_is_known_of_other_machines() -> None:
    assert all(len(sandbox.fork_filter(machine)) % 8 == 0 for machine in sandbox.SYSTEM_CALLS)
    with pytest.raises(IsolationUnavailable, match="riscv64"):
        sandbox.fork_filter("riscv64")
