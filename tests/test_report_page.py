"""The page about a run, opened from its file in headless Chromium and used as by a reader.

Skipped where no Chromium is installed, but not under CI. Does not prove how it looks, nor anything of other browsers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from report_runs import (
    GENERATIONS,
    HOSTILE,
    PROMPTS,
    STEPS,
    arrays_of,
    make_conversations,
    make_run,
    packed,
    write_rows,
)

from mindgrpo.report.write import write_report

BENCH = Path(__file__).resolve().parent.parent / "scripts" / "bench"
sys.path.insert(0, str(BENCH))
from chromium import Page, browser, chromium  # noqa: E402

TEXTS = "[...document.querySelectorAll('#groups .text')].map((node) => node.textContent)"
NUM_SAMPLES = PROMPTS * GENERATIONS
PROGRAM = chromium()


@pytest.fixture(scope="module")
def opened() -> Iterator[Page]:
    """One browser for all tests."""
    if PROGRAM is None:
        missing = "no Chromium is installed: `apt-get install chromium` has one"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    with browser(PROGRAM) as page:
        yield page


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([make_run(tmp_path_factory.mktemp("runs") / "one")])


@pytest.fixture
def page(opened: Page, report: Path) -> Iterator[Page]:
    """The report, newly opened; whatever a test does, nothing is loaded, no error is reported, nothing is run."""
    opened.requests.clear()
    opened.errors.clear()
    # All samples are in sight.
    opened.show(1280, 2600)
    opened.open(report)
    yield opened
    opened.value("1")
    assert opened.requests == [report.resolve().as_uri()]
    assert opened.errors == [] and opened.dialogs == 0


def texts(page: Page) -> list[str]:
    """Of the cards in their order, once all were in sight."""
    page.until(f"{TEXTS}.every((text) => text)")
    return list(page.value(TEXTS))


def count(page: Page, selector: str) -> int:
    return int(page.value(f"document.querySelectorAll({json.dumps(selector)}).length"))


def text_of(page: Page, selector: str) -> str:
    return str(page.value(f"document.querySelector({json.dumps(selector)}).textContent"))


def test_it_opens_from_a_file_without_a_request_or_an_error(page: Page) -> None:
    assert count(page, "#curves .plot canvas") == 3
    assert page.value("document.querySelector('#step-chooser').value") == str(STEPS)
    assert count(page, "#groups .sample") == NUM_SAMPLES
    assert "complete" in text_of(page, "#overview")


def test_a_click_on_a_curve_opens_the_step(page: Page) -> None:
    box = page.value(
        "(() => { const box = document.querySelector('#curves .plot .u-over').getBoundingClientRect(); "
        "return [box.x, box.y, box.width, box.height]; })()"
    )
    # The curves go from step 0 to step 4.
    page.click(box[0] + box[2] / 2 + 4, box[1] + box[3] / 2)
    page.until("document.querySelector('#step-chooser').value === '2'")
    assert texts(page)[0].startswith("say 0")
    assert "step 2" in text_of(page, "#groups .prompt pre")


def test_arrow_keys_change_the_step_and_a_slash_goes_to_the_search(page: Page) -> None:
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    assert page.value("document.querySelector('#step-chooser').value") == "2"
    page.press("ArrowRight")
    assert page.value("document.querySelector('#step-chooser').value") == "3"
    assert text_of(page, "#status") == "Step 3 is shown."
    page.press("/")
    assert page.value("document.activeElement.id") == "search"
    page.press("ArrowLeft")
    page.press("Escape")
    assert page.value("document.querySelector('#step-chooser').value") == "3"
    assert page.value("document.activeElement.id") != "search"


def test_samples_are_sorted_within_and_across_groups(page: Page) -> None:
    page.choose("[name=sort]", "advantage")
    numbers = "[...document.querySelectorAll('#groups .card-head > .quiet')].map((node) => node.textContent)"
    assert page.value(numbers) == ["#3", "#2", "#1", "#0", "#7", "#6", "#5", "#4"]
    page.click_on("input[type=checkbox]")
    assert page.value(numbers)[:4] == ["#0", "#1", "#2", "#3"]
    page.choose("[name=sort]", "reward")
    assert page.value(numbers)[:4] == ["#0", "#2", "#1", "#3"]


def test_samples_are_filtered_by_each_figure_and_by_text(page: Page) -> None:
    shown = "document.querySelectorAll('#groups .sample').length"
    for selector, value, left in (
        ("[name=finish]", "length", 2),
        ("[name=advantage]", "positive", 4),
        ("[name=minReward]", "1", 4),
        ("[name=maxLength]", "0", 0),
        ("#search", "SAY 5", 1),
        ("#search", "prompt 1", 4),
    ):
        page.choose(selector, value)
        assert page.value(shown) == left, selector
        assert text_of(page, "#matching") == f"{left} of {NUM_SAMPLES} samples" if left else True
        page.click_on("#reset")
        assert page.value(shown) == NUM_SAMPLES


def test_tokens_have_the_colours_of_their_figures(page: Page) -> None:
    colours = "[...document.querySelectorAll('#groups .text')[2].children].map((node) => node.style.backgroundColor)"
    assert page.value(colours) == []
    page.choose("[name=colour]", "log_ratio")
    page.until(f"{colours}.length > 2")
    first, second, *others = page.value(colours)
    assert first.startswith("rgba(37, 99, 235") and second.startswith("rgba(234, 88, 12")
    assert set(others) == {""}
    clipped = (
        "document.querySelectorAll('#groups .text')[{}].querySelector('.clipped')?.dataset.token"
    )
    # The upper end clips where the advantage is positive, the lower one where it is negative.
    assert page.value(clipped.format(2)) == "0" and page.value(clipped.format(1)) == "1"
    plain = json.loads(json.dumps(page.value("stepData(0, 4).groups[0].samples[2].text")))
    assert "".join(texts(page)[2].split("∅")) == plain
    page.choose("[name=colour]", "advantage")
    page.until(f"{colours}.every((colour) => colour.startsWith('rgba(37, 99, 235'))")
    page.choose("[name=colour]", "entropy")
    page.until(f"{colours}.every((colour) => colour.startsWith('rgba(124, 58, 237'))")


def test_a_token_under_the_pointer_shows_its_figures(page: Page) -> None:
    page.choose("[name=colour]", "gap")
    page.until("document.querySelector('#groups .text [data-token]') !== null")
    page.click_on("#groups .text [data-token='1']")
    page.until("!document.querySelector('#tip').hidden")
    shown = text_of(page, "#tip")
    assert "gap: trainer − generator: 0.001" in shown and "ratio and clipping: 0.6" in shown


def test_hostile_completions_are_texts(page: Page) -> None:
    page.choose("#step-chooser", "1")
    page.until(f"{TEXTS}[0] === {json.dumps(HOSTILE[0])}")
    assert texts(page)[: len(HOSTILE)] == list(HOSTILE)
    page.choose("[name=colour]", "gap")
    page.until("document.querySelector('#groups .text [data-token]') !== null")
    assert [text.replace("∅", "") for text in texts(page)[: len(HOSTILE)]] == list(HOSTILE)
    assert count(page, "img, #groups script, #groups b") == 0
    assert text_of(page, "#groups .prompt pre") == "Prompt 0 <b>of</b> step 1?"


def test_conversations_show_turns_calls_and_failures_as_texts(opened: Page, tmp_path: Path) -> None:
    opened.show(1280, 2600)
    opened.open(write_report([make_conversations(tmp_path / "talks")]))
    opened.choose("#step-chooser", "1")
    opened.until("document.querySelector('#groups .turn') !== null")
    first = "document.querySelector('#groups .text')"
    shown = f"{first}.querySelectorAll('.turn')"
    assert opened.value(f"{shown}.length") == 3
    call = f"→ {HOSTILE[0]} {json.dumps({'expression': HOSTILE[0]})}"
    assert opened.value(f"{shown}[0].textContent") == f"assistant{HOSTILE[0]}{call}"
    assert "raised" in opened.value(f"{shown}[1].textContent")
    assert opened.value(f"{shown}[1].classList.contains('context')")
    assert not opened.value(f"{shown}[2].classList.contains('context')")
    assert "2 turns" in text_of(opened, "#groups .badges")
    assert count(opened, "img, #groups script, #groups b") == 0


def test_tokens_that_a_tool_wrote_are_grey_and_have_no_colour(opened: Page, tmp_path: Path) -> None:
    opened.show(1280, 2600)
    opened.open(write_report([make_conversations(tmp_path / "talks")]))
    for colour in ("log_ratio", "advantage"):
        opened.choose("[name=colour]", colour)
        opened.until("document.querySelector('#groups [data-token=\"1\"].context') !== null")
        token = "document.querySelector('#groups [data-token=\"1\"]')"
        assert opened.value(f"{token}.style.backgroundColor") == ""
        first = "document.querySelector('#groups [data-token=\"0\"]')"
        assert not opened.value(f"{first}.classList.contains('context')")
        assert opened.value(f"{first}.style.backgroundColor") != ""


def test_the_policy_stops_what_the_page_did_not_bring(page: Page) -> None:
    page.value(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 1\">')"
    )
    page.value(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'ran = 2'}))"
    )
    page.until("document.images[0].complete")
    assert page.value("window.ran") is None
    # Refusals are told on the console; what was refused was not loaded.
    assert page.value("document.images[0].naturalWidth") == 0
    refused = page.errors.copy()
    page.errors.clear()
    page.requests[1:] = []
    assert len(refused) >= 2 and all("Content Security Policy" in text for text in refused)


def test_the_page_changes_its_language(page: Page) -> None:
    assert page.value("document.documentElement.lang") == "en"
    page.click_on("#language")
    assert page.value("document.documentElement.lang") == "zh-CN"
    assert text_of(page, "#curves h2") == "曲线" and text_of(page, "#language") == "English"
    page.click_on("#language")
    assert text_of(page, "#curves h2") == "Curves"


def test_held_out_answers_show_what_changed(page: Page) -> None:
    assert count(page, "#answers .group") == 3
    page.choose("[name=show-answers]", "better")
    assert count(page, "#answers .group") == 3
    page.choose("[name=show-answers]", "worse")
    assert count(page, "#answers .group") == 0
    assert "after 4 steps" not in text_of(page, "#answers")


def test_the_configuration_has_origins_and_is_searched(page: Page) -> None:
    assert count(page, "#keys tbody tr") == 2
    assert "command line --rl_config.epsilon_high" in text_of(page, "#keys")
    page.click_on("#configuration input[type=checkbox]")
    assert count(page, "#keys tbody tr") == 4


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 800, 1600])
def test_nothing_is_wider_than_the_window(width: int, dark: bool, page: Page) -> None:
    page.show(width, 800, dark)
    page.until(f"innerWidth === {width}")
    page.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.value("document.documentElement.scrollWidth") <= width
    background = page.value("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(18, 22, 29)") == dark


def test_every_field_and_curve_has_a_name(page: Page) -> None:
    nameless = (
        "[...document.querySelectorAll('input, select, button, [role=img]')].filter((node) => "
        "!(node.labels?.length && node.labels[0].textContent) && !node.textContent.trim() "
        "&& !node.getAttribute('aria-label') && node.id !== 'step-chooser').length"
    )
    assert page.value(nameless) == 0


def test_two_runs_are_side_by_side(opened: Page, tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "first"), make_run(tmp_path / "second", steps=3, summary=False)
    opened.errors.clear()
    opened.open(write_report([one, two]))
    assert count(opened, "#overview .run") == 2
    legend = text_of(opened, "#curves .u-legend")
    assert "total · A" in legend and "total · B" in legend
    heads = text_of(opened, "#heldout thead")
    assert "A · step 4" in heads and "B · step 3" in heads
    opened.choose("#samples select", "1")
    assert opened.value("document.querySelector('#step-chooser').value") == "3"
    assert opened.errors == []


def test_a_figure_that_is_always_0_says_so_and_is_drawn_from_0_to_1(
    opened: Page, tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "run")
    figures = {"clip_fraction": 0.0, "truncated_fraction": 0.0, "entropy": 0.0}
    # On a logarithmic axis where they are not 0.
    figures |= {"logprob_gap/mean": 0.0, "logprob_gap/max": 0.0}
    write_rows(
        folder / "metrics.jsonl",
        ({"step": step, **figures, "kl": 20.0 * step} for step in range(1, STEPS + 1)),
    )
    opened.open(write_report([folder]))
    scales = (
        "Object.fromEntries(plots.map(({ plot, holder }) => "
        "[holder.previousSibling.textContent, [plot.scales.y.min, plot.scales.y.max]]))"
    )
    shown = opened.value(scales)
    for name in ("Clip fraction", "Truncated fraction", "Entropy", "Log-prob gap"):
        assert shown[f"{name}: 0 in every step"] == [0, 1]
    assert shown["KL to the reference"] == [14, 86], "a tenth of the figures around them"


def test_a_steps_seconds_are_the_median_of_those_measured(opened: Page, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    tile = "[...document.querySelectorAll('#overview .tile-note')].map((node) => node.textContent)"
    write_rows(
        folder / "metrics.jsonl",
        ({"step": i + 1, "time/step": seconds} for i, seconds in enumerate((9.0, 1.5, 1.25))),
    )
    opened.open(write_report([folder]))
    assert opened.value(tile)[-1] == "median 1.5 s a step"
    write_rows(folder / "metrics.jsonl", [{"step": 1, "kl": 0.5}])
    opened.open(write_report([folder]))
    assert not [note for note in opened.value(tile) if note.endswith("a step")]


def test_a_step_that_is_not_in_the_page_opens_the_nearest(opened: Page, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    write_rows(folder / "completions.jsonl", [row for row in rows if row["step"] in (1, 4)])
    opened.open(write_report([folder]))
    opened.value("openStep(2)")
    assert opened.value("document.querySelector('#step-chooser').value") == "1"
    assert "No samples of step 2" in text_of(opened, "#samples")


def test_halves_are_read_as_they_were_written(opened: Page, report: Path) -> None:
    opened.open(report)
    values = [0.0, 1.0, -2.5, 6e-8, 65504.0, -0.001]
    shown = opened.value(f"Array.from(halves({json.dumps(packed(values))}))")
    assert shown == pytest.approx(values, rel=1e-3, abs=1e-8)
    assert opened.value(f"isNaN(halves({json.dumps(packed([float('nan')]))})[0])")
    assert arrays_of({"step": 1, "length": 1}, 0)["log_ratio"] == packed([0.5])


def test_a_run_that_has_done_no_step_has_a_page(opened: Page, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    opened.errors.clear()
    opened.open(write_report([tmp_path]))
    assert "no summary" in text_of(opened, "#overview")
    opened.press("ArrowRight")
    opened.press("/")
    assert opened.errors == []
