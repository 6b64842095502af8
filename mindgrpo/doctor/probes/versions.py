"""Judges which versions of driver, CANN, MindFormers, NumPy and Python fit MindSpore 2.9, from a table.

Sources, as read in November 2026:
- https://www.mindspore.cn/mindformers/docs/en/r1.9.0/installation.html: which MindFormers, MindSpore, CANN, and driver
  with firmware, are published together; Python 3.11.4 is recommended there.
- mindspore 2.9.0, run_check/_check_version.py (AscendEnvChecker): the releases of CANN that it takes without a warning.
No source says which older driver still serves a CANN release, nor which driver is too new: a driver older than the one
published with a CANN release fails here, a newer one passes and is said to be untried.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from mindgrpo.doctor.jobs import CheckLine, fails, ok, skipped
from mindgrpo.run.machine_checks import Numbers, installed_version, release

PAGE = "https://www.mindspore.cn/mindformers/docs/en/r1.9.0/installation.html"


@dataclass(frozen=True)
class Published:
    """Names versions that are published together."""

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
PYTHON = ((3, 10), (3, 13))


@dataclass(frozen=True)
class Requirement:
    """Says which versions of a package fit, why others do not, and the remedy; `is_needed` by runs."""

    title: str
    fits: Callable[[Numbers], bool]
    why: str
    remedy: str
    is_needed: bool = True


def _text(numbers: Numbers) -> str:
    return ".".join(map(str, numbers))


PACKAGES = {
    "mindspore": Requirement(
        "MindSpore's version",
        lambda numbers: numbers == MINDSPORE,
        f"mindgrpo is for {_text(MINDSPORE)}",
        f"pip install mindspore=={OURS.mindspore}",
    ),
    # An oracle of the tests.
    "mindformers": Requirement(
        "MindFormers' version",
        lambda numbers: numbers == release(OURS.mindformers),
        f"{OURS.mindformers} is published with MindSpore {OURS.mindspore}",
        f"pip install mindformers=={OURS.mindformers}, or uninstall it: no run needs it",
        is_needed=False,
    ),
    "numpy": Requirement(
        "NumPy's version",
        lambda numbers: numbers < (2,),
        f"MindSpore {OURS.mindspore} is built against 1",
        "pip install 'numpy<2'",
    ),
}


def package_line(package: str, version: str | None) -> CheckLine:
    """Judges the version of one of PACKAGES; None: it is not installed."""
    needed = PACKAGES[package]
    if version is None and not needed.is_needed:
        return skipped(needed.title, "it is not installed, and no run needs it")
    if version is None:
        return fails(needed.title, "it is not installed", needed.remedy)
    if needed.fits(release(version)):
        return ok(needed.title, version)
    return fails(needed.title, f"{version}, but {needed.why}", needed.remedy)


def python_line(version: Numbers) -> CheckLine:
    first, end = PYTHON
    check, seen = "Python's version", _text(version)
    if first <= version[:2] < end:
        return ok(check, seen)
    needs = f"{seen}, but MindSpore {OURS.mindspore} has packages for 3.10, 3.11 and 3.12"
    return fails(check, needs, "use Python 3.11")


def package_lines() -> list[CheckLine]:
    """Judges the Python that runs this and the packages that are installed."""
    lines = [package_line(name, installed_version(name)) for name in PACKAGES]
    return [python_line(tuple(sys.version_info[:3])), *lines]


def toolkit_line(version: str) -> CheckLine:
    check = "CANN's version"
    if release(version) in CANN_TAKEN:
        is_ours = release(version) == release(OURS.cann)
        published = "" if is_ours else f"; published with it: {OURS.cann}"
        return ok(check, f"{version}, which MindSpore {OURS.mindspore} takes{published}")
    taken = ", ".join(map(_text, CANN_TAKEN))
    return fails(
        check,
        f"{version}, but MindSpore {OURS.mindspore} takes {taken}",
        f"install CANN {OURS.cann} (toolkit and kernels) and source its set_env.sh: {PAGE}",
    )


def driver_line(driver: str, cann: str | None) -> CheckLine:
    """Judges the driver's version; `cann` None: not known."""
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
