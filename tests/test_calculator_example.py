"""The calculator example's data, conversations and committed model.

Does not prove that GRPO teaches it anything: its README has the curve of a run.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from mindgrpo.config import load_config
from mindgrpo.data.supervised import SupervisedForm, SupervisedRowForm, as_sample
from mindgrpo.data.tokenizer import load_tokenizer
from mindgrpo.rewards.builtin.accuracy import accuracy_reward
from mindgrpo.tools.builtin import calculator
from mindgrpo.tools.calls import parse_hermes
from mindgrpo.tools.pool import load_tools

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "grpo" / "calculator"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make_products() -> ModuleType:
    return script("make_products")


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (EXAMPLE / name).read_text("utf-8").splitlines()]


def factors(row: dict[str, str]) -> tuple[int, ...]:
    return tuple(sorted(int(digits) for digits in re.findall(r"\d+", row["question"])))


def test_rows_are_products_and_no_pair_of_factors_is_in_both_splits() -> None:
    train, heldout = rows("train.jsonl"), rows("heldout.jsonl")
    assert (len(train), len(heldout)) == (1000, 200)
    for row in train + heldout:
        a, b = factors(row)
        assert row["answer"] == f"#### {a * b}"
    assert len({factors(row) for row in train + heldout}) == 1200


def test_the_files_are_those_that_the_script_makes(
    make_products: ModuleType, tmp_path: Path
) -> None:
    for name, split in zip(("train", "heldout"), make_products.make_splits(), strict=True):
        make_products.write_rows(tmp_path / name, split)
        assert (tmp_path / name).read_bytes() == (EXAMPLE / f"{name}.jsonl").read_bytes()


def test_only_what_calls_with_the_question_earns_the_reward(make_products: ModuleType) -> None:
    rng = random.Random(1)
    for product in make_products.make_splits()[0]:
        gold = [str(product.result)]
        for style, reward in (("called", 1.0), ("miscalled", 0.0), ("guessed", 0.0)):
            *calls, (last, nothing) = getattr(make_products, style)(product, rng)
            assert accuracy_reward([last], gold) == [reward] and nothing is None
            for written, answer in calls:
                (order,) = parse_hermes(written)
                assert order.name == "calculator" and calculator(**order.arguments) == answer


def test_conversations_are_what_the_committed_template_renders(make_products: ModuleType) -> None:
    tokenizer = load_tokenizer(EXAMPLE / "model")
    (row, *_) = script("pretrain").stage(1, (1.0, 0.0, 0.0), random.Random(0)).rows
    fitted = SupervisedForm(tokenizer, 128).fit(SupervisedRowForm().example(row, "here"))
    assert fitted is not None
    sample = as_sample(0, np.array(fitted.ids, np.int32))
    text = tokenizer.decode(np.concatenate([sample.prompt, sample.tokens]).tolist(), False)
    question = re.search(r"user\n(.*?)<\|im_end\|>", text)
    (call,) = re.findall(r"<tool_call>.*</tool_call>", text)
    answer = re.findall(r"tool\n(\d+)<\|im_end\|>", text)[-1]
    assert question is not None
    whole = tokenizer.render(
        [
            {"role": "user", "content": question[1]},
            {"role": "assistant", "content": call},
            {"role": "tool", "name": "calculator", "content": answer},
            {"role": "assistant", "content": answer},
        ],
        False,
        tools=[tool.schema() for tool in load_tools(["calculator"])],
    )
    assert whole.removesuffix("\n") == text
    written = tokenizer.decode(sample.tokens[sample.action_mask].tolist(), False)
    assert written == f"{call}<|im_end|>{answer}<|im_end|>"


def test_the_configuration_loads_and_leaves_room_for_a_call_and_an_answer() -> None:
    config = load_config(EXAMPLE / "grpo_config.yaml", []).config
    assert config.rl_config.tools == ["calculator"]
    tokenizer = load_tokenizer(EXAMPLE / "model")
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "11*11"}}</tool_call>'
    assert len(tokenizer.encode(call)) < config.generate_config.sampling_config.max_tokens // 2
