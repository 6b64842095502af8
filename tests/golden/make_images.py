"""Makes tests/golden/qwen2_5_vl/: a tiny random vision-language model, and what transformers computes with it.

Run by hand, in an environment with torch and transformers 5.24.0: `python tests/golden/make_images.py`. Patches are
random numbers: how pixels become patches is compared in test_pixels.py. Prints how far float32 is from float64.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

HERE = Path(__file__).resolve().parent / "qwen2_5_vl"
IMAGE, VIDEO, START, END, WORDS = 90, 91, 92, 93, 90
TEXT = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]},
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "window_size": 16,
    "fullatt_block_indexes": [1, 3],
}
# Of patches; windows of 4 x 4 are cut at both edges of the second and of the third.
GRIDS = ((6, 4), (10, 8), (2, 14))
# The images of each sample's prompt, in order; the third sample is text, and the second has one image twice.
IMAGES = ((0,), (1, 0, 1), (), (2,))


def random_model() -> Qwen2_5_VLForConditionalGeneration:
    config = Qwen2_5_VLConfig(
        text_config=TEXT,
        vision_config=VISION,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    model = Qwen2_5_VLForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn_like(p)
            if (
                name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "ln_q.weight"))
                or "layernorm" in name
            ):
                p.copy_(1 + 0.3 * noise)
            elif name.endswith(".bias"):
                p.copy_(0.3 * noise)
            elif "patch_embed" in name:
                p.copy_(0.1 * noise)
            else:
                p.copy_((0.2 if "visual" in name else 0.16) * noise)
    return model


def features_of(
    model: Qwen2_5_VLForConditionalGeneration, patches: np.ndarray, grid: tuple
) -> torch.Tensor:
    dtype = model.lm_head.weight.dtype
    pixels = torch.from_numpy(patches).to(dtype)
    return model.model.visual(pixels, torch.tensor([[1, *grid]])).pooler_output


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rng = np.random.default_rng(1)
    model = random_model()
    model.save_pretrained(HERE)
    (HERE / "generation_config.json").unlink(missing_ok=True)
    patches = [rng.normal(size=(h * w, 96)).astype(np.float32) for h, w in GRIDS]
    golden = {f"patches/{i}": own for i, own in enumerate(patches)}
    golden["grids"] = np.array(GRIDS, np.int32)
    features = [features_of(model, own, grid) for own, grid in zip(patches, GRIDS, strict=True)]
    for i, own in enumerate(features):
        golden[f"features/{i}"] = own.detach().numpy()
    in_float64 = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        HERE, dtype=torch.float64, attn_implementation="eager"
    )
    exact = [features_of(in_float64, own, grid) for own, grid in zip(patches, GRIDS, strict=True)]
    gap = max(
        float((one - two).detach().abs().max()) for one, two in zip(features, exact, strict=True)
    )
    largest = max(float(own.detach().abs().max()) for own in features)
    print("features up to", largest, "float64's gap", gap)

    def words(count: int) -> list[int]:
        return rng.integers(0, WORDS, count).tolist()

    def image(i: int) -> list[int]:
        return [IMAGE] * (GRIDS[i][0] * GRIDS[i][1] // 4)

    # Two images without a token between them, and a completion that holds the token of images.
    prompts = [
        [*words(5), START, *image(0), END, *words(4)],
        [*words(3), START, *image(1), END, *words(2), START, *image(0), *image(1), END, *words(5)],
        words(6),
        [*words(2), START, *image(2), END, *words(1)],
    ]
    completions = [words(9), words(7), words(8), [*words(3), IMAGE, *words(3)]]
    total = torch.zeros(())
    for k, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = torch.tensor([prompt + completion])
        kinds = torch.zeros_like(ids)
        kinds[0, : len(prompt)] = torch.tensor(prompt) == IMAGE
        grid = torch.tensor([[1, *GRIDS[i]] for i in IMAGES[k]])
        position = torch.arange(ids.shape[1])[None, None].repeat(3, 1, 1)
        if k == 1:
            # get_rope_index takes the adjacent images for one, so it is asked about a token between them, too.
            apart = prompt.copy()
            at = 3 + 2 + len(image(1)) + 2 + 1 + len(image(0))
            apart.insert(at, 0)
            asked = torch.tensor([apart + completion])
            own_kinds = torch.zeros_like(asked)
            own_kinds[0, : len(apart)] = torch.tensor(apart) == IMAGE
            position, _ = model.model.get_rope_index(asked, own_kinds, grid)
            position = torch.cat([position[:, :, :at], position[:, :, at + 1 :] - 1], 2)
        elif IMAGES[k]:
            position, _ = model.model.get_rope_index(ids, kinds, grid)
        embeds = model.model.get_input_embeddings()(ids)
        if IMAGES[k]:
            own = torch.cat([features[i] for i in IMAGES[k]])
            mask = (kinds[..., None] == 1).expand_as(embeds)
            embeds = embeds.masked_scatter(mask, own)
        hidden = model.model.language_model(inputs_embeds=embeds, position_ids=position)
        logits = model.lm_head(hidden.last_hidden_state)[0]
        logps = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        logps = logps.gather(1, torch.tensor(completion)[:, None])[:, 0]
        total = total + logps.sum()
        golden |= {
            f"prompt/{k}": np.array(prompt, np.int32),
            f"completion/{k}": np.array(completion, np.int32),
            f"images/{k}": np.array(IMAGES[k], np.int32),
            f"positions/{k}": position[:, 0].T.numpy().astype(np.int32),
            f"logps/{k}": logps.detach().numpy(),
            f"logits/{k}": logits.detach().numpy(),
        }
        print("sample", k, "largest logit", float(logits.abs().max()))
    total.backward()
    names = {id(p): name for name, p in model.named_parameters()}
    for p in model.parameters():
        name = names[id(p)]
        if ".visual." not in name:
            golden[f"gradient/{name.replace('model.language_model.', 'model.')}"] = p.grad.numpy()
    for k in (0, 2, 3):
        ids = torch.tensor([prompts[k]])
        inputs = {}
        if IMAGES[k]:
            inputs = {
                "pixel_values": torch.from_numpy(np.concatenate([patches[i] for i in IMAGES[k]])),
                "image_grid_thw": torch.tensor([[1, *GRIDS[i]] for i in IMAGES[k]]),
                "mm_token_type_ids": (ids == IMAGE).int(),
            }
        with torch.no_grad():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=12,
                do_sample=False,
                pad_token_id=0,
                **inputs,
            )
        golden[f"greedy/{k}"] = made[0, ids.shape[1] :].numpy().astype(np.int32)
        print("greedy", k, golden[f"greedy/{k}"].tolist())
    np.savez_compressed(HERE / "golden.npz", **golden)


if __name__ == "__main__":
    main()
