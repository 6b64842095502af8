"""Every option that a family may declare, one at a time: what the generator reports is what the trainer computes.

The generator runs the decode loop in C where the loop knows the option, and the decoder's block where it does not.
Does not prove that an option is computed as its family's authors meant: test_golden_models.py does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pytest
from small_generators import GROUP, MAX_PROMPT, MAX_TOKENS, ROW, SETTINGS, VERSION, requests_of, run
from small_mixtures import LATENTS, MIXTURES

from mindgrpo.algorithm.packing import MicroShape, PackedRollout
from mindgrpo.algorithm.sample import Request, Rollout, Sample
from mindgrpo.backend.connect import connect
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.targets import SHARED_MEMORY
from mindgrpo.models.decoder_config import DecoderConfig, decoder_config
from mindgrpo.models.families import FAMILIES, PRE_NORMS, BlockNorms, ExpertFamily, Family
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.models.pipeline import ForwardPipeline, compute_log_probs
from mindgrpo.models.shard import Shard
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.rollout.embedded.engine import EmbeddedEngine
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig, missing_options, notices
from mindgrpo.rollout.embedded.slots import SlotDecoder
from mindgrpo.weights.pretrained import fill_random

RAW: dict[str, Any] = {
    "model_type": "variant",
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Variant:
    """The plainest family with `options` of its own, whose models' config.json has `raw` besides."""

    options: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    in_loop: bool = False

    def config(self, monkeypatch: pytest.MonkeyPatch) -> DecoderConfig:
        monkeypatch.setitem(FAMILIES, "variant", Family(**self.options))
        return decoder_config(RAW | self.raw, "here")


OF_GROUPS: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 3,
    "topk_group": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": False,
    "first_k_dense_replace": 0,
}
PLAINEST = Variant(in_loop=True)
# By the fields of Family, and of BlockNorms, that they turn on.
VARIANTS: dict[tuple[str, ...], Variant] = {
    ("qkv_bias",): Variant({"qkv_bias": True, "bias_key": None}, in_loop=True),
    ("bias_key",): Variant(raw={"attention_bias": True}, in_loop=True),
    ("qk_norm",): Variant({"qk_norm": "head"}, in_loop=True),
    ("qk_norm", "bias_key"): Variant({"qk_norm": "projection"}, {"attention_bias": True}),
    ("norms", "attention_out", "mlp_out"): Variant(
        {"norms": BlockNorms(PRE_NORMS.attention_in, "one", PRE_NORMS.mlp_in, "other")}
    ),
    ("norms", "attention_in", "mlp_in"): Variant({"norms": BlockNorms()}),
    ("norm_offset",): Variant({"norm_offset": 1.0}),
    ("activation_key",): Variant({"activation_key": "act"}, {"act": "gelu_pytorch_tanh"}),
    ("scaled_embeddings",): Variant({"scaled_embeddings": True}),
    ("query_scalar_key",): Variant({"query_scalar_key": "scalar"}, {"scalar": 50.0}),
    ("has_local_layers",): Variant(
        {"has_local_layers": True},
        {
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": ROW,
            "rope_local_base_freq": 3.0,
        },
    ),
    ("has_latents",): Variant(
        {"has_latents": True},
        {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 8,
            "v_head_dim": 14,
            "rope_interleave": False,
        },
        in_loop=True,
    ),
    ("experts", "has_latents"): Variant(
        {
            "has_latents": True,
            "experts": FAMILIES["deepseek_v3"].experts,
            "defaults": FAMILIES["deepseek_v3"].defaults,
        },
        {
            **LATENTS,
            **OF_GROUPS,
        },
        in_loop=True,
    ),
    ("experts",): Variant(
        {"experts": ExpertFamily(inner_key="moe_intermediate_size")},
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        in_loop=True,
    ),
}
each_variant = pytest.mark.parametrize("options", VARIANTS, ids=" ".join)


@pytest.fixture(scope="module")
def backend() -> Backend:
    return connect(SHARED_MEMORY, {})


