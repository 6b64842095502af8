"""One job under scripts/launch.sh in a folder of its own, to be hurt from outside: where its ranks are, what is left.

`before` is what the launcher is started by, such as `ip netns exec NAME`.

What is looked at is what any other program could look at: the records that ranks keep, /proc, ports and folders.
Refuses to touch a process that is not this job's.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mindgrpo.health.heartbeat import Heartbeat, heartbeat_path, read_heartbeat  # noqa: E402
from mindgrpo.processes.linux import state_of  # noqa: E402

EXAMPLE = "examples/grpo/tiny_arithmetic/grpo_config.yaml"
PROGRAM = "examples/grpo/qwen_grpo_tutorial/main.py"
POLL_SECONDS = 0.0002
SHARED_MEMORY = Path("/dev/shm")
MAPPED = re.compile(rf"{SHARED_MEMORY}/\S+")
FIRST_LINE = re.compile(
    r"mindgrpo: \d+ ranks? (?:on port (\d+), )?full logs: (\S+)|mindgrpo: 1 rank"
)


@contextmanager
def quick() -> Iterator[None]:
    """Before others, where that is allowed: some phases last a millisecond. What is started in here has it too."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, 0)


@dataclass
class Ended:
    """`seconds` from the blow to the launcher's end; `left` is what was still there then."""

    status: int
    seconds: float
    last_line: str
    left: list[str] = field(default_factory=list)


class Job:
    """`arguments` go to the main program; the run writes to folder/run. No `ranks`: a scheduler says how many."""

    def __init__(
        self,
        folder: Path,
        ranks: int | None,
        arguments: Sequence[str],
        launcher: Sequence[str] = (),
        before: Sequence[str] = (),
    ) -> None:
        self.folder = folder.absolute()
        for name in ("", "tmp", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (self.folder / "examples").symlink_to(ROOT / "examples")
        # `output` holds the link to the latest run.
        made = {self.folder / name for name in ("run", "screen", "output")}
        self._before = set(self.folder.iterdir()) | made
        self._shared = set(SHARED_MEMORY.iterdir())
        self._known_logs = set((self.folder / "logs").iterdir())
        own = Path(sys.executable).parent
        self._screen = (self.folder / "screen").open("w+")
        self.process = subprocess.Popen(
            [
                *before,
                "bash",
                str(ROOT / "scripts" / "launch.sh"),
                *(() if ranks is None else ("--ranks", str(ranks))),
                *launcher,
                "--",
            ]
            + [PROGRAM, "--config", EXAMPLE, "--output_dir", "run", *arguments],
            cwd=self.folder,
            env=os.environ
            | {
                "PATH": f"{own}:{os.environ['PATH']}",
                "MINDGRPO_LOG_DIR": str(self.folder / "logs"),
                "TMPDIR": str(self.folder / "tmp"),
            },
            stdout=self._screen,
            stderr=subprocess.STDOUT,
        )
        self._status: Path | None = None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(120)
        self._screen.close()

    @property
    def screen(self) -> str:
        return (self.folder / "screen").read_text(errors="replace")

    @property
    def status_folder(self) -> Path | None:
        new = sorted(set((self.folder / "logs").iterdir()) - self._known_logs)
        return new[-1] / "status" if new else None

    def where(self, rank: int) -> Heartbeat | None:
        self._status = self._status or self.status_folder
        return read_heartbeat(heartbeat_path(self._status, rank)) if self._status else None

    def stop_in(self, rank: int, kind: str, occurrence: int, seconds: float) -> Heartbeat | None:
        """Stops the rank (SIGSTOP) when it is in phase `kind` for the `occurrence`th time; None if it never was."""
        with quick():
            return self._stop_in(rank, kind, occurrence, seconds)

    def _stop_in(self, rank: int, kind: str, occurrence: int, seconds: float) -> Heartbeat | None:
        until = time.monotonic() + seconds
        seen, last = 0, None
        while time.monotonic() < until and self.process.poll() is None:
            found = self.where(rank)
            now = (found.serial, found.graph) if found and found.kind == kind else None
            if now is not None and now != last:
                seen += 1
            last = now
            if found is None or now is None or seen < occurrence:
                time.sleep(POLL_SECONDS)
                continue
            os.kill(found.pid, signal.SIGSTOP)
            # It takes the signal a moment later, in which it may enter another phase.
            while (state := state_of(found.pid)) is not None and state.letter not in "TZX":
                time.sleep(POLL_SECONDS)
            stopped = self.where(rank)
            if stopped is not None and stopped.kind == kind:
                return stopped
            os.kill(found.pid, signal.SIGCONT)  # it was faster
            last = None
        return None

    def end(self, struck_at: float, seconds: float) -> Ended:
        """Waits for the launcher, and looks at once what is left. Ends the job itself after `seconds`."""
        try:
            status = self.process.wait(max(0.1, struck_at + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.terminate()
            status = self.process.wait(120)
        taken = time.monotonic() - struck_at
        lines = [line for line in self.screen.splitlines() if line.strip()]
        return Ended(status, taken, lines[-1] if lines else "", self.left())

    def left(self) -> list[str]:
        found = [f"process {pid}: {name}" for pid, name in self.processes()]
        mine = f"mindgrpo-{self.process.pid}-"
        new = set(SHARED_MEMORY.iterdir()) - self._shared
        others = _mapped_shared_memory() if new else set()
        for path in new:
            # Other jobs of this machine come and go, and so do other programs' semaphores.
            is_others = path.name.startswith("mindgrpo-") or path in others or not path.exists()
            if path.name.startswith(mine) or not is_others:
                found.append(str(path))
        found += [str(path) for path in (self.folder / "tmp").iterdir()]
        found += [str(path) for path in set(self.folder.iterdir()) - self._before]
        told = FIRST_LINE.search(self.screen)
        if told and told[1] and _listens(int(told[1])):
            found.append(f"port {told[1]}")
        return found

    def processes(self) -> list[tuple[int, str]]:
        """Of this job: its log folder is in their environment."""
        mark = f"MINDGRPO_STATUS_DIR={self.folder / 'logs'}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                if mark in (entry / "environ").read_bytes():
                    name = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found.append((int(entry.name), name[:200]))
            except OSError:
                continue
        return found


def _mapped_shared_memory() -> set[Path]:
    """By any process that lives."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped |= {Path(found) for found in MAPPED.findall(maps.read_text())}
    return mapped


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0
