"""Where ranks say they are, what is made of it when one is late or gone, and whose failure came first.

Clocks and ranks are given by hand here. Does not prove that a real job is told apart from a hang, nor that ranks end:
test_faults.py does.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from mindgrpo.backend.contract import PeerLost
from mindgrpo.presence import failure, verdict
from mindgrpo.presence.deadlines import LONGEST_LOOK, SILENT_SECONDS, Deadlines, Overdue
from mindgrpo.presence.rank import Presence
from mindgrpo.presence.record import Reader, Record, Snapshot, path_of
from mindgrpo.presence.watchman import Watchman

# -- records ---------------------------------------------------------------------------------------------------------


def test_a_record_outlives_a_rank_that_was_killed_in_it(tmp_path: Path) -> None:
    path = path_of(tmp_path, 3)
    pid = os.fork()
    if pid == 0:
        presence = Presence(3, 8, tmp_path)
        presence.at_step(5)
        with presence.phase("rollout"), presence.compiling("decode"):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    found = Reader(path).read()
    assert found is not None
    assert (found.pid, found.step, found.phase, found.graph) == (pid, 5, "rollout", "decode")
    assert found.place == "phase compile (graph decode, in rollout of step 5)"
    assert abs(time.monotonic() - found.since) < 10


def test_a_phase_ends_where_it_is_left_and_stays_where_it_failed(tmp_path: Path) -> None:
    presence = Presence(0, 1, tmp_path)

    def phase() -> str:
        snapshot = presence.of(0)
        assert snapshot is not None
        return snapshot.phase

    with presence.phase("evaluate"):
        with presence.phase("rollout"):
            assert phase() == "rollout"
        assert phase() == "evaluate"
    assert phase() == "start"
    with pytest.raises(ValueError), presence.phase("score"), presence.phase("inner"):
        raise ValueError
    assert phase() == "inner"
    with presence.phase("update"):
        assert phase() == "update"


def test_a_record_is_kept_where_no_file_can_be(tmp_path: Path) -> None:
    record = Record(tmp_path / "missing" / "phase_0")
    record.enter("load")
    assert record.read().phase == "load"


def test_a_file_that_is_no_record_says_nothing(tmp_path: Path) -> None:
    path = path_of(tmp_path, 0)
    assert Reader(path).read() is None
    path.write_bytes(b"")
    assert Reader(path).read() is None
    path.write_bytes(b"x" * 4096)
    assert Reader(path).read() is None


def test_a_reader_never_sees_a_phase_half_written(tmp_path: Path) -> None:
    """Names and numbers that belong together, changed as fast as they can be by another process."""
    pid = os.fork()
    if pid == 0:
        record = Record(path_of(tmp_path, 0))
        while True:
            for name in ("a" * 31, "bb"):
                record.enter(name)
                record.at_step(len(name))
    try:
        reader, seen = Reader(path_of(tmp_path, 0)), set()
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            found = reader.read()
            if found is not None and found.phase != "start":
                seen.add(found.phase)
        assert seen == {"a" * 31, "bb"}
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# -- deadlines -------------------------------------------------------------------------------------------------------


def at(phase: str, serial: int, now: float, since: float = 0.0, **more: object) -> Snapshot:
    return replace(Snapshot(1, 1, now, 5, serial, since, phase), **more)  # type: ignore[arg-type]


class Clock:
    """Every rank's look, a second apart."""

    def __init__(self, limits: dict[str, float], size: int) -> None:
        self.now = 1000.0
        self.ranks = [Deadlines(rank, limits) for rank in range(size)]

    def run(
        self, seconds: int, where: dict[int, Snapshot], silent: tuple[int, ...] = ()
    ) -> list[Overdue]:
        told: list[Overdue] = []
        for _ in range(seconds):
            self.now += 1.0
            alive = {
                rank: found if rank in silent else replace(found, beat_at=self.now)
                for rank, found in where.items()
            }
            found = [
                look.look(self.now, alive)
                for rank, look in enumerate(self.ranks)
                if rank not in silent
            ]
            told += [overdue for overdue in found if overdue]
        return told


def test_a_late_phase_names_the_rank_that_is_behind_once_and_again_at_twice_the_limit() -> None:
    clock = Clock({"default": 60.0}, 3)
    where = {rank: at("update", 7, 0, 1000.0) for rank in range(3)}
    where[2] = at("rollout", 5, 0, 990.0)
    assert clock.run(60, where) == []
    (told,) = clock.run(30, where)
    assert told.missing == (2,) and told.kind == "update"
    assert told.sentence == (
        "phase update of step 5 has taken 60 s (monitor_config.phase_deadline_seconds is 60): "
        "waiting for rank 2 (phase rollout of step 5 since 71 s)"
    )
    assert len(clock.run(35, where)) == 1


