"""Checks everything that a run is given, without a device, and prints a summary of the run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from mindgrpo.backend.targets import check_device, check_hosts, ranks_per_host
from mindgrpo.config import load_config, parse_command_line, require_run_keys
from mindgrpo.errors import UserError
from mindgrpo.monitor.run_directory import check_free
from mindgrpo.monitor.trackers.contract import check_installed
from mindgrpo.run.host_limits import refuse_what_cannot_run
from mindgrpo.run.machine_checks import wrong_variables
from mindgrpo.run.preflight import Inputs, prepare
from mindgrpo.run.start import find_start, run_name


def main(argv: Sequence[str]) -> None:
    words = list(argv)
    is_quiet = words[:1] == ["--quiet"]
    words = words[is_quiet:]
    world_size = None
    if words[:1] == ["--ranks"]:
        ranks, words = "".join(words[1:2]), words[2:]
        if not ranks.isdecimal() or int(ranks) < 1:
            raise UserError(
                f"--ranks is '{ranks}', but must be a whole number from 1 up; write --ranks 8."
            )
        world_size = int(ranks)
    if wrong := wrong_variables(os.environ):
        raise UserError(f"{wrong[0]}; correct or unset it in the environment.")
    if words and words[0] in ("eval", "sft"):
        import_module(f"mindgrpo.cli.{words[0]}").check(words[1:], world_size or 1)
        return
    files, overrides = parse_command_line(words)
    loaded = load_config(files, overrides)
    require_run_keys(loaded)

    check_hosts(loaded.config.context.target, os.environ, world_size or 1)
    if loaded.config.output_dir and loaded.config.rl_config.resume_training is False:
        check_free(loaded.config.output_dir)
    check_installed(loaded.config.monitor_config.trackers)
    inputs = prepare(loaded.config, world_size)
    assert inputs.scorer is not None
    try:
        here = None if world_size is None else ranks_per_host(os.environ, world_size)
        start = find_start(loaded.config, inputs, run_name(files))
        refuse_what_cannot_run(inputs.plan, here, start)
        inputs.check_rewards()
        # Last: who checks before the run goes to another host learns of everything else first.
        check_device(loaded.config.context.target, os.environ)
    finally:
        inputs.scorer.close()
    if not is_quiet:
        print("\n".join(summary(files, inputs)))


def summary(files: Sequence[Path], inputs: Inputs) -> list[str]:
    plan, environment = inputs.plan, inputs.plan.config.rl_config.environment
    assert inputs.scorer is not None
    rewards = [
        *inputs.scorer.names,
        *(f"environment {text}" for text in environment or ()),
    ]
    sections = {
        "run": [f"{plan.steps_text(len(inputs.prompts))} on {plan.world_size} ranks"],
        "layouts": plan.layout_lines(),
        "memory": plan.memory_lines(),
        "data": inputs.data_lines(),
        "rewards": [", ".join(rewards)],
        "notes": list(inputs.notes),
    }
    lines = [f"{' with '.join(map(str, files))} can run:"]
    for name, texts in sections.items():
        heads = [name, *[""] * len(texts)]
        lines += [f"  {head:<8}  {text}" for head, text in zip(heads, texts, strict=False)]
    return lines
