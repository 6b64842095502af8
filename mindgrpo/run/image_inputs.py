"""Reads and checks what a run with images needs beside its rows: how patches are made, and the vision encoders."""

from __future__ import annotations

from dataclasses import replace

from mindgrpo.config import Config
from mindgrpo.data.image_prompts import RunImages
from mindgrpo.data.pixels import read_pixel_rule
from mindgrpo.errors import UserError
from mindgrpo.models.decoder_config import DecoderConfig
from mindgrpo.models.vision_config import vision_specs
from mindgrpo.plan.run_plan import RunPlan
from mindgrpo.weights.pretrained import check_tensors, encoder_files

SAME_ENCODER = "name a model that was trained from the same one with its encoder frozen."


def read_images(config: Config, model: DecoderConfig, longest: int) -> RunImages | None:
    """Reads how the model makes patches of images; None for a model that sees none. Raises UserError.

    By default an image has at most `longest` tokens.
    """
    if model.vision is None:
        return None
    rl, directory = config.rl_config, config.actor_config.load
    rule = read_pixel_rule(directory, rl.min_pixels, rl.max_pixels)
    vision = model.vision
    sizes = rule.patch_size, rule.merge_size, rule.temporal_patch_size
    if sizes != (vision.patch_size, vision.merge_size, vision.temporal_patch_size):
        raise UserError(
            f"'{directory}': preprocessor_config.json makes patches of {sizes} (patch_size, merge_size, "
            "temporal_patch_size), but vision_config in config.json has other sizes; restore both files."
        )
    if rl.max_pixels is None:
        most = max(rule.min_pixels, longest * rule.token_side**2)
        rule = replace(rule, max_pixels=min(rule.max_pixels, most))
    return RunImages(rule, vision.image_token)


def check_encoders(plan: RunPlan) -> None:
    """Checks the vision encoder's tensors, and that models beside the policy can have its features.

    Raises UserError.
    """
    config, model = plan.config, plan.model
    if model.vision is not None:
        check_tensors(config.actor_config.load, vision_specs(model.vision))
    if model.vision is not None and plan.reward_models:
        raise UserError(
            f"{plan.reward_models[0].key}.load '{plan.reward_models[0].load}' is a model of text, but the policy's "
            "prompts may have images, which reward models are not given yet; set reward_config.verifier_function to a "
            "function, which gets the row's images."
        )
    others = plan.other_models
    for key, load, shapes in (
        ("ref_config.load", config.reference_load, others.teacher or model),
        ("critic_config.load", config.critic_load, others.critic or model),
    ):
        own = config.actor_config.load
        is_beside = plan.reference if key == "ref_config.load" else plan.critic
        if is_beside is None or load == own or (model.vision or shapes.vision) is None:
            continue
        encoder, theirs = encoder_files(own), encoder_files(load)
        if encoder is None or theirs is None:
            sees, blind = (own, load) if theirs is None else (load, own)
            raise UserError(
                f"{key} is '{load}', but '{sees}' sees images and '{blind}' does not; {SAME_ENCODER}"
            )
        name = encoder.differing(theirs)
        if name is not None:
            raise UserError(
                f"{key} '{load}' has another vision encoder than actor_config.load '{own}' (first: {name}), but images "
                f"are encoded once for both; {SAME_ENCODER}"
            )
