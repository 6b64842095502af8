"""Which low-rank adapters (LoRA, arXiv:2106.09685) a model gets, and how they are cut over ranks. Pure.

W' = W + alpha / rank * B A, with A [rank, in] and B [out, rank]. A is cut where W's inputs are, B where its outputs
are; the other is whole on every rank of a model group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindgrpo.errors import UserError
from mindgrpo.parallel.sharding import ParameterSpec

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
A, B = "lora_A", "lora_B"


@dataclass(frozen=True)
class LoraSettings:
    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def adapter_names(name: str) -> tuple[str, str]:
    """Of base tensor `name`."""
    stem = name.removesuffix("weight")
    return f"{stem}{A}.weight", f"{stem}{B}.weight"


def adapter_specs(
    base: Sequence[ParameterSpec], settings: LoraSettings
) -> tuple[ParameterSpec, ...]:
    """A and B of every base matrix that is a target. Raises UserError for a target that the model has not."""
    specs: list[ParameterSpec] = []
    seen = set()
    for spec in base:
        module, kind = spec.name.split(".")[-2:]
        if kind == "weight" and module in settings.targets:
            seen.add(module)
            specs += _pair(spec, settings.rank)
    missing = [target for target in settings.targets if target not in seen]
    if missing:
        raise UserError(
            f"actor_config.lora.target_modules names '{missing[0]}', but must name some of {', '.join(TARGETS)}; "
            "correct it or leave it out for all of them."
        )
    return tuple(specs)


def _pair(spec: ParameterSpec, rank: int) -> tuple[ParameterSpec, ParameterSpec]:
    (a_name, b_name), (a_key, b_key) = adapter_names(spec.name), adapter_names(spec.key)
    out, inner = spec.shape

    def factor(name: str, key: str, shape: tuple[int, int], dim: int) -> ParameterSpec:
        kept = tuple(split for split in spec.splits if split.dim == dim)
        # What a rank holds whole, it sees only its own part of the gradient of.
        partial = {split.axis for split in spec.splits if split.dim != dim}
        summed_over = spec.summed_over | partial
        return replace(
            spec, name=name, fused_key=key, shape=shape, splits=kept, summed_over=summed_over
        )

    return factor(a_name, a_key, (rank, inner), 1), factor(b_name, b_key, (out, rank), 0)
