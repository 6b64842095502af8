"""What a run's graphs hold beside its pools, by phase: from the configuration and the model's shapes alone. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mindgrpo.algorithm.packing import MicroShape
from mindgrpo.backend.connect import keeps_slots
from mindgrpo.backend.dtypes import ITEM_BYTES
from mindgrpo.backend.targets import SHARED_MEMORY
from mindgrpo.config import Config
from mindgrpo.models.local_sizes import LOGITS_BYTES, local_heads, local_vocabulary
from mindgrpo.models.lora_specs import adapter_specs
from mindgrpo.models.precision import compute_dtype, flash_attention
from mindgrpo.parallel.sharding import Layout, local_shape
from mindgrpo.plan.activations import (
    Block,
    Graphs,
    Kind,
    StageLayers,
    UpdateBytes,
    forward_bytes,
    update_bytes,
)
from mindgrpo.plan.run_plan import RunPlan

FLOAT = ITEM_BYTES["float32"]
# float32 rows of the vocabulary that sampling has at once for every slot: logits, noise, their sum, and what a
# truncation sorts.
SAMPLING_ROWS = 6


def update_shape(config: Config, ragged: bool) -> MicroShape:
    """Of a micro-batch of an update on each data-parallel rank; `ragged` as kernels say it."""
    rl = config.rl_config
    return _micro_shape(config, rl.batch_size // rl.micro_batch_interleaved, ragged)


def reference_shape(config: Config, ragged: bool) -> MicroShape:
    return _micro_shape(config, config.ref_config.ref_model_batch_size, ragged)


def _micro_shape(config: Config, rows: int, ragged: bool) -> MicroShape:
    """`rows` rows of seq_length, or one as long as all of them where length costs nothing by itself."""
    rl = config.rl_config
    if not rl.packing:
        return MicroShape(rows, rl.seq_length, 1)
    if ragged:
        return MicroShape(1, rows * rl.seq_length, rl.pack_num and rows * rl.pack_num)
    return MicroShape(rows, rl.seq_length, rl.pack_num)


def kernel_kind(config: Config) -> Kind:
    """Of the kernels that the run gets on its device."""
    target = config.context.target
    if keeps_slots(target) and config.context.mode == 0:
        return "native"
    return "fused" if target.has_fused_attention and flash_attention(config) else "plain"


def activation_bytes(plan: RunPlan) -> Mapping[str, int]:
    """Of the rank that needs most, by phase; vLLM's own are not known here."""
    ragged = kernel_kind(plan.config) == "native"
    update = graphs_of(plan, plan.train, update_shape(plan.config, ragged))
    by_phase = {
        "rollout": _rollout_bytes(plan),
        "old_logps": _forward_bytes(plan.train, update),
        "update": update_need(plan).total,
    }
    if plan.reference is not None:
        shape = reference_shape(plan.config, ragged)
        graphs = graphs_of(plan, plan.reference, shape)
        by_phase["reference"] = _forward_bytes(plan.reference, graphs)
    return by_phase


def update_need(plan: RunPlan) -> UpdateBytes:
    """Of the stage that needs most."""
    shape = update_shape(plan.config, kernel_kind(plan.config) == "native")
    graphs = graphs_of(plan, plan.train, shape)
    stages = range(len(plan.train.stage_layers))
    needs = [update_bytes(graphs, _stage_layers(plan, stage)) for stage in stages]
    return max(needs, key=lambda need: need.total)


def graphs_of(plan: RunPlan, layout: Layout, shape: MicroShape) -> Graphs:
    model, tp_size = plan.model, layout.mesh.model_parallel
    block = Block(
        model.hidden_size,
        -(-model.intermediate_size // tp_size),
        local_heads(model, tp_size),
        is_silu=model.activation == "silu",
        has_out_norms=bool(model.family.norms.attention_out or model.family.norms.mlp_out),
    )
    # The processors' kernels have float32 activations whatever weights are.
    on_host = plan.config.context.target == SHARED_MEMORY
    itemsize = FLOAT if on_host else ITEM_BYTES[compute_dtype(plan.config)]
    return Graphs(
        kernel_kind(plan.config),
        block,
        local_vocabulary(model, tp_size),
        shape.tokens,
        shape.length,
        itemsize,
        LOGITS_BYTES,
        sums=tp_size > 1,
    )


def _forward_bytes(layout: Layout, graphs: Graphs) -> int:
    """Of a last stage, with what comes from the stage before and a result that goes on."""
    flow = graphs.tokens * graphs.block.hidden * graphs.itemsize
    between = 2 * flow if len(layout.stage_layers) > 1 else 0
    return forward_bytes(graphs, has_head=True) + between


def _stage_layers(plan: RunPlan, stage: int) -> StageLayers:
    recompute, layers = plan.config.actor_config.recompute_config, plan.train.stage_layers[stage]
    nothing: frozenset[str] = frozenset()
    again = [nothing if index % recompute.every else recompute.modules for index in layers]
    num_stages = len(plan.train.stage_layers)
    by_position = _gradients(plan)
    tied = plan.model.tie_word_embeddings
    return StageLayers(
        recomputed=again,
        gradients=[by_position.get(index, 0) for index in layers],
        waiting=num_stages - stage,
        embedding=by_position.get("first_and_last" if tied else "first", 0) if stage == 0 else None,
        head=(
            by_position.get("first_and_last", 0) + by_position.get("last", 0)
            if stage == num_stages - 1
            else None
        ),
    )


def _gradients(plan: RunPlan) -> Mapping[int | str, int]:
    """Bytes of a rank's float32 gradients by their parameters' positions in the model."""
    specs: Sequence = plan.train.specs
    if plan.lora is not None:
        specs = adapter_specs(specs, plan.lora)
    by_position: dict[int | str, int] = {}
    for spec in specs:
        size = FLOAT * math.prod(local_shape(spec, plan.train.mesh.model_parallel))
        by_position[spec.position] = by_position.get(spec.position, 0) + size
    return by_position


def _rollout_bytes(plan: RunPlan) -> int:
    """Of the plain decoder's graphs: its prompts, or a token of every slot. The decode loop in C has pools alone."""
    if plan.config.generate_config.uses_vllm or plan.keeps_slots:
        return 0
    cache, heads = plan.cache_config, local_heads(plan.model, plan.infer.mesh.model_parallel)
    prompts = MicroShape(cache.prompts_at_once, cache.max_prompt, 1)
    graphs = graphs_of(plan, plan.infer, prompts)
    length = cache.max_prompt + cache.max_tokens
    scores = 0 if graphs.kind == "fused" else 3 * heads.queries * length * FLOAT
    rows = SAMPLING_ROWS * graphs.vocabulary * FLOAT + length * FLOAT + scores
    one_token = replace(graphs, tokens=cache.slots, row_length=1)
    decode = cache.slots * rows + forward_bytes(one_token, has_head=False)
    return max(forward_bytes(graphs, has_head=False), decode)
