"""Which device and backend a configuration means, and what it is told where there is none.

Does not prove that a device works, nor that a driver is really behind its file.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mindgrpo.backend import targets
from mindgrpo.backend.connect import RuntimeSettings, _capture_launches, apply
from mindgrpo.backend.targets import Target, choose_target
from mindgrpo.errors import UserError


@pytest.fixture
def host_with_ascend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "davinci0").touch()
    monkeypatch.setattr(targets, "DEVICE_FILES", tmp_path)


def test_without_a_device_the_host_computes_in_shared_memory() -> None:
    assert choose_target(None, None) == Target("CPU", "shared_memory")
    assert choose_target("cpu", "device") == Target("CPU", "device")


@pytest.mark.usefixtures("host_with_ascend")
def test_where_the_host_has_ascend_devices_they_are_used_unless_another_is_named() -> None:
    assert choose_target(None, None) == Target("Ascend", "device")
    assert choose_target("CPU", None) == Target("CPU", "shared_memory")
    assert not choose_target(None, None).may_fork


@pytest.mark.parametrize(
    ("device", "backend", "words"),
    [
        ("GPU", None, "context.device_target is 'GPU', but must be one of CPU, Ascend"),
        ("CPU", "mccl", "context.backend is 'mccl', but must be one of shared_memory, device"),
        ("Ascend", "shared_memory", "must be one of device on Ascend"),
    ],
)
def test_what_does_not_exist_is_refused(device: str, backend: str | None, words: str) -> None:
    with pytest.raises(UserError, match=words):
        choose_target(device, backend)


@pytest.mark.skipif(any(Path("/dev").glob("davinci[0-9]*")), reason="there is an Ascend device")
def test_ascend_without_its_libraries_is_one_sentence_that_names_the_cure() -> None:
    with pytest.raises(UserError) as caught:
        apply(RuntimeSettings(), "Ascend", os.environ)
    message = str(caught.value)
    assert "context.device_target is 'Ascend'" in message and "CANN" in message
    assert "\n" not in message


def test_launches_are_captured_where_a_device_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import mindspore as ms

    captured: list[bool] = []
    monkeypatch.setattr(ms.runtime, "set_kernel_launch_capture", captured.append)
    assert "has no effect" in _capture_launches("CPU")[0] and not captured
    assert _capture_launches("Ascend") == [] and captured == [True]
