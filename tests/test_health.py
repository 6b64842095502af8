"""Heartbeats, phases that take too long, and which rank failed first, with clocks and ranks made by hand.

Does not prove that a real job is told apart from a hang, nor that ranks end: test_faults.py does.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mindgrpo.health.failure import (
    first_failure,
)
from mindgrpo.health.heartbeat import (
    IDLE,
    Heartbeat,
    HeartbeatFile,
    LiveLine,
    heartbeat_path,
    read_heartbeat,
)
from mindgrpo.health.rank_health import RankHealth
from mindgrpo.health.watchdog import (
    LONGEST_CHECK_SECONDS,
    SILENT_SECONDS,
    HangDetector,
    Overdue,
    Watchdog,
)

# -- heartbeats ------------------------------------------------------------------------------------------------------


def test_a_heartbeat_outlives_a_rank_that_was_killed(tmp_path: Path) -> None:
    before = time.monotonic()
    pid = os.fork()
    if pid == 0:
        health = RankHealth(3, 8, tmp_path)
        health.at_step(5)
        with health.phase("rollout"), health.compiling("decode"):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    last = read_heartbeat(heartbeat_path(tmp_path, 3))
    assert last is not None
    assert (last.pid, last.step, last.phase, last.graph) == (pid, 5, "rollout", "decode")
    assert last.position == "phase compile (graph decode, in rollout of step 5)"
    assert before < last.since < time.monotonic()


def test_a_phase_ends_where_it_is_left_and_stays_where_it_failed(tmp_path: Path) -> None:
    health = RankHealth(0, 1, tmp_path)

    def phase() -> str:
        known, written = health.heartbeat_of(0), read_heartbeat(heartbeat_path(tmp_path, 0))
        assert known is not None and known == written
        return known.phase

    with health.phase("evaluate"):
        with health.phase("rollout"):
            assert phase() == "rollout"
        assert phase() == "evaluate"
    assert phase() == "start"
    with pytest.raises(ValueError), health.phase("score"), health.phase("inner"):
        raise ValueError
    assert phase() == "inner"
    with health.phase("update"):
        assert phase() == "update"


def test_a_rank_knows_its_phase_where_no_file_can_be_written(tmp_path: Path) -> None:
    health = RankHealth(0, 1, tmp_path / "missing")
    health.enter("load")
    own = health.heartbeat_of(0)
    assert own is not None and own.phase == "load" and set(health.heartbeats()) == {0}


@pytest.mark.parametrize(
    "damage", [None, b"", b"x" * 4096, b"00000000", b"a3a6bf43{}", b"4c2f32b8[1]", b"\xff"]
)
def test_a_file_that_is_no_heartbeat_says_nothing(tmp_path: Path, damage: bytes | None) -> None:
    path = heartbeat_path(tmp_path, 0)
    if damage is not None:
        path.write_bytes(damage)
    assert read_heartbeat(path) is None


def test_a_reader_never_sees_half_of_a_write(tmp_path: Path) -> None:
    """Fields that belong together, changed as fast as they can be by another process."""
    path = heartbeat_path(tmp_path, 0)
    pid = os.fork()
    if pid == 0:
        file = HeartbeatFile(path)
        while True:
            for name in ("a" * 60, "bb"):
                file.write(Heartbeat(1, 0.0, name, 0.0, step=len(name), graph=name))
    try:
        changes, previous = 0, None
        while changes < 1000:
            last = read_heartbeat(path)
            if last is not None:
                assert last.step == len(last.phase) and last.graph == last.phase
                assert last.phase in ("a" * 60, "bb")
                changes += previous != last.phase
                previous = last.phase
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# -- hangs -----------------------------------------------------------------------------------------------------------


def at(phase: str, serial: int, now: float, since: float = 0.0, **more: Any) -> Heartbeat:
    return Heartbeat(1, now, phase, since, step=5, serial=serial, **more)


class Clock:
    """Every rank's check, a second apart."""

    def __init__(self, limits: dict[str, float], size: int) -> None:
        self.now = 1000.0
        self.ranks = [HangDetector(rank, limits) for rank in range(size)]

    def run(
        self, seconds: int, where: dict[int, Heartbeat], silent: tuple[int, ...] = ()
    ) -> list[Overdue]:
        overdue: list[Overdue] = []
        for _ in range(seconds):
            self.now += 1.0
            alive = {
                rank: beat if rank in silent else replace(beat, beat_at=self.now)
                for rank, beat in where.items()
            }
            checked = [
                detector.check(self.now, alive)
                for rank, detector in enumerate(self.ranks)
                if rank not in silent
            ]
            overdue += [one for one in checked if one]
        return overdue


def test_a_trainer_may_wait_to_train_for_as_long_as_its_user_likes() -> None:
    clock = Clock({"default": 60.0}, 1)
    assert clock.run(500, {0: at(IDLE, 3, 0)}) == []
    assert len(clock.run(70, {0: at("load", 4, 0)})) == 1
    assert LiveLine().text(at(IDLE, 3, 0), 500.0) == ""


