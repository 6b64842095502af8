"""A tool whose replies take as long as a call says, for conversations.py."""

from __future__ import annotations

import time


def sleeps(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"
