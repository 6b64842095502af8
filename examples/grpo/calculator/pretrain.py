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
from pathlib import Path

HERE = Path(__file__).resolve().parent
GRPO = HERE.parent
sys.path[:0] = [str(HERE), str(GRPO)]

from make_products import Product, called, guessed, make_splits, miscalled, sample_product  # noqa: E402
from small_tokenizer import train_tokenizer, write_company  # noqa: E402
from supervised import ROWS_A_STEP, Stage, in_two_stages, warm_start  # noqa: E402

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


def stage(steps: int, shares: tuple[float, ...], rng: random.Random) -> Stage:
    """Draws as many conversations as the steps read."""
    schemas = [tool.schema() for tool in load_tools(["calculator"])]
    keep_out = {product.key for product in make_splits()[1]}
    rows = []
    for _ in range(steps * ROWS_A_STEP):
        product: Product = sample_product(rng, keep_out)
        messages = [{"role": "user", "content": product.question}]
        for written, answer in rng.choices(STYLES, shares)[0](product, rng):
            messages.append({"role": "assistant", "content": written})
            if answer is not None:
                messages.append({"role": "tool", "name": "calculator", "content": answer})
        rows.append({"messages": messages, "tools": schemas})
    return Stage(rows, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the example's tokenizer and warm start.")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=HERE / "model")
    arguments = parser.parse_args()
    make_tokenizer(arguments.output_dir, arguments.seed)
    rng = random.Random(arguments.seed)
    learning, last = in_two_stages(arguments.steps, FINAL_SHARE_OF_STEPS)
    stages = [stage(learning, LEARNING, rng), stage(last, FINAL, rng)]
    output = arguments.output_dir
    warm_start(MODEL, output, stages, arguments.lr, arguments.seed, output)


if __name__ == "__main__":
    main()