def test_a_late_phase_names_the_rank_that_is_behind_once_and_again_at_twice_the_limit() -> None:
    clock = Clock({"default": 60.0}, 3)
    where = {rank: at("update", 7, 0, 1000.0) for rank in range(3)}
    where[2] = at("rollout", 5, 0, 990.0)
    assert clock.run(60, where) == []
    (late,) = clock.run(30, where)
    assert late.missing == (2,) and late.kind == "update"
    assert late.sentence == (
        "phase update of step 5 has taken 60 s (monitor_config.phase_deadline_seconds is 60): "
        "waiting for rank 2 (phase rollout of step 5 since 71 s)"
    )
    assert len(clock.run(35, where)) == 1


def test_a_rank_without_a_heartbeat_is_the_one_waited_for_and_another_speaks_for_rank_0() -> None:
    clock = Clock({"update": 600.0}, 3)
    where = {rank: at("update", 7, 1000.0, 1000.0) for rank in range(3)}
    late = clock.run(602, where, silent=(0,))
    assert [overdue.missing for overdue in late] == [(0,)]
    assert "rank 0 (phase update of step 5 since 601 s, no heartbeat for 601 s)" in late[0].sentence


def test_ranks_that_are_all_alive_and_equally_far_are_said_to_be() -> None:
    where = {rank: at("rollout", 3, 0, 1000.0) for rank in range(2)}
    (late,) = Clock({"default": 9.0}, 2).run(12, where)
    assert late.missing == () and late.sentence.endswith(
        "every rank is in it with a heartbeat, and none stands out"
    )


def test_of_ranks_that_are_equally_far_the_one_that_waits_for_nobody_is_waited_for() -> None:
    """Nor is one that waits blamed for being behind."""
    where = {rank: at("update", 7, 0, 1000.0, waits_since=1001.0) for rank in range(4)}
    where[2] = at("update", 7, 0, 1000.0)
    where[3] = at("update", 6, 0, 1000.0, waits_since=1001.0)
    (late,) = Clock({"default": 9.0}, 4).run(12, where)
    assert late.missing == (2,)


def test_many_missing_ranks_are_counted() -> None:
    where = {rank: at("update", 7 if rank == 0 else 6, 0, 1000.0) for rank in range(9)}
    late = Clock({"default": 9.0}, 9).run(11, where)
    assert late[0].sentence.count("(phase") == 4 and late[0].sentence.endswith(" and 4 more")


def test_time_in_which_a_rank_compiles_is_not_the_phase_of_those_who_wait() -> None:
    clock = Clock({"update": 10.0, "compile": 100.0}, 2)
    waiting = at("update", 7, 0, 1000.0)
    compiling = at("update", 7, 0, 1000.0, graph="loss", graph_since=1000.0)
    assert clock.run(90, {0: waiting, 1: compiling}) == []
    clock = Clock({"update": 10.0, "compile": 100.0}, 2)
    assert clock.run(110, {0: compiling, 1: waiting})[0].kind == "compile"


def test_a_phase_without_a_limit_may_take_for_ever() -> None:
    where = {rank: at("rollout", 3, 0) for rank in range(2)}
    assert Clock({"update": 1.0}, 2).run(5000, where) == []


def test_a_phase_that_comes_again_has_its_time_again() -> None:
    clock = Clock({"default": 10.0}, 1)
    for serial in range(20):
        assert clock.run(8, {0: at("rollout", serial, 0)}) == []


def test_a_machine_that_stood_still_does_not_use_up_a_phase() -> None:
    detector = HangDetector(0, {"default": 60.0})
    for now in (0.0, 1.0, 5000.0):
        assert detector.check(now, {0: at("update", 7, now)}) is None
    assert LONGEST_CHECK_SECONDS < SILENT_SECONDS


# -- the watchdog ----------------------------------------------------------------------------------------------------


class Ended(Exception):
    pass


def _end(sentence: str) -> NoReturn:
    raise Ended(sentence)


def _late(tmp_path: Path, action: str, capsys: pytest.CaptureFixture[str]) -> Watchdog:
    health = RankHealth(1, 2, tmp_path)
    silent = Heartbeat(1, time.monotonic() - 2 * SILENT_SECONDS, "start", 0.0)
    HeartbeatFile(heartbeat_path(tmp_path, 0)).write(silent)
    watchdog = Watchdog(health, {"default": 0.0}, action, _end)  # type: ignore[arg-type]
    watchdog.check()
    return watchdog


def test_a_warning_reaches_the_screen_from_whichever_rank_speaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _late(tmp_path, "warn", capsys).check()
    shown = (tmp_path / "messages").read_text()
    assert shown.startswith("mindgrpo: rank 1: warning: phase start") and "rank 0 (" in shown
    assert "warning: phase start" in capsys.readouterr().out


def test_a_stop_is_told_to_all_and_ends_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Ended, match="waiting for rank 0 .* and the job was ended"):
        _late(tmp_path, "stop", capsys).check()
    other = Watchdog(RankHealth(0, 2, tmp_path), {}, "warn", _end)
    with pytest.raises(Ended, match="another rank has ended this job"):
        other.check()
    first = first_failure(tmp_path)
    assert first is not None and first.rank == 0 and first.status == 1
    assert "waiting for rank 0" in first.message and "phase_deadline_seconds" in first.remedy
