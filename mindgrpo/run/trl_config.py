"""Translates TRL's GRPOConfig and PEFT's LoraConfig into configuration keys, by the rules of config/foreign.py."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from mindgrpo.config.adapters import keys_of_adapters
from mindgrpo.config.foreign import meaning
from mindgrpo.config.meanings import AS_HERE, Ignored, Others, Refused
from mindgrpo.errors import UserError
from mindgrpo.run.trl_fields import TRLFields

RANKS = "MS_WORKER_NUM"


class GRPOConfig(TRLFields):
    """Holds settings by TRL's names, for `GRPOTrainer(args=...)`; `values` has them by key of the configuration.

    Values that count in another unit there are converted; a device of TRL's is a rank here. Fields that are left out
    have the defaults of this package. `notices` say what has no effect. Raises UserError with all fields that cannot be
    taken.
    """

    def take(self, settings: dict[str, Any]) -> None:
        others = Others(settings, int(os.environ.get(RANKS) or 1))
        self.values: dict[str, object] = {}
        refused, ignored = [], []
        for name, value in settings.items():
            meant = meaning(name, value, others)
            if isinstance(meant, Refused):
                refused.append(f"{name}: {meant}")
            elif isinstance(meant, Ignored):
                ignored += [] if meant is AS_HERE else [f"{name} ({meant})"]
            else:
                self.values |= meant
        if refused:
            raise UserError(f"GRPOConfig does not take {'; '.join(refused)}.")
        self.notices = [f"no effect of GRPOConfig's {', '.join(ignored)}"] if ignored else []


def settings_of(args: object) -> GRPOConfig:
    """Returns GRPOTrainer's `args`. Raises UserError for anything but a GRPOConfig."""
    if isinstance(args, GRPOConfig):
        return args
    raise UserError(
        f"args is {one_of(args)}, but must be a mindgrpo.GRPOConfig, which takes TRL's names; write "
        "args=GRPOConfig(...), or config={...} with the sections of the configuration."
    )


def one_of(value: object) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def adapters_of(peft_config: object) -> dict[str, object]:
    """Returns the keys of actor_config.lora for PEFT's LoraConfig, or a mapping with its names. Raises UserError."""
    if isinstance(peft_config, Mapping):
        return keys_of_adapters(peft_config, {})
    if not hasattr(peft_config, "lora_alpha"):
        raise UserError(
            f"peft_config is {one_of(peft_config)}, but must be PEFT's LoraConfig or a mapping such as "
            "{'r': 16, 'lora_alpha': 32, 'target_modules': 'all-linear'}."
        )
    own = fields(peft_config) if is_dataclass(peft_config) else ()
    # Of fields that a release has beside those that are known here.
    defaults = {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in own
        if each.default is not MISSING or each.default_factory is not MISSING
    }
    return keys_of_adapters(vars(peft_config), defaults)
