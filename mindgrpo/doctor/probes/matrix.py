"""Which versions of driver, CANN, MindFormers, NumPy and Python fit MindSpore 2.9, as data; judged without the machine.

Sources, as read in November 2026:
- https://www.mindspore.cn/mindformers/docs/en/r1.9.0/installation.html: which MindFormers, MindSpore, CANN, and driver
  with firmware, are published together; Python 3.11.4 is recommended there.
- mindspore 2.9.0, run_check/_check_version.py (AscendEnvChecker): the releases of CANN that it takes without a warning.
No source says which older driver still serves a CANN release, nor which driver is too new: a driver older than the one
published with a CANN release fails here, a newer one passes and is said to be untried.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mindgrpo.doctor.probes.line import Line, fails, ok, skipped

PAGE = "https://www.mindspore.cn/mindformers/docs/en/r1.9.0/installation.html"
Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Published:
    """Versions that are published together."""

    mindformers: str
    mindspore: str
    cann: str
    driver: str


TOGETHER = (
    Published("1.9.0", "2.9.0", "9.0.0", "26.0.RC1"),
    Published("1.8.0", "2.7.2", "8.5.0", "25.5.0"),
    Published("1.7.0", "2.7.1", "8.3.RC1", "25.3.RC1"),
    Published("1.6.0", "2.7.0", "8.2.RC1", "25.2.0"),
)
OURS = TOGETHER[0]
# Releases of CANN that MindSpore 2.9.0 itself takes.
CANN_TAKEN = ((8, 2), (8, 3), (8, 5), (9, 0))
MINDSPORE = (2, 9)
NUMPY_END = (2,)
PYTHON = ((3, 10), (3, 13))


def release(version: str) -> Numbers:
    """The first two numbers: 8.5 of 8.5.0, 8.3 of 8.3.RC2."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _text(numbers: Numbers) -> str:
    return ".".join(map(str, numbers))


def toolkit_line(version: str) -> Line:
    check = "CANN's version"
    if release(version) in CANN_TAKEN:
        exact = (
            "" if release(version) == release(OURS.cann) else f"; published with it: {OURS.cann}"
        )
        return ok(check, f"{version}, which MindSpore {OURS.mindspore} takes{exact}")
    taken = ", ".join(map(_text, CANN_TAKEN))
    return fails(
        check,
        f"{version}, but MindSpore {OURS.mindspore} takes {taken}",
        f"install CANN {OURS.cann} (toolkit and kernels) and source its set_env.sh: {PAGE}",
    )


def driver_line(driver: str, cann: str | None) -> Line:
    """`cann` None: not known."""
    check = "driver's version"
    known = [row for row in TOGETHER if cann and release(row.cann) == release(cann)]
    if not known:
        reason = f"{driver}; which driver CANN {cann or '(unknown)'} needs is not known"
        return skipped(check, reason)
    (row,) = known
    have, wanted = release(driver), release(row.driver)
    if have < wanted:
        return fails(
            check,
            f"{driver}, older than {row.driver}, which is published with CANN {row.cann}",
            f"install driver and firmware {row.driver} (the host's administrator; then restart it): {PAGE}",
        )
    newer = " (newer than the published one, untried)" if have > wanted else ""
    return ok(check, f"{driver}, published with CANN {row.cann}: {row.driver}{newer}")


def mindspore_line(version: str | None) -> Line:
    check, remedy = "MindSpore's version", f"pip install mindspore=={OURS.mindspore}"
    if version is None:
        return fails(check, "it is not installed", remedy)
    if release(version) == MINDSPORE:
        return ok(check, version)
    return fails(check, f"{version}, but mindgrpo is for {_text(MINDSPORE)}", remedy)


def mindformers_line(version: str | None) -> Line:
    """It is an oracle of the tests; no run needs it."""
    check = "MindFormers' version"
    if version is None:
        return skipped(check, "it is not installed, and no run needs it")
    if release(version) == release(OURS.mindformers):
        return ok(check, version)
    return fails(
        check,
        f"{version}, but {OURS.mindformers} is published with MindSpore {OURS.mindspore}",
        f"pip install mindformers=={OURS.mindformers}, or uninstall it: no run needs it",
    )


def numpy_line(version: str | None) -> Line:
    check, remedy = "NumPy's version", "pip install 'numpy<2'"
    if version is None:
        return fails(check, "it is not installed", remedy)
    if release(version) < NUMPY_END:
        return ok(check, version)
    return fails(check, f"{version}, but MindSpore {OURS.mindspore} is built against 1", remedy)


def python_line(version: Numbers) -> Line:
    first, end = PYTHON
    seen = _text(version)
    if first <= version[:2] < end:
        return ok("Python's version", seen)
    return fails(
        "Python's version",
        f"{seen}, but MindSpore {OURS.mindspore} has packages for 3.10, 3.11 and 3.12",
        "use Python 3.11",
    )
