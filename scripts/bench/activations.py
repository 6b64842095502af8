"""Memory that graphs take beside all pools, planned and measured: updates and forward passes of small models.

activations.py [--shapes square,...] [--recompute false,true] [--backend shared_memory] [--ranks 2 [--split]] prints one
JSON line. Each case is a run of so many ranks of a layer, with sequence parallelism or without, with random weights;
its figures are those of the first rank. Measured are the pages of MindSpore's own memory that one call touches
(`Referenced` of /proc/self/smaps after writing 1 to clear_refs), in its second step, when everything is compiled.
Weights, gradients and moments lie in memory of their own; so does what C kernels of experts work in, which is planned
and not measured: 4 bytes a width of a token's experts forward, 16 backward. Refuses to say anything of accelerators.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import numpy as np
from work import Work

from mindgrpo.grpo.state import State

# What MindSpore takes from the system at once, and the flag of madvise(2) that keeps it a mapping of its own.
BLOCK_BYTES, NO_HUGE_PAGES, FLAG = 1 << 30, 15, "nh"


def model(
    hidden: int, inner: int, layers: int, heads: int, kv: int, vocabulary: int
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }


SHAPES = {
    "square": Work(model(256, 704, 4, 8, 4, 2048), 2, 4, 64, 513),
    "wide": Work(model(256, 1408, 6, 8, 4, 512), 2, 4, 64, 513),
    "deep": Work(model(512, 1408, 6, 8, 2, 2048), 2, 4, 64, 257),
    "long": Work(model(384, 1024, 3, 6, 6, 2048), 2, 4, 64, 785),
    "vocabulary": Work(model(256, 704, 2, 8, 4, 32768), 2, 4, 64, 513),
    "short": Work(model(256, 704, 4, 8, 4, 2048), 2, 4, 64, 113),
}


# Of which a token passes two of eight.
EXPERTS = {
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 704,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SHAPES["experts"] = Work(model(256, 704, 4, 8, 4, 2048) | EXPERTS, 2, 4, 64, 513)


def own_block() -> None:
    """Makes MindSpore take its memory, and keeps that apart from what the process maps next to it."""
    from mindspore import Tensor, ops

    ops.add(Tensor(np.ones(9, np.float32)), 1.0).asnumpy()
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split()
        start, stop = (int(word, 16) for word in words[0].split("-"))
        if stop - start >= BLOCK_BYTES and len(words) == 5 and words[1].startswith("rw"):
            span = ctypes.c_void_p(start), ctypes.c_size_t(stop - start)
            if ctypes.CDLL(None).madvise(*span, NO_HUGE_PAGES) == 0:
                return
    raise RuntimeError("MindSpore's memory is not one block: nothing can be measured")


def touched_bytes() -> int:
    total = referenced = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, rest = line.partition(":")
        if key == "Referenced":
            referenced = int(rest.split()[0]) * 1024
        elif key == "VmFlags" and FLAG in rest.split():
            total += referenced
    return total


def measured(call: Callable[..., Any], kept: dict[str, int], name: str) -> Callable[..., Any]:
    """`call`, of which the last time's figure is kept."""

    def around(*arguments: Any) -> Any:
        Path("/proc/self/clear_refs").write_text("1")
        result = call(*arguments)
        kept[name] = touched_bytes()
        return result

    return around


def configuration(work: Work, recompute: Any, given: argparse.Namespace) -> Any:
    import assembly

    from mindgrpo.config import Config

    layout = (1, given.ranks, 1), (1, given.ranks)
    tree = assembly.configuration(work, *layout, assembly.Rows(4, 1)).model_dump(by_alias=True)
    key = "recompute" if isinstance(recompute, bool) else "select_recompute"
    tree["actor_config"]["recompute_config"] = {key: recompute}
    tree["actor_config"]["lora"] = {"rank": given.lora_rank}
    tree["actor_config"]["parallel_config"]["use_seq_parallel"] = given.split
    tree["context"] |= {"device_target": "CPU", "backend": given.backend}
    return Config.model_validate(tree)


def measure(work: Work, recompute: Any, given: argparse.Namespace) -> None:
    import assembly

    from mindgrpo.backend.connect import connect
    from mindgrpo.backend.targets import choose_target
    from mindgrpo.plan.activations import activation_bytes

    backend = connect(choose_target("CPU", given.backend), dict(os.environ))
    own_block()
    config = configuration(work, recompute, given)
    plan = assembly.plan_of(config, assembly.model_of(work), given.ranks)
    roles = assembly.roles_of(plan, backend)
    stepper = assembly.stepper_of(roles, work)
    seen: dict[str, int] = {}
    policy: Any = roles.policy
    reference: Any = roles.reference
    policy.accumulate = measured(policy.accumulate, seen, "update")
    forward = reference.pipeline
    forward.log_probs = measured(forward.log_probs, seen, "reference")
    state = State()
    for _ in range(2):
        stepper.run(state)
    planned = activation_bytes(plan)
    if backend.rank == 0:
        launching.give_figures(
            {
                phase: {
                    "planned": planned[phase],
                    "measured": seen[phase],
                    "ratio": planned[phase] / seen[phase],
                }
                for phase in ("update", "reference")
            }
        )
    backend.close()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="square,wide,deep", help=f"of {', '.join(SHAPES)}")
    parser.add_argument(
        "--recompute", default="false,true", help='JSON values, such as true or ["mlp"]'
    )
    parser.add_argument("--backend", default="shared_memory", help="or device")
    parser.add_argument("--lora_rank", type=int, help="trains adapters of this rank alone")
    parser.add_argument("--ranks", type=int, default=1, help="of each layer")
    parser.add_argument("--split", action="store_true", help="with sequence parallelism")
    return parser.parse_args()


def main() -> None:
    given = options()
    shapes = given.shapes.split(",")
    settings = json.loads(f"[{given.recompute}]")
    if launching.is_rank():
        measure(SHAPES[shapes[0]], settings[0], given)
        return
    cases = []
    for shape in shapes:
        for recompute in settings:
            words = [
                "--shapes",
                shape,
                "--recompute",
                json.dumps(recompute),
                "--backend",
                given.backend,
                "--ranks",
                str(given.ranks),
                *(["--split"] if given.split else []),
            ]
            if given.lora_rank is not None:
                words += ["--lora_rank", str(given.lora_rank)]
            figures = launching.run_on_ranks(__file__, words, given.ranks)
            cases.append({"shape": shape, "recompute": recompute, **figures})
    how = {name: getattr(given, name) for name in ("backend", "ranks", "split", "lora_rank")}
    print(json.dumps({"bench": "activations", **how, "cases": cases}))


if __name__ == "__main__":
    main()
