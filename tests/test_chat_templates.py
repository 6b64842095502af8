"""Chat templates render as transformers renders them, and end with one sentence where they would not end.

Does not prove that every public model's template renders: the constructs of tests/chat_templates.py do.
"""

from __future__ import annotations

import json
import random
import resource
import signal
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CONVERSATIONS, DOCUMENTS, TEMPLATES, TOOLS
from data_sets import MODEL, change, copy_tokenizer, examples_of
from tables import each_row

from mindgrpo.config import config_with
from mindgrpo.data import chat_template
from mindgrpo.data.chat_template import ChatTemplate, choose_template, shipped_names
from mindgrpo.data.prompts import PromptForm, PromptSet
from mindgrpo.data.tokenizer import Tokenizer, load_tokenizer
from mindgrpo.errors import UserError

# Midnight may pass between two looks at the clock.
STARTED = datetime.now()
ASKED = [{"role": "user", "content": "x"}]
EXTRAS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True},
    {"tools": TOOLS, "documents": DOCUMENTS},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With special tokens of all kinds, for templates to ask for."""
    folder = copy_tokenizer(tmp_path_factory.mktemp("special") / "model")
    change(
        folder / "tokenizer_config.json",
        cls_token="<|im_start|>",
        mask_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    return folder


@pytest.fixture(scope="module")
def theirs(directory: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(str(directory))


@pytest.fixture(scope="module")
def ours(directory: Path) -> Tokenizer:
    return load_tokenizer(directory)


def test_what_a_template_tells_does_not_depend_on_when_it_is_asked(ours: Tokenizer) -> None:
    text = "{{ strftime_now('%d %b %Y') }} {{ range(1000) | random }} {{ messages[0].content }}"
    told = replace(with_text(ours, text), date=datetime(2024, 7, 26))
    first, state = told.render(ASKED), random.getstate()
    assert first.startswith("26 Jul 2024 ")
    assert {told.render(ASKED) for _ in range(9)} == {first}
    assert random.getstate() == state
    # Of other messages something else is drawn.
    others = [told.render([{"role": "user", "content": str(i)}]) for i in range(9)]
    assert len({other.split()[3] for other in others}) > 1
    now = with_text(ours, "{{ strftime_now('%Y-%m-%d') }}")
    assert now.render(ASKED) in {f"{day:%Y-%m-%d}" for day in (datetime.now(), STARTED)}


def test_a_date_is_one() -> None:
    key = "rl_config.chat_template_date"
    for date in ("2024-07-26", "2024-07-26 09:30:00"):
        assert config_with(None, {key: date}).config.rl_config.chat_template_date == date
    with pytest.raises(UserError, match="chat_template_date is 'today', but must be a date, as in"):
        config_with(None, {key: "today"})


def with_text(tokenizer: Tokenizer, text: str) -> Tokenizer:
    return replace(tokenizer, template=ChatTemplate(text, "the template"))


def outcome(render: Any, *arguments: Any, **keywords: Any) -> Any:
    """What `render` gives; of an exception only that there was one."""
    try:
        return render(*arguments, **keywords)
    except Exception:
        return Exception


@each_row("name", TEMPLATES)
def test_a_construct_renders_as_transformers_renders_it(
    ours: Tokenizer, theirs: Any, name: str
) -> None:
    tokenizer = with_text(ours, TEMPLATES[name])
    # transformers 5 keeps them from templates, which were written for 4 and may use them.
    further = getattr(theirs, "extra_special_tokens", None)
    passed = {"additional_special_tokens": further} if further else {}
    for conversation in CONVERSATIONS.values():
        for extra in EXTRAS:
            expected = outcome(
                theirs.apply_chat_template,
                conversation,
                chat_template=TEMPLATES[name],
                tokenize=False,
                **passed,
                **extra,
            )
            given = {"add_generation_prompt": False} | extra
            assert outcome(tokenizer.render, conversation, **given) == expected


def test_the_constructs_are_many_and_few_of_them_raise(ours: Tokenizer) -> None:
    renders = [
        name
        for name, text in TEMPLATES.items()
        if outcome(with_text(ours, text).render, CONVERSATIONS["question"]) is not Exception
    ]
    assert len(renders) >= 40 and len(TEMPLATES) - len(renders) >= 6


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_templates_render_as_transformers_renders_them(
    ours: Tokenizer, theirs: Any, name: str
) -> None:
    text = choose_template(name, {}).text
    tokenizer = with_text(ours, text)
    for conversation in CONVERSATIONS.values():
        for extra in EXTRAS[:2]:
            expected = theirs.apply_chat_template(
                conversation, chat_template=text, tokenize=False, **extra
            )
            assert (
                tokenizer.render(conversation, **({"add_generation_prompt": False} | extra))
                == expected
            )


# As Qwen3's own template looks for the last question.
LOOKS_AT_CONTENT = (
    "{% for m in messages %}{% if m.content.startswith('<tool_response>') %}T{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% endfor %}"
)


def test_a_prompt_of_many_letters_is_rendered_and_then_dropped_or_cut(ours: Tokenizer) -> None:
    tokenizer = with_text(ours, LOOKS_AT_CONTENT)
    assert len(tokenizer.render([{"role": "user", "content": "é" * 5_000_000}])) == 5_000_000
    for letters, length in ((300_000, "300000 tokens"), (5_000_000, "5000000 letters")):
        rows = [{"question": text, "answer": "5"} for text in ("2 + 3", "7" * letters)]
        kept = PromptSet(examples_of(rows), PromptForm(tokenizer, 40, "drop"))
        assert (len(kept), kept.num_dropped) == (1, 1)
        for overflow in ("left", "right"):
            cut = PromptSet(examples_of(rows), PromptForm(tokenizer, 40, overflow))
            assert (len(cut), cut.num_cut, cut.longest) == (2, 1, 40)
        with pytest.raises(
            UserError, match=f"row 2: the prompt is {length} long and max_prompt_length is 40"
        ):
            PromptSet(examples_of(rows), PromptForm(tokenizer, 40))


RUN_ON = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "constants": "{{ 10 ** 99999999999 }}",
    "macros": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
}
GROW = {
    "factor": "{{ 'a' * 10 ** 10 }}",
    "joined": (
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
    ),
    "padded": "{{ 'a'.ljust(10 ** 10) }}",
    "centered": "{{ 'a'|center(10 ** 10) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "format": "{{ '{:>10000000000}'.format(1) }}",
    "sorted": "{{ ((range(99999) | list) * 9999) | sort | length }}",
}
ESCAPES = {
    "class": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__.os }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}",
}


@pytest.mark.parametrize("name", RUN_ON)
def test_a_template_that_runs_on_ends_with_a_sentence(
    ours: Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.3)
    with pytest.raises(
        UserError, match="cannot render .*: it takes more than 0.3 s of processor time"
    ):
        with_text(ours, RUN_ON[name]).render(ASKED)


@pytest.mark.parametrize("name", GROW)
def test_a_template_that_grows_ends_with_a_sentence(
    ours: Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(chat_template, "MAX_GIB", 1)
    with pytest.raises(UserError, match="cannot render .*: it takes more than 1 GiB of memory"):
        with_text(ours, GROW[name]).render(ASKED)


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_reaches_nothing_of_pythons(ours: Tokenizer, name: str) -> None:
    with pytest.raises(UserError, match="cannot render .*(unsafe|recursion)"):
        with_text(ours, ESCAPES[name]).render(ASKED)


def test_limits_leave_the_process_as_it_was(ours: Tokenizer) -> None:
    before = (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM))
    with_text(ours, "{{ messages[0].content }}").render(ASKED)
    with pytest.raises(UserError):
        with_text(ours, GROW["factor"]).render(ASKED)
    after = (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM))
    assert after == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_tokens_of_a_tokenizer_without_some_are_not_defined() -> None:
    text = "{{ bos_token is defined }} {{ additional_special_tokens is defined }} {{ eos_token }}"
    listed = json.loads((MODEL / "tokenizer_config.json").read_text("utf-8"))
    assert not listed.get("bos_token")
    assert with_text(load_tokenizer(MODEL), text).render(ASKED).startswith("False ")
