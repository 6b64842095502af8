"""What a device's own profile is asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProfileSettings:
    """`level` is none, 0, 1 or 2; `with_device` off leaves the host's part alone."""

    level: str
    with_device: bool
    with_host: bool
    with_memory: bool
    with_stack: bool
    analyse: bool
    marks: bool
