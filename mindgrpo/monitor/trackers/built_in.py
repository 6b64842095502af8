"""Records runs with four packages, each imported when it is opened: Weights & Biases, SwanLab, MLflow and Trackio.

The packages' environment variables count, such as WANDB_MODE, SWANLAB_LOG_DIR, MLFLOW_TRACKING_URI and TRACKIO_DIR.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindgrpo.monitor.trackers.contract import Cells, TrackedRun

LARGEST_BATCH = {"metrics": 1000, "params": 100}
LONGEST_PARAM = 500


def table(rows: Sequence[Cells]) -> tuple[list[Any], list[list[Any]]]:
    """Returns the columns' names and the cells by row; a column with integers and fractions has fractions only."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    fractions = {
        column
        for column in columns
        if any(isinstance(row.get(column), float) for row in rows)
        and all(isinstance(row.get(column), int | float | None) for row in rows)
    }

    def cell(row: Cells, column: str) -> Any:
        value = row.get(column)
        return float(value) if column in fractions and value is not None else value

    return columns, [[cell(row, column) for column in columns] for row in rows]


class WandbTracker:
    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._table = wandb.Table
        self.id = run.id or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=self.id,
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or run.folder,
            # What this process prints is the tracker's own log, and its resources are not the run's.
            settings=wandb.Settings(console="off", x_disable_stats=True),
        )
        self._run.config.update(dict(run.config), allow_val_change=True)

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Cells]) -> None:
        samples = {"completions": self._table(*table(completions))} if completions else {}
        self._run.log({**metrics, **samples}, step=step, commit=True)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self._run.summary.update({"summary": dict(summary)} if summary else {})
        self._run.finish(exit_code=1 if summary is None else 0)


class SwanlabTracker:
    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self._text = swanlab.Text
        self.id = run.id or secrets.token_hex(8)
        has_folder = any(os.environ.get(name) for name in ("SWANLAB_LOG_DIR", "SWANLAB_LOGDIR"))
        self._run = swanlab.init(
            project=run.project,
            experiment_name=run.name,
            id=self.id,
            resume="allow",
            config=dict(run.config),
            # This process's resources are not the run's.
            settings=swanlab.Settings(probe={"monitor": False}),
            **({} if has_folder else {"log_dir": str(run.folder)}),
        )

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Cells]) -> None:
        texts = ["\n".join(f"{key}: {value}" for key, value in row.items()) for row in completions]
        samples = {"completions": [self._text(text) for text in texts]} if texts else {}
        self._run.log({**metrics, **samples}, step=step)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if summary is None:
            self._run.finish("crashed", error="the run ended without a summary")
        else:
            self._run.finish()


class TrackioTracker:
    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._table = trackio.Table
        self._run = trackio.init(
            project=run.project,
            name=run.id or run.name,
            config=dict(run.config),
            resume="allow" if run.id else "never",
            embed=False,
        )
        self.id = str(self._run.name)  # by which the package resumes

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Cells]) -> None:
        samples = {"completions": self._table(*table(completions))} if completions else {}
        self._run.log({**metrics, **samples}, step=step)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self._run.finish()


class MlflowTracker:
    """Writes to MLFLOW_TRACKING_URI; without it, runs are files in mlruns/ of the current folder."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        # The package refuses files unless this is set; naming a folder asks for them.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or Path("mlruns").absolute().as_uri()
        self._client, self._metric = MlflowClient(uri), Metric
        self.id = run.id or self._new_run(run)
        if run.id:
            self._client.update_run(self.id, status="RUNNING")
        # MLflow does not change a parameter, so those of the run's first session stay.
        known = self._client.get_run(self.id).data.params
        params = [
            Param(allowed(key), str(value)[:LONGEST_PARAM])
            for key, value in run.config.items()
            if allowed(key) not in known
        ]
        self._log_batches("params", params)

    def _new_run(self, run: TrackedRun) -> str:
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(run.project)
        try:
            number = (
                experiment.experiment_id
                if experiment is not None
                else self._client.create_experiment(run.project)
            )
        except MlflowException:
            # Another run may have been quicker.
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

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Cells]) -> None:
        now, names = int(time.time() * 1000), metric_names(metrics)
        entries = [self._metric(names[key], value, now, step) for key, value in metrics.items()]
        self._log_batches("metrics", entries)
        if completions:
            columns, cells = table(completions)
            # As log_table writes it, which needs pandas.
            path = f"completions/step_{step:06d}.json"
            self._client.log_dict(self.id, {"columns": columns, "data": cells}, path)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            self._client.log_dict(self.id, dict(summary), "summary.json")
        self._client.set_terminated(self.id, "FAILED" if summary is None else "FINISHED")


def metric_names(keys: Iterable[str]) -> dict[str, str]:
    """Returns each key's name in MLflow, where a key that others begin with is their `all`: each is a file."""
    folders = {key.rpartition("/")[0] for key in keys}
    return {key: allowed(f"{key}/all" if key in folders else key) for key in keys}


def allowed(key: str) -> str:
    """Replaces what MLflow has not in names, such as @: mean@4 is mean_at_4 there."""
    return re.sub(r"[^\w\-. :/]", "_", key.replace("@", "_at_"))
