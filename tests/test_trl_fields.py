"""GRPOConfig's declaration: what an editor and `help` show of its fields.

Does not prove what becomes of a value: test_trl_form.py does.
"""

from __future__ import annotations

import inspect
import pydoc
from pathlib import Path

import pytest

import mindgrpo
from mindgrpo import GRPOConfig
from mindgrpo.config.names import aliases
from mindgrpo.config.schema import LIVE
from mindgrpo.config.trl_fields import trl_fields
from mindgrpo.run import trl_fields as declared

ROOT = Path(__file__).resolve().parent.parent


def test_the_declaration_is_what_the_schema_says() -> None:
    source = Path(str(declared.__file__)).read_text("utf-8")
    written = source.partition("        *,\n")[2].partition("\n    ) -> None")[0]
    assert written == trl_fields(), "write what python -m mindgrpo config --trl_fields prints"


def test_help_and_the_signature_show_the_fields_with_types_and_defaults() -> None:
    fields = inspect.signature(GRPOConfig).parameters
    rate = fields["learning_rate"]
    assert rate.annotation == "float"
    assert rate.default == LIVE["actor_config.lr_schedule.lr"].field.default
    assert fields["max_steps"].annotation == "int | None" and fields["max_steps"].default is None
    assert "num_generations: 'int' = 8" in pydoc.render_doc(GRPOConfig)
    # Whatever is declared stands for a key, which the line beside it names.
    theirs = {name for names in aliases().by_key.values() for name in names.get("trl", ())}
    assert fields.keys() <= theirs


def test_only_fields_that_are_given_win_over_a_configuration() -> None:
    assert GRPOConfig("out", beta=0.5).values == {"output_dir": "out", "rl_config.beta": 0.5}
    assert GRPOConfig().values == {}


def test_an_editor_sees_the_fields_and_every_public_name() -> None:
    jedi = pytest.importorskip("jedi", reason="it comes with setup.py's extra dev")

    def signatures(code: str) -> list[str]:
        script = jedi.Script(f"import mindgrpo\n{code}", project=jedi.Project(ROOT))
        return [one.to_string() for one in script.get_signatures(2, len(code))]

    (shown,) = signatures("mindgrpo.GRPOConfig(")
    assert "learning_rate: float=1e-06" in shown and "max_steps: int | None=None" in shown
    for name in mindgrpo.MODULES:
        assert signatures(f"mindgrpo.{name}("), name
