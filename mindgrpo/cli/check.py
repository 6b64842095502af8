"""Checks everything that a run is given, without a device, and prints a summary of the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from mindgrpo.backend.targets import check_device, check_hosts, ranks_per_host
from mindgrpo.cli.arguments import taken
from mindgrpo.config import (
    Config,
    Loaded,
    load_config,
    missing_keys,
    parse_command_line,
    require_run_keys,
    values_by_key,
)
from mindgrpo.config.load import RUN_KEYS
from mindgrpo.config.supervised import SFT_KEYS
from mindgrpo.data.hub_names import hub_name
from mindgrpo.data.sources import FOR_EVALUATION, FOR_TRAINING, data_files
from mindgrpo.errors import UserError, counted, error_of, sentences_of, whole_number
from mindgrpo.grpo.inputs import Inputs
from mindgrpo.models.decoder_config import DecoderConfig
from mindgrpo.models.mindformers_yaml import check_agreement
from mindgrpo.monitor.trackers.contract import check_installed
from mindgrpo.plan.run_plan import plan_run
from mindgrpo.run.host_limits import refuse_what_cannot_run
from mindgrpo.run.machine_checks import wrong_variables
from mindgrpo.run.named_sources import with_local_paths
from mindgrpo.run.preflight import (
    engine_notes,
    prepare,
    prepare_supervised,
    read_model,
    read_other_models,
    read_tokenizer,
    scorer_of,
)
from mindgrpo.run.start import (
    changes_since,
    check_folders,
    find_start,
    run_name,
    saved_values,
)

TEACHER_ALONE = "none: the teacher's log-probs alone"


def main(argv: Sequence[str]) -> None:
    own, words = taken(argv, ("--ranks",), ("--quiet",))
    world_size = None
    if (ranks := own.get("--ranks")) is not None:
        world_size = whole_number(ranks)
        if not world_size:
            raise UserError(
                f"--ranks is '{ranks}', but must be a whole number from 1 up; write --ranks 8."
            )
    if wrong := wrong_variables(os.environ):
        raise UserError(f"{wrong[0]}; correct or unset it in the environment.")
    if words[:1] == ["eval"]:
        import_module("mindgrpo.cli.eval").check(words[1:], world_size or 1)
        return
    is_supervised = words[:1] == ["sft"]
    files, overrides = parse_command_line(words[is_supervised:])
    loaded = load_config(files, overrides, is_supervised=is_supervised)
    known = [loaded]
    try:
        inputs = _check(known, files, world_size)
    except UserError as error:
        others = _others(known[-1], run_name(files), world_size)
        raise error_of([*sentences_of(error), *others]) from None
    if "--quiet" not in own:
        print("\n".join(summary(files, inputs, loaded.notices)))


def _check(known: list[Loaded], files: Sequence[Path], world_size: int | None) -> Inputs:
    """Checks everything in the order of a run. Raises UserError for what is wrong first.

    Adds to `known` the configuration with paths in place of names on a hub.
    """
    loaded, name = known[0], run_name(files)
    require_run_keys(loaded, needed=_needed(loaded))
    check_hosts(loaded.config.context.target, os.environ, world_size or 1)
    check_installed(loaded.config.monitor_config.trackers)
    start, loaded = find_start(loaded, name)
    check_folders(loaded.config, name, start)
    loaded = with_local_paths(loaded, earlier=saved_values(start))
    known.append(loaded)
    config = loaded.config
    inputs = (prepare_supervised if loaded.is_supervised else prepare)(config, world_size)
    try:
        here = None if world_size is None else ranks_per_host(os.environ, world_size)
        changes_since(start, config, inputs)
        refuse_what_cannot_run(inputs.plan, here, start)
        inputs.check_rewards()
        # Last: who checks before the run goes to another host learns of everything else first.
        check_device(config.context.target, os.environ)
    finally:
        if inputs.scorer is not None:
            inputs.scorer.close()
    return inputs


def _needed(loaded: Loaded) -> Mapping[str, str]:
    return SFT_KEYS if loaded.is_supervised else RUN_KEYS


def _check_folders(config: Config, name: str) -> None:
    """Checks the folders of a new run; which ones a resumed run has is known once its checkpoint is."""
    if config.rl_config.resume_training is False:
        check_folders(config, name, None)


def _others(loaded: Loaded, name: str, world_size: int | None) -> Iterator[str]:
    """Yields what else is wrong, of all that can be checked by itself, so that it can be changed together."""
    config, rl = loaded.config, loaded.config.rl_config
    model: list[DecoderConfig] = []
    data = {
        "rl_config.dataset_file": replace(FOR_TRAINING, name=rl.dataset_split),
        "rl_config.eval_dataset_file": replace(FOR_EVALUATION, name=rl.eval_dataset_split),
    }

    def check_data() -> None:
        for key, choice in data.items():
            path = values_by_key(config)[key]
            if path and key not in missing and hub_name(str(path)) is None:
                data_files(str(path), choice, key)

    # Of what is missing nothing more is said.
    missing, samples = missing_keys(loaded, needed=_needed(loaded)), not loaded.is_supervised
    has_rewards = samples and "reward_config.verifier_function" not in missing
    has_model = "actor_config.load" not in missing and hub_name(config.actor_config.load) is None
    yield from problems(
        lambda: require_run_keys(loaded, needed=_needed(loaded)),
        lambda: check_hosts(config.context.target, os.environ, world_size or 1),
        lambda: _check_folders(config, name),
        lambda: check_installed(config.monitor_config.trackers),
        lambda: engine_notes(config) if samples else None,
        lambda: check_device(config.context.target, os.environ),
    )
    yield from problems(
        check_data,
        lambda: scorer_of(config).close() if has_rewards else None,
        lambda: model.append(read_model(config)) if has_model else None,
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
        lambda: plan_run(config, model, world_size, read_other_models(config, model)),
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
    rewards = [
        *(inputs.scorer.names if inputs.scorer is not None else ()),
        *(
            f"{own.score_name} (the model in {own.load})"
            for own in plan.config.reward_config.models_by_key.values()
        ),
        *(f"environment {text}" for text in environment or ()),
    ]
    sections = {
        "run": [f"{plan.steps_text(len(inputs.prompts))} on {counted(plan.world_size, 'rank')}"],
        "layouts": plan.layout_lines(),
        "memory": plan.memory_lines(),
        "data": inputs.data_lines(),
        "prompt": inputs.prompt_lines(),
        "rewards": [] if inputs.scorer is None else [", ".join(rewards) or TEACHER_ALONE],
        "notes": [*notices, *inputs.notes],
    }
    lines = [f"{' with '.join(map(str, files))} can run:"]
    for name, texts in sections.items():
        heads = [name, *[""] * len(texts)]
        lines += [f"  {head:<8}  {text}" for head, text in zip(heads, texts, strict=False)]
    return lines
