"""Reads a run's folder, whether the run has ended, was killed or is still running.

A folder without a run is refused; half-written and older files are taken as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mindgrpo.config.supervised import ORIGIN
from mindgrpo.errors import UserError
from mindgrpo.strict_files import lines_of, row_of

RunRow = dict[str, Any]

OUTPUT_BYTES = 20_000
_ENTRY = re.compile(r"( *)([^\s:#][^:]*):(?: (.*))?")
# Runs write the step first: a file of many steps is indexed without reading its rows.
_STEP = re.compile(rb'\{"step": ?(\d{1,15})[,}]')


def parsed(line: bytes) -> RunRow | None:
    """Returns None for anything but a JSON object with a whole number as its step."""
    row = row_of(line)
    return None if row is None or type(row.get("step")) is not int else row


class RowFile:
    """Reads the lines of a JSON lines file by step, as it is now; a missing file has none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bad = 0
        self._spans: dict[int, list[tuple[int, int]]] = {}
        if not path.is_file():
            return
        with path.open("rb") as lines:
            for offset, line in lines_of(lines):
                step = _step_of(line)
                if step is not None:
                    self._spans.setdefault(step, []).append((offset, len(line)))
                elif line.strip():
                    self.num_bad += 1

    @property
    def steps(self) -> list[int]:
        return sorted(self._spans)

    @property
    def num_rows(self) -> int:
        return sum(map(len, self._spans.values()))

    def count(self, step: int) -> int:
        return len(self._spans.get(step, []))

    def of_step(self, step: int) -> list[RunRow | None]:
        """Reads the rows of a step in the order of the file, with None for a damaged one, so that numbers are kept."""
        spans = self._spans.get(step, [])
        if not spans:
            return []
        with self.path.open("rb") as lines:
            rows = []
            for offset, size in spans:
                lines.seek(offset)
                rows.append(parsed(lines.read(size)))
        self.num_bad += rows.count(None)
        return rows

    def all(self) -> list[RunRow]:
        """Reads all rows in the order of steps."""
        return [row for step in self.steps for row in self.of_step(step) if row is not None]


def _step_of(line: bytes) -> int | None:
    match = _STEP.match(line) if line.endswith(b"}\n") else None
    if match:
        return int(match[1])
    row = parsed(line)
    return None if row is None else int(row["step"])


@dataclass(frozen=True)
class ConfigEntry:
    """Holds a key of config_resolved.yaml, the text of its value, and where that came from."""

    key: str
    text: str
    origin: str


def read_configuration(path: Path) -> list[ConfigEntry]:
    """Reads config_resolved.yaml, if it exists; lines that are not entries are skipped."""
    if not path.is_file():
        return []
    entries: list[ConfigEntry] = []
    sections: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        match = _ENTRY.fullmatch(line)
        if match is None:
            continue
        depth, name, rest = len(match[1]) // 2, match[2], match[3]
        sections = [*sections[:depth], name]
        if rest is not None:
            text, _, origin = rest.rpartition("  # ")
            entries.append(ConfigEntry(".".join(sections), text or rest, origin if text else ""))
    return entries


def _value_of(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def number_of(values: Mapping[str, Any], key: str, default: float) -> float:
    value = values.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


@dataclass(frozen=True)
class RunFolder:
    """Holds a run's files; `summary` is empty until it has ended, `reward_output` is the end of the rewards' output."""

    path: Path
    metrics: list[RunRow]
    evaluations: list[RunRow]
    summary: dict[str, Any]
    configuration: list[ConfigEntry]
    values: Mapping[str, Any]
    completions: RowFile
    per_token: RowFile
    held_out: RowFile
    reward_output: str
    num_bad_rows: int

    @property
    def is_supervised(self) -> bool:
        """Returns whether the run was of supervised training."""
        return any(entry.origin == ORIGIN for entry in self.configuration)

    @property
    def name(self) -> str:
        return "/".join(self.path.parts[-2:]).strip("/")


def read_run(folder: Path) -> RunFolder:
    """Reads a run's folder. Raises UserError if it has no metrics.jsonl."""
    path = folder.resolve()
    if not (path / "metrics.jsonl").is_file():
        raise UserError(
            f"{folder} holds no run: it has no metrics.jsonl; name the folder that a run wrote, as output/latest."
        )
    metrics, evaluations = (RowFile(path / name) for name in ("metrics.jsonl", "evaluations.jsonl"))
    configuration = read_configuration(path / "config_resolved.yaml")
    values = {entry.key: _value_of(entry.text) for entry in configuration}
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
    """Returns the path of completions.jsonl, which may be in a folder that runs share."""
    asked = values.get("rl_config.save_prompt_completions_dir")
    inside = path / "completions.jsonl"
    if inside.exists() or not isinstance(asked, str) or not asked:
        return inside
    label = "-".join(path.parts[-2:])
    of_run = Path(asked) / label / "completions.jsonl"
    return of_run if of_run.exists() else Path(asked) / "completions.jsonl"


def _summary(path: Path) -> dict[str, Any]:
    return (row_of(path.read_bytes()) or {}) if path.is_file() else {}


def _end_of(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as output:
        output.seek(max(0, path.stat().st_size - OUTPUT_BYTES))
        return output.read().decode("utf-8", "replace")
