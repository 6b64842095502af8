"""The bundled notebook, run in a kernel: what a user sees, and that the stop button ends a run and nothing else.

Needs the packages of the extra `dev`. Does not prove how a browser shows the outputs.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
import small_runs

nbformat = pytest.importorskip("nbformat", reason="setup.py's extra dev is not installed")
pytest.importorskip("nbclient", reason="setup.py's extra dev is not installed")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NOTEBOOK = EXAMPLES / "grpo.ipynb"
MOST_BYTES = 1_000_000
NUM_STEPS = 6
Cells = dict[str, Any]


def code_cells(notebook: Any) -> Cells:
    """Code cells by their ids."""
    return {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("notebook")
    (made / "grpo").symlink_to(EXAMPLES / "grpo")
    return made


@pytest.fixture(scope="module")
def ran(folder: Path) -> Cells:
    """Fails where a cell raises that is not marked to."""
    from notebook_kernel import Kernel

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in code_cells(notebook).values():
        cell.outputs = []
    Kernel(notebook, folder).execute()
    return code_cells(notebook)


def kinds(cell: Any) -> set[tuple[str, ...]]:
    """What is shown, without what it says."""
    return {
        (o.output_type, *sorted(o.get("data", {})), o.get("name", o.get("ename", "")))
        for o in cell.outputs
    }


def shown(cell: Any, kind: str, form: str = "text/plain") -> str:
    (text,) = [o.data[form] for o in cell.outputs if o.output_type == kind]
    return re.sub("\033\\[[^m]*m", "", text)


def printed(cell: Any) -> str:
    return "".join(o.text for o in cell.outputs if o.output_type == "stream")


def steps_of(cell: Any) -> list[int]:
    """The steps of the table of progress."""
    table = shown(cell, "display_data")
    return [int(number) for number in re.findall(r"^│ (\d+) ", table, re.MULTILINE)]


def run_of(folder: Path, name: str) -> Path:
    (run,) = (folder / "output" / name).iterdir()
    return run


def test_the_stored_outputs_are_of_the_kinds_that_the_cells_make(ran: Cells) -> None:
    stored = code_cells(nbformat.read(NOTEBOOK, as_version=4))
    assert {name: kinds(cell) for name, cell in ran.items()} == {
        name: kinds(cell) for name, cell in stored.items()
    }
    assert NOTEBOOK.stat().st_size < MOST_BYTES


def test_progress_is_one_table_that_grows(ran: Cells) -> None:
    assert steps_of(ran["first"]) == [*range(1, NUM_STEPS + 1)]
    table = shown(ran["first"], "display_data")
    assert f"step {NUM_STEPS} of {NUM_STEPS}" in table and "contains_answer" in table
    # No step is printed as well.
    assert re.search(r"^step \d", printed(ran["first"]), re.MULTILINE) is None


def test_the_report_is_the_runs_page_in_a_frame(ran: Cells, folder: Path) -> None:
    frame = shown(ran["report"], "execute_result", "text/html")
    (page,) = re.findall(r'^<iframe srcdoc="([^"]*)" sandbox="allow-scripts"', frame)
    written = (run_of(folder, "first") / "report.html").read_text()
    assert html.unescape(page) == written and "uPlot" in written


def test_the_stop_button_ends_a_run_with_a_checkpoint_and_train_continues_from_it(
    ran: Cells, folder: Path
) -> None:
    steps = steps_of(ran["stopped"])
    assert 2 <= len(steps) < NUM_STEPS, "the run was not stopped"
    (error,) = [o for o in ran["stopped"].outputs if o.output_type == "error"]
    assert error.traceback == [f"mindgrpo: the run was interrupted after {len(steps)} steps"]
    assert f"checkpoints/step_{len(steps):06}" in printed(ran["stopped"])
    assert steps_of(ran["continued"]) == [*range(len(steps) + 1, NUM_STEPS + 1)]
    first, second = run_of(folder, "first"), run_of(folder, "second")
    assert len(small_runs.rows(first)) == NUM_STEPS
    assert small_runs.rows(second) == small_runs.rows(first)
    assert small_runs.model_bits(second) == small_runs.model_bits(first)
    assert shown(ran["same"], "execute_result") == "(True, True)"


def test_all_cells_run_too_where_nobody_presses_the_stop_button(folder: Path) -> None:
    """The cells about it, with two steps."""
    from notebook_kernel import STOPPED, Kernel

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = code_cells(notebook)
    names = ("settings", "stopped", "continued")
    notebook.cells = [cells[name] for name in names]
    cells["settings"].source = cells["settings"].source.replace(f": {NUM_STEPS},", ": 2,")
    cells["stopped"].source = cells["stopped"].source.replace('"second"', '"unstopped"')
    cells["stopped"].metadata.tags.remove(STOPPED)
    Kernel(notebook, folder).execute()
    assert steps_of(cells["stopped"]) == [1, 2] and printed(cells["continued"]) == ""


def test_a_mistake_is_one_sentence(ran: Cells) -> None:
    (error,) = ran["mistake"].outputs
    (line,) = error.traceback
    assert line == f"mindgrpo: {error.evalue}" and "rl_config.beta" in line
