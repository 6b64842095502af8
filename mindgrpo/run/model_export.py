"""Writes the model that a run has trained, with its tokenizer, and its adapters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindgrpo.backend.rank_consistency import on_first_rank
from mindgrpo.data.tokenizer import Tokenizer, write_tokenizer
from mindgrpo.errors import writing
from mindgrpo.grpo.roles import Roles
from mindgrpo.weight_sync.hf_export import export_adapters, export_policy


@dataclass(frozen=True)
class ModelExport:
    """Writes the policy of `roles` with its tokenizer."""

    roles: Roles
    tokenizer: Tokenizer

    def write(self, target: Path) -> None:
        """The whole model, adapters added in; all ranks together, with the policy on the device."""
        roles, policy, config = self.roles, self.roles.policy, self.roles.plan.config
        source, memory = config.actor_config.load, roles.residency
        weights = policy.weights
        if policy.has_masters:
            roles.enter("update")
            weights = policy.masters
        export_policy(weights, roles.backend, source, target, memory, policy.adapters)
        own_template = config.rl_config.chat_template is not None

        def write_own() -> None:
            with writing(target):
                write_tokenizer(self.tokenizer, target, own_template)

        on_first_rank(roles.backend, write_own)

    def write_all(self, target: Path, adapter_target: Path) -> None:
        """The whole model, and where there are adapters these by themselves."""
        roles = self.roles
        roles.enter("old_logps")
        self.write(target)
        if roles.policy.adapters is not None:
            source = roles.plan.config.actor_config.load
            adapters, memory = roles.policy.adapters, roles.residency
            export_adapters(adapters, roles.backend, source, adapter_target, memory)