def test_a_rank_without_a_heartbeat_is_the_one_waited_for_and_another_speaks_for_rank_0() -> None:
    clock = Clock({"update": 600.0}, 3)
    where = {rank: at("update", 7, 1000.0, 1000.0) for rank in range(3)}
    told = clock.run(602, where, silent=(0,))
    assert [overdue.missing for overdue in told] == [(0,)]
    assert "rank 0 (phase update of step 5 since 601 s, no heartbeat for 601 s)" in told[0].sentence


def test_ranks_that_are_all_alive_and_equally_far_are_said_to_be() -> None:
    where = {rank: at("rollout", 3, 0, 1000.0) for rank in range(2)}
    (told,) = Clock({"default": 9.0}, 2).run(12, where)
    assert told.missing == () and told.sentence.endswith(
        "every rank is in it with a heartbeat, and none stands out"
    )


def test_of_ranks_that_are_equally_far_the_one_that_waits_for_nobody_is_waited_for() -> None:
    """Nor is one that waits blamed for being behind."""
    where = {rank: at("update", 7, 0, 1000.0, waits_since=1001.0) for rank in range(4)}
    where[2] = at("update", 7, 0, 1000.0)
    where[3] = at("update", 6, 0, 1000.0, waits_since=1001.0)
    (told,) = Clock({"default": 9.0}, 4).run(12, where)
    assert told.missing == (2,)


def test_many_missing_ranks_are_counted() -> None:
    where = {rank: at("update", 7 if rank == 0 else 6, 0, 1000.0) for rank in range(9)}
    told = Clock({"default": 9.0}, 9).run(11, where)
    assert told[0].sentence.count("(phase") == 4 and told[0].sentence.endswith(" and 4 more")


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
    deadlines = Deadlines(0, {"default": 60.0})
    for now in (0.0, 1.0, 5000.0):
        assert deadlines.look(now, {0: at("update", 7, now)}) is None
    assert LONGEST_LOOK < SILENT_SECONDS


# -- the watchman ----------------------------------------------------------------------------------------------------


class Ended(Exception):
    pass


def _end(sentence: str) -> NoReturn:
    raise Ended(sentence)


def _late(tmp_path: Path, action: str, capsys: pytest.CaptureFixture[str]) -> Watchman:
    presence = Presence(1, 2, tmp_path)
    Presence(0, 2, tmp_path)._record._memory[16:32] = bytes(16)  # its last beat is long ago
    watchman = Watchman(presence, {"default": 0.0001}, action, _end)  # type: ignore[arg-type]
    watchman.look()
    time.sleep(0.01)
    return watchman


def test_a_warning_reaches_the_screen_from_whichever_rank_speaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _late(tmp_path, "warn", capsys).look()
    told = (tmp_path / "told").read_text()
    assert told.startswith("mindgrpo: rank 1: warning: phase start") and "rank 0 (" in told
    assert "warning: phase start" in capsys.readouterr().out


def test_a_stop_is_told_to_all_and_ends_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Ended, match="waiting for rank 0 .* and the job was ended"):
        _late(tmp_path, "stop", capsys).look()
    other = Watchman(Presence(0, 2, tmp_path), {}, "warn", _end)
    with pytest.raises(Ended, match="another rank has ended this job"):
        other.look()
    cause = verdict.find_cause(tmp_path)
    assert cause is not None and cause.rank == 0 and cause.status == 1
    assert "waiting for rank 0" in cause.what and "phase_deadline_seconds" in cause.remedy


# -- whose failure came first ----------------------------------------------------------------------------------------


class Job:
    """A status folder as its ranks leave it."""

    def __init__(self, tmp_path: Path) -> None:
        self.logs, self.folder = tmp_path, tmp_path / "status"
        self.folder.mkdir()
        (self.logs / "msrun.log").write_text("")
        (self.logs / "scheduler.log").write_text("")

    def rank(self, rank: int, *lines: str, phase: str = "rollout") -> None:
        (self.folder / f"rank_{rank}").write_text(
            "".join(f"{x}\n" for x in (f"pid {100 + rank}", *lines))
        )
        record = Record(path_of(self.folder, rank))
        record.at_step(5)
        record.enter(phase)
        (self.logs / f"worker_{rank}.log").write_text(f"log of rank {rank}\n")

    def failed(self, rank: int, when: float, error: BaseException, phase: str = "rollout") -> None:
        self.rank(rank, f"status 1 {when}", phase=phase)
        told = replace(failure.of_exception(rank, error), time=when)
        failure.write(self.folder, told)

    def told(self, ended: int = 1) -> tuple[str, int]:
        lines, status = verdict.tell(self.logs, ended)
        return lines[-1] if lines else "", status


