"""What transformers computed of the models of tests/golden/, beside what ranks compute together, for job.py.

Judges nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import cases as c
import numpy as np
from golden_images import SAMPLES, GoldenImages, read_golden_images
from golden_models import each_in_its_row, read_golden, read_scores, scores_of, train

from mindgrpo.backend.contract import Backend
from mindgrpo.grpo.image_encoder import ImageEncoder
from mindgrpo.models.decoder_config import decoder_config, read_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.weights.pretrained import fill_random, load_weights


def golden_gaps(backend: Backend) -> dict[str, Any]:
    """By case of this world: the largest gap of this rank's log-probs, and of each of its parts of a gradient, of the
    tensor's largest one.
    """
    world = backend.world_size, "shared_memory" if backend.shares_memory else "device"
    return {case.name: _gaps(backend, case) for case in c.GOLDEN if case.world == world}


def golden_scores(folder: Path, backend: Backend) -> dict[str, Any]:
    """By layout of this world: scores of transformers' classifier, and those of random weights, with every bit."""
    golden = read_scores(c.SCORED_FAMILY)
    if backend.rank == 0:
        golden.write(folder)
    backend.world.barrier()
    random = decoder_config(c.SHARDED_MODEL, "the test's model").with_scalar_head()
    of_golden = read_config(folder), partial(load_weights, directory=folder)
    of_random = random, partial(fill_random, seed=3, scale=0.2)
    earlier, backend.kernels.batch_invariant = backend.kernels.batch_invariant, True
    found = {}
    for name, sizes in c.SCORED.items():
        if prod(sizes) == backend.world_size:
            with_mesh = golden.texts, backend, Mesh(*sizes)
            found[name] = {
                "golden": scores_of(*of_golden, *with_mesh),
                "random": [score.hex() for score in scores_of(*of_random, *with_mesh)],
            }
    backend.kernels.batch_invariant = earlier
    return found


def image_features(backend: Backend) -> list[str]:
    """Digests of the features of the golden model's images, which these ranks encode together."""
    golden = read_golden_images()
    earlier, backend.kernels.batch_invariant = backend.kernels.batch_invariant, True
    encoder = ImageEncoder(golden.config.vision, golden.run_images, backend)
    load_weights(encoder.weights, golden.directory)
    prompts = [golden.prompt(k) for k in range(SAMPLES)]
    encoder.encode(prompts, False, encoder.weights.pool.load)
    backend.kernels.batch_invariant = earlier
    rows = [encoder.features.rows(golden.table.ids(i)) for i in range(len(golden.grids))]
    return [sha256(features.tobytes()).hexdigest() for features in rows]


def _gaps(backend: Backend, case: c.Golden) -> dict[str, Any]:
    sees_images = case.family == c.SEES_IMAGES
    golden = read_golden_images() if sees_images else read_golden(case.family)
    images = golden.images if isinstance(golden, GoldenImages) else None
    ep, etp = case.experts
    mesh = replace(Mesh(*case.mesh), ep=ep, etp=etp)
    splits = mesh.tp > 1
    layout = Layout.of(mesh, parameter_specs(golden.config, splits), 0, splits)
    policy, logps = train(golden, backend, each_in_its_row(golden.rollout), layout, images)
    policy.gradient_norm()
    gradients, whole = policy.gradients, golden.gradients
    with gradients.on_host() as host:
        gaps = {
            name: np.abs(part - whole[name][gradients.boxes[name].slices]).max()
            / np.abs(whole[name]).max()
            for name, part in host.hf_views.items()
            if name in whole
        }
    found = [np.abs(own - golden.log_probs(i)).max() for i, own in logps.items()]
    return {
        "samples": len(found),
        "logps": float(max(found, default=0.0)),
        "gradients": {name: float(gap) for name, gap in gaps.items()},
    }
