"""`python -m mindgrpo plan`: what a configuration would do, from shapes alone.

Needs no device and loads no weights. Where actor_config.load is not there yet, the shapes come from the MindFormers
form that model_config names; refuses to guess shapes that neither tells.
"""

from __future__ import annotations

from pathlib import Path

from mindgrpo.config import Config, Loaded
from mindgrpo.errors import UserError
from mindgrpo.model.families import DecoderConfig, read_config
from mindgrpo.model.shapes import read_model_yaml
from mindgrpo.run_plan import RunPlan, plan_run


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


def print_plan(loaded: Loaded) -> None:
    model, where = shapes_of(loaded.config)
    plan = plan_run(loaded.config, model, world_size=None)
    sections = {
        "model": [f"{model.model_type}, {model.num_parameters / 1e9:.3f} B parameters ({where})"],
        "devices": [f"{plan.world_size}"],
        "layouts": plan.layout_lines(),
        "memory": [
            *plan.memory_lines(),
            "float32 weights, gradients, moments and cache; activations come on top",
        ],
        "reshard": [*plan.reshard_lines(), *_receivers(plan)],
        "batch": plan.batch.lines(),
    }
    for name, lines in sections.items():
        for number, line in enumerate(lines):
            print(f"{name if number == 0 else '':<9}{line}")


def _receivers(plan: RunPlan) -> list[str]:
    reshard = plan.reshard
    if reshard.num_ranks > 16:
        return []
    return [
        f"rank {rank}: receives {reshard.received_bytes(rank) / 2**20:.1f} MiB, sends "
        f"{reshard.sent_bytes(rank) / 2**20:.1f} MiB"
        for rank in range(reshard.num_ranks)
    ]
