"""What a run writes: metrics, completions, curve, console, run directory.

Does not prove that the trainer writes these keys, nor that the picture is pretty.
"""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tables import each_row

from mindgrpo.errors import UserError
from mindgrpo.monitor import curve, run_directory
from mindgrpo.monitor.console import Console
from mindgrpo.monitor.curve import CurveProcess, draw_curve
from mindgrpo.monitor.host_memory import format_bytes, process_rss
from mindgrpo.monitor.metrics import MetricsWriter, append_rows, read_metrics
from mindgrpo.report import write

ROOT = Path(__file__).resolve().parent.parent


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def a_step(step: int, **more: Any) -> dict[str, Any]:
    figures = {
        "step": step,
        "reward/mean": 1.25,
        "reward/std": 0.5,
        "reward/accuracy_reward/mean": 0.45,
        "reward/format_reward/mean": 0.8,
        "kl": 0.01,
        "grad_norm": 1.5,
        "logprob_gap/max": 1e-5,
        "completion_length/mean": 30.0,
        "completion_length/max": 64,
        "time/step": 3.21,
    }
    return figures | more


def test_each_step_is_one_json_object_a_line(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path, None)) as writer:
        writer.write(1, {"loss": np.float32(0.5), "tokens": np.int64(7)})
        writer.write(2, {"step": 2, "loss": 0.25, "kl": None})
    assert rows_of(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 0.5, "tokens": 7},
        {"step": 2, "loss": 0.25, "kl": None},
    ]


def test_a_step_is_on_disk_before_the_writer_is_closed(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, None)
    writer.write(1, {"loss": 0.5})
    assert rows_of(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 0.5}]
    writer.close()


def test_what_is_not_finite_becomes_null_and_is_named(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path, None)) as writer:
        writer.write(1, {"loss": float("nan"), "kl": np.float32("inf"), "lr": 0.1})
    (row,) = rows_of(tmp_path / "metrics.jsonl")
    assert row == {"step": 1, "loss": None, "kl": None, "lr": 0.1, "nonfinite": ["loss", "kl"]}


def test_an_array_is_no_figure(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path, None)) as writer, pytest.raises(TypeError, match="list"):
        writer.write(1, {"loss": [0.5]})


def test_tensorboard_gets_the_numbers_only(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path, tmp_path / "board", queue_size=1)) as writer:
        writer.write(1, {"loss": 0.5, "note": "text", "kl": None})
    (events,) = (tmp_path / "board").iterdir()
    content = events.read_bytes()
    assert b"loss" in content
    assert b"note" not in content and b"kl" not in content


def test_the_half_line_of_a_killed_run_is_passed_and_a_broken_middle_is_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1}]
    path.write_text('{"step": 1, "lo\n{"step": 2}\n')
    with pytest.raises(json.JSONDecodeError):
        read_metrics(path)


def a_sample(**more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "prompt": "3 + 4?",
        "completion": "<answer>7</answer>\n…",
        "answer": "7",
        "finish_reason": "stop",
        "length": 5,
        "rewards": {"accuracy_reward": 1.0, "format_reward": None},
        "advantage": 0.5,
    }
    return fields | more


def test_completions_are_kept_word_by_word_at_the_steps_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    for step in (1, 2, 3):
        samples = [a_sample(token_ids=np.array([4, 5])), a_sample(advantage=np.float32("nan"))]
        append_rows(path, step, samples, interval=2)
    rows = rows_of(path)
    assert [row["step"] for row in rows] == [1, 1, 3, 3]
    assert rows[0]["completion"] == a_sample()["completion"]
    assert rows[0]["rewards"] == {"accuracy_reward": 1.0, "format_reward": None}
    assert rows[0]["token_ids"] == [4, 5] and "token_ids" not in rows[1]
    assert rows[1]["advantage"] is None and rows[1]["nonfinite"] == ["advantage"]


def test_a_reward_that_is_not_finite_is_named_with_its_function(tmp_path: Path) -> None:
    append_rows(tmp_path / "completions.jsonl", 1, [a_sample(rewards={"mine": float("inf")})])
    (row,) = rows_of(tmp_path / "completions.jsonl")
    assert row["rewards"] == {"mine": None} and row["nonfinite"] == ["rewards/mine"]


