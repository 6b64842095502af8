"""vLLM on devices that it shares with training: its dtype, its devices and its memory, with the engine's double.

The devices are the host's processors in a class that has the variable and the cache of an NPU. Does not prove that vLLM
on an NPU keeps to what it is told, nor what MindSpore's pool gives back there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import small_runs
from small_generators import CONFIG, LAYOUT, SETTINGS, room_of

from mindgrpo.backend.contract import AloneGroup
from mindgrpo.backend.device.host_cpu import HostCpuBackend
from mindgrpo.cli.verbs import main
from mindgrpo.config import load_config
from mindgrpo.errors import UserError
from mindgrpo.grpo.build import make_engine
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.rollout.vllm import process
from mindgrpo.rollout.vllm.process import EngineFailed, EngineProcess
from mindgrpo.run.preflight import prepare

DOUBLE = Path(__file__).with_name("engine_double")
EXAMPLE = small_runs.EXAMPLE / "grpo_config.yaml"
VARIABLE, GIB = "ASCEND_RT_VISIBLE_DEVICES", 1 << 30
ON_NPUS = ("--context.device_target", "Ascend", "--generate_config.use_vllm", "1")


class Npu(HostCpuBackend):
    devices_variable = VARIABLE

    def __init__(self, events: list[str]) -> None:
        self._events = events
        super().__init__(dict(os.environ))

    def _memory_bytes(self) -> int | None:
        return 64 * GIB

    def make_room(self) -> None:
        self._events.append("emptied")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens in order: requests to the double by their types, and "emptied"."""
    seen: list[str] = []
    request = EngineProcess.request

    def noting(self: EngineProcess, message: Any, *rest: Any) -> Any:
        seen.append(message["type"])
        return request(self, message, *rest)

    monkeypatch.setattr(process, "CHILD", DOUBLE)
    monkeypatch.setattr(EngineProcess, "request", noting)
    return seen


def started(
    folder: Path, events: list[str], *words: str, rank: int = 0, mesh: Mesh | None = None
) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """An engine of a run on NPUs, with what its process was started with: request and variables."""
    paths = ("--generate_config.vllm.python", sys.executable, "--actor_config.load", str(folder))
    config = load_config(EXAMPLE, [*ON_NPUS, *paths, *words]).config
    backend = Npu(events)
    layout = LAYOUT
    if mesh is not None:
        layout = Layout.of(mesh, parameter_specs(CONFIG))
        backend.rank, backend.world_size = rank, mesh.size
        # Of its other ranks there are no processes here.
        backend.group = lambda ranks: AloneGroup(rank)  # type: ignore[method-assign]
    engine = make_engine(config, CONFIG, layout, backend, SETTINGS, room_of(4, 2))
    with pytest.raises(EngineFailed, match="lacks"):
        engine.publish(lambda: None, 1)  # type: ignore[arg-type, return-value]
    request = json.loads((folder / "start.json").read_text())
    return engine, request, json.loads((folder / "environment.json").read_text())


def test_an_engine_computes_in_the_runs_dtype_and_sleeps_between_rollouts(
    tmp_path: Path, events: list[str]
) -> None:
    engine, request, _ = started(
        tmp_path, events, "--generate_config.gpu_memory_utilization", "0.7"
    )
    engine.close()
    # What a run on NPUs computes in.
    assert request["dtype"] == "bfloat16"
    assert request["arguments"]["gpu_memory_utilization"] == 0.7
    assert request["arguments"]["enable_sleep_mode"] is True
    assert engine.memory_bytes() == int(0.7 * 64 * GIB)


def test_what_the_user_says_of_an_engine_wins(tmp_path: Path, events: list[str]) -> None:
    words = ("--generate_config.vllm.dtype", "float16")
    words += ("--generate_config.vllm.arguments", "[enable_sleep_mode=false]")
    engine, request, _ = started(tmp_path, events, *words)
    engine.close()
    assert request["dtype"] == "float16"
    assert request["arguments"]["enable_sleep_mode"] is False


