"""Reads what the trackers' packages have written on this machine, with their own readers.

Numbers come by step and key as in metrics.jsonl, completions as the number of rows by step.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from mindgrpo.run.machine_checks import release

PACKAGES = {
    "wandb": "wandb",
    "swanlab": "swanlab",
    "mlflow": "mlflow",
    "trackio": "trackio",
}


# Of wandb's journal, which has LevelDB's format: a header, then blocks of fragments, each with a header of its own.
HEADER, BLOCK_BYTES, FRAGMENT = b":W&B", 1 << 15, struct.Struct("<4xHB")
WHOLE, LAST = 1, 4


def import_package(name: str) -> Any:
    """Skips the test where the package is missing, but not in continuous integration.

    SwanLab goes with MindSpore 2.9 alone: it needs an older protobuf than 2.10 does.
    """
    is_excluded = name == "swanlab" and release(metadata.version("mindspore")) >= (2, 10)
    if os.environ.get("CI") == "true" and not is_excluded:
        return __import__(name)
    extra = "swanlab], with MINDGRPO_MINDSPORE=2.9" if is_excluded else "dev]"
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install -e .[{extra}")


@dataclass
class Recorded:
    """`steps` has the order in which steps were recorded, so that one that comes twice is seen."""

    numbers: dict[int, dict[str, float]] = field(default_factory=dict)
    completions: dict[int, int] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    points: list[tuple[int, str]] = field(default_factory=list)

    def add(self, step: int, key: str, value: float) -> None:
        self.numbers.setdefault(step, {})[key] = value
        self.points.append((step, key))


def wandb_runs(folder: Path) -> Recorded:
    """Of all sessions of one run, which `wandb sync` puts together by their id."""
    from wandb.proto import wandb_internal_pb2

    recorded = Recorded()
    ids = set()
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        ids.add(path.stem)
        for data in _wandb_records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                items = {(*i.nested_key, i.key)[0]: [] for i in record.history.item}
                for item in record.history.item:
                    keys = [*item.nested_key] or [item.key]
                    items[keys[0]].append((keys[1:], json.loads(item.value_json)))
                _add_wandb_step(recorded, items)
            for item in [*record.config.update, *record.run.config.update]:
                recorded.config[item.key or item.nested_key[0]] = json.loads(item.value_json)
    assert len(ids) == 1
    return recorded


def _add_wandb_step(recorded: Recorded, items: Mapping[str, Any]) -> None:
    step = items["_step"][0][1]
    for key, entries in items.items():
        if key == "completions":
            fields = {words[0]: value for words, value in entries}
            recorded.completions[step] = fields["nrows"]
        elif not key.startswith("_"):
            recorded.add(step, key, entries[0][1])


def _wandb_records(path: Path) -> Iterator[bytes]:
    # wandb has its reader in a compiled program only.
    data = path.read_bytes()
    assert data.startswith(HEADER)
    offset, record = len(HEADER) + struct.calcsize("<HB"), b""
    while offset + FRAGMENT.size <= len(data):
        left = BLOCK_BYTES - offset % BLOCK_BYTES
        if left < FRAGMENT.size:
            offset += left
            continue
        size, kind = FRAGMENT.unpack_from(data, offset)
        offset += FRAGMENT.size
        record += data[offset : offset + size]
        offset += size
        if kind in (WHOLE, LAST):
            yield record
            record = b""
    assert not record


def swanlab_runs(folder: Path) -> Recorded:
    from swanlab.proto.swanlab.record.v1 import record_pb2
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    recorded = Recorded()
    for path in sorted(folder.glob("run-*/run-*.swanlab")):
        reader = DataStoreReader()
        reader.open(path)
        for data in reader:
            record = record_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "scalar":
                recorded.add(record.scalar.step, record.scalar.key, record.scalar.value.number)
            elif kind == "media":
                recorded.completions[record.media.step] = len(record.media.value.items)
        reader.close()
    return recorded


def mlflow_runs(uri: str, project: str) -> Recorded:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(project)
    (run,) = client.search_runs([experiment.experiment_id])
    recorded = Recorded(config=dict(run.data.params))
    for key in run.data.metrics:
        for point in client.get_metric_history(run.info.run_id, key):
            recorded.add(point.step, key, point.value)
    for artifact in client.list_artifacts(run.info.run_id, "completions"):
        local = client.download_artifacts(run.info.run_id, artifact.path)
        step = int(Path(local).stem.rpartition("_")[2])
        recorded.completions[step] = len(json.loads(Path(local).read_text())["data"])
    assert run.info.status == "FINISHED"
    return recorded


def trackio_runs(project: str) -> Recorded:
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs(project)
    recorded = Recorded(config=SQLiteStorage.get_run_config(project, name))
    for row in SQLiteStorage.get_logs(project, name):
        for key, value in row.items():
            if key == "completions":
                recorded.completions[row["step"]] = len(value["_value"])
            elif key not in ("step", "timestamp"):
                recorded.add(row["step"], key, value)
    return recorded
