"""mindgrpo against its peers, alternating in one go: ratios as one JSON line.

compare.py [--peers DIR] [--only step,generate,ragged,ranks] [--rounds 2] [--steps 5] runs ours, the peer, ours, the
peer ... each in a process of its own, and divides the medians over all rounds. PEERS is what peers/setup.sh made.
Refuses to compare figures of different runs, and to call a target met: it prints both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from work import refuse

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Contestant:
    """`environment` is a folder of PEERS, or "" for this one; `figure` is a list in its JSON line, a run an entry."""

    name: str
    environment: str
    program: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contest:
    """Ours first. `target` bounds our figure over a peer's: seconds from above, tokens a second from below."""

    contestants: tuple[Contestant, ...]
    targets: dict[str, float]
    seconds: bool


OURS = Contestant("mindgrpo", "", "step.py")
RANKS = ("--ranks", "8", "--train", "1,4,2", "--infer", "2,4")
# As many parameters a token with experts and without.
MIXTURE = ("--work", str(HERE / "work_qwen3_moe.json"))
DENSE = ("--work", str(HERE / "work_qwen3.json"))
SMOLLM2 = ("--work", str(HERE / "work_smollm2.json"))
GENERATORS = (
    Contestant("mindgrpo", "", "generate.py"),
    Contestant("transformers", "trl", "peers/hf_generate.py"),
    Contestant("vllm", "vllm", "peers/vllm_generate.py"),
)
CONTESTS = {
    "step": Contest((OURS, Contestant("trl", "trl", "peers/trl_step.py")), {"trl": 0.33}, True),
    "generate": Contest(GENERATORS, {"transformers": 1.5, "vllm": 1.2}, False),
    "ragged": Contest(
        tuple(Contestant(g.name, g.environment, g.program, ("--ragged",)) for g in GENERATORS),
        {"transformers": 2.0},
        False,
    ),
    "sft": Contest(
        (
            Contestant("mindgrpo", "", "sft_step.py", SMOLLM2),
            Contestant("trl", "trl", "peers/trl_sft_step.py", SMOLLM2),
        ),
        {"trl": 0.5},
        True,
    ),
    "sft_bfloat16": Contest(
        (
            Contestant(
                "mindgrpo", "", "sft_step.py", (*SMOLLM2, "--float32_matmul_precision", "medium")
            ),
            Contestant("trl", "trl", "peers/trl_sft_step.py", (*SMOLLM2, "--bf16")),
        ),
        {"trl": 0.5},
        True,
    ),
    "ranks": Contest(
        (Contestant("mindgrpo 8 ranks", "", "step.py", RANKS), OURS), {"mindgrpo": 1.6}, True
    ),
    "experts": Contest(
        (
            Contestant("8 experts, 2 a token", "", "step.py", MIXTURE),
            Contestant("dense", "", "step.py", DENSE),
        ),
        {"dense": 1.3},
        True,
    ),
    "decode_experts": Contest(
        (
            Contestant("8 experts, 2 a token", "", "generate.py", MIXTURE),
            Contestant("dense", "", "generate.py", DENSE),
        ),
        {"dense": 1 / 1.3},
        False,
    ),
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("MINDGRPO_PEERS", Path.home() / ".cache" / "mindgrpo-peers")
    parser.add_argument("--peers", type=Path, default=Path(default))
    parser.add_argument("--work", type=Path, default=HERE / "work.json")
    parser.add_argument("--only", default=",".join(CONTESTS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="timed runs a round")
    given = parser.parse_args()
    given.only = given.only.split(",")
    wrong = [name for name in given.only if name not in CONTESTS]
    if wrong:
        refuse(f"--only names '{wrong[0]}', but must be of {', '.join(CONTESTS)}.")
    if given.rounds < 2 or given.rounds * given.steps < 5:
        refuse("--rounds must be at least 2 and --rounds x --steps at least 5.")
    return given


def run(contestant: Contestant, given: argparse.Namespace) -> dict[str, Any]:
    """One process of `contestant`; everybody's threads are their own default."""
    python = Path(sys.executable)
    if contestant.environment:
        python = given.peers / contestant.environment / "bin" / "python"
        if not python.exists():
            refuse(f"There is no {python}: make it with 'bash scripts/bench/peers/setup.sh'.")
    count = "--steps" if "step" in contestant.program else "--repeats"
    words = [str(python), str(HERE / contestant.program), "--work", str(given.work)]
    words += [*contestant.arguments, count, str(given.steps)]
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    if contestant.environment:
        environment.pop("PYTHONPATH", None)
    ended = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        refuse(f"{contestant.name} ended with status {ended.returncode}: {' '.join(words)}")
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def compare(contest: Contest, given: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {c.name: [] for c in contest.contestants}
    for _ in range(given.rounds):
        for contestant in contest.contestants:
            figures = run(contestant, given)
            runs[contestant.name].append(figures)
            print(f"{contestant.name}: {brief(figures)}", file=sys.stderr, flush=True)
    medians = {name: figure(found, contest.seconds) for name, found in runs.items()}
    first = contest.contestants[0].name
    ratios = {name: medians[first] / medians[name] for name in contest.targets}
    limit = "at most" if contest.seconds else "at least"
    return {
        "unit": "seconds a step" if contest.seconds else "tokens a second",
        "medians": medians,
        "ratios": ratios,
        "targets": {name: f"{limit} {value:g}" for name, value in contest.targets.items()},
    }


def figure(found: Sequence[dict[str, Any]], seconds: bool) -> float:
    """The median over the timed runs of all rounds."""
    if seconds:
        return statistics.median(s for figures in found for s in figures["steps_s"])
    timed = [s for figures in found for s in figures["seconds"]]
    return float(found[0]["tokens"]) / statistics.median(timed)


def brief(figures: dict[str, Any]) -> str:
    keys = ("median_step_s", "min_step_s", "phases", "tokens_per_s", "tokens_per_s_without_logps")
    return json.dumps({key: figures[key] for key in keys if figures.get(key)})


def main() -> None:
    given = options()
    results = {name: compare(CONTESTS[name], given) for name in given.only}
    print(json.dumps({"bench": "compare", "cores": os.cpu_count(), **results}))


if __name__ == "__main__":
    main()