class Model:
    """A variant with random weights: as a generator, and as the trainer's forward pass."""

    def __init__(self, config: DecoderConfig, backend: Backend) -> None:
        layers = range(config.num_hidden_layers)
        self.layout, self.backend = (
            Layout(Mesh(1, 1), parameter_specs(config), ((layers,),)),
            backend,
        )
        room = KVCacheConfig(16, GROUP, None, MAX_PROMPT, MAX_TOKENS)
        self.generator = EmbeddedEngine(config, self.layout, backend, SETTINGS, room)
        self.generator.publish(self._fill, VERSION)
        weights = self.generator.weights
        shard = Shard(config, weights, backend)
        self.pipeline = ForwardPipeline(
            shard, backend, "policy", MicroShape(4, ROW), ROW, SETTINGS.temperature
        )

    def _fill(self) -> None:
        weights = self.generator.weights
        fill_random(weights, seed=1, scale=0.25)
        for name, part in weights.arrays.hf_views.items():
            if part.ndim == 1:
                part += 0.3 * np.random.default_rng(len(name)).normal(size=part.shape)

    def trainer_logps(
        self, requests: Sequence[Request], completions: Sequence[Sample]
    ) -> list[np.ndarray]:
        rollout = Rollout.single_turn(
            [request.prompt for request in requests for _ in request.samples],
            [completion.tokens for completion in completions],
            [completion.finish_reason for completion in completions],
            [completion.logps for completion in completions],
            [i for i, request in enumerate(requests) for _ in request.samples],
        )
        packed = PackedRollout(rollout)
        return compute_log_probs(self.pipeline, self.layout.mesh, self.backend, packed)


@pytest.fixture(scope="module")
def plainest(backend: Backend) -> list[Sample]:
    with pytest.MonkeyPatch.context() as patch:
        return run(Model(PLAINEST.config(patch), backend).generator, requests_of())


def test_every_field_of_a_family_has_a_variant() -> None:
    turned_on = {name for names in VARIANTS for name in names}
    declared = {each.name for each in (*fields(Family), *fields(BlockNorms))}
    # What config.json may leave out, and what is refused, is read, not computed: test_families.py. Of models that see
    # images: test_image_models.py.
    assert turned_on == declared - {"defaults", "not_computed", "sees_images"}


@each_variant
def test_log_probs_are_the_trainers_with_every_option(
    backend: Backend,
    plainest: list[Sample],
    options: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variant = VARIANTS[options]
    model = Model(variant.config(monkeypatch), backend)
    uses_loop = isinstance(model.generator._decoder, SlotDecoder)
    assert uses_loop == (variant.in_loop and backend.kernels.has_slots)
    requests = requests_of()
    completions = run(model.generator, requests)
    trained = model.trainer_logps(requests, completions)
    for completion, logps in zip(completions, trained, strict=True):
        np.testing.assert_allclose(completion.logps, logps, rtol=0, atol=1e-4)
    # An option that changes nothing would be tested by nothing.
    first = zip(completions, plainest, strict=True)
    assert max(abs(float(c.logps[0] - p.logps[0])) for c, p in first) > 1e-2


@each_variant
def test_the_decode_loop_says_what_it_lacks_in_one_sentence(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = VARIANTS[options]
    config = variant.config(monkeypatch)
    assert bool(missing_options(config)) != variant.in_loop
    said = notices(config)
    assert len(said) == (0 if variant.in_loop else 1)
    assert all(option in said[0] for option in missing_options(config))


@pytest.mark.parametrize(
    ("family", "in_loop"),
    [
        *((family, True) for family in ("qwen2", "llama", "qwen3", "qwen3_moe", "mixtral")),
        ("deepseek_v3", True),
        *((family, False) for family in ("olmo2", "gemma3_text")),
    ],
)
def test_which_families_the_decode_loop_computes(family: str, in_loop: bool) -> None:
    of_experts = {k: v for k, v in MIXTURES["qwen3_moe"].items() if k != "head_dim"}
    if family == "deepseek_v3":
        of_experts = VARIANTS["experts", "has_latents"].raw
    config = decoder_config(RAW | of_experts | {"model_type": family}, "here")
    assert bool(missing_options(config)) != in_loop
