"""Makes tests/golden/scores.npz: heads for models of tests/golden/, and what transformers' classifiers score with them.

Run by hand, in an environment with torch and transformers 5.24.0: `python tests/golden/make_scores.py`. A model that
has never been a classifier gets a random head there; its other tensors are those of its folder.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

HERE = Path(__file__).resolve().parent
FAMILIES = ("qwen2", "llama", "qwen3", "gemma3_text")
LENGTHS = (1, 2, 9, 17, 24, 24, 40)
VOCABULARY = 61


def main() -> None:
    golden: dict[str, np.ndarray] = {"lengths": np.array(LENGTHS)}
    for number, family in enumerate(FAMILIES):
        torch.manual_seed(number)
        rng = np.random.default_rng(number)
        model = AutoModelForSequenceClassification.from_pretrained(
            HERE / family, num_labels=1, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            model.score.weight.copy_(0.25 * torch.randn_like(model.score.weight))
            texts = [rng.integers(0, VOCABULARY, length) for length in LENGTHS]
            # One at a time: there is no padding, and so no question where a text ends.
            scores = [float(model(torch.from_numpy(ids[None])).logits[0, 0]) for ids in texts]
        golden[f"{family}/head"] = model.score.weight.detach().numpy()
        golden[f"{family}/ids"] = np.concatenate(texts).astype(np.int32)
        golden[f"{family}/scores"] = np.array(scores, np.float32)
        print(family, type(model).__name__, np.round(scores, 3))
    np.savez_compressed(HERE / "scores.npz", **golden)


if __name__ == "__main__":
    main()
