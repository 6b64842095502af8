"""The trace of a run's phases: what chrome://tracing asks of it, and which steps, phases and ranks are in it.

The accelerator's own profile is played by a stand-in. Does not prove that a real one accepts these calls.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindgrpo.backend.contract import CompileLog, ProfileSettings
from mindgrpo.config.observation import PROFILED_STAGES, ProfilerConfig
from mindgrpo.memory.residency import PHASES
from mindgrpo.monitor.trace import PhaseTrace
from mindgrpo.run.watch import Profile


class Alone:
    """A backend of one rank that writes down what its device's profile was asked for."""

    rank = 0

    def __init__(self, has_device_profile: bool = False) -> None:
        self.compile_log = CompileLog()
        self.has_device_profile = has_device_profile
        self.world = SimpleNamespace(gather_objects=lambda value: [value])
        self.profiles: list[tuple[str, ProfileSettings]] = []
        self.marks: list[str] = []
        self.running: str | None = None

    @contextmanager
    def device_profile(self, folder: Path, settings: ProfileSettings) -> Iterator[None]:
        self.profiles.append((folder.name, settings))
        self.running = folder.name
        yield
        self.running = None

    @contextmanager
    def device_mark(self, name: str) -> Iterator[None]:
        self.marks.append(name)
        yield


class Record:
    label = "run"

    def __init__(self) -> None:
        self.said: list[str] = []
        self.console = SimpleNamespace(line=self.said.append)


def run(folder: Path, backend: Alone, num_steps: int, **settings: Any) -> tuple[Profile, Record]:
    """`num_steps` steps of two phases each under a profile."""
    record = Record()
    config = ProfilerConfig(profile=True, profile_save_path=str(folder), **settings)
    profile = Profile(config, backend, record)  # type: ignore[arg-type]
    for step in range(num_steps):
        with profile.step(step):
            with profile.phase("rollout"):
                backend.compile_log.run("decode", lambda: time.sleep(0.002))
            with profile.phase("update"):
                time.sleep(0.001)
    profile.finish()
    return profile, record


def events(path: Path) -> list[dict[str, Any]]:
    document = json.loads(path.read_text())
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    found: list[dict[str, Any]] = document["traceEvents"]
    return found


def bars(path: Path) -> list[str]:
    return [event["name"] for event in events(path) if event["ph"] == "X"]


def test_events_are_what_the_trace_event_format_asks_for(tmp_path: Path) -> None:
    run(tmp_path, Alone(), 2, profile_step_end=-1, profile_with_memory=True)
    found = events(tmp_path / "trace_rank_0.json")
    assert {event["ph"] for event in found} == {"M", "X", "C"}
    for event in found:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["ts"] > 0 and event["dur"] >= 0
        if event["ph"] == "C":
            assert event["args"]["rss"] > 2**20
    assert events(tmp_path / "trace.json") == found


def test_bars_lie_inside_the_bars_of_what_they_are_part_of(tmp_path: Path) -> None:
    before = time.time() * 1e6
    run(tmp_path, Alone(), 1)
    found = {e["name"]: e for e in events(tmp_path / "trace.json") if e["ph"] == "X"}
    assert set(found) == {"step 1", "rollout", "update", "compile decode"}

    def ends(name: str) -> tuple[float, float]:
        return found[name]["ts"], found[name]["ts"] + found[name]["dur"]

    for inner, outer in (
        ("rollout", "step 1"),
        ("update", "step 1"),
        ("compile decode", "rollout"),
    ):
        assert ends(outer)[0] <= ends(inner)[0] and ends(inner)[1] <= ends(outer)[1]
    assert ends("rollout")[1] <= ends("update")[0]
    assert found["rollout"]["dur"] >= 2000, "microseconds"
    assert before <= found["rollout"]["ts"] < time.time() * 1e6


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [1]),
        ({"profile_step_start": 1, "profile_step_end": 3}, [2, 3]),
        ({"profile_step_start": 2, "profile_step_end": -1}, [3, 4]),
        ({"profile_step_start": 9, "profile_step_end": 10}, []),
    ],
)
def test_the_steps_that_were_asked_for_are_traced(
    tmp_path: Path, settings: dict[str, Any], steps: list[int]
) -> None:
    run(tmp_path, Alone(), 4, **settings)
    expected = [f"step {step}" for step in steps]
    assert [name for name in bars(tmp_path / "trace.json") if name[:4] == "step"] == expected


