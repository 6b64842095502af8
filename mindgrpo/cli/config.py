"""Explains keys of the configuration, or prints a generated page of docs/ or module.

Of settings `name=value` of MindRLHF, verl or TRL, and of programs, scripts or YAML files with them, --explain prints
the YAML that they mean here.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindgrpo.config.reference import explain, other_trainers, reference
from mindgrpo.config.translate import is_setting, translate
from mindgrpo.config.trl_fields import trl_fields
from mindgrpo.errors import UserError


def main(argv: Sequence[str]) -> None:
    words = list(argv)
    if words[:1] == ["--explain"] and len(words) > 1 and all(map(is_setting, words[1:])):
        print(translate(words[1:]))
    elif words[:1] == ["--explain"] and len(words) > 1:
        print("\n\n".join(explain(name) for name in words[1:]))
    elif words == ["--reference"]:
        print(reference())
    elif words == ["--other_trainers"]:
        print(other_trainers())
    elif words == ["--trl_fields"]:
        print(trl_fields())
    else:
        raise UserError(
            f"config takes --explain KEY, --reference or --other_trainers, but was given '{' '.join(words)}'; write "
            "python -m mindgrpo config --explain rl_config.beta."
        )
