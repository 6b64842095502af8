"""The page about a run, as a file: what it reads, how much it holds, and that what a run wrote stays text.

test_report_page.py opens it in a browser. Does not prove that the page is pretty, nor that it is read in time.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from report_runs import (
    GENERATIONS,
    HOSTILE,
    PROMPTS,
    STEPS,
    Blocks,
    a_sample,
    data_of,
    make_conversations,
    make_run,
    packed,
    write_rows,
)
from small_runs import make_inputs, run

from mindgrpo.cli.verbs import main
from mindgrpo.errors import UserError
from mindgrpo.report import samples, write
from mindgrpo.report.run_folder import RowFile, read_run
from mindgrpo.report.samples import evenly, groups_of, packed_lengths, spread, stratified
from mindgrpo.report.write import page, write_report

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def a_run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "one")


def test_a_page_has_every_sample_of_a_short_run(a_run: Path) -> None:
    data = data_of(page([read_run(a_run)]))
    (shown,) = data["data"]["runs"]
    assert shown["samples"]["steps"] == [1, 2, 3, 4] and shown["samples"]["arrays"] == [
        *("entropy", "gap", "log_ratio")
    ]
    assert shown["samples"]["numShown"] == STEPS * PROMPTS * GENERATIONS
    groups = data["step-0-2"]["groups"]
    assert [len(group["samples"]) for group in groups] == [GENERATIONS] * PROMPTS
    sample = groups[1]["samples"][3]
    expected = a_sample(2, 7)
    assert sample["text"] == expected["completion"] and sample["advantage"] == 1.5
    assert sample["total"] == 1.75 and sample["finish"] == "length"
    assert sample["arrays"]["gap"] == packed(0.001 * i for i in range(expected["length"]))
    assert shown["clipping"]["high"] == 0.28
    assert ["actor_config.load", '"a/model # 2"', "default"] in shown["configuration"]


def test_what_a_run_wrote_is_only_ever_data(a_run: Path) -> None:
    text = page([read_run(a_run)])
    blocks = Blocks(text)
    assert not {tag for tag, _ in blocks.tags} & {"img", "b", "iframe", "object", "link"}
    assert all(not name.startswith("on") for _, attrs in blocks.tags for name in attrs)
    shown = [
        sample["text"]
        for group in data_of(text)["step-0-1"]["groups"]
        for sample in group["samples"]
    ]
    assert shown == [HOSTILE[i % len(HOSTILE)] for i in range(PROMPTS * GENERATIONS)]
    for attrs, body in blocks.inside("script"):
        assert "id" not in attrs or not set(body) & set("<>&\u2028\u2029")


def test_conversations_have_their_turns_calls_and_failures_as_data(tmp_path: Path) -> None:
    text = page([read_run(make_conversations(tmp_path / "talks"))])
    sample = data_of(text)["step-0-1"]["groups"][0]["samples"][0]
    assert [turn["role"] for turn in sample["turns"]] == ["assistant", "tool", "assistant"]
    asked, answered, last = sample["turns"]
    assert asked["content"] == last["content"] == answered["name"] == HOSTILE[0]
    assert asked["calls"] == [f"{HOSTILE[0]} {json.dumps({'expression': HOSTILE[0]})}"]
    assert (answered["failure"], asked["failure"], last["calls"]) == ("raised", "", [])
    blocks = Blocks(text)
    for attrs, body in blocks.inside("script"):
        assert "id" not in attrs or not set(body) & set("<>&\u2028\u2029")


def test_the_policy_allows_the_page_s_own_blocks_and_nothing_else(a_run: Path) -> None:
    text = page([read_run(a_run)])
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    blocks = Blocks(text)
    for kind, rule in (("script", "script-src"), ("style", "style-src")):
        bodies = [body for attrs, body in blocks.inside(kind) if "id" not in attrs]
        digests = [hashlib.sha256(body.encode()).digest() for body in bodies]
        hashes = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
        assert rules[rule].split() == hashes and len(hashes) >= 2
    assert rules["default-src"] == "'none'" and rules["img-src"] == "data:"
    assert all("src" not in attrs and "style" not in attrs for _, attrs in blocks.tags)
    assert [attrs["href"] for _, attrs in blocks.tags if "href" in attrs] == ["#main"]


@pytest.mark.parametrize(
    "missing",
    [
        ("per_token.jsonl",),
        ("hf/tokenizer.json",),
        ("completions.jsonl", "per_token.jsonl"),
        ("summary.json", "evaluations.jsonl", "eval_completions.jsonl", "config_resolved.yaml"),
    ],
)
def test_older_and_unfinished_runs_have_a_page(missing: tuple[str, ...], a_run: Path) -> None:
    for name in missing:
        (a_run / name).unlink()
    data = data_of(page([read_run(a_run)]))
    (shown,) = data["data"]["runs"]
    assert shown["figures"]["columns"]["reward/mean"][-1] == 1.0
    assert (shown["ending"]["is_complete"] is None) == ("summary.json" in missing)
    if "hf/tokenizer.json" in missing:
        sample = data["step-0-2"]["groups"][0]["samples"][1]
        assert "lengths" not in sample and sample["text"] == a_sample(2, 1)["completion"]


def test_rows_of_before_there_were_advantages_have_a_page(a_run: Path) -> None:
    write_rows(a_run / "completions.jsonl", [{"step": 1, "completion": "only this"}])
    (group,) = data_of(page([read_run(a_run)]))["step-0-1"]["groups"]
    (sample,) = group["samples"]
    assert sample["text"] == "only this" and sample["total"] is sample["advantage"] is None


def test_the_total_of_a_sample_is_what_the_run_wrote_and_never_a_sum_of_its_own(
    a_run: Path,
) -> None:
    for name in ("completions.jsonl", "eval_completions.jsonl"):
        rows = [json.loads(line) for line in (a_run / name).read_text().splitlines()]
        write_rows(a_run / name, ({**row, "reward": -3.5} for row in rows[1:]))
        # As runs wrote them before they told of the total.
        with (a_run / name).open("a") as lines:
            old = {key: value for key, value in rows[0].items() if key != "reward"}
            lines.write(json.dumps({**old, "prompt": "An old one"}) + "\n")
    data = data_of(page([read_run(a_run)]))
    shown = [group["samples"] for step in (1, 2) for group in data[f"step-0-{step}"]["groups"]]
    totals = [sample["total"] for samples in shown for sample in samples]
    assert sorted(map(str, totals)) == ["-3.5"] * (len(totals) - 1) + ["None"]
    held_out = {row["prompt"]: row for row in data["data"]["heldOut"]["rows"]}
    assert held_out["An old one"]["cells"][0]["total"] is held_out["An old one"]["change"] is None
    assert held_out["Held out 1?"]["cells"][0]["total"] == -3.5
    assert held_out["Held out 1?"]["change"] == 0


@pytest.mark.parametrize(
    "name", ["metrics", "completions", "per_token", "evaluations", "eval_completions"]
)
def test_half_a_last_line_is_counted_and_passed(name: str, a_run: Path) -> None:
    path = a_run / f"{name}.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 9, "reward/mean": 0.')
    (shown,) = data_of(page([read_run(a_run)]))["data"]["runs"]
    assert ["bad_rows", 1] in shown["warnings"]
    assert shown["ending"]["steps"] == STEPS and 9 not in shown["samples"]["steps"]


def test_a_damaged_row_leaves_the_others_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 1, "a": 0}\n{"step": 1, "a: 1}\n[2]\n{"a": 3, "step": 1}\n')
    rows = RowFile(path)
    assert rows.of_step(1) == [{"step": 1, "a": 0}, None, {"a": 3, "step": 1}]
    assert rows.num_bad == 2


def test_the_choice_is_even_and_of_all_rewards() -> None:
    assert evenly(range(1, 501), 5) == [1, 126, 251, 375, 500]
    assert evenly([3, 4], 5) == [3, 4] and evenly([3, 4], 1) == [4]
    assert list(spread(5)) == [0, 4, 2, 1, 3] and list(spread(1)) == [0] and not list(spread(0))
    assert sorted(spread(100)) == list(range(100))
    assert stratified([0.5, 0.0, 1.0])[:2] == [1, 2]


def test_a_group_stays_one_where_an_environment_gave_its_samples_prompts_of_their_own(
    a_run: Path,
) -> None:
    path = a_run / "completions.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for number, row in enumerate(rows):
        row["prompt"] = f"level {number % 2}"
    write_rows(path, rows)
    data = data_of(page([read_run(a_run)]))["step-0-1"]
    assert data["num_groups"] == PROMPTS
    for group in data["groups"]:
        assert len(group["samples"]) == GENERATIONS and group["prompt"] == "level 0"
        own = [sample.get("prompt") for sample in group["samples"]]
        assert own == [None, "level 1"] * (GENERATIONS // 2)


def test_groups_are_of_one_prompt_and_of_the_number_of_samples() -> None:
    rows: list[Any] = [{"prompt": "a"}] * 4 + [{"prompt": "b"}, None]
    sizes = [[number for number, _ in group] for group in groups_of(rows, 2)]
    assert sizes == [[0, 1], [2, 3], [4]]
    assert [len(group) for group in groups_of(rows, 0)] == [4, 1]


def test_a_budget_keeps_whole_groups_of_the_first_and_the_last_step(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=30)
    chosen = samples.choose_samples(read_run(folder), 20_000)
    steps = list(chosen.by_step)
    assert steps[0] == 1 and steps[-1] == 30 and 2 < len(steps) < 30
    assert sum(len(text.encode()) for text in chosen.by_step.values()) < 20_000 + 100 * len(steps)
    for text in chosen.by_step.values():
        assert all(len(group["samples"]) == GENERATIONS for group in json.loads(text)["groups"])


def test_curves_of_a_long_run_are_thinned_and_keep_their_ends(a_run: Path) -> None:
    rows = [{"step": s, "reward/mean": 0.5, "kl": None, "note": "text"} for s in range(1, 9001)]
    write_rows(a_run / "metrics.jsonl", rows)
    (shown,) = data_of(page([read_run(a_run)]))["data"]["runs"]
    steps = shown["figures"]["steps"]
    # Evaluations were before the first step and after the fourth.
    assert {0, 4, 9000} <= set(steps) and len(steps) <= 2002
    assert shown["figures"]["num_steps"] == 9001
    assert shown["figures"]["columns"].keys() == {"reward/mean", "eval/accuracy_reward/mean"}


def test_a_long_completion_loses_its_middle_and_its_arrays_too(a_run: Path) -> None:
    length = samples.HEAD_TOKENS + samples.TAIL_TOKENS + 5
    row = a_sample(1, 0) | {"length": length, "token_ids": [20] * length}
    arrays = {"step": 1, "sample": 0, "length": length, "gap": packed(i % 7 for i in range(length))}
    write_rows(a_run / "completions.jsonl", [row])
    write_rows(a_run / "per_token.jsonl", [arrays])
    (group,) = data_of(page([read_run(a_run)]))["step-0-1"]["groups"]
    (sample,) = group["samples"]
    assert sample["omitted"] == 5 and sample["length"] == length
    values = base64.b64decode(sample["arrays"]["gap"])
    assert len(values) == 2 * (length - 5)
    assert len(base64.b64decode(sample["lengths"])) == length - 5


def test_lengths_count_as_javascript_does() -> None:
    assert base64.b64decode(packed_lengths(["a", "", "😀", "x" * 300])) == bytes([1, 0, 2, 255, 45])


def test_arrays_of_another_length_are_not_shown(a_run: Path) -> None:
    wrong = {"step": 1, "sample": 0, "length": 2, "gap": packed([1.0, 2.0]), "kl": "no base64"}
    write_rows(a_run / "per_token.jsonl", [wrong])
    groups = data_of(page([read_run(a_run)]))["step-0-1"]["groups"]
    assert groups[0]["samples"][0]["arrays"] == {}


def test_held_out_answers_of_two_runs_are_compared_at_their_ends(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", steps=1), make_run(tmp_path / "b", steps=2)]
    shown = data_of(page([read_run(folder) for folder in runs]))["data"]["heldOut"]
    assert shown["columns"] == [
        {"run": 0, "step": 0},
        {"run": 0, "step": 1},
        {"run": 1, "step": 0},
        {"run": 1, "step": 2},
    ]
    changes = {row["prompt"]: row["change"] for row in shown["rows"]}
    assert changes == {"Held out 0?": 0, "Held out 1?": 1, "Held out 2?": 0}


@pytest.mark.parametrize(
    ("beta", "own", "shown"),
    [
        ("0.05", None, "DP2 MP4"),
        ("0.05", 1, "DP1 MP4"),
        ("0.0", 1, None),
        ("0.0", None, None),
    ],
)
def test_the_layout_of_the_reference_is_shown_where_there_is_one(
    a_run: Path, beta: str, own: int | None, shown: str | None
) -> None:
    degrees = "    data_parallel: {}  # default\n    model_parallel: 4  # default\n"
    layout = "  parallel_config: null  # default\n"
    if own is not None:
        layout = f"  parallel_config:\n{degrees.format(own)}"
    (a_run / "config_resolved.yaml").write_text(
        f"rl_config:\n  beta: {beta}  # default\n"
        f"actor_config:\n  parallel_config:\n{degrees.format(2)}ref_config:\n{layout}"
    )
    (run_shown,) = data_of(page([read_run(a_run)]))["data"]["runs"]
    facts = dict(run_shown["facts"])
    assert facts["layout_actor"] == "DP2 MP4" and facts.get("layout_ref") == shown


def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told == (
        f"mindgrpo: {tmp_path} holds no run: it has no metrics.jsonl; name the folder that a run wrote, as "
        "output/latest.\n"
    )


def test_the_verb_writes_where_it_is_told_and_beside_the_first_run(
    a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_run(tmp_path / "two")
    (latest := tmp_path / "latest").symlink_to(a_run)
    assert main(["report", str(latest)]) == 0 and (a_run / "report.html").is_file()
    assert main(["report", str(latest), str(other)]) == 0
    assert (a_run / "report_vs_two.html").is_file()
    assert main(["report", str(other), "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").is_file() and not (other / "report.html").exists()
    assert capsys.readouterr().out.count(" MB)\n") == 3
    with pytest.raises(UserError, match="3 runs are named"):
        from mindgrpo.cli.report import main as verb

        verb([str(other)] * 3)
    with pytest.raises(UserError, match="cannot be written"):
        write_report([other], tmp_path / "nowhere" / "page.html")


def test_a_page_that_cannot_be_written_is_one_line(a_run: Path) -> None:
    (a_run / "report.html").mkdir()
    path, failed = write.write_at_end(a_run)
    assert path == a_run / "report.html"
    assert failed is not None and failed.startswith(f"{path} was not written: ")
    assert "\n" not in failed


def test_a_page_that_takes_too_long_is_given_up(
    a_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "LONGEST_WRITING", 0.0)
    path, failed = write.write_at_end(a_run)
    assert failed == f"{path} was not written: its process took more than 0 s"


@pytest.mark.parametrize("wanted", [True, False])
def test_a_run_ends_with_its_page(wanted: bool, tmp_path: Path) -> None:
    make_inputs(tmp_path)
    words = ("--rl_config.max_steps", "2", "--monitor_config.report", str(wanted).lower())
    folder = run(tmp_path, tmp_path / "out", *words)
    assert (folder / "report.html").exists() == wanted
    if wanted:
        data = data_of((folder / "report.html").read_text(encoding="utf-8"))
        (shown,) = data["data"]["runs"]
        assert shown["ending"]["is_complete"] and shown["samples"]["steps"] == [1, 2]
        assert data["step-0-2"]["groups"][0]["samples"][0]["lengths"]


def test_what_is_inlined_is_named_with_its_licence() -> None:
    vendor = ROOT / "mindgrpo" / "report" / "vendor"
    notice = (ROOT / "NOTICE").read_text()
    (version,) = re.findall(r"uPlot \(v([\d.]+)\)", (vendor / "uPlot.iife.min.js").read_text())
    assert f"uPlot {version}" in notice and "MIT" in (vendor / "LICENSE.uPlot").read_text()
    assert f"uPlot {version}" in (vendor.parent / "page" / "words.js").read_text()


def test_both_languages_have_every_text() -> None:
    text = (ROOT / "mindgrpo/report/page/words.js").read_text(encoding="utf-8")
    english, chinese = text.split("\n  zh: {")
    keys = [re.findall(r"[{,\n ](\w+): \"", half) for half in (english, chinese)]
    assert keys[0] == keys[1] and len(keys[0]) > 150
    marks = [re.findall(r"(\w+): \"([^\"]*)\"", half) for half in (english, chinese)]
    for (key, ours), (_, theirs) in zip(*marks, strict=True):
        assert set(re.findall(r"{\d}", ours)) == set(re.findall(r"{\d}", theirs)), key


def test_the_page_s_sources_are_short_and_all_of_them_are_used() -> None:
    folder = ROOT / "mindgrpo" / "report" / "page"
    assert {path.name for path in folder.glob("*.js")} == set(write.SCRIPTS)
    assert all(path.read_text(encoding="utf-8").count("\n") <= 400 for path in folder.iterdir())
    for path in folder.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", path.read_text()
        )
