"""Programs and their judges as isolated processes, with their time, memory and output bounded.

There are two methods to keep a program from everything but its own descriptors: bubblewrap, or Landlock with seccomp.
Both refuse new processes, the network, signals to others, and every file but those that Python needs, which are
read-only. Neither needs privileges; root keeps none inside.

A program that is compared by its output is one process; assertions take two: the completion's program, and the judge
that calls it. What they write goes to files in memory, so that nothing has to be read while they run.
"""

from __future__ import annotations

import compileall
import ctypes
import errno
import functools
import marshal
import os
import shutil
import site
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindgrpo.processes.child import Child

SANDBOXED = Path(__file__).with_name("sandboxed")
READABLE = (
    *("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime"),
    *(sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix), str(SANDBOXED)),
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
CLONE_THREAD = 0x00010000
PR_CAPBSET_DROP, NUM_CAPABILITIES = 24, 64
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
X32_NUMBERS = 0x40000000
# Machine -> its number for audits, clone, and what is refused: fork, vfork, unshare, shmget, ptrace.
SYSTEM_CALLS = {
    "x86_64": (0xC000003E, 56, (57, 58, 272, 29, 101)),
    "aarch64": (0xC00000B7, 220, (97, 194, 117)),
}
CLONE3 = 435


class IsolationUnavailable(RuntimeError):
    """This method does not work on this machine; the message says why."""


