"""Declares GRPOConfig's fields with types and defaults, as Python source: what editors and `help` read.

`python -m mindgrpo config --trl_fields` prints the parameters that mindgrpo/run/trl_fields.py has.
"""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from mindgrpo.config.names import aliases
from mindgrpo.config.schema import LIVE
from mindgrpo.settings.section import kinds

# Of ScriptArguments, ModelConfig and the trainer's own arguments, which are not fields of its GRPOConfig.
_ELSEWHERE = frozenset(
    [
        "model_name_or_path",
        "dataset_name",
        "dataset_config",
        "dataset_train_split",
        "dataset_test_split",
        "eval_dataset",
        "processing_class",
        "reward_funcs",
        "environment_factory",
        "tools",
        "max_length",
        "lora_r",
        "lora_alpha",
        "lora_target_modules",
        "use_peft",
        "torch_dtype",
        "trust_remote_code",
        "output_dir",
    ]
)
# Where TRL's values are of another type than ours.
_TYPES = {
    "bf16": "bool | None",
    "cast_lm_head_to_fp32": "bool",
    "eval_strategy": "str",
    "evaluation_strategy": "str",
    "fp16": "bool",
    "full_determinism": "bool",
    "lr_scheduler_type": "str",
    "model_init_kwargs": "dict[str, Any] | str | None",
    "no_cuda": "bool",
    "num_train_epochs": "float",
    "optim": "str",
    "report_to": "str | list[str] | None",
    "resume_from_checkpoint": "bool | str | None",
    "save_strategy": "str",
    "scale_rewards": "bool | str",
    "use_cpu": "bool",
    "use_vllm": "bool | int",
    "vllm_importance_sampling_correction": "bool",
    "vllm_importance_sampling_mode": "str | None",
}
# Characters of the values of a field above which it is text: a line has no room for more.
_LONG_CHOICES = 60


def trl_fields() -> str:
    """Returns a line for each field."""
    names = {
        name: key
        for key, theirs in aliases().by_key.items()
        for name in theirs.get("trl", ())
        if name not in _ELSEWHERE and key in LIVE
    }
    return "\n".join(_parameter(name, key) for name, key in names.items())


def _parameter(name: str, key: str) -> str:
    field = LIVE[key].field
    default: object = field.get_default(call_default_factory=True)
    kind = _TYPES.get(name) or " | ".join(map(_written, kinds(field.annotation)))
    is_ours = name not in _TYPES or type(default).__name__ in kind.split(" | ")
    if not is_ours or name in aliases().differences or isinstance(default, list):
        default = None
    if default is None and not kind.endswith("None"):
        kind += " | None"
    shown = f'"{default}"' if isinstance(default, str) else repr(default)
    return f"        {name}: {kind} = {shown},  # {key}"


def _written(kind: Any) -> str:
    if get_origin(kind) is Literal:
        choices = ", ".join(map(_quoted, get_args(kind)))
        return f"Literal[{choices}]" if len(choices) < _LONG_CHOICES else "str"
    if get_origin(kind) is list:
        return f"list[{' | '.join(map(_written, kinds(get_args(kind)[0])))}]"
    return "None" if kind is type(None) else str(kind.__name__)


def _quoted(choice: object) -> str:
    return f'"{choice}"' if isinstance(choice, str) else repr(choice)
