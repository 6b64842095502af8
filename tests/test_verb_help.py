"""What --help and --help-keys of a verb print: its own flags on one screen, and the keys it reads when asked.

Does not prove that a flag does what is said of it. test_page_flags.py compares it with the pages.
"""

from __future__ import annotations

import pytest
from tables import each_row
from test_user_errors import only_sentence

from mindgrpo.cli.verbs import USAGE, main
from mindgrpo.config.command_line import FLAGS
from mindgrpo.config.schema import LIVE
from mindgrpo.config.supervised import is_read


@each_row("verb", USAGE)
def test_help_of_a_verb_is_its_usage(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--config", "none.yaml", "--help"]) == 0
    said = capsys.readouterr().out
    assert f"\n  {verb} " in said
    # With the line of the prompt above it.
    assert said.count("\n") < 50, verb
    takes_keys = verb in ("launch", "train", "sft", "eval", "check", "plan")
    assert main([verb, "--help-keys"]) == (0 if takes_keys else 2)
    listed = capsys.readouterr().out
    for key in LIVE:
        is_there = takes_keys and (verb != "sft" or is_read(key))
        assert is_there == (f"\n  --{key}  (" in f"\n{listed}"), key
        assert f"\n  --{key}  (" not in said
    for flag, key in FLAGS.items():
        is_there = takes_keys and (verb != "sft" or is_read(key))
        # As a flag for this key: export has a --tokenizer_dir of its own.
        listed_flag = any(line.split() == [flag, key] for line in said.splitlines())
        assert is_there == listed_flag, flag


def test_the_keys_of_a_section_are_listed_by_themselves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["--help-keys", "rl_config"], ["--help-keys=rl_config"]):
        assert main(["train", *words]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
        assert len(lines) == sum(key.startswith("rl_config.") for key in LIVE)
        assert all(line.startswith("  --rl_config.") for line in lines)
    assert main(["train", "--help-keys", "actor_confg"]) == 2
    assert "did you mean actor_config" in only_sentence(capsys.readouterr().err)
    assert main(["sft", "--help-keys", "generate_config"]) == 2
    assert "reads no key of the section" in only_sentence(capsys.readouterr().err)
