"""Log-probs of every token that the policy wrote in conversations of four turns, against transformers on the whole.

Runs where $MINDGRPO_VLLM_PYTHON or .venv-vllm names a Python that has transformers. float32, the bundled model: the
largest difference measured was 3.5e-5, of log-probs down to -18.4.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine_process import Oracle
from engine_subject import EXACT, needs_vllm
from four_turns import LENGTH, LONG, conversations, log_probs, policy_of
from small_models import TINY

from mindgrpo.algorithm.loss_config import LossConfig
from mindgrpo.algorithm.packing import MicroShape
from mindgrpo.backend.cpu.backend import CpuBackend

pytestmark = needs_vllm


@pytest.mark.parametrize("shape", [MicroShape(1, LENGTH, 1), MicroShape(1, LONG)], ids=str)
def test_log_probs_are_transformers_on_the_whole_conversation(
    oracle: Oracle, shape: MicroShape
) -> None:
    rollout = conversations()
    found = log_probs(policy_of(CpuBackend({}), LossConfig(), shape), rollout)
    prompts, completions = rollout.prompt_ids, rollout.completion_ids
    rows = [np.concatenate(pair).tolist() for pair in zip(prompts, completions, strict=True)]
    tables = oracle.log_probs(TINY, 1.0, rows)
    gaps = []
    for i, (prompt, tokens) in enumerate(zip(prompts, completions, strict=True)):
        table = tables[i][len(prompt) - 1 : -1]
        gap = np.abs(table[np.arange(len(tokens)), tokens] - found[i])
        gaps.append(gap[rollout.action_mask[i]].max())
    sizes = [np.abs(own[mask]).max() for own, mask in zip(found, rollout.action_mask, strict=True)]
    print(f"largest difference {max(gaps):.1e}, of log-probs down to {-max(sizes):.1f}")
    assert max(gaps) < EXACT
