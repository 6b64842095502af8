"""Prints what a configuration would do, from shapes alone: `python -m mindgrpo plan`.

Needs no device and loads no weights. Where actor_config.load is not there yet, the shapes come from the MindFormers
form that model_config names.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from mindgrpo.cli.arguments import Arguments
from mindgrpo.config import Config, Loaded, load_config, parse_command_line
from mindgrpo.errors import UserError, whole_number
from mindgrpo.models.decoder_config import DecoderConfig, read_config
from mindgrpo.models.mindformers_yaml import read_model_yaml
from mindgrpo.models.parameters import num_active_parameters, num_parameters
from mindgrpo.models.precision import compute_dtype
from mindgrpo.models.vision_config import num_vision_parameters
from mindgrpo.plan import layouts
from mindgrpo.plan.fit import Verdict, verdict
from mindgrpo.plan.memory import HostPlan, phase_needs
from mindgrpo.plan.micro_shapes import row_lines
from mindgrpo.plan.model_roles import OtherModels
from mindgrpo.plan.run_plan import RunPlan, plan_run
from mindgrpo.plan.seconds import Roofline
from mindgrpo.rollout.vllm.settings import device_share, engine_dtype
from mindgrpo.run.banner import algorithm_lines
from mindgrpo.run.named_sources import MODELS, with_local_paths
from mindgrpo.run.preflight import read_critic, read_reward_models, read_teacher
from mindgrpo.weight_sync.plan import GIGA, Links, busiest_link

_COUNTED = (
    "pools are exact, activations computed; the runtime's own memory comes on top (docs/fits.md)"
)
_OPTIMIZER = "float32 gradients and moments"
LINK, PER_HOST, LOCAL = "--link_GB_per_s", "--ranks_per_host", "--local_GB_per_s"


def shapes_of(config: Config) -> tuple[DecoderConfig, str]:
    """Returns the model's dimensions and where they were read."""
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


def above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def whole(text: str) -> int:
    if not (number := whole_number(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return number


def parser() -> Arguments:
    flags = Arguments(prog="mindgrpo plan", allow_abbrev=False)
    text = (
        "number of ranks, for layouts without a data_parallel (default: what the layouts ask for)"
    )
    flags.add_argument("--ranks", type=whole, metavar="N", help=text)
    text = "exit status 1 unless the run fits context.max_device_memory"
    flags.add_argument("--must_fit", action="store_true", help=text)
    text = "also plan other layouts of as many ranks, and rank them by the seconds of a step"
    flags.add_argument("--layouts", action="store_true", help=text)
    text = "also the reshard's seconds, where a host's link carries X 10^9 bytes/s each way"
    flags.add_argument(LINK, dest="link", type=above_zero, metavar="X", help=text)
    text = "with it: ranks that share a host's link (1)"
    flags.add_argument(PER_HOST, dest="per_host", type=whole, metavar="N", help=text)
    text = "with it: 10^9 bytes/s inside a host (default: takes no time)"
    flags.add_argument(LOCAL, dest="local", type=above_zero, metavar="Y", help=text)
    return flags


def links_of(flags: argparse.Namespace) -> Links | None:
    """Returns what the flags say of links; None where none does."""
    if flags.link is None:
        if flags.per_host or flags.local:
            raise UserError(
                f"{PER_HOST if flags.per_host else LOCAL} has no effect without {LINK}; add {LINK} with the bandwidth "
                "of a host's network link."
            )
        return None
    return Links(flags.link * GIGA, flags.per_host or 1, flags.local and flags.local * GIGA)


def _not_counted(plan: RunPlan) -> list[str]:
    generate, own = plan.config.generate_config, compute_dtype(plan.config)
    if not generate.uses_vllm:
        return [f"{own} weights and cache, {_OPTIMIZER}"]
    lines = [f"{own} weights, {_OPTIMIZER}; vLLM's weights and cache {engine_dtype(plan.config)}"]
    share = device_share(plan.config)
    if share is not None:
        line = f"vLLM takes {share:g} of each device (generate_config.gpu_memory_utilization) while it is awake"
        if plan.device_memory is None:
            line += "; how much that is, context.max_device_memory would say"
        lines.append(line)
    return [
        *lines,
        "vLLM's own programs come on top: some 0.5 GB an engine of one worker, 0.9 GB and 0.25 GB a worker an engine",
        "of several (measured on processors, docs/vllm.md)",
    ]


def _parameters(model: DecoderConfig) -> str:
    words = f"{num_parameters(model) / 1e9:.3f} B parameters"
    if model.vision is not None:
        count = num_vision_parameters(model.vision) / 1e9
        words += f", and {count:.3f} B of a vision encoder, which stays frozen"
    if model.moe is None:
        return words
    active = num_active_parameters(model) / 1e9
    return f"{words}, {active:.3f} B of them for a token with {model.moe.per_token} of {model.moe.num_experts} experts"


def print_plan(
    loaded: Loaded,
    ranks: int | None = None,
    with_layouts: bool = False,
    links: Links | None = None,
) -> Verdict:
    loaded = loaded.on_ranks(ranks)
    model, where = shapes_of(loaded.config)
    others, assumed = _others_of(loaded.config, model)
    plan = plan_run(loaded.config, model, ranks, others)
    fit = verdict(loaded, plan)
    sections = {
        "model": [
            f"{model.model_type}, {_parameters(model)} ({where})",
            *plan.notices,
            *assumed,
        ],
        "devices": [f"{plan.world_size}"],
        "layouts": plan.layout_lines(),
        "memory": [*plan.memory_lines(), *_not_counted(plan)],
        "device": [*map(str, phase_needs(plan)), *HostPlan(plan).device_lines(), _COUNTED],
        "host": HostPlan(plan).lines(),
        "fit": fit.lines(),
        "seconds": Roofline(plan).step().lines(),
        "ranked": layouts.lines(loaded, plan) if with_layouts else [],
        "reshard": [*plan.reshard_lines(), *_receivers(plan), *_link_lines(plan, links)],
        "batch": [*plan.batch.lines(), *row_lines(plan.config)],
        "algorithm": algorithm_lines(plan.config, plan.batch),
    }
    for name, lines in sections.items():
        for number, line in enumerate(lines):
            print(f"{name if number == 0 else '':<11}{line}")
    return fit


def _others_of(config: Config, model: DecoderConfig) -> tuple[OtherModels, list[str]]:
    """Returns the shapes of models beside the policy, and notes on those whose folders are not here."""

    def is_here(load: str | None) -> bool:
        return Path(load or "", "config.json").is_file()

    teacher = read_teacher(config, model) if is_here(config.reference_load) else None
    keyed = config.reward_config.models_by_key
    missing = [key for key, own in keyed.items() if not is_here(own.load)]
    notes = [
        f"{key}.load '{keyed[key].load}' is not here: planned with the policy's shapes"
        for key in missing
    ]
    shapes = read_reward_models(config, [key for key in keyed if key not in missing])
    shapes |= dict.fromkeys(missing, model.with_scalar_head())
    critic = read_critic(config) if is_here(config.critic_load) else None
    return OtherModels(teacher, shapes, critic), notes


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
    flags, rest = parser().parse_known_args(list(argv))
    links = links_of(flags)
    loaded = load_config(*parse_command_line(rest))
    if not loaded.config.actor_config.model_yaml:
        loaded = with_local_paths(loaded, MODELS, shapes=True)
    fit = print_plan(loaded, flags.ranks, flags.layouts, links)
    if flags.must_fit and not fit.fits:
        # The verdict is in the middle of what was printed.
        print(f"--must_fit: {fit.lines()[0]}")
        raise SystemExit(1)
