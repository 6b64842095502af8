"""Prompts with images: features from the rank take the places of placeholders; vLLM processes and encodes nothing.

vLLM gets an input that is already processed, of ids that are already expanded, so that no second expansion can happen.
"""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindgrpo_engine.protocol import Message, UserFailure

MISSING = re.compile(r"operator torchvision::(\w+) does not exist")
# Of the environment; rollout/vllm/install.py makes it.
FOLDER = Path(sys.prefix, "images")


def prepare_torchvision() -> None:
    """Makes torchvision importable, whatever torch it was built for. Raises UserFailure without it.

    vLLM's module of Qwen2.5-VL imports it. Its Python code registers operators that it takes from a library, which a
    build for another torch than the one that is installed cannot load; nothing here calls them, so they are declared.
    """
    import torch

    if FOLDER.is_dir():
        sys.path.append(str(FOLDER))
    library = torch.library.Library("torchvision", "FRAGMENT")
    # Declarations last as long as this.
    prepare_torchvision.library = library  # type: ignore[attr-defined]
    declared = set[str]()
    while True:
        try:
            importlib.import_module("torchvision")
            return
        except ModuleNotFoundError as error:
            raise UserFailure(
                f"a model that sees images needs the package {error.name} in vLLM's environment: make that anew with "
                "'bash scripts/setup_env.sh --vllm', or install the package there"
            ) from error
        except RuntimeError as error:
            missing = MISSING.search(str(error))
            if missing is None or missing[1] in declared:
                raise
            declared.add(missing[1])
            library.define(f"{missing[1]}(Tensor self) -> Tensor")


def register_model() -> None:
    """Gives vLLM its class of the model, which it would import in a new process to look at it, without declarations."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Model

    ModelRegistry.register_model(Model.__name__, Model)


@dataclass(frozen=True)
class Features:
    """Features of the images of a request, float32 [features, H]: `token` stands for one in ids, and `merge` is the
    side of the patches that became one."""

    rows: Any
    token: int
    merge: int

    @classmethod
    def read(cls, request: Message, images: Message | None) -> Features | None:
        """Reads the file that the rank wrote; None if no prompt has an image."""
        if images is None or request.get("features") is None:
            return None
        import numpy as np

        return cls(np.load(request["features"]), images["token"], images["merge"])

    def prompt(self, request: Message) -> Any:
        """Returns vLLM's input of a prompt with images."""
        import torch
        from vllm.inputs.engine import mm_input
        from vllm.model_executor.models.qwen2_vl import _create_qwen2vl_field_factory
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        images = request["images"]
        sizes = [rows * columns for rows, columns in (image["grid"] for image in images)]
        grids = torch.tensor(
            [[1, *(side * self.merge for side in image["grid"])] for image in images]
        )
        starts = [image["first"] for image in images]
        rows = [self.rows[a : a + n] for a, n in zip(starts, sizes, strict=True)]
        embeds = torch.cat([torch.from_numpy(own) for own in rows])
        config = _create_qwen2vl_field_factory(self.merge)({"image_grid_thw": grids})
        fields = {"image_embeds": embeds, "image_grid_thw": grids}
        items = MultiModalKwargsItems.from_hf_inputs(fields, config)
        ranges = [
            PlaceholderRange(offset=image["offset"], length=size)
            for image, size in zip(images, sizes, strict=True)
        ]
        names = [image["name"] for image in images]
        return mm_input(request["prompt"], items, {"image": names}, {"image": ranges})
