"""The user's configuration: a YAML file and the command line become one frozen `Config`, with every key's origin.

Entry points: `load_config`, `parse_command_line`, `BatchPlan` (samples, updates and ranks that a configuration means),
`reference.explain`. Rooms below take settings of their own, which `grpo` makes from this one; what keys do is theirs.
"""

from mindgrpo.config.arithmetic import BatchPlan, schedule_notes, validate_world
from mindgrpo.config.command_line import (
    FLAGS,
    configuration_words,
    parse_command_line,
    split_overrides,
)
from mindgrpo.config.load import (
    Loaded,
    config_with,
    load_config,
    missing_keys,
    require_run_keys,
    write_resolved,
)
from mindgrpo.config.schema import Config, values_by_key
from mindgrpo.settings.section import memory_bytes

__all__ = [
    "FLAGS",
    "BatchPlan",
    "Config",
    "Loaded",
    "config_with",
    "configuration_words",
    "load_config",
    "memory_bytes",
    "missing_keys",
    "parse_command_line",
    "require_run_keys",
    "schedule_notes",
    "split_overrides",
    "validate_world",
    "values_by_key",
    "write_resolved",
]
