"""Makes the example's model from nothing: a tokenizer, and weights that know how a calculator is called.

    python pretrain.py           # some minutes on 2 cores; writes model/

The model learns to guess, to call with what the question asks, and to call with something else. It has to copy two
numbers into a call and an answer out of it; multiplying it never learns: guesses are never right. Held-out products
are never seen. Only what the policy writes is learnt, as in GRPO.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
GRPO = HERE.parent
sys.path[:0] = [str(HERE), str(GRPO), str(GRPO / "tiny_arithmetic")]

from make_products import Product, called, guessed, make_splits, miscalled, sample_product  # noqa: E402
from make_tokenizer import train_tokenizer, write_company  # noqa: E402
from supervised import TOKENS_A_STEP, new_policy, train, write_model  # noqa: E402

from mindgrpo.algorithm.sample import STOPPED, Rollout, Sample  # noqa: E402
from mindgrpo.data.tokenizer import Tokenizer, load_tokenizer  # noqa: E402
from mindgrpo.data.turns import TurnSuffix  # noqa: E402
from mindgrpo.tools.pool import load_tools  # noqa: E402

MODEL = json.loads((HERE / "model" / "config.json").read_text())
# Names alone: the model knows its only tool.
CHAT_TEMPLATE = (
    "{%- if tools -%}<|im_start|>tools\n"
    "{%- for tool in tools %}{{ tool['function']['name'] + '\\n' }}{% endfor -%}<|im_end|>\n{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
# (called, miscalled, guessed): while learning to call, and at the end.
STYLES = (called, miscalled, guessed)
LEARNING, FINAL = (0.8, 0.1, 0.1), (0.3, 0.2, 0.5)
FINAL_SHARE_OF_STEPS = 0.2


def texts(seed: int) -> Iterator[str]:
    """What the tokenizer learns from."""
    rng = random.Random(seed)
    for product in make_splits(seed)[0]:
        yield product.question
        for style in STYLES:
            for written, answer in style(product, rng):
                yield from (written, answer or "")
        for role in ("tools", "user", "assistant", "tool", "calculator"):
            yield f"{role}\n"


def make_tokenizer(directory: Path, seed: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(texts(seed), "tool_call", MODEL["vocab_size"])
    tokenizer.save(str(directory / "tokenizer.json"))
    write_company(directory, tokenizer, CHAT_TEMPLATE)


class Conversations:
    """Draws conversations in ids: the prompt, turns, and the suffix that brings a tool's answer."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        schemas = [tool.schema() for tool in load_tools(["calculator"])]
        self._tokenizer, self._rng, self._schemas = tokenizer, random.Random(seed), schemas
        self._suffix = TurnSuffix(tokenizer, schemas)
        self._keep_out = {product.key for product in make_splits()[1]}

    def rollout(self, shares: tuple[float, ...]) -> Rollout:
        """As many samples as surely fit a step."""
        prompts, completions, masks, used = [], [], [], 0
        while True:
            product = sample_product(self._rng, self._keep_out)
            question = [{"role": "user", "content": product.question}]
            text = self._tokenizer.render(question, tools=self._schemas)
            prompt = np.array(self._tokenizer.encode(text), np.int32)
            ids, mask = self._turns(product, shares)
            used += len(prompt) + len(ids)
            if used > TOKENS_A_STEP:
                break
            prompts.append(prompt)
            completions.append(ids)
            masks.append(mask)
        samples = (
            replace(
                Sample.drawn(i, prompt, ids, STOPPED, 0, logps=np.zeros(len(ids))), action_mask=mask
            )
            for i, (prompt, ids, mask) in enumerate(zip(prompts, completions, masks, strict=True))
        )
        return Rollout(tuple(samples), tuple(range(len(prompts))))

    def _turns(self, product: Product, shares: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
        style = self._rng.choices(STYLES, shares)[0]
        ids: list[int] = []
        mask: list[bool] = []
        for written, answer in style(product, self._rng):
            own = [*self._tokenizer.encode(written), self._suffix.end_id]
            context = []
            if answer is not None:
                message = {"role": "tool", "name": "calculator", "content": answer}
                context = self._suffix.ids([message])
            ids += own + context
            mask += [True] * len(own) + [False] * len(context)
        return np.array(ids, np.int32), np.array(mask)


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the example's tokenizer and warm start.")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=HERE / "model")
    arguments = parser.parse_args()
    make_tokenizer(arguments.output_dir, arguments.seed)
    policy = new_policy(MODEL, arguments.seed)
    write_model(policy, MODEL, arguments.output_dir)  # a tokenizer is read with its config.json
    conversations = Conversations(load_tokenizer(arguments.output_dir), arguments.seed)

    def rollout_of(step: int) -> Rollout:
        is_late = step >= arguments.steps * (1 - FINAL_SHARE_OF_STEPS)
        return conversations.rollout(FINAL if is_late else LEARNING)

    train(policy, rollout_of, arguments.steps, arguments.lr)
    write_model(policy, MODEL, arguments.output_dir)


if __name__ == "__main__":
    main()
