"""Says in one line what a rank is doing, how far it is and when that ends, for a terminal that shows it in place."""

from __future__ import annotations

from mindgrpo.health.heartbeat import Heartbeat

SHORTEST_SECONDS = 2.0
CLEAR = "\r\033[K"
NAMES = {
    "start": "starting",
    "old_logps": "log-probs",
    "reference": "reference log-probs",
    "close": "closing files",
}
# Between the phases of a step.
BETWEEN = "loop"


class LiveLine:
    """Hears the heartbeats of one rank, and remembers how long its phases took."""

    def __init__(self) -> None:
        self._last: Heartbeat | None = None
        self._seconds: dict[str, float] = {}

    def text(self, heartbeat: Heartbeat, now: float) -> str:
        """Empty in the first seconds of a phase and between phases. `now` is in seconds of CLOCK_MONOTONIC."""
        self._remember(heartbeat)
        since = heartbeat.graph_since if heartbeat.graph else heartbeat.since
        seconds = now - since
        if seconds < SHORTEST_SECONDS or heartbeat.kind == BETWEEN:
            return ""
        what = NAMES.get(heartbeat.phase, heartbeat.phase)
        if heartbeat.graph:
            what = f"compiling {heartbeat.graph}"
        step = f"step {heartbeat.step}: " if heartbeat.step else ""
        words = [f"  {step}{what} {seconds:.0f} s"]
        share = 0.0
        if heartbeat.total and not heartbeat.graph:
            words.append(f"{heartbeat.done} of {heartbeat.total} {heartbeat.unit}")
            share = heartbeat.done / heartbeat.total
        left = self._left(heartbeat, seconds, share)
        if left is not None:
            words.append(f"about {left:.0f} s left")
        return ", ".join(words)

    def _left(self, heartbeat: Heartbeat, seconds: float, share: float) -> float | None:
        """By what is done of the phase, else by how long it took the last time."""
        if share > 0:
            return seconds * (1 - share) / share
        last = None if heartbeat.graph else self._seconds.get(heartbeat.phase)
        return last - seconds if last is not None and last > seconds else None

    def _remember(self, heartbeat: Heartbeat) -> None:
        last, self._last = self._last, heartbeat
        if last is not None and last.serial != heartbeat.serial:
            self._seconds[last.phase] = heartbeat.since - last.since
