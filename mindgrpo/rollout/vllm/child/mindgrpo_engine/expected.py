"""Names and shapes of the tensors that a checkpoint of a model has, by transformers' own definition of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mindgrpo_engine.messages import EngineFailure

Shapes = dict[str, tuple[int, ...]]

NUM_NAMED = 3


@dataclass(frozen=True)
class Checkpoint:
    """Shapes by Hugging Face name; tied names are second names of another tensor, and need not come."""

    shapes: Shapes
    tied: frozenset[str]

    @classmethod
    def of(cls, folder: str) -> Checkpoint:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        ties = config.tie_word_embeddings
        return cls(shapes, frozenset({"lm_head.weight"} & shapes.keys() if ties else ()))

    def check(self, tensors: Shapes) -> None:
        missing = [name for name in self.shapes if name not in tensors and name not in self.tied]
        _refuse_any(missing, "the publish lacks tensors of the model's checkpoint")
        extra = [name for name in tensors if name not in self.shapes]
        _refuse_any(extra, "the publish has tensors that the model's checkpoint has not")
        wrong = [
            f"{name} of {list(shape)} instead of {list(self.shapes[name])}"
            for name, shape in tensors.items()
            if shape != self.shapes[name]
        ]
        _refuse_any(wrong, "the publish has tensors of another shape than the model's checkpoint")


def _refuse_any(names: list[str], sentence: str) -> None:
    if names:
        named = ", ".join(names[:NUM_NAMED])
        rest = f", and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
        raise EngineFailure(f"{sentence}: {named}{rest}")
