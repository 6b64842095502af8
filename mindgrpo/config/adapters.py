"""Takes PEFT's LoraConfig as keys of actor_config.lora: each of its fields is taken, changes nothing, or is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

from mindgrpo.config.names import aliases
from mindgrpo.errors import UserError

# PEFT's own defaults of what is taken.
TAKEN: Mapping[str, Any] = {
    "r": 8,
    "lora_alpha": 8,
    "target_modules": None,
    "use_rslora": False,
}
ALL_LINEAR = "all-linear"


def keys_of_adapters(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, object]:
    """Returns the keys for fields of a LoraConfig; `defaults` are those of fields that this package does not know.

    Raises UserError with all fields that adapters here do not have.
    """
    refused = [
        f"{name} {value!r:.60}"
        for name, value in fields.items()
        if name not in TAKEN and not is_harmless(name, value, defaults)
    ]
    if refused:
        raise UserError(
            f"peft_config has {', '.join(refused)}, which adapters here do not have; leave it out, they have "
            f"{', '.join(TAKEN)}."
        )
    own = {**TAKEN, **fields}
    rank, alpha, modules = own["r"], own["lora_alpha"], own["target_modules"]
    if modules is None or (isinstance(modules, str) and modules != ALL_LINEAR):
        raise UserError(
            f"peft_config has target_modules {modules!r}, which PEFT reads by the model's class; list the names, as in "
            "['q_proj', 'v_proj'], or write 'all-linear'."
        )
    # Adapters are multiplied by alpha / r here, and by alpha / sqrt(r) with rsLoRA.
    is_scaled = own["use_rslora"] is True and isinstance(rank, int) and rank > 0
    if isinstance(alpha, int | float) and not isinstance(alpha, bool):
        alpha = float(alpha * math.sqrt(rank) if is_scaled else alpha)
    return {
        "actor_config.lora.rank": rank,
        "actor_config.lora.alpha": alpha,
        "actor_config.lora.target_modules": None if modules == ALL_LINEAR else sorted(modules),
    }


def is_harmless(name: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    """Says whether a field that has no key here leaves adapters as they are here."""
    table, value = aliases().peft, value.value if isinstance(value, Enum) else value
    if value is None or any(name in group["names"] for group in table["ignored"]):
        return True
    if name in table["refused"]:
        return (list(value) if isinstance(value, set | tuple) else value) in table["refused"][name]
    return (name in defaults and value == defaults[name]) or (name.startswith("_") and not value)
