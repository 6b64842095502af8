"""A vision encoder's dimensions and parameters, and the language model's keys beside them, read from `config.json`.

Of Qwen2.5-VL (arXiv:2502.13923): windows in most layers, all of an image in the others, and a merger that makes one
feature of 2 x 2 patches. Files are flat, with the language model's keys at the top, or have them in `text_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout, ParameterSpec
from mindgrpo.weights.model_files import VISUAL

# The only activation of the encoder's MLP.
ACTIVATION = "silu"
# RMS norms of the encoder ignore rms_norm_eps.
NORM_EPS = 1e-6
ROTARY_BASE = 1e4
# The names of the keys in transformers' configuration classes and their defaults; published files have in_chans.
DEFAULTS: Mapping[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": ACTIVATION,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": (7, 15, 23, 31),
}
MOST = 1 << 20


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Dimensions of the vision encoder.

    A patch has `patch_values` numbers; `merge_size`^2 patches become a feature of `out_hidden_size`, the language
    model's hidden size. Layers in `full_layers` attend to a whole image, the others to windows of `window_side`^2
    features. The language model sees a feature in the place of each token `image_token`.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    channels: int
    window_side: int
    full_layers: frozenset[int]
    image_token: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """Returns the length of a patch: channels x frames x rows x columns of pixels."""
        return self.channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged(self) -> int:
        """Returns the number of patches that become one feature."""
        return self.merge_size**2


def language_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the language model's keys of a vision-language model's config.json, flat."""
    nested = fields.get("text_config")
    own = {**fields, **nested} if isinstance(nested, Mapping) else dict(fields)
    if "tie_word_embeddings" in fields:
        # In nested files, the text_config's own value is a default that nothing reads.
        own["tie_word_embeddings"] = fields["tie_word_embeddings"]
    for key in ("rope_scaling", "rope_parameters"):
        rope = own.get(key)
        # The type of files before transformers 4.49: no scaling, but positions with several axes.
        if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) == "mrope":
            own[key] = {**rope, "rope_type": "default", "type": "default"}
    return own | {"model_type": fields.get("model_type")}


def read_vision(fields: Mapping[str, Any], where: str) -> VisionConfig:
    """Reads the vision encoder of a config.json; `where` is named in errors. Raises UserError."""
    raw = fields.get("vision_config")
    if not isinstance(raw, Mapping):
        raise UserError(
            f"{where} has no vision_config, which says what encodes images; restore it."
        )
    named = {"in_channels" if key == "in_chans" else key: value for key, value in raw.items()}
    held = {**DEFAULTS, **{key: value for key, value in named.items() if value is not None}}
    at = f"{where}: vision_config"
    if held["hidden_act"] != ACTIVATION:
        raise UserError(f"{at}.hidden_act is {held['hidden_act']!r}, but only silu is computed.")
    sizes = {}
    for key in DEFAULTS.keys() - {"hidden_act", "fullatt_block_indexes"}:
        value = held[key]
        if type(value) is not int or not 0 < value <= MOST:
            raise UserError(f"{at}.{key} is {value!r}, but must be a whole number above 0.")
        sizes[key] = value
    full = held["fullatt_block_indexes"]
    if not isinstance(full, list | tuple) or not all(type(layer) is int for layer in full):
        raise UserError(f"{at}.fullatt_block_indexes is {full!r}, but must list numbers of layers.")
    token = fields.get("image_token_id", 151655)
    if type(token) is not int or token < 0:
        raise UserError(f"{where}: image_token_id is {token!r}, but must be a token's id.")
    vision = VisionConfig(
        depth=sizes["depth"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_heads=sizes["num_heads"],
        out_hidden_size=sizes["out_hidden_size"],
        patch_size=sizes["patch_size"],
        merge_size=sizes["spatial_merge_size"],
        temporal_patch_size=sizes["temporal_patch_size"],
        channels=sizes["in_channels"],
        window_side=sizes["window_size"] // sizes["spatial_merge_size"] // sizes["patch_size"],
        full_layers=frozenset(full),
        image_token=token,
    )
    if vision.hidden_size % (4 * vision.num_heads):
        raise UserError(
            f"{at}: hidden_size {vision.hidden_size} is not a multiple of 4 num_heads ({vision.num_heads}), whose "
            "rotary positions have two axes; correct the file."
        )
    if vision.window_side < 1:
        raise UserError(
            f"{at}: window_size {sizes['window_size']} has no room for {vision.merge_size} x {vision.merge_size} "
            f"patches of {vision.patch_size} pixels; correct the file."
        )
    return vision


def rope_sections(rope: Mapping[str, Any], head_dim: int, where: str) -> tuple[int, ...]:
    """Reads `mrope_section`: how many of the head_dim / 2 rotary frequencies turn by a token's time, row and column."""
    sections = rope.get("mrope_section")
    own = sections if isinstance(sections, list) else []
    are_counts = all(type(count) is int and count >= 0 for count in own)
    if len(own) != 3 or not are_counts or 2 * sum(own) != head_dim:
        raise UserError(
            f"{where}: mrope_section is {sections!r}, but must be three whole numbers whose sum is half of the head "
            f"size {head_dim}; restore it."
        )
    return tuple(own)


def vision_layout(vision: VisionConfig, num_ranks: int) -> Layout:
    """Lays out the encoder, whole on every rank."""
    return Layout(Mesh(dp=num_ranks, tp=1), vision_specs(vision), ((range(1),),))


def vision_specs(vision: VisionConfig) -> tuple[ParameterSpec, ...]:
    """Returns the specs of all of the encoder's parameters, whole, in model order."""
    hidden, inner, out = vision.hidden_size, vision.intermediate_size, vision.out_hidden_size
    specs: list[ParameterSpec] = []

    def whole(name: str, *shape: int, fused_key: str = "") -> None:
        is_matrix = len(shape) > 1
        options: dict[str, Any] = {"position": "first", "decay": is_matrix, "transposed": is_matrix}
        key = fused_key and f"{VISUAL}{fused_key}"
        specs.append(ParameterSpec(f"{VISUAL}{name}", shape, fused_key=key, **options))

    whole("patch_embed.proj.weight", hidden, vision.patch_values)
    for layer in range(vision.depth):
        own = f"blocks.{layer}."
        whole(f"{own}norm1.weight", hidden)
        whole(f"{own}norm2.weight", hidden)
        whole(f"{own}attn.qkv.weight", 3 * hidden, hidden)
        whole(f"{own}attn.qkv.bias", 3 * hidden)
        whole(f"{own}attn.proj.weight", hidden, hidden)
        whole(f"{own}attn.proj.bias", hidden)
        for name in ("gate_proj", "up_proj"):
            whole(f"{own}mlp.{name}.weight", inner, hidden, fused_key=f"{own}mlp.gate_up.weight")
        for name in ("gate_proj", "up_proj"):
            whole(f"{own}mlp.{name}.bias", inner, fused_key=f"{own}mlp.gate_up.bias")
        whole(f"{own}mlp.down_proj.weight", hidden, inner)
        whole(f"{own}mlp.down_proj.bias", hidden)
    merged = vision.merged * hidden
    whole("merger.ln_q.weight", hidden)
    whole("merger.mlp.0.weight", merged, merged)
    whole("merger.mlp.0.bias", merged)
    whole("merger.mlp.2.weight", out, merged)
    whole("merger.mlp.2.bias", out)
    return tuple(specs)


def num_vision_parameters(vision: VisionConfig) -> int:
    return sum(prod(spec.shape) for spec in vision_specs(vision))