@pytest.mark.parametrize(
    ("rank", "outer", "own"),
    [
        (0, None, "0,1"),
        (2, None, "2,3"),
        (2, "1,3,4,6", "4,6"),
        (0, "1,3,4,6", "1,3"),
    ],
)
def test_each_engine_sees_the_devices_of_its_replicas_ranks(
    tmp_path: Path,
    events: list[str],
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    outer: str | None,
    own: str,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if outer is not None:
        monkeypatch.setenv(VARIABLE, outer)
    engine, request, variables = started(tmp_path, events, rank=rank, mesh=Mesh(2, 2))
    engine.close()
    assert request["tensor_parallel"] == 2
    assert variables[VARIABLE] == own


def test_devices_are_counted_from_a_hosts_first_rank_and_an_engine_has_one_host(
    tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("MINDGRPO_RANKS_PER_HOST", "4")
    engine, _, variables = started(tmp_path, events, rank=6, mesh=Mesh(4, 2))
    engine.close()
    assert variables[VARIABLE] == "2,3"
    monkeypatch.setenv("MINDGRPO_RANKS_PER_HOST", "1")
    with pytest.raises(UserError, match=r"model_parallel is 2, .* ranks 0 to 1, of several hosts"):
        started(tmp_path, events, rank=0, mesh=Mesh(2, 2))


def test_memory_that_training_keeps_is_given_back_before_an_engine_starts_or_wakes(
    tmp_path: Path, events: list[str]
) -> None:
    engine, _, _ = started(tmp_path, events)
    assert events.index("emptied") < events.index("start")
    engine.version = 1
    engine.sleep()
    del events[:]
    engine.wake()
    assert events == ["emptied", "wake"]
    engine.wake()
    assert events == ["emptied", "wake"], "it is awake already"
    engine.close()


# -- before a run --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    small_runs.make_inputs(folder)
    return folder


def words_of(inputs: Path, share: str) -> list[str]:
    paths = {**small_runs.input_keys(inputs), "generate_config.vllm.python": sys.executable}
    pairs = [word for key, value in paths.items() for word in (f"--{key}", value)]
    sizes = ["--context.max_device_memory", "8MB"]
    return [*pairs, *ON_NPUS, *sizes, "--generate_config.gpu_memory_utilization", share]


@pytest.mark.parametrize(("share", "fits"), [("0.5", True), ("0.99", False)])
def test_the_plan_counts_vllms_share_of_a_device(
    inputs: Path, capsys: pytest.CaptureFixture[str], share: str, fits: bool
) -> None:
    words = ["plan", "--config", str(inputs / "small.yaml"), "--must_fit"]
    status = 0
    try:
        main([*words, *words_of(inputs, share)])
    except SystemExit as ended:
        status = int(str(ended.code))
    out = capsys.readouterr().out
    assert status == (0 if fits else 1)
    assert f"vLLM takes {share} of each device" in out and "vLLM in bfloat16" in out
    assert "vLLM's weights while it sleeps" in out, "they go to the host"
    rows = [row for row in out.splitlines() if row.startswith("rollout") or " rollout " in row]
    (line,) = (row for row in rows if "generator" in row)
    assert float(line.split("MiB")[0].split()[-1]) == pytest.approx(8 * float(share), abs=0.1)


def test_a_run_whose_engine_and_policy_do_not_fit_a_device_is_refused_with_the_sum(
    inputs: Path,
) -> None:
    def refusal(share: str) -> str:
        config = load_config(inputs / "small.yaml", words_of(inputs, share)).config
        with pytest.raises(UserError) as raised:
            prepare(config, None, scores=False)
        return str(raised.value)

    sentence = refusal("0.99")
    assert (
        "generate_config.gpu_memory_utilization 0.99 gives vLLM 7.9 MiB of each device" in sentence
    )
    assert (
        "in phase reshard the run has" in sentence
        and "together, but a device has 8.0 MiB" in sentence
    )
    assert "lower generate_config.gpu_memory_utilization" in sentence
    # There is no vLLM in this Python, which is looked for later.
    assert "has no vLLM" in refusal("0.5")
