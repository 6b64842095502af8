"""What a run's folder holds, whether the run has ended, was killed or goes on; refused is a folder without a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.report.configuration import Entry, read_configuration, values_of
from mindgrpo.report.rows import Row, RowFile

OUTPUT_BYTES = 20_000


@dataclass(frozen=True)
class RunFolder:
    """`summary` is empty until the run has ended; `reward_output` is the end of what rewards printed."""

    path: Path
    metrics: list[Row]
    evaluations: list[Row]
    summary: dict[str, Any]
    configuration: list[Entry]
    values: Mapping[str, Any]
    completions: RowFile
    per_token: RowFile
    held_out: RowFile
    reward_output: str
    num_bad_rows: int

    @property
    def name(self) -> str:
        return "/".join(self.path.parts[-2:]).strip("/")


def read_run(folder: Path) -> RunFolder:
    """Raises UserError for a folder that holds no run."""
    path = folder.resolve()
    if not (path / "metrics.jsonl").is_file():
        raise UserError(
            f"{folder} holds no run: it has no metrics.jsonl; name the folder that a run wrote, as output/latest."
        )
    metrics, evaluations = (RowFile(path / name) for name in ("metrics.jsonl", "evaluations.jsonl"))
    configuration = read_configuration(path / "config_resolved.yaml")
    values = values_of(configuration)
    rows = metrics.all(), evaluations.all()
    return RunFolder(
        path,
        *rows,
        _summary(path / "summary.json"),
        configuration,
        values,
        RowFile(_completions(path, values)),
        RowFile(path / "per_token.jsonl"),
        RowFile(path / "eval_completions.jsonl"),
        _end_of(path / "reward_output.txt"),
        metrics.num_bad + evaluations.num_bad,
    )


def _completions(path: Path, values: Mapping[str, Any]) -> Path:
    """In the run's folder, unless they were to be kept in another one that holds no other run's."""
    asked = values.get("rl_config.save_prompt_completions_dir")
    inside = path / "completions.jsonl"
    if inside.exists() or not isinstance(asked, str) or not asked:
        return inside
    label = "-".join(path.parts[-2:])
    of_run = Path(asked) / label / "completions.jsonl"
    return of_run if of_run.exists() else Path(asked) / "completions.jsonl"


def _summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _end_of(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as output:
        output.seek(max(0, path.stat().st_size - OUTPUT_BYTES))
        return output.read().decode("utf-8", "replace")
