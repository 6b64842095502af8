"""Writes the page: the template with its styles, scripts and data inlined, under a policy that allows no others."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindgrpo
from mindgrpo.errors import UserError
from mindgrpo.processes.child import FunctionCall
from mindgrpo.report.facts import clipping, ending, facts, metric_columns, warnings
from mindgrpo.report.held_out import held_out
from mindgrpo.report.run_folder import RunFolder, read_run
from mindgrpo.report.samples import ShownSamples, choose_samples, data_text

FILE_NAME = "report.html"
LONGEST_WRITING = 60.0  # seconds
# Metrics take 1 to 2 MB: together a page stays below 15 MB.
SAMPLE_BYTES, HELD_OUT_BYTES = 10_000_000, 2_000_000
_HERE = Path(__file__).resolve().parent
_STYLES = ("vendor/uPlot.min.css", "page/style.css", "page/samples.css")
# In the order of their dependencies.
SCRIPTS = (
    "words.js",
    "dom.js",
    "data.js",
    "header.js",
    "charts.js",
    "colours.js",
    "samples.js",
    "groups.js",
    "held_out.js",
    "tables.js",
    "main.js",
)


def write_report(folders: Sequence[Path | str], output: Path | None = None) -> Path:
    """Writes the page of one run, or of two side by side, to `output` (default: in the first folder); returns its path.

    Raises UserError for a folder that is not a run's and for an `output` that cannot be written.
    """
    runs = [read_run(Path(folder)) for folder in folders]
    name = FILE_NAME if len(runs) == 1 else f"report_vs_{runs[1].path.name}.html"
    target = output or runs[0].path / name
    unfinished = target.with_name(f".{target.name}.part")
    try:
        unfinished.write_text(page(runs), encoding="utf-8")
        unfinished.replace(target)
    except OSError as error:
        raise UserError(
            f"{target} cannot be written ({error.strerror}): name another file with --output."
        ) from error
    return target


def page(runs: Sequence[RunFolder]) -> str:
    samples = [choose_samples(run, SAMPLE_BYTES // len(runs)) for run in runs]
    shown = [_run_data(run, chosen) for run, chosen in zip(runs, samples, strict=True)]
    data = {
        "version": mindgrpo.__version__,
        "runs": shown,
        "heldOut": held_out(runs, HELD_OUT_BYTES),
    }
    blocks = [_data_block("data", data_text(data))]
    for number, chosen in enumerate(samples):
        blocks += [_data_block(f"step-{number}-{s}", text) for s, text in chosen.by_step.items()]
    styles = [_source(name) for name in _STYLES]
    scripts = [_source("vendor/uPlot.iife.min.js"), _own_script()]
    policy = (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    values = {
        "POLICY": policy,
        "TITLE": html.escape(" | ".join(run.name for run in runs)),
        "STYLES": "\n".join(f"<style>{text}</style>" for text in styles),
        "DATA": "\n".join(blocks),
        "SCRIPTS": "\n".join(f"<script>{text}</script>" for text in scripts),
    }
    # Split before anything is filled in: text of a run is never searched for a mark.
    sections = _source("page/page.html").split("@@")
    return "".join(values[text] if i % 2 else text for i, text in enumerate(sections))


def _run_data(run: RunFolder, samples: ShownSamples) -> dict[str, Any]:
    return {
        "name": run.name,
        "facts": facts(run),
        "ending": ending(run),
        "warnings": warnings(run),
        "figures": metric_columns(run),
        "clipping": clipping(run),
        "configuration": [[entry.key, entry.text, entry.origin] for entry in run.configuration],
        "rewardOutput": run.reward_output,
        "samples": {
            "steps": sorted(samples.by_step),
            "numSteps": len(run.completions.steps),
            "numShown": samples.num_shown,
            "numSamples": run.completions.num_rows,
            "arrays": sorted(samples.arrays),
        },
    }


def _source(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _own_script() -> str:
    return '"use strict";\n' + "\n".join(_source(f"page/{name}") for name in SCRIPTS)


def _hashes(texts: Sequence[str]) -> str:
    digests = (hashlib.sha256(text.encode("utf-8")).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def _data_block(name: str, text: str) -> str:
    return f'<script type="application/json" id="{name}">{text}</script>'


def write_at_end(folder: Path) -> tuple[Path, str | None]:
    """Writes the page in a process, so that the rank does not hold what is read; returns its path and why it failed."""
    path = folder / FILE_NAME
    try:
        process = FunctionCall("mindgrpo.report.write:write_report", {"folders": [str(folder)]})
        why = process.failure(LONGEST_WRITING)
    except OSError as error:
        why = f"its process cannot be started ({error.strerror})"
    return path, None if why is None else f"{path} was not written: {why}"