def test_the_curve_is_a_picture_even_of_one_step_and_of_missing_figures(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path, None)) as writer:
        writer.write(0, {"eval/accuracy_reward/mean": 0.4})
        writer.write(1, a_step(1, kl=0.0, **{"reward/std": float("nan")}))
    draw_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_step_has_no_curve(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="no step"):
        draw_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")


def test_a_picture_is_drawn_in_a_process_of_its_own(tmp_path: Path) -> None:
    picture = tmp_path / "reward_curve.png"
    with closing(MetricsWriter(tmp_path, None)) as writer:
        curve = CurveProcess(writer.path, picture)
        assert "no step with a reward/mean" in str(curve.draw_last({}))
        assert not picture.exists()
        writer.write(1, a_step(1))
        curve.draw_sometimes({})
        assert not picture.exists(), "drawn too soon"
        assert curve.draw_last({"accuracy_reward": 0.5, "mine": None}) is None
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", picture.name]


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (
            120,
            "step 3/60  reward 1.250  accuracy 0.45  format 0.80  kl 0.0100  grad 1.500"
            "  gap 1.0e-05  length 30.0  3.2 s",
        ),
        (80, "step 3/60  reward 1.250  accuracy 0.45  format 0.80  kl 0.0100  3.2 s"),
        (40, "step 3/60  reward 1.250  3.2 s"),
    ],
)
def test_the_step_line_has_the_figures_that_matter_most_of_those_that_fit(
    width: int, line: str
) -> None:
    stream = io.StringIO()
    Console(True, stream, width).step_line(a_step(3), num_steps=60)
    assert stream.getvalue() == line + "\n"


def test_no_divergence_is_shown_where_none_is_computed() -> None:
    stream = io.StringIO()
    Console(True, stream).step_line(a_step(3) | {"kl": None})
    assert "kl" not in stream.getvalue()


def test_the_banner_wraps_what_is_longer_than_the_terminal_and_keeps_paths_whole() -> None:
    stream, path = io.StringIO(), "/a" * 50
    words = "0123456789 " * 12
    console = Console(True, stream, 80)
    console.banner("run", {"data": [words.strip(), path], "prompt": ["q"]})
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if len(line) > 80] == [f"          {path}"]
    assert "".join(lines).count("0123456789") == 12


def test_a_hint_is_given_when_its_cause_begins_and_not_again_while_it_lasts() -> None:
    stream = io.StringIO()
    console = Console(True, stream)
    for share in (0.95, 0.95, 0.5, 0.95):
        console.step_line(a_step(1, zero_std_fraction=share, truncated_fraction=0.9))
    assert stream.getvalue().count("hint: 95% of the groups") == 2
    assert "max_tokens" not in stream.getvalue()


def test_a_policy_that_has_diverged_draws_that_hint_and_none_that_would_mislead() -> None:
    stream = io.StringIO()
    shares = {"truncated_fraction": 1.0, "zero_std_fraction": 1.0, "padding_share": 0.54}
    Console(True, stream).step_line(a_step(1) | shares | {"kl": 9.8})
    hints = [line for line in stream.getvalue().splitlines() if "hint: " in line]
    assert [hint.partition("hint: ")[2].partition(",")[0].partition(":")[0] for hint in hints] == [
        "KL to the reference is 9.8",
        "54% of the positions that the update computes are padding",
    ]


def test_a_divergence_that_becomes_ten_times_as_large_is_told_again() -> None:
    stream = io.StringIO()
    console = Console(True, stream)
    for kl in (0.5, 1.5, 9.0, 11.0, 157.0, 200.0, 150.0, 2.0, 11.0):
        console.step_line(a_step(1, kl=kl))
    lines = [
        line.partition("KL to the reference is ")[2] for line in stream.getvalue().splitlines()
    ]
    assert [line.partition(",")[0] for line in lines if line] == ["1.5", "11", "1.6e+02", "11"]


def test_a_step_without_any_reward_shows_none_and_says_why() -> None:
    stream = io.StringIO()
    none = {"reward/mean": None, "reward/accuracy_reward/mean": None}
    Console(True, stream).step_line(a_step(1) | none | {"reward/accuracy_reward/errors": 0})
    assert "reward -  accuracy -" in stream.getvalue()
    assert "hint: no reward function gave any sample a number" in stream.getvalue()
    stream = io.StringIO()
    Console(True, stream).step_line(a_step(1) | none | {"reward/accuracy_reward/errors": 4})
    assert "hint" not in stream.getvalue()