@dataclass(frozen=True)
class Isolation:
    """A method: `words` come before the program's command, `filter_code` is passed behind them as a descriptor if there
    is some, and `enter` runs in the new process before the program is loaded."""

    name: str
    words: tuple[str, ...] = ()
    filter_code: bytes = b""
    enter: Callable[[], None] = lambda: None

    def start(
        self, command: Sequence[str], descriptors: Sequence[int], stdin: int, stdout: int
    ) -> Child:
        """Starts `command` with these descriptors and no others, which it has under the same numbers."""
        before, passed = list(self.words), list(descriptors)
        filter_file = memory_file(self.filter_code)
        if self.filter_code:
            before += ["--seccomp", str(filter_file), "--"]
            passed.append(filter_file)
        try:
            return Child(
                [*before, *command],
                # Threads of numerical libraries would cost memory for nothing.
                {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"},
                prepare=self.enter,
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                pass_fds=passed,
                cwd="/",
            )
        finally:
            os.close(filter_file)


def memory_file(content: bytes = b"") -> int:
    """Returns a descriptor at the start of a file that is on no disk."""
    descriptor = os.memfd_create("mindgrpo")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def bubblewrap() -> Isolation:
    """Makes the isolation by bubblewrap. Raises IsolationUnavailable."""
    path = shutil.which("bwrap")
    if path is None:
        raise IsolationUnavailable("bwrap is not on the PATH")
    words = [path, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    words += ["--cap-drop", "ALL", "--uid", "65534", "--gid", "65534"]
    for file in READABLE:
        words += ["--ro-bind-try", file, file]
    for device in DEVICES:
        words += ["--dev-bind", device, device]
    return Isolation("bubblewrap", (*words, "--remount-ro", "/"), fork_filter(os.uname().machine))


def fork_filter(machine: str) -> bytes:
    """Returns a Berkeley packet filter that allows threads and no processes.

    Bubblewrap's namespaces do not bound how many processes there are, nor do limits bind root.
    """
    if machine not in SYSTEM_CALLS or sys.byteorder != "little":
        raise IsolationUnavailable(f"the system calls of {machine} are not known")
    audit, clone, refused = SYSTEM_CALLS[machine]
    code = [
        *((LOAD, 0, 0, 4), (JUMP_EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL)),
        *((LOAD, 0, 0, 0), (JUMP_AT_LEAST, 0, 1, X32_NUMBERS), (RETURN, 0, 0, KILL)),
        # The C library then calls clone, whose flags can be looked at.
        *((JUMP_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, REFUSE | errno.ENOSYS)),
    ]
    for number in refused:
        code += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | errno.EPERM)]
    code += [(JUMP_EQUAL, 0, 3, clone), (LOAD, 0, 0, 16), (JUMP_ANY_BIT, 1, 0, CLONE_THREAD)]
    code += [(RETURN, 0, 0, REFUSE | errno.EPERM), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def landlock_and_seccomp() -> Isolation:
    """Makes the isolation by the packages of the extra `mindgrpo[code]`. Raises IsolationUnavailable."""
    try:
        import landlock
        import pyseccomp
    except (ImportError, RuntimeError) as error:  # RuntimeError: no libseccomp.so.2
        raise IsolationUnavailable(str(error)) from error
    try:
        ctypes.set_errno(0)  # or the package takes an older failure for its own
        rules = landlock.Ruleset()
        read = landlock.FSAccess.READ_FILE | landlock.FSAccess.EXECUTE
        for file in filter(os.path.exists, (*READABLE, *DEVICES)):
            folder = landlock.FSAccess.READ_DIR if os.path.isdir(file) else landlock.FSAccess(0)
            rules.allow(file, rules=read | folder)
        rules.allow(os.devnull, rules=landlock.FSAccess.WRITE_FILE)
        system_calls = allowed_system_calls(pyseccomp)
    except OSError as error:
        raise IsolationUnavailable(str(error).splitlines()[0]) from error
    libc = ctypes.CDLL(None)

    def enter() -> None:
        for capability in range(NUM_CAPABILITIES):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        ctypes.set_errno(0)
        rules.apply()
        system_calls.load()

    return Isolation("landlock and seccomp", enter=enter)


# What Python and numerical libraries call that concerns the process itself or files it may open.
ALLOWED = """
    read write readv writev pread64 pwrite64 close close_range lseek dup dup2 dup3 pipe pipe2 open openat
    stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat getcwd chdir
    getdents getdents64 fadvise64 ftruncate mmap mprotect munmap mremap mincore brk membarrier
    poll ppoll select pselect6 epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd2 futex sched_yield
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack alarm pause
    setitimer getitimer nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times getrusage
    getpid getppid gettid getpgid getpgrp getsid getuid geteuid getgid getegid getgroups getresuid getresgid
    uname sysinfo getcpu sched_getaffinity getrandom getrlimit setrlimit umask wait4 waitid
    arch_prctl set_tid_address set_robust_list rseq restart_syscall execve exit exit_group
"""
# TCGETS, TIOCGWINSZ, FIONREAD, FIONCLEX, FIOCLEX
DESCRIPTOR_QUERIES = (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)
DESCRIPTOR_COMMANDS = (0, 1, 2, 3, 4, 1030)  # not F_SETOWN, which sends signals


def allowed_system_calls(pyseccomp: Any) -> Any:
    """Returns the filter, to be loaded: everything unknown fails as on a kernel that lacks it."""
    system_calls = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.ENOSYS))

    def allow(name: str, *arguments: Any) -> None:
        # -1: a name that this libseccomp does not know.
        if pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) != -1:
            system_calls.add_rule(pyseccomp.ALLOW, name, *arguments)

    for name in ALLOWED.split():
        allow(name)
    for name, values in (("ioctl", DESCRIPTOR_QUERIES), ("fcntl", DESCRIPTOR_COMMANDS)):
        for value in values:
            allow(name, pyseccomp.Arg(1, pyseccomp.EQ, value))
    allow("prlimit64", pyseccomp.Arg(0, pyseccomp.EQ, 0))  # of the process itself
    allow("clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, CLONE_THREAD, CLONE_THREAD))
    return system_calls


MAX_OUTPUT_BYTES = 1 << 20
# Bubblewrap comes first: its processes do not see one another at all.
METHODS: dict[str, Callable[[], Isolation]] = {
    "bubblewrap": bubblewrap,
    "mindgrpo[code]": landlock_and_seccomp,
}
TRIAL = """
import os
def refused(action):
    try:
        action()
    except OSError:
        return True
def fork():
    if os.fork() == 0:
        os._exit(0)
if all(map(refused, [fork, lambda: open('/etc/passwd'), lambda: open('/proc/self/environ')])):
    print('isolated')
"""


@dataclass(frozen=True)
class Ending:
    """`status` is the exit status, None where time ran out; `output` at most 1 MiB."""

    status: int | None
    output: bytes


def run_program(
    code: str, standard_input: str, seconds: float, memory: int, isolation: Isolation | None = None
) -> Ending:
    """Runs Python source as a program. `memory` is bytes of address space. Raises IsolationUnavailable."""
    deadline = time.monotonic() + seconds
    program_input, output = memory_file(standard_input.encode("utf-8", "replace")), memory_file()
    order = {"code": code, "seconds": seconds, "memory": memory}
    processes: list[Child] = []
    try:
        isolation = isolation or find_isolation()
        processes += [start(isolation, "run", order, [], program_input, output)]
        status = processes[0].wait_until(deadline)
        printed = os.pread(output, MAX_OUTPUT_BYTES, 0)
    finally:
        end(processes)
        os.close(program_input)
        os.close(output)
    return Ending(status, printed)


def judge_assertions(
    code: str, setup: str, assertions: Sequence[str], seconds: float, memory: int
) -> str:
    """Returns a letter for each assertion that was reached: p passed, f failed, u unjudgeable.

    `setup` is run before each assertion, in the judge's process; `code` in one of its own, once.
    """
    deadline, isolation = time.monotonic() + seconds, find_isolation()
    limits = {"seconds": seconds, "memory": memory}
    order = {"setup": setup, "assertions": list(assertions), **limits}
    questions, asks = os.pipe()
    replies, answers = os.pipe()
    verdicts = memory_file()
    processes: list[Child] = []
    try:
        nothing = subprocess.DEVNULL
        pipes = [questions, answers]
        processes += [start(isolation, "answer", {"code": code, **limits}, pipes, nothing, nothing)]
        processes += [start(isolation, "judge", order, [asks, replies], nothing, verdicts)]
        # The judge hears that the program has ended only if nobody else holds its pipes.
        while pipes:
            os.close(pipes.pop())
        processes[1].wait_until(deadline)
        return os.pread(verdicts, len(assertions), 0).decode("ascii")
    finally:
        end(processes)
        for descriptor in (*pipes, asks, replies, verdicts):
            os.close(descriptor)


def start(
    isolation: Isolation,
    role: str,
    order: dict[str, Any],
    pipes: Sequence[int],
    stdin: int,
    stdout: int,
) -> Child:
    """Starts an isolated process in one of the roles of sandboxed/__main__.py. Raises IsolationUnavailable."""
    # Python starts twice as fast without `site`, which reads configuration that nobody needs here.
    packages = [path for path in sys.path if path in site.getsitepackages()]
    order |= {"output": MAX_OUTPUT_BYTES, "path": packages}
    order_file = memory_file(marshal.dumps(order))
    python = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(SANDBOXED)]
    numbers = [order_file, *pipes]
    try:
        return isolation.start([*python, role, *map(str, numbers)], numbers, stdin, stdout)
    except (OSError, subprocess.SubprocessError) as error:
        raise IsolationUnavailable(f"a process could not be started ({error})") from error
    finally:
        os.close(order_file)


def end(processes: Sequence[Child]) -> None:
    for process in processes:
        process.end()


@functools.cache
def find_isolation() -> Isolation:
    """Returns the first method that works here, tried with a program. Raises IsolationUnavailable."""
    # Processes are started with nowhere to keep compiled modules.
    compileall.compile_dir(SANDBOXED, quiet=2)
    reasons = []
    for name, make in METHODS.items():
        try:
            isolation = make()
            ending = run_program(TRIAL, "", 20.0, 1 << 30, isolation)
            if ending.output == b"isolated\n":
                return isolation
            reasons.append(f"{name}: its trial ended with status {ending.status}")
        except IsolationUnavailable as error:
            reasons.append(f"{name}: {error}")
    raise IsolationUnavailable("; ".join(reasons))
