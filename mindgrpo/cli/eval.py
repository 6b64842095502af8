"""Measures what a model earns on held-out prompts, on the ranks that there are: `python -m mindgrpo eval`.

Only the generator has weights and a cache here: no optimizer, no reference, no policy. With the same model, seed, step
and `model_parallel` the metrics are those of a training run's own evaluation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindgrpo.backend.connect import connect
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.rank_consistency import on_first_rank
from mindgrpo.backend.targets import check_device, check_hosts
from mindgrpo.cli.arguments import naming
from mindgrpo.config import Config, Loaded, load_config, require_run_keys
from mindgrpo.config.command_line import EvaluationLine, parse_evaluation
from mindgrpo.config.roles import (
    GenerateParallelConfig,
    RewardModelConfig,
    ScoreParallelConfig,
)
from mindgrpo.data.sources import ALONE, Ranks
from mindgrpo.errors import UserError, counted
from mindgrpo.grpo.build import evaluation_modes, fill_forward, make_engine, runtime_settings
from mindgrpo.grpo.evaluation import Evaluator, Mode, Outcome, evaluation_metrics
from mindgrpo.grpo.image_encoder import ImageEncoder
from mindgrpo.grpo.inputs import RolloutInputs, sampling_params
from mindgrpo.grpo.reward_model import make_reward_models
from mindgrpo.grpo.scoring import CompletionForm, RolloutScorer
from mindgrpo.memory.residency import VISION, Residency
from mindgrpo.models.decoder_config import DecoderConfig
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.monitor.console import Console
from mindgrpo.parallel.sharding import Layout
from mindgrpo.plan.model_roles import ModelRole, reward_model_roles
from mindgrpo.plan.role_layouts import check_positions, generating_layout
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig
from mindgrpo.rollout.engine import RolloutEngine
from mindgrpo.rollout.environment import environment_weight
from mindgrpo.rollout.replicas import Replicas
from mindgrpo.rollout.turns import make_conversations, read_turns
from mindgrpo.run.evaluation_log import details, table, write_completions
from mindgrpo.run.image_inputs import read_images
from mindgrpo.run.named_sources import (
    EVALUATED,
    with_local_paths,
    with_names,
    with_paths_of_ranks,
)
from mindgrpo.run.preflight import (
    engine_notes,
    held_out_prompts,
    read_classifier_texts,
    read_model,
    read_reward_models,
    read_tokenizer,
    scorer_of,
    try_environment,
)
from mindgrpo.weights.pretrained import check_tensors

EVALUATION_KEYS: dict[str, str] = {
    "actor_config.load": "the Hugging Face directory of the model, also --model",
    "rl_config.eval_dataset_file": "the held-out data, also --data",
    "reward_config.verifier_function": "the reward functions",
}
# Samples in flight on each replica, where generate_config.max_num_seqs does not say.
MOST_SLOTS = 256
# The only weights that there are.
VERSION = 0


@dataclass(frozen=True, kw_only=True)
class EvaluationInputs(RolloutInputs):
    """Holds what an evaluation is given; `num_prompts` of the held-out prompts are answered."""

    model: DecoderConfig
    layout: Layout
    modes: list[Mode]
    num_prompts: int
    reward_models: tuple[ModelRole, ...] = ()

    def cache_config(self, config: Config) -> KVCacheConfig:
        generate, group = config.generate_config, max(mode.num_samples for mode in self.modes)
        prompts = -(-self.num_prompts // self.layout.mesh.dp)
        slots = min(prompts * group, generate.max_num_seqs or MOST_SLOTS)
        longest, goes_on = generate.sampling_config.max_tokens, config.rl_config.has_conversations
        sizes = slots, group, prompts, config.longest_context, longest, goes_on
        return KVCacheConfig(*sizes, generate.draft_rows)


def mesh_for(asked: GenerateParallelConfig, world_size: int) -> GenerateParallelConfig:
    """Returns the mesh on so many ranks: the configuration's `model_parallel`, and replicas on the rest.

    One rank holds the whole model. Raises UserError.
    """
    tp_size = 1 if world_size == 1 else asked.model_parallel
    if world_size % tp_size:
        raise UserError(
            f"generate_config.parallel_config.model_parallel {tp_size} does not divide the {world_size} ranks of this "
            "evaluation; start a multiple of it, or one rank, or set it to a divisor."
        )
    return GenerateParallelConfig(
        data_parallel=world_size // tp_size,
        model_parallel=tp_size,
        expert_parallel=1 if tp_size == 1 else asked.expert_parallel,
    )


def read_inputs(
    config: Config, world_size: int, ranks: Ranks = ALONE, scores: bool = True
) -> EvaluationInputs:
    """Reads and checks everything an evaluation is given, without a device. Raises UserError."""
    with ExitStack() as unless_read:
        scorer = scorer_of(config) if scores else None
        if scorer is not None:
            unless_read.callback(scorer.close)
        model = read_model(config)
        check_tensors(config.actor_config.load, parameter_specs(model))
        images = read_images(config, model, config.generate_config.max_prompt_length)
        check_positions(config, model)
        if scores:
            engine_notes(config)
        mesh = mesh_for(config.generate_config.parallel_config, world_size)
        tokenizer = read_tokenizer(config, model)
        turns = read_turns(config, tokenizer, images)
        prompts = held_out_prompts(config, tokenizer, ranks, turns, True, images=images)
        assert prompts is not None
        sampling = sampling_params(config, tokenizer)
        count = len(prompts[: config.rl_config.eval_samples])
        modes = evaluation_modes(config, sampling)
        layout = generating_layout(config, model, mesh)
        shapes = read_reward_models(config)
        roles = reward_model_roles(_on_ranks(config, mesh, world_size), shapes)
        for role in roles:
            check_tensors(role.load, role.layout.specs)
        texts = read_classifier_texts(config, tokenizer, shapes)
        trial = try_environment(turns, prompts, ranks)
        unless_read.pop_all()
    form: CompletionForm = config.reward_config.completions or "text"
    return EvaluationInputs(
        model=model,
        layout=layout,
        tokenizer=tokenizer,
        held_out=prompts,
        scorer=scorer,
        sampling=sampling,
        modes=modes,
        num_prompts=count,
        turns=turns,
        trial=trial,
        form=form,
        classifier_texts=texts,
        reward_models=roles,
        images=images,
    )


def _on_ranks(config: Config, mesh: GenerateParallelConfig, world_size: int) -> Config:
    """Returns `config` with reward models laid out on these ranks, as the generator is, if their own layout is not."""
    rewards = config.reward_config
    shared = ScoreParallelConfig(
        data_parallel=mesh.data_parallel, model_parallel=mesh.model_parallel
    )

    def fitted(own: RewardModelConfig) -> RewardModelConfig:
        asked = config.parallel_of(own)
        if asked.replicas * asked.replica_ranks == world_size:
            return own
        return own.model_copy(update={"parallel_config": shared})

    models = {"model": fitted(rewards.model), "models": [fitted(own) for own in rewards.models]}
    return config.model_copy(update={"reward_config": rewards.model_copy(update=models)})


def load(argv: Sequence[str]) -> tuple[EvaluationLine, Loaded]:
    """Reads command line and configuration. Raises UserError, also for a file that would be written over."""
    line = parse_evaluation(argv)
    loaded = load_config(line.files, line.overrides)
    require_run_keys(loaded, needed=EVALUATION_KEYS)
    for flag, path in (("--output", line.output), ("--completions", line.completions)):
        if path is not None and path.exists():
            raise UserError(f"{flag} {path} exists and is not overwritten; name another file.")
    return line, loaded


def check(argv: Sequence[str], world_size: int) -> None:
    """Checks all that can be known of an evaluation without a device. Raises UserError."""
    line, loaded = load(argv)
    check_hosts(loaded.config.context.target, os.environ, world_size)
    with naming(line.flags):
        inputs = read_inputs(with_local_paths(loaded, EVALUATED).config, world_size)
    try:
        inputs.check_rewards()
        check_device(loaded.config.context.target, os.environ)
    finally:
        assert inputs.scorer is not None
        inputs.scorer.close()


def main(argv: Sequence[str]) -> None:
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        # msrun's scheduler runs this program too, and may be so late that the evaluation has been written.
        line = parse_evaluation(argv)
        context = load_config(line.files, line.overrides).config.context
        connect(context.target, dict(os.environ))
        return
    line, loaded = load(argv)
    backend = connect(
        loaded.config.context.target, dict(os.environ), runtime_settings(loaded.config)
    )
    with naming(line.flags):
        loaded = with_paths_of_ranks(loaded, backend, EVALUATED)
        config = loaded.config
        outcomes, inputs = run(config, line.step, backend)
    if backend.rank == 0:
        metrics = report(config, line.step, backend, inputs, outcomes)
        print(table(outcomes), flush=True)
        for path in filter(None, (line.output, line.completions)):
            path.parent.mkdir(parents=True, exist_ok=True)
        if line.output is not None:
            line.output.write_text(json.dumps(metrics, indent=2) + "\n")
        if line.completions is not None:
            write_completions(line.completions, line.step, outcomes)
    backend.close()


def run(config: Config, step: int, backend: Backend) -> tuple[list[Outcome], EvaluationInputs]:
    """Evaluates on all ranks together."""
    console = Console(backend.rank == 0)
    ranks = Ranks(backend.rank, backend.world_size, backend.world.gather_objects)
    inputs = read_inputs(config, backend.world_size, ranks, scores=backend.rank == 0)
    console.line(f"  {config.actor_config.load}: generate {inputs.layout.mesh}")
    with console.phase("loading weights"):
        engine, residency, encode = _engine(config, inputs, backend)
        models = make_reward_models(config, inputs.reward_models, inputs.classifier_texts, backend)
        for model, role in zip(models, inputs.reward_models, strict=True):
            fill_forward(model.weights, role.load, config)
            residency.add({model.role: [model.weights.pool]})
    on_first_rank(backend, inputs.check_rewards)
    conversations = make_conversations(config, inputs.tokenizer, inputs.turns, backend, encode)
    evaluator = Evaluator(
        Replicas(engine, inputs.layout.mesh, backend, conversations),
        RolloutScorer(
            inputs.scorer,
            inputs.tokenizer,
            backend,
            environment_weight(config),
            inputs.form,
            models,
            residency.activate,
        ),
        config.rl_config.seed,
    )
    with console.phase(
        f"evaluating on {counted(inputs.num_prompts, 'prompt')} of {config.rl_config.eval_dataset_file or 'seeds'}"
    ):
        assert inputs.held_out is not None
        prompts = inputs.held_out[: inputs.num_prompts]
        outcomes = evaluator.run(prompts, inputs.modes, step, VERSION)
    engine.close()
    if conversations is not None:
        conversations.close()
    for outcome in outcomes:
        for name, message in outcome.scored.scores.messages.items():
            console.line(f"  reward {name}: {message}")
    if inputs.scorer is not None:
        inputs.scorer.close()
    return outcomes, inputs


def _engine(
    config: Config, inputs: EvaluationInputs, backend: Backend
) -> tuple[RolloutEngine, Residency, Callable[[Sequence[np.ndarray]], None] | None]:
    """Makes the engine with its weights, and its cache on the device; and what encodes images of further prompts."""
    cache_config = inputs.cache_config(config)
    residency = Residency(config.context.max_device_bytes)
    vision, images, features, encode = inputs.model.vision, inputs.images, None, None
    if vision is not None and images is not None:
        encoder = ImageEncoder(vision, images, backend)
        fill_forward(encoder.weights, config.actor_config.load, config)
        residency.add({VISION: [encoder.weights.pool]})
        features = encoder.features

        def encode(prompts: Sequence[np.ndarray]) -> None:
            if encoder.encode(prompts, True, lambda: residency.activate("images")):
                residency.activate("rollout")
                engine.load(config.actor_config.load, VERSION)

        if config.rl_config.environment is None and inputs.held_out is not None:
            ids = [prompt.ids for prompt in inputs.held_out[: inputs.num_prompts]]
            encoder.encode(ids, False, lambda: residency.activate("images"))
    engine = make_engine(
        config, inputs.model, inputs.layout, backend, inputs.sampling, cache_config, features
    )
    for name, pools in engine.pools.items():
        residency.register(name, pools, rebuilt=True, filled=False)
    residency.activate("rollout")
    engine.wake()
    engine.load(config.actor_config.load, VERSION)
    return engine, residency, encode


def report(
    config: Config,
    step: int,
    backend: Backend,
    inputs: EvaluationInputs,
    outcomes: Sequence[Outcome],
) -> dict[str, Any]:
    """Returns what --output gets. `eval` has the first mode's means, as a run's summary does, `figures` all metrics."""
    named = with_names(config)
    return {
        "model": named.actor_config.load,
        "data": named.rl_config.eval_dataset_file,
        "prompts": inputs.num_prompts,
        "seed": config.rl_config.seed,
        "step": step,
        "ranks": backend.world_size,
        "layout": str(inputs.layout.mesh),
        "eval": outcomes[0].means,
        "figures": evaluation_metrics(outcomes),
        "compiles": len(backend.compile_log.entries),
        "modes": {outcome.mode.name: details(outcome) for outcome in outcomes},
    }
