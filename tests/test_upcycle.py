"""A mixture of equal experts, which examples/grpo/upcycle.py makes, against transformers' values of the dense model.

Which experts a token passes does not matter then: this holds their sum and the gradients' way back, not the choice.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from golden_models import each_in_its_row, read_golden, train

from mindgrpo.backend.connect import RuntimeSettings, connect
from mindgrpo.backend.targets import SHARED_MEMORY
from mindgrpo.models.decoder_config import read_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout

UPCYCLE = Path(__file__).resolve().parents[1] / "examples" / "grpo" / "upcycle.py"


def upcycle(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(UPCYCLE), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_equal_experts_compute_the_dense_model_and_share_its_gradients(
    family: str, tmp_path: Path
) -> None:
    dense = read_golden(family)
    words = "--model", dense.directory, "--output", tmp_path, "--experts", 4, "--per_token", 2
    assert upcycle(*words).returncode == 0
    config = read_config(tmp_path)
    layout = Layout.of(Mesh(1, 1), parameter_specs(config))
    mixture = replace(dense, directory=tmp_path, config=config, layout=layout)
    backend = connect(SHARED_MEMORY, {}, RuntimeSettings(matmul_precision="highest"))
    policy, logps = train(mixture, backend, each_in_its_row(mixture.rollout))
    assert np.abs(np.stack(list(logps.values())) - dense.values["logps"]).max() < 1e-5
    made = policy.gradients.arrays.hf_views
    for name, expected in dense.gradients.items():
        found = made.get(name)
        if found is None:
            of_experts = made[name.replace(".mlp.", ".mlp.experts.")]
            assert all(np.abs(own).max() > 0 for own in of_experts), name
            found = of_experts.sum(0)
        assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max(), name
    backend.close()


def test_a_model_that_has_no_family_with_experts_is_refused_in_a_sentence(tmp_path: Path) -> None:
    words = "--model", read_golden("qwen2").directory, "--output", tmp_path
    ended = upcycle(*words)
    assert ended.returncode == 1
    assert "model_type is 'qwen2', but only llama and qwen3 can be turned" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
