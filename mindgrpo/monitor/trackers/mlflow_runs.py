"""MLflow. MLFLOW_TRACKING_URI says where; without it, runs are files in mlruns/ of the current folder."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from mindgrpo.monitor.trackers.contract import Row, TrackedRun
from mindgrpo.monitor.trackers.tables import cells_of, columns_of

LARGEST_BATCH = {"metrics": 1000, "params": 100}
LONGEST_PARAM = 500


def metric_names(keys: Iterable[str]) -> dict[str, str]:
    """Each key's name: a key that others begin with is their `all`, as each is a file where runs are files."""
    folders = {key.rpartition("/")[0] for key in keys}
    return {key: allowed(f"{key}/all" if key in folders else key) for key in keys}


def allowed(key: str) -> str:
    """MLflow has no @ in names: mean@4 is mean_at_4 there."""
    return re.sub(r"[^\w\-. :/]", "_", key.replace("@", "_at_"))


class MlflowTracker:
    def __init__(self, run: TrackedRun) -> None:
        # The package refuses files unless this is set; who names a folder has asked for them.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or Path("mlruns").absolute().as_uri()
        self._client = MlflowClient(uri)
        self.id = run.id or self._new_run(run)
        if run.id:
            self._client.update_run(self.id, status="RUNNING")
        # What a run has begun with stays: MLflow changes no parameter.
        known = self._client.get_run(self.id).data.params
        params = [
            Param(allowed(key), str(value)[:LONGEST_PARAM])
            for key, value in run.config.items()
            if allowed(key) not in known
        ]
        self._log_batches("params", params)

    def _new_run(self, run: TrackedRun) -> str:
        experiment = self._client.get_experiment_by_name(run.project)
        if experiment is not None:
            number = experiment.experiment_id
        else:
            try:
                number = self._client.create_experiment(run.project)
            except MlflowException:  # another run was quicker
                experiment = self._client.get_experiment_by_name(run.project)
                if experiment is None:
                    raise
                number = experiment.experiment_id
        return str(self._client.create_run(number, run_name=run.name).info.run_id)

    def _log_batches(self, kind: str, entries: Sequence[Any]) -> None:
        size = LARGEST_BATCH[kind]
        for first in range(0, len(entries), size):
            batch: dict[str, Any] = {kind: entries[first : first + size]}
            self._client.log_batch(self.id, **batch)

    def log(self, step: int, figures: Mapping[str, float], completions: Sequence[Row]) -> None:
        now = int(time.time() * 1000)
        names = metric_names(figures)
        metrics = [Metric(names[key], value, now, step) for key, value in figures.items()]
        self._log_batches("metrics", metrics)
        if completions:
            columns = columns_of(completions)
            # As log_table writes it, which needs pandas.
            table = {"columns": columns, "data": cells_of(completions, columns)}
            self._client.log_dict(self.id, table, f"completions/step_{step:06d}.json")

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            self._client.log_dict(self.id, dict(summary), "summary.json")
        self._client.set_terminated(self.id, "FAILED" if summary is None else "FINISHED")
