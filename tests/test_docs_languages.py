"""README_CN.md and docs/zh/ are in step with the English pages; the Chinese page on configuration is true.

Compares headings, fenced blocks, figures, code spans and links (page_units.py). Commands of translated pages are not
run again: they are the English pages' bytes, which tests/test_docs_commands.py runs.
Does not prove that a sentence means the same in both languages: a change of words alone is not seen.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fenced_blocks import ROOT
from page_units import CODE, differences, english_of, targets, units_of
from tables import each_row

from mindgrpo.config.names import KNOWN, SECTIONS
from mindgrpo.config.reference import written
from mindgrpo.config.schema import LIVE

CHINESE = [
    "README_CN.md",
    *sorted(f"docs/zh/{path.name}" for path in (ROOT / "docs/zh").glob("*.md")),
]
# Written in Chinese for itself: the English page is generated from the schema.
CONFIGURATION = "docs/zh/configuration.md"
TRANSLATED = [page for page in CHINESE if page != CONFIGURATION]

PAGE = """# One page

Some 12 % of 3.5 GB, by `key_one` and `key_two`, see [data](data.md).

- an item with -1

<!-- not run: needs a network -->
```bash
first --flag    # comment
second
```

## Table

| key | 10 |
| --- | --- |
| `a` | [page](https://example.org/2024) |
"""


@pytest.mark.parametrize("page", TRANSLATED)
def test_a_translated_page_is_in_step_with_the_english(page: str) -> None:
    found = differences(english_of(page), page)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", TRANSLATED)
def test_a_page_and_its_translation_link_to_each_other(page: str) -> None:
    for here, there in ((page, english_of(page)), (english_of(page), page)):
        lines = (ROOT / here).read_text(encoding="utf-8").splitlines()[:5]
        links = re.findall(r"\]\(([^)]+)\)", "\n".join(lines))
        paths = [(ROOT / here).parent.joinpath(link).resolve() for link in links]
        assert (ROOT / there).resolve() in paths, f"the first lines of {here} do not link {there}"


@each_row("page", [*CHINESE, *map(english_of, CHINESE)])
def test_a_link_leads_to_a_page_that_exists_in_the_readers_language(page: str) -> None:
    for unit in units_of(page):
        for path in (path for path in targets(unit) if "://" not in path):
            assert unit.kind.startswith("block") or (ROOT / path).exists(), f"{unit.where}: {path}"
            if page in CHINESE and path != english_of(page):
                chinese = [other for other in TRANSLATED if english_of(other) == path]
                assert chinese == [], f"{unit.where} links {path}; there is {chinese[0]}"


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("## Table", "### Table", ["en.md:13 has the heading of level 2", "level 3 'Table'"]),
        ("# One page", "# Page 1", ["zh.md:1 has 1, which en.md:1 lacks"]),
        ("## Table\n", "", ["en.md:13 has the heading", "zh.md has no further heading"]),
        ("\n- an item with -1\n", "", ["section 'One page / One page'", "en.md:5 has a list item"]),
        ("\nSome", "\nNews.\n\nSome", ["zh.md:3 has a paragraph without a counterpart"]),
        ("with -1", "with 1", ["en.md:5 has -1, which zh.md:5 lacks", "zh.md:5 has 1, which"]),
        ("12 %", "13 %", ["en.md:3 has 12%", "zh.md:3 has 13%"]),
        ("3.5 GB", "3.5 MB", ["en.md:3 has 3.5GB", "zh.md:3 has 3.5MB"]),
        ("`key_two`", "`key_one`", ["en.md:3 has `key_two`, which zh.md:3 lacks"]),
        ("(data.md)", "(rewards.md)", ["data.md, which zh.md:3", "rewards.md, which en.md:3"]),
        ("/2024", "/2025", ["link to https://example.org/2024"]),
        ("needs a network", "needs a router", ["marked as not run: needs a router"]),
        (
            "<!-- not run: needs a network -->\n",
            "",
            ["zh.md:7 has a block of bash without a counterpart"],
        ),
        ("```bash", "```text", ["zh.md:8 has a block of text"]),
        ("# comment", "# Kommentar", ["en.md:9 has 'first --flag    # comment'", "zh.md:9"]),
        ("second\n", "", ["en.md:10 has 'second'", "zh.md:10 has '(no line)'"]),
        ("| `a` |", "| `a` | |", ["zh.md:17 has a table row of 3 cells"]),
        ("| key | 10 |", "| key | 11 |", ["section 'Table / Table': en.md:15 has 10, which"]),
    ],
)
def test_a_change_of_one_page_alone_is_named(
    old: str, new: str, named: list[str], tmp_path: Path
) -> None:
    assert PAGE.count(old) == 1
    pages = [tmp_path / "en.md", tmp_path / "zh.md"]
    for texts in ((PAGE, PAGE.replace(old, new)), (PAGE.replace(old, new), PAGE)):
        for page, text in zip(pages, texts, strict=True):
            page.write_text(text, encoding="utf-8")
        found = "\n".join(differences(*map(str, pages))).replace(f"{tmp_path}/", "")
        assert found, "the change is not seen"
        if texts[0] == PAGE:
            assert [words for words in named if words not in found] == [], found


def test_a_translation_may_order_its_words_and_links_to_its_own_language(tmp_path: Path) -> None:
    chinese = PAGE.replace("Some 12 % of 3.5 GB", "3.5 GB 的 12%").replace("## Table", "## 表格")
    english, translated = tmp_path / "page.md", tmp_path / "zh" / "page.md"
    translated.parent.mkdir()
    english.write_text(PAGE, encoding="utf-8")
    translated.write_text(chinese.replace("\n\n", "\n\n[English](../page.md)\n\n", 1))
    assert differences(str(english), str(translated)) == []


def test_the_chinese_page_on_configuration_names_only_keys_that_exist() -> None:
    tops = {key.split(".")[0] for key in SECTIONS}
    for unit in units_of(CONFIGURATION):
        for code in CODE.findall("" if unit.kind.startswith("block") else unit.text):
            name = re.fullmatch(r"(?:--)?([a-z_]+(?:\.[a-z0-9_]+)*)(?:[ =:].*)?", code)
            if name and name[1].split(".")[0] in tops:
                assert name[1] in (*KNOWN, *SECTIONS), f"{unit.where}: {name[1]} is no key"


def test_the_chinese_page_on_configuration_states_the_defaults_of_the_schema() -> None:
    stated = {}
    for unit in units_of(CONFIGURATION):
        row = re.match(r"\| `([a-z_0-9.]+)` \| `([^`]*)` \| \S", unit.text)
        if unit.kind == "table row of 3 cells" and "`" in unit.text:
            assert row, f"{unit.where} is not: | `key` | `default` | meaning |"
            assert row[1] in LIVE, f"{unit.where}: {row[1]} is no key"
            default = written(LIVE[row[1]].field.default)
            assert row[2] == default, f"{unit.where}: {row[1]} has the default {default}"
            assert row[1] not in stated, f"{unit.where}: {row[1]} is there twice"
            stated[row[1]] = unit
    assert len(stated) >= 40
