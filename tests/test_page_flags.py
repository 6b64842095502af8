"""Flags in documents: each one that a page gives to a verb is in the verb's help, and every other one is known.

Does not prove that a flag does what a page says.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache

import pytest
from fenced_blocks import ROOT, blocks_of

from mindgrpo.cli.verbs import USAGE, main
from mindgrpo.config.command_line import FLAGS, OF_LAUNCH
from mindgrpo.config.names import SECTIONS
from mindgrpo.config.schema import LIVE
from mindgrpo.launch import options

PAGES = [
    *("README.md", "README_CN.md", "CONTRIBUTING.md"),
    *sorted(
        path.relative_to(ROOT).as_posix()
        for folder in ("docs", "examples", "scripts/bench")
        for path in (ROOT / folder).rglob("*.md")
    ),
]
FLAG = re.compile(r"(?<![\w-])--[A-Za-z](?:[\w.-]*\w)?")
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
# Programs that start a verb with the words behind them.
STARTS = (
    (r"(?:python -m |bash )?mindgrpo (\w+)", None),
    (r"(?:bash )?\S*launch\.sh", "launch"),
    (r"(?:bash )?\S*quickstart\.sh", "train"),
)
# Of scripts, before what is the trainer's.
OF_SCRIPTS = {"quickstart.sh": {"--ranks", "--example"}}


@cache
def help_of(verb: str) -> frozenset[str]:
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *texts, **_: printed.extend(map(str, texts)))
        assert main([verb, "--help"]) == 0
    return frozenset(FLAG.findall("\n".join(printed)))


def is_key(flag: str) -> bool:
    return flag[2:] in LIVE or flag[2:] in SECTIONS


def commands(page: str) -> Iterator[tuple[str, list[str]]]:
    """Verbs and the words behind them, of fenced blocks and of spans in the text."""
    texts = [
        *(
            command
            for block in blocks_of(page)
            if block.kind in ("bash", "console")
            for command in block.commands()
        ),
        *SPAN.findall((ROOT / page).read_text("utf-8")),
    ]
    for text in texts:
        for start, verb in STARTS:
            if found := re.match(start, text):
                rest = text[found.end() :]
                words = (
                    rest.split() if "'" in rest or '"' in rest else shlex.split(rest, comments=True)
                )
                yield from verbs_of(verb or found[1], text, words)


def verbs_of(verb: str, text: str, words: list[str]) -> Iterator[tuple[str, list[str]]]:
    own = next((flags for name, flags in OF_SCRIPTS.items() if name in text), set())
    words = [word for word in words if word not in own]
    if verb == "launch" and "--" in words:
        at = words.index("--")
        yield verb, words[:at]
        verb, words = (words[at + 1] if words[at + 1 :] else ""), words[at + 2 :]
    if verb in USAGE:
        yield verb, words


def test_a_flag_that_a_page_gives_to_a_verb_is_in_its_help() -> None:
    checked, wrong = 0, []
    for page in PAGES:
        for verb, words in commands(page):
            for flag in FLAG.findall(" ".join(words)):
                checked += 1
                if flag not in help_of(verb) | {"--help", "--help-keys"} and not is_key(flag):
                    wrong.append(f"{page}: mindgrpo {verb} {flag}")
    assert not wrong
    assert checked > 100


def test_the_configuration_knows_the_launchers_flags() -> None:
    assert OF_LAUNCH == options.FLAGS
    assert not {*OF_LAUNCH} & {*FLAGS}
