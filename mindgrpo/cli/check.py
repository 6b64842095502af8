"""Checks everything that a run is given, without a device, and prints a summary of the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from mindgrpo.backend.targets import check_device, check_hosts, ranks_per_host
from mindgrpo.config import (
    Config,
    Loaded,
    load_config,
    parse_command_line,
    require_run_keys,
    values_by_key,
)
from mindgrpo.data.sources import FOR_EVALUATION, FOR_TRAINING, data_files
from mindgrpo.errors import UserError, error_of, sentences_of
from mindgrpo.models.decoder_config import DecoderConfig
from mindgrpo.models.mindformers_yaml import check_agreement
from mindgrpo.monitor.run_directory import check_free
from mindgrpo.monitor.trackers.contract import check_installed
from mindgrpo.plan.run_plan import plan_run
from mindgrpo.run.host_limits import refuse_what_cannot_run
from mindgrpo.run.machine_checks import wrong_variables
from mindgrpo.run.preflight import (
    Inputs,
    engine_notes,
    prepare,
    read_model,
    read_teacher,
    read_tokenizer,
    scorer_of,
)
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
    try:
        inputs = _check(loaded, files, world_size)
    except UserError as error:
        raise error_of([*sentences_of(error), *_others(loaded, world_size)]) from None
    if not is_quiet:
        print("\n".join(summary(files, inputs, loaded.notices)))


def _check(loaded: Loaded, files: Sequence[Path], world_size: int | None) -> Inputs:
    """Checks everything in the order of a run. Raises UserError for what is wrong first."""
    require_run_keys(loaded)
    check_hosts(loaded.config.context.target, os.environ, world_size or 1)
    _check_folder(loaded.config)
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
    return inputs


def _check_folder(config: Config) -> None:
    if config.output_dir and config.rl_config.resume_training is False:
        check_free(config.output_dir)


def _others(loaded: Loaded, world_size: int | None) -> Iterator[str]:
    """Yields what else is wrong, of all that can be checked by itself, so that it can be changed together."""
    config, rl = loaded.config, loaded.config.rl_config
    model: list[DecoderConfig] = []
    data = {
        "rl_config.dataset_file": replace(FOR_TRAINING, name=rl.dataset_split),
        "rl_config.eval_dataset_file": replace(FOR_EVALUATION, name=rl.eval_dataset_split),
    }

    def check_data() -> None:
        for key, choice in data.items():
            if path := values_by_key(config)[key]:
                data_files(str(path), choice, key)

    yield from problems(
        lambda: require_run_keys(loaded),
        lambda: check_hosts(config.context.target, os.environ, world_size or 1),
        lambda: _check_folder(config),
        lambda: check_installed(config.monitor_config.trackers),
        lambda: engine_notes(config),
        lambda: check_device(config.context.target, os.environ),
    )
    if any(problems(lambda: require_run_keys(loaded))):
        return  # Both would be said again of the same keys.
    yield from problems(
        check_data,
        lambda: scorer_of(config).close(),
        lambda: model.append(read_model(config)),
    )
    for own in model:
        yield from _others_of_model(config, own, world_size)


def _others_of_model(config: Config, model: DecoderConfig, world_size: int | None) -> Iterator[str]:
    directory = config.actor_config.load
    yaml_files = [config.actor_config.model_yaml, config.generate_config.model_yaml]
    if config.reference_load == directory:
        yaml_files.append(config.ref_config.model_yaml)
    for path in dict.fromkeys(filter(None, yaml_files)):
        yield from problems(partial(check_agreement, model, path, directory))
    yield from problems(
        lambda: plan_run(config, model, world_size, read_teacher(config, model)),
        lambda: read_tokenizer(config, model),
    )


def problems(*checks: Callable[[], object]) -> Iterator[str]:
    """Yields the sentences of those that raise UserError."""
    for check in checks:
        try:
            check()
        except UserError as error:
            yield from sentences_of(error)


def summary(files: Sequence[Path], inputs: Inputs, notices: Sequence[str] = ()) -> list[str]:
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
        "prompt": inputs.prompt_lines(),
        "rewards": [", ".join(rewards)],
        "notes": [*notices, *inputs.notes],
    }
    lines = [f"{' with '.join(map(str, files))} can run:"]
    for name, texts in sections.items():
        heads = [name, *[""] * len(texts)]
        lines += [f"  {head:<8}  {text}" for head, text in zip(heads, texts, strict=False)]
    return lines
