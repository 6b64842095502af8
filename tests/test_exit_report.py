"""Which rank failed first and how a job's end is worded, from log and status folders made by hand.

Does not prove that ranks write what is made here: test_launch_script.py and test_faults.py do.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mindgrpo.backend.contract import PeerLost
from mindgrpo.errors import UserError
from mindgrpo.health.failure import (
    LONGEST_MESSAGE,
    RankFailure,
    failure_of_code,
    failure_of_exception,
    write_failure,
)
from mindgrpo.health.rank_health import RankHealth
from mindgrpo.launch import exit_report


class Job:
    """Log and status folders as a job's ranks leave them."""

    def __init__(self, tmp_path: Path) -> None:
        self.logs, self.folder = tmp_path, tmp_path / "status"
        self.folder.mkdir()
        (self.logs / "msrun.log").write_text("")

    def rank(self, rank: int, phase: str = "rollout") -> None:
        (self.folder / f"rank_{rank}").write_text(f"pid {100 + rank}\n")
        health = RankHealth(rank, 4, self.folder)
        health.at_step(5)
        health.enter(phase)
        (self.logs / f"worker_{rank}.log").write_text(f"log of rank {rank}\n")

    def failed(
        self,
        rank: int,
        when: float,
        error: BaseException,
        phase: str = "rollout",
        status: int = 1,
    ) -> None:
        self.rank(rank, phase)
        failure = failure_of_exception(self.folder, rank, error, status)
        write_failure(self.folder, rank, replace(failure, time=when))

    def killed(self, rank: int, when: float, phase: str = "rollout") -> None:
        self.rank(rank, phase)
        write_failure(self.folder, rank, failure_of_code(self.folder, rank, -9, when))

    def report(self, code: int = 1, num_ranks: int = 4) -> tuple[str, int]:
        lines, status = exit_report.report(self.logs, num_ranks, 0, code)
        return lines[-1] if lines else "", status


def test_a_job_that_went_well_has_nothing_to_tell(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for rank in range(2):
        job.rank(rank)
    assert job.report(code=0) == ("", 0)


def test_the_first_exception_is_the_cause_with_its_phase(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.failed(0, 11.0, RuntimeError("later"))
    job.failed(1, 10.0, ValueError("broken\n  here\n\n- C++ Call Stack: ..."), phase="score")
    line, status = job.report()
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
    job.killed(2, 10.0, phase="update")
    line, status = job.report()
    assert "rank 2 was killed by signal 9 in phase update of step 5" in line and status == 1
    assert "dmesg" in line


def test_ranks_that_were_killed_to_end_the_job_are_not_its_cause(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.failed(3, 10.0, ValueError("broken"))
    for rank in (0, 1, 2):
        job.killed(rank, 10.5)
    assert "rank 3 failed in phase rollout" in job.report()[0]


def test_what_a_rank_wrote_of_its_end_stays_when_its_parent_sees_it(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.failed(1, 10.0, ValueError("broken"))
    job.killed(1, 9.0)
    assert "ValueError: broken" in job.report()[0]


def test_a_killed_rank_that_nobody_forked_is_known_from_msrun(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.failed(0, 9.0, PeerLost("rank 1 has ended"))
    job.rank(1)
    lost = "[ERROR] Worker process 101 exit with exception. Error code: -9.\n"
    (job.logs / "msrun.log").write_text(lost)
    assert "rank 1 was killed by signal 9 in phase rollout of step 5" in job.report()[0]


def test_only_consequences_are_better_than_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.failed(0, 9.0, PeerLost("rank 1 has ended"))
    job.rank(1)
    assert "rank 0 failed in phase rollout of step 5: PeerLost: rank 1 has ended" in job.report()[0]


def test_the_users_mistake_is_not_told_twice(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.failed(0, 10.0, SystemExit(2), status=2)
    job.failed(1, 9.0, SystemExit(2), status=2)
    assert job.report() == ("", 2)


def test_the_users_mistake_is_one_sentence_wherever_it_was_noted_first(tmp_path: Path) -> None:
    """The rank whose log is on the screen was ended before it wrote that it failed, and maybe before it said why."""
    job, sentence = Job(tmp_path), "mindgrpo: rl_config.beta is -1, but must be at least 0."
    job.rank(0)
    job.failed(1, 9.0, UserError("rl_config.beta is -1, but must be at least 0."), status=2)
    (job.logs / "worker_1.log").write_text(f"{sentence}\n")
    assert exit_report.report(job.logs, 2, 0, 1) == ([sentence], 2)
    (job.logs / "worker_0.log").write_text(f"log of rank 0\n{sentence}\n")
    assert exit_report.report(job.logs, 2, 0, 1) == ([], 2)


@pytest.mark.parametrize("error", [SystemExit(7), SystemExit("seven")])
def test_a_status_of_its_own_is_handed_on(tmp_path: Path, error: SystemExit) -> None:
    job = Job(tmp_path)
    job.rank(0)
    job.failed(1, 10.0, error, status=7)
    line, status = job.report()
    more = ": seven" if error.code == "seven" else ""
    assert status == 7 and f"rank 1 ended with status 7 in phase rollout of step 5{more}; " in line


def test_what_ends_the_ranks_beside_msrun_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.rank(0)
    line, status = job.report(code=-9)
    assert "msrun was killed by signal 9 before a rank did" in line and status == 1
    words = "the process that forks the ranks has ended"
    write_failure(job.folder, 0, RankFailure(None, 9.0, 1, words, "fork_server.log may say why"))
    assert job.report()[0].startswith(f"mindgrpo: {words}; fork_server.log")


def test_the_only_rank_is_named_by_the_code_of_its_process(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.rank(0)
    line, status = job.report(code=-11, num_ranks=1)
    assert "rank 0 was killed by signal 11 in phase rollout of step 5" in line and status == 1


def test_damaged_files_do_not_hide_the_rest(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.failed(1, 10.0, ValueError("broken"))
    (job.folder / "rank_0").write_text("pid one")
    (job.folder / "failure_0").write_text("{")
    (job.folder / "failure_2").write_text('{"rank": 2}')
    assert "rank 1 failed" in job.report()[0]


def test_the_other_ranks_lines_and_traceback_are_shown_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.rank(0)
    job.failed(1, 10.0, ValueError("broken"))
    assert "log of rank 1" in exit_report.report(job.logs, 4, 0, 1)[0]
    shown = exit_report.traceback_of_first_failure(job.folder)
    assert "rank 1 failed in phase rollout of step 5: ValueError: broken" in shown
    (job.logs / "worker_0.log").write_text(shown)
    assert len(exit_report.report(job.logs, 4, 0, 1)[0]) == 1


def test_who_waits_is_told_of_the_cause_and_not_of_the_next_in_line(tmp_path: Path) -> None:
    job = Job(tmp_path)
    waiting = RankHealth(0, 3, job.folder)
    job.failed(1, 11.0, PeerLost("rank 2"))
    job.killed(2, 10.0, phase="update")
    words = waiting.how_rank_ended(1)
    assert words.startswith("rank 1 has ended in phase rollout of step 5, after rank 2 was killed")
    assert waiting.how_rank_ended(2) == "rank 2 was killed by signal 9 in phase update of step 5"
    assert RankHealth(0, 3, None).how_rank_ended(2) == ""


def test_a_failure_is_one_line_of_bounded_length(tmp_path: Path) -> None:
    failure = failure_of_exception(tmp_path, 0, ValueError("x\n" * 10_000), 1)
    assert "\n" not in failure.message
    assert len(failure.message) < LONGEST_MESSAGE + 100 and failure.message.endswith("...")
