"""The memory of this process, in bytes and in words."""

from __future__ import annotations

import psutil


def process_rss() -> int:
    return int(psutil.Process().memory_info().rss)


def format_bytes(num_bytes: int | float) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
