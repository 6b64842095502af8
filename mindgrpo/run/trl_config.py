"""Takes TRL's GRPOConfig and PEFT's LoraConfig as keys of the configuration, where their values mean the same.

Whatever means something else here, or counts in another unit, is refused with the key to use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindgrpo.config.names import aliases, suggestion
from mindgrpo.errors import UserError
from mindgrpo.run.trl_fields import TRLFields

# TRL counts these in updates, of which a rollout has num_iterations.
IN_UPDATES = ("max_steps", "eval_steps", "save_steps", "ref_model_sync_steps")
# PEFT's own defaults.
LORA_DEFAULTS: Mapping[str, Any] = {"r": 8, "lora_alpha": 8, "target_modules": None}
# What else changes the adapters, with the values that change nothing.
LORA_OTHERS: Mapping[str, Sequence[Any]] = {
    "lora_dropout": (0,),
    "bias": ("none",),
    "use_rslora": (False,),
    "use_dora": (False,),
    "modules_to_save": (None, []),
    "exclude_modules": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
}
ALL_LINEAR = "all-linear"


class GRPOConfig(TRLFields):
    """Holds settings by TRL's names, for `GRPOTrainer(args=...)`; `values` has them by key of the configuration.

    Fields that are left out have the defaults of this package. Raises UserError with all fields that cannot be taken.
    """

    def take(self, fields: dict[str, Any]) -> None:
        keys = aliases().taken_from_trl
        refused = [name for name in fields if name not in keys]
        if refused:
            each = "; ".join(f"{name}: {suggestion(name)}" for name in refused)
            raise UserError(f"GRPOConfig does not take {each}.")
        if (fields.get("num_iterations") or 1) > 1:
            for name in (name for name in IN_UPDATES if fields.get(name)):
                raise UserError(
                    f"GRPOConfig has num_iterations {fields['num_iterations']}, with which TRL counts {name} in "
                    f"updates; set {keys[name]}, which counts rollouts, in config."
                )
        self.values: dict[str, object] = {}
        for name, value in fields.items():
            if (value := converted(name, value)) is not None:
                self.values[keys[name]] = value
        if "rl_config.epsilon_low" in self.values:
            self.values.setdefault("rl_config.epsilon_high", self.values["rl_config.epsilon_low"])


def converted(name: str, value: Any) -> Any:
    """Returns a value in the form of our key; None where TRL's means that it is not set."""
    if name == "max_steps" and value == -1:
        return None
    if name == "num_train_epochs" and isinstance(value, float) and value.is_integer():
        return int(value)
    if name == "use_vllm" and isinstance(value, bool):
        return int(value)
    if name == "report_to" and isinstance(value, str):
        return [] if value == "none" else [value]
    return value


def values_of(args: object) -> dict[str, object]:
    """Returns GRPOTrainer's `args` by key. Raises UserError for anything but a GRPOConfig."""
    if isinstance(args, GRPOConfig):
        return dict(args.values)
    raise UserError(
        f"args is {one_of(args)}, but must be a mindgrpo.GRPOConfig, which takes TRL's names; write "
        "args=GRPOConfig(...), or config={...} with the sections of the configuration."
    )


def one_of(value: object) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def adapters_of(peft_config: object) -> dict[str, object]:
    """Returns the keys of actor_config.lora for PEFT's LoraConfig, or a mapping with its names. Raises UserError."""
    is_mapping = isinstance(peft_config, Mapping)
    if not is_mapping and not hasattr(peft_config, "lora_alpha"):
        raise UserError(
            f"peft_config is {one_of(peft_config)}, but must be PEFT's LoraConfig or a mapping such as "
            "{'r': 16, 'lora_alpha': 32, 'target_modules': 'all-linear'}."
        )
    fields = dict(peft_config) if isinstance(peft_config, Mapping) else vars(peft_config)
    for name, harmless in LORA_OTHERS.items():
        if name in fields and fields[name] not in harmless:
            raise UserError(
                f"peft_config has {name} {fields[name]!r:.60}, which adapters here do not have; leave it out."
            )
    if is_mapping and (unknown := fields.keys() - LORA_DEFAULTS.keys() - LORA_OTHERS.keys()):
        raise UserError(
            f"peft_config has {', '.join(sorted(map(str, unknown)))}; a mapping has {', '.join(LORA_DEFAULTS)}."
        )
    fields = {**LORA_DEFAULTS, **fields}
    modules = fields["target_modules"]
    if modules is None or (isinstance(modules, str) and modules != ALL_LINEAR):
        raise UserError(
            f"peft_config has target_modules {modules!r}, which PEFT reads by the model's class; list the names, as in "
            "['q_proj', 'v_proj'], or write 'all-linear'."
        )
    return {
        "actor_config.lora.rank": fields["r"],
        "actor_config.lora.alpha": float(fields["lora_alpha"]),
        "actor_config.lora.target_modules": None if modules == ALL_LINEAR else sorted(modules),
    }
