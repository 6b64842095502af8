"""Makes an update that was skipped again, in one process, and shows its numbers: `python -m mindgrpo replay DUMP`.

Computes with the weights that saw the batch, or with those of `--model`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindgrpo.algorithm import non_finite
from mindgrpo.algorithm.non_finite import NonFiniteUpdate
from mindgrpo.algorithm.sample import Rollout
from mindgrpo.cli.arguments import Arguments
from mindgrpo.cli.arguments import path as path_of
from mindgrpo.config import Config, load_config
from mindgrpo.errors import UserError
from mindgrpo.parallel.mesh import CONFIG_KEYS
from mindgrpo.run import batch_dump as dump
from mindgrpo.run.named_sources import fetch_local

ROLES = ("actor_config", "ref_config", "generate_config")


def parser() -> Arguments:
    flags = Arguments(prog="mindgrpo replay")
    flags.add_argument("dump", type=path_of, help="a run's dumps/step_* folder")
    flags.add_argument("--model", type=path_of, help="weights to use instead of the dump's own")
    flags.add_argument("--output", type=path_of, help="a new JSON file for what is printed")
    return flags


def main(argv: Sequence[str]) -> None:
    flags = parser().parse_args(list(argv))
    if flags.output and flags.output.exists():
        raise UserError(
            f"--output '{flags.output}' exists and is not overwritten; name a new file."
        )
    kept = dump.read(flags.dump)
    report = _report(kept)
    print("\n".join(_stored_lines(kept, report)))
    model = flags.model and fetch_local(str(flags.model), "model", "--model")
    report["replay"] = _again(kept, flags.dump, model)
    print("\n".join(f"{name}: {value}" for name, value in report["replay"].items()))
    if flags.output:
        flags.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _report(kept: dump.Dump) -> dict[str, Any]:
    about = kept.about
    return {
        "cause": about.cause,
        "step": about.step,
        "update": about.update,
        "samples": len(kept.batch),
        "members": len(about.members),
        "stored": {name: _figures(arrays) for name, arrays in _stored(kept)},
    }


def _stored(kept: dump.Dump) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Yields what is known of the samples, one array per sample."""
    for name, values in kept.rewards.items():
        yield f"rewards of {name}", list(np.asarray(values).reshape(-1, 1))
    yield "advantages", [np.atleast_1d(value) for value in kept.batch.advantages]
    yield "generator_logps", list(kept.batch.rollout.generator_logps)
    for name in dump.BATCH_BY_TOKEN:
        rows = getattr(kept.batch, name)
        if rows is not None:
            yield name, list(rows)


def _figures(arrays: list[np.ndarray]) -> dict[str, Any]:
    values = np.concatenate(arrays).astype(np.float64)
    good = values[np.isfinite(values)]
    bad = [i for i, array in enumerate(arrays) if not np.isfinite(array).all()]
    return {
        "count": int(values.size),
        "not_finite": int(values.size - good.size),
        "samples_not_finite": bad,
        "lowest": float(good.min()) if good.size else None,
        "highest": float(good.max()) if good.size else None,
    }


def _stored_lines(kept: dump.Dump, report: Mapping[str, Any]) -> Iterator[str]:
    yield f"step {report['step']}, update {report['update']}: {report['cause']}"
    yield f"{report['samples']} samples, {report['members']} of them in this update"
    for name, figures in report["stored"].items():
        line = f"  {name}: {figures['count']} numbers"
        if figures["lowest"] is not None:
            line += f" from {figures['lowest']:.6g} to {figures['highest']:.6g}"
        if figures["not_finite"]:
            samples = figures["samples_not_finite"]
            line += f", {figures['not_finite']} not finite, in samples {samples[:10]}"
        yield line
    suspects = {i for figures in report["stored"].values() for i in figures["samples_not_finite"]}
    for i in sorted(suspects)[:3]:
        if i < len(kept.about.texts):
            yield f"  sample {i}: {kept.about.texts[i]!r}"


