"""What the kernel refuses a process for the rest of its life, asked for without a library or privilege.

A seccomp filter: no socket, no other process or program, no signal to others, nothing written to
any file. Landlock, where the kernel has it: nothing read outside given folders. Refuses machines
whose system calls it does not know; there nothing is locked down.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Sequence

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, JUMP_EQUAL, JUMP_ANY_BIT, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER_OFFSET, ARCHITECTURE_OFFSET, FIRST_ARGUMENT_OFFSET = 0, 4, 16
X32_NUMBERS = 0x40000000
# Machine -> its number for the audit, and its place in the table below.
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

Numbers = tuple["int | None", "int | None"]
REFUSED: dict[str, Numbers] = {
    # The network, in every way to get a socket.
    "socket": (41, 198),
    "socketpair": (53, 199),
    "io_uring_setup": (425, 425),
    # Other processes and programs.
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "prlimit64": (302, 261),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # Files: nothing is made, changed or removed.
    "creat": (85, None),
    "truncate": (76, 45),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "memfd_create": (319, 279),
    "open_by_handle_at": (304, 265),
    # The machine.
    "mount": (165, 40),
    "umount2": (166, 39),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "syslog": (103, 116),
    "acct": (163, 89),
}
# The C library falls back to the older call, whose flags can be looked at.
UNKNOWN_TO_PROGRAMS: dict[str, Numbers] = {"clone3": (435, 435), "openat2": (437, 437)}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_TMPFILE", 0o20000000)
# O_TMPFILE holds the bit of O_DIRECTORY, which reading a folder sets as well.
WRITING &= ~os.O_DIRECTORY
CLONE_THREAD = 0x00010000
F_SETOWN, F_SETSIG, F_SETOWN_EX = 8, 10, 15

LANDLOCK_CREATE, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_RULE_PATH_BENEATH = 1
LANDLOCK_EXECUTE, LANDLOCK_READ_FILE, LANDLOCK_READ_FOLDER = 1, 4, 8


class FilterUnavailable(OSError):
    """This kernel or machine does not let a process lock itself down."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def refuse_forever(machine: str | None = None) -> None:
    """Installs the filter on this process. Raises FilterUnavailable and then has changed nothing that matters."""
    code = filter_code(machine or os.uname().machine)
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(code) // 8, code)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        number = ctypes.get_errno()
        raise FilterUnavailable(number, f"no system-call filter: {os.strerror(number)}")


def filter_code(machine: str) -> bytes:
    """Berkeley packet filter instructions; each rule falls through to the next."""
    if machine not in MACHINES or sys.byteorder != "little":
        raise FilterUnavailable(errno.ENOSYS, f"the system calls of {machine} are not known")
    audit, place = MACHINES[machine]
    code = [(LOAD, 0, 0, ARCHITECTURE_OFFSET), (JUMP_EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL)]
    code += [(LOAD, 0, 0, NUMBER_OFFSET)]
    if machine == "x86_64":
        code += [(JUMP_AT_LEAST, 0, 1, X32_NUMBERS), (RETURN, 0, 0, KILL)]
    for table, number_of_error in ((REFUSED, errno.EPERM), (UNKNOWN_TO_PROGRAMS, errno.ENOSYS)):
        for numbers in table.values():
            number = numbers[place]
            if number is not None:
                code += [(JUMP_EQUAL, 0, 1, number)]
                code += [(RETURN, 0, 0, REFUSE | number_of_error)]
    open_call, openat, clone, fcntl = ((2, 257, 56, 72), (None, 56, 220, 25))[place]
    if open_call is not None:
        code += _refuse_bits(open_call, 1, WRITING)
    code += _refuse_bits(openat, 2, WRITING)
    code += _argument(clone, 0, [(JUMP_ANY_BIT, 1, 0, CLONE_THREAD), _refusal()])
    signals = [(JUMP_EQUAL, 0, 1, F_SETOWN), _refusal(), (JUMP_EQUAL, 0, 1, F_SETSIG), _refusal()]
    code += _argument(fcntl, 1, [*signals, (JUMP_EQUAL, 0, 1, F_SETOWN_EX), _refusal()])
    code += [(RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def _refusal() -> tuple[int, int, int, int]:
    return (RETURN, 0, 0, REFUSE | errno.EPERM)


def _refuse_bits(number: int, argument: int, bits: int) -> list[tuple[int, int, int, int]]:
    return _argument(number, argument, [(JUMP_ANY_BIT, 0, 1, bits), _refusal()])


def _argument(
    number: int, argument: int, test: list[tuple[int, int, int, int]]
) -> list[tuple[int, int, int, int]]:
    """`test` on an argument of call `number`, which is allowed if no test returns."""
    load = (LOAD, 0, 0, FIRST_ARGUMENT_OFFSET + 8 * argument)
    body = [load, *test, (RETURN, 0, 0, ALLOW)]
    return [(JUMP_EQUAL, 0, len(body), number), *body]


def read_only_below(folders: Sequence[str]) -> bool:
    """From now on this process reads only in `folders`. False where the kernel cannot promise that."""
    libc = ctypes.CDLL(None, use_errno=True)
    handled = LANDLOCK_EXECUTE | LANDLOCK_READ_FILE | LANDLOCK_READ_FOLDER
    attributes = ctypes.c_uint64(handled)
    rules = libc.syscall(LANDLOCK_CREATE, ctypes.byref(attributes), ctypes.c_size_t(8), 0)
    if rules < 0:
        return False
    try:
        for folder in folders:
            _allow(libc, rules, folder, handled)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return libc.syscall(LANDLOCK_RESTRICT, rules, 0) == 0
    finally:
        os.close(rules)


def _allow(libc: ctypes.CDLL, rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not os.path.isdir(path):
        rights &= ~LANDLOCK_READ_FOLDER
    rule = ctypes.create_string_buffer(struct.pack("<Qi", rights, place))
    libc.syscall(LANDLOCK_ADD_RULE, rules, LANDLOCK_RULE_PATH_BENEATH, rule, 0)
    os.close(place)
