"""Lays out each role's model over its ranks, and refuses what the model does not allow there.

Pure: no device, no weights.
"""

from __future__ import annotations

from dataclasses import replace

from mindgrpo.config import Config
from mindgrpo.config.roles import ParallelConfig
from mindgrpo.errors import UserError
from mindgrpo.models.decoder_config import DecoderConfig
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout, Offset


def layout_of(
    degrees: ParallelConfig,
    model: DecoderConfig,
    offset: Offset = 0,
    where: str = "actor_config.parallel_config",
) -> Layout:
    """Lays out the whole model; `where` is the section that `degrees` are of. Raises UserError."""
    mesh, splits_tokens = degrees.mesh, degrees.splits_tokens
    check_experts(mesh, model, splits_tokens, where)
    specs = parameter_specs(model, splits_tokens)
    return Layout.of(mesh, specs, offset, splits_tokens, degrees.num_chunks)


def generating_layout(
    config: Config, model: DecoderConfig, degrees: ParallelConfig | None = None
) -> Layout:
    """Lays out the generator's model by `degrees`, those of its section by default; vLLM's workers have columns of each
    expert. Raises UserError."""
    generate, where = config.generate_config, "generate_config.parallel_config"
    layout = layout_of(degrees or generate.parallel_config, model, where=where)
    if not generate.uses_vllm:
        return layout
    if model.latent is not None:
        raise UserError(
            f"generate_config.use_vllm is {generate.use_vllm}, but models of type {model.model_type} are not handed to "
            "vLLM; set it to 0 for the embedded generator."
        )
    if model.moe is None:
        return layout
    if layout.mesh.ep > 1:
        raise UserError(
            f"{where}.expert_parallel is {layout.mesh.ep}, but vLLM (generate_config.use_vllm) cuts each expert over "
            "its workers; leave it at 1."
        )
    mesh = replace(layout.mesh, etp=layout.mesh.tp)
    check_experts(mesh, model, splits_tokens=False, where=where)
    return Layout.of(mesh, layout.specs)


def fits(mesh: Mesh, model: DecoderConfig) -> bool:
    try:
        Layout.of(mesh, parameter_specs(model))
    except UserError:
        return False
    return True


def check_experts(mesh: Mesh, model: DecoderConfig, splits_tokens: bool, where: str) -> None:
    """Raises UserError for a mesh that the model's experts do not divide into, or that has a token on several of the
    ranks that compute it; `where` is the section of its keys."""
    moe = model.moe
    if moe is None:
        if mesh.ep * mesh.etp > 1:
            raise UserError(
                f"{where}: expert_parallel is {mesh.ep} and expert_tensor_parallel {mesh.etp}, but models of type "
                f"{model.model_type} have no experts; leave both at 1."
            )
        return
    for key, size, whole, what in (
        ("expert_parallel", mesh.ep, moe.num_experts, "experts of a layer"),
        ("expert_tensor_parallel", mesh.etp, moe.inner, "columns of an expert"),
    ):
        if whole % size:
            raise UserError(
                f"{where}.{key} is {size}, but does not divide the {whole} {what}; choose a divisor."
            )
    if where.startswith("generate_config"):
        if mesh.tp % mesh.ep:
            raise UserError(
                f"{where}.expert_parallel is {mesh.ep}, but experts are dealt to the ranks of a replica, and "
                f"model_parallel is {mesh.tp}; choose a divisor of it."
            )
    elif mesh.tp > 1 and not splits_tokens:
        raise UserError(
            f"{where}.model_parallel is {mesh.tp}, but models with experts ({model.model_type}) share out their tokens "
            f"over these ranks; set {where}.use_seq_parallel to true, or model_parallel to 1."
        )


def check_routing(config: Config, model: DecoderConfig) -> None:
    """Raises UserError where experts are to be trained by what the engine or the model does not have."""
    rl, moe = config.rl_config, model.moe
    if moe is not None and config.generate_config.uses_vllm and rl.router_replay:
        raise UserError(
            "rl_config.router_replay is true, but the experts that vLLM (generate_config.use_vllm) chose for a token "
            "are not handed back; set it to false to train with those that a forward pass before the update chooses, "
            "or generate_config.use_vllm to 0."
        )
    if rl.router_aux_loss_coef > 0 and (moe is None or moe.scores != "softmax"):
        has = "have no experts" if moe is None else "score experts one by one, without a softmax"
        raise UserError(
            f"rl_config.router_aux_loss_coef is {rl.router_aux_loss_coef:g}, but models of type {model.model_type} "
            f"{has}; set it to 0."
        )
    rate = rl.moe_router_bias_update_rate
    if rate > 0 and (moe is None or not moe.has_bias):
        raise UserError(
            f"rl_config.moe_router_bias_update_rate is {rate:g}, but models of type {model.model_type} choose no "
            "experts by a bias; set it to 0."
        )
    if rate > 0 and config.actor_config.lora.rank is not None:
        raise UserError(
            f"rl_config.moe_router_bias_update_rate is {rate:g}, but with adapters (actor_config.lora.rank) the "
            "model's own numbers stay as they are; set it to 0 or leave actor_config.lora out."
        )


def check_mode(config: Config, model: DecoderConfig) -> None:
    """Raises UserError for what is trained wrongly without compiled graphs.

    There MindSpore 2.9 and 2.10 get the gradient of a split wrong where one of its parts is concatenated as it is, and
    that of a parameter that has none is of another shape. With model_parallel the same ends a run, and sums over
    data_parallel ranks are others.
    """
    if config.context.mode == 0:
        return
    layout = config.actor_config.parallel_config
    num_ranks = layout.replicas * layout.replica_ranks
    wrong = {
        f"models of type {model.model_type}": model.family.qk_norm == "projection"
        or model.latent is not None,
        f"{num_ranks} ranks (actor_config.parallel_config)": num_ranks > 1,
    }
    for what, is_asked in wrong.items():
        if is_asked:
            raise UserError(
                f"context.mode is 1, but without compiled graphs MindSpore gets gradients wrong with {what}; set "
                "context.mode to 0."
            )


def check_positions(config: Config, model: DecoderConfig) -> None:
    generate = config.generate_config
    longest = generate.max_prompt_length + generate.sampling_config.max_tokens
    if longest > model.max_position_embeddings:
        raise UserError(
            f"The model knows positions up to {model.max_position_embeddings} (max_position_embeddings), but "
            f"max_prompt_length + max_tokens is {longest}; lower generate_config.max_prompt_length or max_tokens."
        )
    if model.sliding_window is not None and longest > model.sliding_window:
        raise UserError(
            f"The model's local layers see {model.sliding_window} tokens (sliding_window in config.json), and only "
            f"sequences within the window are computed, but max_prompt_length + max_tokens is {longest}; lower "
            "generate_config.max_prompt_length or max_tokens."
        )
