"""The user's configuration: YAML and command line in, one frozen Config out."""

from mindgrpo.config.arithmetic import BatchPlan, schedule_notes, validate_world
from mindgrpo.config.command_line import split_overrides
from mindgrpo.config.evaluation_line import configuration_words
from mindgrpo.config.load import (
    FLAGS,
    Loaded,
    load_config,
    parse_command_line,
    require_run_keys,
    write_resolved,
)
from mindgrpo.config.schema import Config, values_by_key
from mindgrpo.config.section import memory_bytes

__all__ = [
    "FLAGS",
    "BatchPlan",
    "Config",
    "Loaded",
    "configuration_words",
    "load_config",
    "memory_bytes",
    "parse_command_line",
    "require_run_keys",
    "split_overrides",
    "schedule_notes",
    "validate_world",
    "values_by_key",
    "write_resolved",
]