def _again(kept: dump.Dump, folder: Path, model: Path | None) -> dict[str, Any]:
    weights = model or folder / dump.MODEL
    if not weights.is_dir():
        raise UserError(
            f"'{folder}' was kept without weights (rl_config.dump_weights); give those to use with --model."
        )
    # What computes is imported only where something is computed.
    from mindgrpo.algorithm.packing import PackedRollout
    from mindgrpo.backend.connect import RuntimeSettings, connect
    from mindgrpo.backend.targets import SHARED_MEMORY
    from mindgrpo.data.tokenizer import load_tokenizer
    from mindgrpo.grpo.build import make_policy
    from mindgrpo.grpo.inputs import sampling_params
    from mindgrpo.models.decoder_config import read_config
    from mindgrpo.models.pipeline import compute_log_probs
    from mindgrpo.models.precision import compute_dtype, matmul_precision
    from mindgrpo.plan.run_plan import plan_run
    from mindgrpo.training.update import update
    from mindgrpo.weights.pretrained import load_weights

    config = _alone(folder / dump.CONFIG)
    plan = plan_run(config, read_config(weights), 1)
    settings = RuntimeSettings(
        matmul_precision=matmul_precision(config), compute_dtype=compute_dtype(config)
    )
    backend = connect(SHARED_MEMORY, dict(os.environ), settings)
    policy = make_policy(plan, backend, sampling_params(config, load_tokenizer(weights)))
    load_weights(policy.weights if policy.adapters else policy.masters, weights)
    policy.masters_changed()
    policy.updates = kept.about.updates
    batch, members = kept.batch, kept.about.members
    packed = PackedRollout(batch.rollout)
    outcome: dict[str, Any] = {"weights": str(weights)}
    with policy.weights.on_host() as host:
        bad = non_finite.in_arrays(host.hf_views.items())
    if bad is not None:
        outcome["first number not finite in the weights"] = str(bad)
    logps = compute_log_probs(policy.pipeline, plan.train.mesh, backend, packed)
    outcome |= _compared(logps, batch.rollout)
    if np.isnan(batch.advantages).all() or not members:
        return outcome | {"update": "not made again: the batch was refused before its advantages"}
    try:
        report = update(policy, batch, packed, members, kept.about.lr)
    except NonFiniteUpdate as error:
        return outcome | {"update": f"refused again: {error.number}"}
    finally:
        backend.close()
    return outcome | {
        "update": "finite this time",
        "loss": report.loss,
        "grad_norm": report.grad_norm,
    }


def _compared(logps: Sequence[np.ndarray], rollout: Rollout) -> dict[str, Any]:
    rows = zip(logps, rollout.generator_logps, rollout.action_mask, strict=True)
    gaps = [np.abs(own - drawn)[mask] for own, drawn, mask in rows]
    largest = [float(gap.max()) if gap.size else 0.0 for gap in gaps]
    bad = [i for i, values in enumerate(logps) if not np.isfinite(values).all()]
    finite_gaps = [gap if np.isfinite(gap) else -1.0 for gap in largest]
    worst = int(np.argmax(finite_gaps))
    return {
        "samples whose log-probs are not finite now": bad,
        "largest gap to the generator's log-probs": f"{finite_gaps[worst]:.3g} (sample {worst})",
    }


def _alone(path: Path) -> Config:
    """Returns the run's configuration for one process: the layout changes nothing but where numbers are."""
    degrees = CONFIG_KEYS.values()
    words = [f"--{role}.parallel_config.{key}=1" for role in ROLES for key in degrees]
    words += [f"--{role}.parallel_config.pp_interleave_num=1" for role in ROLES[:2]]
    words += ["--actor_config.offset=0", "--rl_config.resume_training=false"]
    words += [f"--actor_config.lora.{key}=null" for key in ("rank", "alpha", "target_modules")]
    return load_config(path, words).config
