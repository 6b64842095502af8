"""`python -m mindgrpo plan`: what a configuration would do, from shapes alone.

Needs no device and loads no weights. Where actor_config.load is not there yet, the shapes come from the MindFormers
form that model_config names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from mindgrpo.config import (
    Config,
    Loaded,
    load_config,
    parse_command_line,
    split_overrides,
)
from mindgrpo.errors import UserError
from mindgrpo.grpo.algorithm_summary import algorithm_lines
from mindgrpo.grpo.run_plan import RunPlan, plan_run
from mindgrpo.models.decoder_config import DecoderConfig, read_config
from mindgrpo.models.parameters import num_parameters
from mindgrpo.run.mindformers_yaml import read_model_yaml
from mindgrpo.weight_sync.link_time import GIGA, Links, busiest_link

LINK, PER_HOST, LOCAL = "--link_GB_per_s", "--ranks_per_host", "--local_GB_per_s"
LINK_FLAGS = (LINK, PER_HOST, LOCAL)


def shapes_of(config: Config) -> tuple[DecoderConfig, str]:
    """The model's dimensions and where they were read."""
    load = config.actor_config.load
    if load and (Path(load) / "config.json").is_file():
        return read_config(load), f"{load}/config.json"
    yaml_path = config.actor_config.model_yaml
    if yaml_path:
        return read_model_yaml(yaml_path), yaml_path
    raise UserError(
        f"actor_config.load '{load}' has no config.json and actor_config.model_config is not set, so the model's "
        "shapes are unknown; set one of them."
    )


def read_links(pairs: Sequence[tuple[str, str]]) -> tuple[Links | None, list[tuple[str, str]]]:
    """The links that flags tell, None where none does, and the flags that are left."""
    links = {flag: value for flag, value in pairs if flag in LINK_FLAGS}
    rest = [(flag, value) for flag, value in pairs if flag not in LINK_FLAGS]
    if not links:
        return None, rest
    if LINK not in links:
        raise UserError(
            f"{next(iter(links))} says nothing without {LINK}; add the bandwidth of a host's link."
        )
    local = links.get(LOCAL)
    return (
        Links(
            bytes_per_s=_bandwidth(LINK, links[LINK]),
            ranks_per_host=_count(PER_HOST, links.get(PER_HOST, "1")),
            local_bytes_per_s=None if local is None else _bandwidth(LOCAL, local),
        ),
        rest,
    )


def _bandwidth(flag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise UserError(
            f"{flag} is '{text}', but must be a number above 0, in 10^9 bytes a second."
        )
    return value * GIGA


def _count(flag: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{flag} is '{text}', but must be a whole number from 1 up.")
    return int(text)


def print_plan(loaded: Loaded, links: Links | None = None) -> None:
    model, where = shapes_of(loaded.config)
    plan = plan_run(loaded.config, model, world_size=None)
    sections = {
        "model": [
            f"{model.model_type}, {num_parameters(model) / 1e9:.3f} B parameters ({where})",
            *plan.notices,
        ],
        "devices": [f"{plan.world_size}"],
        "layouts": plan.layout_lines(),
        "memory": [
            *plan.memory_lines(),
            "float32 weights, gradients, moments and cache; activations come on top",
        ],
        "reshard": [*plan.reshard_lines(), *_receivers(plan), *_link_lines(plan, links)],
        "batch": plan.batch.lines(),
        "algorithm": algorithm_lines(plan.config, plan.batch),
    }
    for name, lines in sections.items():
        for number, line in enumerate(lines):
            print(f"{name if number == 0 else '':<11}{line}")


def _receivers(plan: RunPlan) -> list[str]:
    reshard = plan.reshard
    if reshard.num_ranks > 16:
        return []
    return [
        f"rank {rank}: receives {reshard.received_bytes(rank) / 2**20:.1f} MiB, sends "
        f"{reshard.sent_bytes(rank) / 2**20:.1f} MiB"
        for rank in range(reshard.num_ranks)
    ]


def _link_lines(plan: RunPlan, links: Links | None) -> list[str]:
    if links is None:
        return [f"seconds: give {LINK} X [{PER_HOST} N [{LOCAL} Y]]"]
    busiest = busiest_link(plan.reshard, links)
    hosts = f"{links.ranks_per_host} ranks a host" if links.ranks_per_host > 1 else "a link a rank"
    inside = ""
    if links.ranks_per_host > 1:
        local = links.local_bytes_per_s
        inside = ", inside a host free" if local is None else f", inside {local / GIGA:g} GB/s"
    return [
        f"{busiest.seconds:.3g} s at least, at {links.bytes_per_s / GIGA:g} GB/s each way ({hosts}{inside}): "
        f"{busiest.who} {busiest.direction} {busiest.num_bytes / GIGA:.3g} GB"
    ]


def main(argv: Sequence[str]) -> None:
    links, rest = read_links(split_overrides(argv))
    path, overrides = parse_command_line([f"{flag}={value}" for flag, value in rest])
    print_plan(load_config(path, overrides), links)