@each_row("encoding", ["latin-1", "ascii", "cp1252", "utf-8"])
def test_what_a_console_cannot_show_is_escaped(encoding: str) -> None:
    raw = io.BytesIO()
    console = Console(True, io.TextIOWrapper(raw, encoding, "strict"))
    console.banner("mindgrpo", {"prompt": ["\u00e9\u6570\U0001f600"]})
    console.step_line(a_step(1) | {"reward/\u5956\u52b1/mean": 0.5})
    shown = raw.getvalue().decode(encoding)
    assert ("\\u6570" in shown) is (encoding != "utf-8") and "reward 1.250" in shown


def test_a_picture_and_a_page_whose_process_cannot_be_started_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    for module in (curve, write):
        monkeypatch.setattr(module, "FunctionCall", refuses)
    monkeypatch.setattr(curve, "SECONDS_BETWEEN_PICTURES", 0.0)
    drawing = CurveProcess(tmp_path / "metrics.jsonl", tmp_path / "reward_curve.png")
    drawing.draw_sometimes({})
    assert "cannot be started (Resource temp" in str(drawing.draw_last({}))
    assert "cannot be started (Resource temp" in str(write.write_at_end(tmp_path)[1])


def test_a_pipe_that_nobody_reads_any_more_ends_no_program() -> None:
    words = (
        "from mindgrpo.monitor.console import Console\n"
        "for _ in range(9): Console(True).line('a step')\n"
        "print('mine', flush=True)\n"
        "raise SystemExit(7)"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as unread:
        ended = subprocess.run(
            [sys.executable, "-c", words],
            cwd=ROOT,
            stdout=unread,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (ended.returncode, ended.stderr) == (7, "")


def test_a_verb_prints_in_a_locale_of_few_letters(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"question": "?", "answer": "\u4e8c"}\n', encoding="utf-8"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    words = ["score", "--reward", "format_reward", "--data", "rows.jsonl"]
    command = [sys.executable, "-m", "mindgrpo", *words]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "") and "\\u4e8c" in ended.stdout


@each_row(
    ("figures", "hint"),
    [
        ({"environment/turns": 1.0, "truncated_fraction": 0.41}, "41% of the conversations ended"),
        ({"tools/turns": 1.2, "truncated_fraction": 0.95}, "95% of the conversations ended"),
        ({"environment/turns": 2.4, "truncated_fraction": 0.41}, ""),
        ({"environment/turns": 1.0, "truncated_fraction": 0.1}, ""),
        ({"truncated_fraction": 0.41}, ""),
    ],
)
def test_conversations_without_room_for_their_second_turn_draw_one_hint(
    figures: dict[str, float], hint: str
) -> None:
    stream = io.StringIO()
    Console(True, stream).step_line(a_step(1) | figures)
    assert stream.getvalue().count("hint: ") == bool(hint)
    assert hint in stream.getvalue()


def test_equal_rewards_of_a_function_that_failed_draw_no_hint_to_change_the_prompts() -> None:
    stream = io.StringIO()
    step = a_step(1, zero_std_fraction=1.0) | {"reward/accuracy_reward/mean": None}
    Console(True, stream).step_line(step)
    assert "hint" not in stream.getvalue()


def test_held_out_means_have_a_line_of_their_own() -> None:
    stream = io.StringIO()
    console, figures = Console(True, stream, 40), {"eval/accuracy_reward/mean": 0.91}
    console.means_line("held out", figures, "eval/")
    console.means_line("held out", figures | {"eval/a_longer_name/mean": 0.5}, "eval/")
    assert stream.getvalue() == "  held out  accuracy 0.910\n" * 2


def test_a_phase_tells_how_long_it_took_and_that_it_failed() -> None:
    stream = io.StringIO()
    console = Console(True, stream)
    with console.phase("compiling"):
        pass
    with pytest.raises(ValueError), console.phase("loading"):
        raise ValueError
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["  compiling ...", "  compiling: 0.0 s"]
    assert lines[3].startswith("  loading: failed after")


def test_a_console_that_is_not_enabled_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(False)
    console.banner("title", {"layouts": ["DP1"]})
    with console.phase("compiling"):
        console.step_line(a_step(1))
    assert capsys.readouterr().out == ""


def test_the_banner_is_plain_text_where_nobody_sits_at_a_terminal() -> None:
    stream = io.StringIO()
    Console(True, stream).banner(
        "run", {"layouts": ["DP1/MP4", "DP2/MP2"], "batch": ["8"], "none": []}
    )
    assert "\033" not in stream.getvalue()
    assert "  layouts  DP1/MP4\n           DP2/MP2\n  batch    8\n" in stream.getvalue()


def test_runs_of_the_same_second_get_directories_of_their_own(tmp_path: Path) -> None:
    root = tmp_path / "output"
    runs = [run_directory.create(None, "tiny", root) for _ in range(3)]
    assert len(set(runs)) == 3
    assert all(run.parent == root / "tiny" for run in runs)
    assert (root / "latest").resolve() == runs[-1].resolve()


def test_a_directory_with_an_earlier_run_is_refused(tmp_path: Path) -> None:
    given = tmp_path / "mine"
    assert run_directory.create(given, "tiny", tmp_path / "output") == given
    assert (tmp_path / "output" / "latest").resolve() == given
    (given / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match="earlier run .* name another output_dir or leave it out"):
        run_directory.create(given, "tiny", tmp_path / "output")


def test_a_directory_of_a_run_that_made_no_step_is_free_unless_that_may_still_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    run_directory.check_free(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"st')
    run_directory.write_process(tmp_path, None)
    run_directory.check_free(tmp_path)
    process = json.loads((tmp_path / "process.json").read_text())

    def of(**other: Any) -> None:
        (tmp_path / "process.json").write_text(json.dumps(process | other))

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as alive:
        of(pid=alive.pid, started=psutil.Process(alive.pid).create_time())
        with pytest.raises(UserError, match=f"is that of process {alive.pid} on .*, which is runn"):
            run_directory.check_free(tmp_path)
        alive.communicate(b"\n")
    run_directory.check_free(tmp_path)
    of(host="another")
    with pytest.raises(UserError, match="on another, which cannot be seen from here: name another"):
        run_directory.check_free(tmp_path)


def test_a_file_where_the_directory_should_be_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be made"):
        run_directory.create(tmp_path / "file", "tiny", tmp_path / "output")


def test_what_stands_in_the_place_of_latest_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "latest" / "precious").mkdir(parents=True)
    with pytest.raises(UserError, match="latest"):
        run_directory.create(None, "tiny", tmp_path)
    assert (tmp_path / "latest" / "precious").is_dir()
    assert run_directory.create(tmp_path / "given", "tiny", tmp_path).is_dir()


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_bytes_are_told_in_the_largest_unit_that_fits(num_bytes: int, words: str) -> None:
    assert format_bytes(num_bytes) == words


def test_this_process_uses_some_memory() -> None:
    assert process_rss() > 2**20


def test_a_folder_without_an_earlier_runs_files_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/other.txt").touch()
    place = run_directory.own_folder(tmp_path / "shared", "mine", "completions.jsonl", "the key")
    assert place == tmp_path / "shared"
    fresh = run_directory.own_folder(tmp_path / "a/b", "mine", "*", "the key")
    assert fresh == tmp_path / "a/b" and fresh.is_dir()


def test_a_folder_with_an_earlier_runs_files_gets_a_new_folder_each_time(tmp_path: Path) -> None:
    (tmp_path / "completions.jsonl").touch()
    places = [
        run_directory.own_folder(tmp_path, "mine", "completions.jsonl", "the key") for _ in range(2)
    ]
    assert places == [tmp_path / "mine", tmp_path / "mine-2"]


def test_a_file_in_a_folders_place_is_told_with_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="the.key '.*file' cannot be made or read as a folder"):
        run_directory.own_folder(tmp_path / "file", "mine", "*", "the.key")


def test_mindspore_imports_after_what_writes_tensorboards_files() -> None:
    order = "import mindgrpo, tensorboardX, mindspore"
    ended = subprocess.run(
        [sys.executable, "-c", order], cwd=Path(__file__).resolve().parent.parent, timeout=200
    )
    assert ended.returncode == 0