def test_a_trace_is_written_as_soon_as_its_last_step_is_over(tmp_path: Path) -> None:
    backend, record = Alone(), Record()
    config = ProfilerConfig(profile=True, profile_save_path=str(tmp_path))
    profile = Profile(config, backend, record)  # type: ignore[arg-type]
    with profile.step(0):
        pass
    assert (tmp_path / "trace.json").exists()
    assert len(record.said) == 1 and "chrome://tracing" in record.said[0]
    with profile.step(1):
        pass
    profile.finish()
    assert len(record.said) == 1


def test_the_phases_that_were_asked_for_are_traced_by_users_names(tmp_path: Path) -> None:
    run(tmp_path, Alone(), 1, stage=["actor_update", "reference_log_prob"])
    assert [name for name in bars(tmp_path / "trace.json") if "compile" not in name] == [
        "update",
        "step 1",
    ]


def test_every_phase_has_a_users_name_that_leads_to_it() -> None:
    assert set(PROFILED_STAGES.values()) == {*PHASES, "score"}


def test_ranks_that_were_not_asked_for_are_not_traced(tmp_path: Path) -> None:
    run(tmp_path, Alone(), 1, profile_ranks=[3])
    assert not (tmp_path / "trace_rank_0.json").exists()
    assert bars(tmp_path / "trace.json") == []


def test_a_second_run_does_not_write_over_the_first(tmp_path: Path) -> None:
    run(tmp_path, Alone(), 1)
    first = (tmp_path / "trace.json").read_bytes()
    run(tmp_path, Alone(), 1)
    assert (tmp_path / "trace.json").read_bytes() == first
    assert (tmp_path / "run" / "trace.json").exists()


def test_without_a_profile_of_the_devices_own_that_is_told(tmp_path: Path) -> None:
    profile, _ = run(tmp_path, Alone(), 1)
    assert len(profile.notes) == 1 and "profile_with_npu has no effect" in profile.notes[0]
    profile, _ = run(tmp_path / "other", Alone(), 1, profile_with_npu=False)
    assert profile.notes == []


def test_the_devices_own_profile_covers_the_same_steps(tmp_path: Path) -> None:
    backend = Alone(has_device_profile=True)
    profile, _ = run(tmp_path, backend, 4, profile_step_start=1, profile_step_end=3)
    assert profile.notes == []
    assert [name for name, _ in backend.profiles] == ["steps"]
    assert backend.running is None


def test_the_devices_own_profile_covers_the_same_phases_and_gets_the_settings(
    tmp_path: Path,
) -> None:
    backend = Alone(has_device_profile=True)
    run(
        tmp_path,
        backend,
        2,
        stage="actor_update",
        profile_step_end=2,
        profile_level="level_none",
        profile_with_stack=True,
        profile_analysis=True,
        profile_with_memory=True,
        profile_with_cpu=False,
        mstx=True,
    )
    settings = ProfileSettings(
        level="none",
        with_device=True,
        with_host=False,
        with_memory=True,
        with_stack=True,
        analyse=True,
        marks=True,
    )
    assert backend.profiles == [("update", settings)] * 2
    assert backend.marks == ["rollout", "update"] * 2


@pytest.mark.parametrize(
    ("given", "level"), [("levelNone", "none"), ("level0", "0"), ("level2", "2")]
)
def test_levels_are_read_in_every_spelling(tmp_path: Path, given: str, level: str) -> None:
    backend = Alone(has_device_profile=True)
    run(tmp_path, backend, 1, profile_level=given)
    assert backend.profiles[0][1].level == level


def test_a_phase_that_fails_is_in_the_trace() -> None:
    trace = PhaseTrace(0)
    with pytest.raises(ValueError), trace.span("update"):
        raise ValueError
    assert [event["name"] for event in trace.events if event["ph"] == "X"] == ["update"]


def test_without_profile_nothing_is_traced_and_nothing_is_written(tmp_path: Path) -> None:
    config = ProfilerConfig(profile_save_path=str(tmp_path / "data"))
    backend = Alone(has_device_profile=True)
    profile = Profile(config, backend, Record())  # type: ignore[arg-type]
    with profile.step(0), profile.phase("update"):
        pass
    profile.finish()
    assert not (tmp_path / "data").exists() and backend.profiles == [] and backend.marks == []
