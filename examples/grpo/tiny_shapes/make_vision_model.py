"""Makes the example's model from nothing: a tokenizer, and weights that have begun to see.

    python make_vision_model.py      # some minutes on 2 cores; writes made/model/

A vision-language model of Qwen2.5-VL's kind with 1 M parameters. Its vision encoder is random and stays so: what it
makes of a cell is enough for the language model to learn from. The warm start learns to describe cells and to count
them, and as often to guess, on pictures that are in no split.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
GRPO = HERE.parent
sys.path[:0] = [str(HERE), str(GRPO)]

from make_shapes import MADE, described, guessed, sample_picture  # noqa: E402
from small_tokenizer import train_tokenizer, write_company  # noqa: E402
from supervised import ROWS_A_STEP, Stage, in_two_stages, warm_start  # noqa: E402
from tokenizers import AddedToken  # noqa: E402

# Three tokens of images come behind what the tokenizer learns.
LEARNED, VOCAB_SIZE = 301, 304
# Of the last answers of the warm start; GRPO has to learn that looking pays.
GUESSED, LAST_SHARE_OF_STEPS = 0.6, 0.15
VISION_START, VISION_END, IMAGE_PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else -%}{{ part['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{ '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
MODEL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "image_token_id": LEARNED + 2,
    "vision_start_token_id": LEARNED,
    "vision_end_token_id": LEARNED + 1,
    "torch_dtype": "float32",
    "vision_config": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 128,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    },
}
PIXELS = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 56 * 56,
    "max_pixels": 56 * 56,
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def texts(seed: int) -> Iterator[str]:
    """What the tokenizer learns from."""
    rng = random.Random(seed)
    for _ in range(500):
        picture = sample_picture(rng)
        yield picture.question.removeprefix("<image>")
        yield from (described(picture), guessed(rng))
    for role in ("system", "user", "assistant"):
        yield f"{role}\n"


def make_tokenizer(directory: Path, seed: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(texts(seed), vocab_size=LEARNED)
    tokens = (VISION_START, VISION_END, IMAGE_PAD)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    assert tokenizer.token_to_id(IMAGE_PAD) == MODEL["image_token_id"]
    tokenizer.save(str(directory / "tokenizer.json"))
    write_company(directory, tokenizer, CHAT_TEMPLATE)
    text = json.dumps(PIXELS, indent=2) + "\n"
    (directory / "preprocessor_config.json").write_text(text)


def warm_rows(count: int, rng: random.Random, folder: Path, guesses: float) -> Stage:
    """Draws rows for so many steps: pictures that are described, and the share `guesses` of guesses."""
    rows = []
    folder.mkdir(parents=True)
    for i in range(count * ROWS_A_STEP):
        picture = sample_picture(rng)
        path = folder / f"{i}.png"
        picture.draw().save(path)
        answer = guessed(rng) if rng.random() < guesses else described(picture)
        rows.append({"prompt": picture.question, "completion": answer, "images": [str(path)]})
    return Stage(rows, count)


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the example's tokenizer and warm start.")
    parser.add_argument("--steps", type=int, default=340)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=MADE / "model")
    arguments = parser.parse_args()
    output: Path = arguments.output_dir
    make_tokenizer(output, arguments.seed)
    rng = random.Random(f"warm {arguments.seed}")
    with TemporaryDirectory(prefix="mindgrpo-shapes-") as folder:
        pictures, (looking, last) = (
            Path(folder),
            in_two_stages(arguments.steps, LAST_SHARE_OF_STEPS),
        )
        stages = [
            warm_rows(looking, rng, pictures / "looking", 0.0),
            warm_rows(last, rng, pictures / "last", GUESSED),
        ]
        warm_start(MODEL, output, stages, arguments.lr, arguments.seed, output)


if __name__ == "__main__":
    main()
