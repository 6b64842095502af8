"""How users name rewards: built-in names, modules, files, arguments, and what given in code can be found again.

Does NOT prove that a module which does something at import does it once only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mindgrpo.errors import UserError
from mindgrpo.rewards.builtin.accuracy import accuracy_reward
from mindgrpo.rewards.load import parse, reference_to, resolve


def local() -> Callable[[list[str]], float]:
    def one_float(completions: list[str]) -> float:
        return 0.0

    return one_float


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_specs_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "besides.py", "VALUE = 0.5\n")
    write(
        tmp_path / "mine_for_test.py",
        "import besides\n"
        "def half(completions, answers):\n    return [besides.VALUE] * len(completions)\n"
        "class Count:\n"
        "    def __init__(self):\n        self.calls = 0\n"
        "    def __call__(self, completions):\n"
        "        self.calls += 1\n        return [self.calls] * len(completions)\n"
        "class Longer:\n"
        "    def __init__(self, than):\n        self.than = than\n"
        "    def __call__(self, completions):\n"
        "        return [float(len(text) > self.than) for text in completions]\n"
        "def share(completions, of, answers=()):\n    return [len(t) / of for t in completions]\n",
    )
    assert resolve("accuracy_reward").call is accuracy_reward
    for spec in (
        "mine_for_test.py:half",
        "mine_for_test:half",
        f"{tmp_path}/mine_for_test.py:half",
    ):
        function = resolve(spec)
        assert (function.name, function.call(["a"], ["b"])) == ("half", [0.5])
    counter = resolve("mine_for_test.py:Count")
    assert (counter.name, counter.call(["a"]), counter.call(["a"])) == ("Count", [1], [2])
    assert resolve("mine_for_test.py:Longer(than=2)").call(["ab", "abc"]) == [0.0, 1.0]
    share = resolve("mine_for_test:share(of=4)")
    assert (share.call(["ab"]), share.bound) == ([0.5], {"of"})
    assert resolve(lambda completions: [0.0]).name == "<lambda>"
    assert resolve("mine_for_test.py:half( )").call(["a"], ["b"]) == [0.5]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("acuracy_reward", "nearest name is 'accuracy_reward'"),
        ("bad.py", "bad.py:function"),
        ("missing.py:f", "does not exist"),
        ("nosuch.module:f", "No module named 'nosuch'"),
        ("bad.py:f", "ZeroDivisionError"),
        ("broken.py:f", "SyntaxError"),
        ("leaves.py:f", "SystemExit"),
        ("fine.py:scor", "nearest name is 'score'"),
        ("fine.py:LIMIT", "is a int"),
        ("fine.py:Needy", "without arguments"),
        ("fine.py:Needy(size=3)", "with {'size': 3}"),
        ("fine.py:score(3)", "3 has no name"),
        ("fine.py:score(n=open('x'))", "cannot be read as arguments"),
        ("cosine_reward(", "is not built in"),
    ],
)
def test_what_does_not_resolve_is_one_sentence(
    spec: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "bad.py", "1 / 0\n")
    write(tmp_path / "broken.py", "def f(:\n")
    write(tmp_path / "leaves.py", "raise SystemExit(3)\n")
    write(
        tmp_path / "fine.py",
        "LIMIT = 3\ndef score(c):\n    return [0.0]\n"
        "class Needy:\n    def __init__(self, model):\n        pass\n",
    )
    with pytest.raises(UserError, match="reward_config.verifier_function") as caught:
        resolve(spec)
    assert said in str(caught.value)
    assert spec in str(caught.value)
    assert "\n" not in str(caught.value)


def test_arguments_are_plain_values() -> None:
    spec = parse("cosine_reward(max_value_wrong=-1, min_value_correct=0.25)")
    assert (spec.source, spec.name) == ("", "cosine_reward")
    assert spec.arguments == {"max_value_wrong": -1, "min_value_correct": 0.25}
    assert parse("dir (old)/f.py:fn( names=['a', 'b(c)'] )").arguments == {"names": ["a", "b(c)"]}
    assert parse("dir (old)/f.py:fn").source == "dir (old)/f.py"


def test_what_is_given_in_code_is_found_again_only_by_module_and_name() -> None:
    reference = reference_to(accuracy_reward)
    assert reference is not None
    assert resolve(reference).call is accuracy_reward
    assert reference_to(lambda completions: [0.0]) is None
    assert reference_to(Path("x").exists) is None
    assert reference_to(local()) is None
    assert reference_to(local) is not None
