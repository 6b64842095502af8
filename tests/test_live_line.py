"""The line on a terminal that says what a run is doing, and that logs and pipes have none of it."""

from __future__ import annotations

import io
import os
import pty
import threading
import time
from dataclasses import replace
from pathlib import Path

from mindgrpo.health.heartbeat import Heartbeat, LiveLine, heartbeat_path, read_heartbeat
from mindgrpo.health.rank_health import RankHealth
from mindgrpo.launch.log_follower import LogFollower
from mindgrpo.monitor.console import Console
from mindgrpo.rewards.score import Scorer

ROLLOUT = Heartbeat(
    1, 0.0, "rollout", since=100.0, step=7, serial=4, done=48, total=128, unit="samples"
)


def test_a_phase_of_some_seconds_is_named_with_what_is_done_and_what_is_left() -> None:
    line = LiveLine()
    assert line.text(ROLLOUT, 101.9) == ""
    assert line.text(ROLLOUT, 106.0) == "  step 7: rollout 6 s, 48 of 128 samples, about 10 s left"


def test_where_nothing_is_counted_the_phase_s_last_time_tells_what_is_left() -> None:
    line = LiveLine()
    reshard = Heartbeat(1, 0.0, "reshard", since=90.0, step=6, serial=3)
    line.text(reshard, 91.0)
    line.text(ROLLOUT, 101.0)
    again = replace(reshard, since=200.0, serial=5, step=7)
    assert line.text(again, 203.0) == "  step 7: reshard 3 s, about 7 s left"
    assert line.text(again, 215.0) == "  step 7: reshard 15 s"


def test_a_graph_that_is_compiled_is_named_instead() -> None:
    compiling = replace(ROLLOUT, step=0, graph="decode", graph_since=103.0)
    assert LiveLine().text(compiling, 108.0) == "  compiling decode 5 s"


def test_a_rank_tells_how_far_it_is_at_its_next_beat_and_no_longer_in_the_next_phase(
    tmp_path: Path,
) -> None:
    health = RankHealth(0, 1, tmp_path)

    def written() -> tuple[int, int, str]:
        last = read_heartbeat(heartbeat_path(tmp_path, 0))
        assert last is not None
        return last.done, last.total, last.unit

    with health.phase("rollout"):
        health.progress("samples", 3, 8)
        assert written()[:2] == (0, 0)
        health.beat()
        assert written() == (3, 8, "samples")
    assert written()[:2] == (0, 0)
    with health.phase("score"), health.counting("rewards", 16, lambda: 5):
        health.beat()  # asks how far it is, and the next beat writes it
        health.beat()
        assert written() == (5, 16, "rewards")


def test_rewards_are_counted_while_a_function_still_works() -> None:
    going_on = threading.Event()

    def waits_at_the_third(completions: list[str]) -> list[float]:
        if completions == ["a", "b", "c", "d"]:
            raise ValueError("one by one, please")
        if completions == ["c"]:
            going_on.wait()
        return [1.0] * len(completions)

    scorer = Scorer([waits_at_the_third])
    try:
        step = threading.Thread(target=scorer.score, args=(["a", "b", "c", "d"], [""] * 4, {}))
        step.start()
        while scorer.num_done() < 2:
            time.sleep(0.01)
        before = scorer.num_done()
        going_on.set()
        step.join()
        assert (before, scorer.num_done()) == (2, 4)
    finally:
        scorer.close()


def read_until(reader: int, until: bytes) -> bytes:
    shown = b""
    while until not in shown:
        shown += os.read(reader, 4096)
    return shown


def test_the_launcher_shows_it_below_the_log_and_takes_it_away_for_the_next_line(
    tmp_path: Path,
) -> None:
    reader, terminal = pty.openpty()
    log = tmp_path / "log"
    log.write_text("step 1/3  reward 0.1\n")
    follower = LogFollower([log], terminal, lambda: "  step 2: update 4 s")
    follower.start()
    read_until(reader, b"\r\x1b[K  step 2: update 4 s")
    with log.open("a") as lines:
        lines.write("step 2/3  reward 0.2\n")
    shown = read_until(reader, b"step 2/3  reward 0.2")
    follower.finish()
    follower.join()
    assert b"\r\x1b[Kstep 2/3  reward 0.2" in shown
    os.close(reader)
    os.close(terminal)


def test_logs_and_pipes_have_whole_lines_only(tmp_path: Path) -> None:
    log, stream = tmp_path / "log", io.StringIO()
    log.write_text("step 1/3\n")
    reader, writer = os.pipe()
    follower = LogFollower([log], writer, lambda: "  step 2: update 4 s")
    follower.start()
    shown = read_until(reader, b"\n")
    follower.finish()
    follower.join()
    os.close(writer)
    assert shown + os.read(reader, 4096) == b"step 1/3\n"
    os.close(reader)
    console = Console(True, stream)
    console.live("  step 2: update 4 s")
    console.line("step 2/3")
    assert stream.getvalue() == "step 2/3\n"


def test_a_process_by_itself_shows_it_on_its_own_terminal() -> None:
    reader, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream:
        console = Console(True, stream, width=30)
        console.live("  step 2: update 4 s, 3 of 8 micro-batches")
        console.line("step 2/3")
        shown = read_until(reader, b"step 2/3")
    assert shown == b"\r\x1b[K  step 2: update 4 s, 3 of 8 \r\x1b[Kstep 2/3\r\n"
    os.close(reader)