def test_a_job_that_went_well_has_nothing_to_tell(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for rank in range(2):
        job.rank(rank, "status 0 10.0", "ended 0 10.1")
    assert job.told(ended=0) == ("", 0)


def test_the_first_exception_is_the_cause_with_its_phase(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.failed(0, 11.0, RuntimeError("later"))
    job.failed(1, 10.0, ValueError("broken\n  here\n\n- C++ Call Stack: ..."), phase="score")
    line, status = job.told()
    assert status == 1
    assert line == (
        "mindgrpo: rank 1 failed in phase score of step 5: ValueError: broken here; its traceback is above; "
        f"full logs: {tmp_path}"
    )


def test_a_lost_peer_is_never_the_cause_however_early_it_was_noticed(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.failed(0, 9.0, PeerLost("rank 2 has ended"))
    try:
        raise RuntimeError("in a graph") from PeerLost("rank 2 has ended")
    except RuntimeError as error:
        job.failed(1, 8.0, error)
    job.rank(2, "ended -9 10.0", phase="update")
    line, status = job.told()
    assert "rank 2 was killed by signal 9 in phase update of step 5" in line and status == 1
    assert "dmesg" in line


def test_ranks_that_were_killed_to_end_the_job_are_not_its_cause(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.failed(3, 10.0, ValueError("broken"))
    for rank in (0, 1, 2):
        job.rank(rank, "ended -9 10.5")
    assert "rank 3 failed in phase rollout" in job.told()[0]


def test_a_killed_rank_that_nobody_forked_is_known_from_msrun(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.failed(0, 9.0, PeerLost("rank 1 has ended"))
    job.rank(1)
    lost = "[ERROR] Worker process 101 exit with exception. Error code: -9.\n"
    (job.logs / "msrun.log").write_text(lost)
    assert "rank 1 was killed by signal 9 in phase rollout of step 5" in job.told()[0]


def test_only_consequences_are_better_than_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.failed(0, 9.0, PeerLost("rank 1 has ended"))
    job.rank(1)
    assert "rank 0 failed in phase rollout of step 5: PeerLost: rank 1 has ended" in job.told()[0]


def test_the_users_mistake_is_not_told_twice(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.rank(0, "status 2 10.0")
    job.rank(1, "status 2 9.0")
    assert job.told() == ("", 2)


@pytest.mark.parametrize("words", ["SystemExit: 7", "SystemExit"])
def test_a_status_of_its_own_is_handed_on(tmp_path: Path, words: str) -> None:
    job = Job(tmp_path)
    job.rank(0, "status 0 9.0")
    job.rank(1, "status 7 10.0")
    failure.write(job.folder, failure.Failure(1, 10.0, words, "", False))
    line, status = job.told()
    assert status == 7 and "rank 1 ended with status 7 in phase rollout of step 5; full" in line


def test_what_ends_the_ranks_beside_msrun_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.rank(0, "orphaned 9.0")
    assert "the process that forks the ranks has ended" in job.told()[0]
    (job.folder / "rank_0").write_text("pid 100\n")
    line, status = job.told(ended=137)
    assert "msrun was killed by signal 9 before a rank did" in line and status == 1


def test_damaged_records_do_not_hide_the_rest(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.failed(1, 10.0, ValueError("broken"))
    job.rank(0, "status one", "ended")
    (job.folder / "failure_0").write_text("{")
    assert "rank 1 failed" in job.told()[0]


def test_the_other_ranks_lines_and_traceback_are_shown_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.rank(0)
    job.failed(1, 10.0, ValueError("broken"))
    assert "log of rank 1" in verdict.tell(job.logs, 1)[0]
    shown = verdict.traceback_of_cause(job.folder)
    assert "rank 1 failed in phase rollout of step 5: ValueError: broken" in shown
    (job.logs / "worker_0.log").write_text(shown)
    assert len(verdict.tell(job.logs, 1)[0]) == 1


def test_who_waits_is_told_of_the_cause_and_not_of_the_next_in_line(tmp_path: Path) -> None:
    job = Job(tmp_path)
    waiting = Presence(0, 3, job.folder)
    job.failed(1, 11.0, PeerLost("rank 2"))
    job.rank(2, "ended -9 10.0", phase="update")
    words = waiting.ending_of(1)
    assert words.startswith("rank 1 has ended in phase rollout of step 5, after rank 2 was killed")
    assert waiting.ending_of(2) == "rank 2 was killed by signal 9 in phase update of step 5"
    assert Presence(0, 3, None).ending_of(2) == ""


def test_a_failure_is_one_line_of_bounded_length() -> None:
    told = failure.of_exception(0, ValueError("x" * 10_000))
    assert len(told.message) == failure.LONGEST_MESSAGE and told.message.endswith("...")
    assert json.loads(json.dumps(told.__dict__))["rank"] == 0
