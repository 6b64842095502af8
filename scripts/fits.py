"""Which Qwen2.5 fits how many devices: writes the table of docs/fits.md, and the plans in examples/ascend/*/README.md.

One of these has a table of what settings cost in seconds, too.

fits.py [--write] prints what the files should hold, or writes it. Everything is planned from shapes: no device is
needed, and none was used.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mindgrpo.cli.plan import print_plan, shapes_of
from mindgrpo.config import config_with, load_config
from mindgrpo.plan.fit import Change, Verdict, verdict
from mindgrpo.plan.memory import phase_needs
from mindgrpo.plan.run_plan import plan_run
from mindgrpo.plan.seconds import Roofline

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "fits.md"
EXAMPLES = ROOT / "examples" / "ascend"
BASE = EXAMPLES / "qwen2_5_7b_8npu" / "grpo_config.yaml"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of table -->)", re.DOTALL)
LONG_ROWS = re.compile(r"(?<=<!-- long rows -->\n).*?(?=<!-- end of long rows -->)", re.DOTALL)
OUTPUT = re.compile(r"(?<=```text\n).*?(?=```)", re.DOTALL)
COSTS = re.compile(r"(?<=<!-- costs -->\n).*?(?=<!-- end of costs -->)", re.DOTALL)
PHASES = ("reshard", "rollout", "reference", "update")


@dataclass(frozen=True)
class Case:
    """Layouts are (dp, tp, pp, and cp) and (dp, tp), that of the reference is the latter.

    `sharded` is the optimizer's state, over the replicas; `offloaded` are its moments; tokens of policy and reference
    are split.
    """

    size: str
    devices: int
    train: tuple[int, ...]
    infer: tuple[int, int]
    sharded: bool = False
    offloaded: bool = False
    splits_tokens: bool = False
    seq_length: int = 8192

    def words(self) -> list[str]:
        model = f"./model_configs/qwen_grpo/qwen2_5_{self.size}/finetune_qwen2_5_{self.size}.yaml"
        words = ["--actor_config.model_config", model]
        axes = ("data_parallel", "model_parallel", "pipeline_stage", "context_parallel")
        layouts = {"actor": self.train, "generate": self.infer, "ref": self.infer}
        for role, layout in layouts.items():
            for axis, degree in zip(axes, layout, strict=False):
                words += [f"--{role}_config.parallel_config.{axis}", str(degree)]
        keys = {
            "actor_config.enable_parallel_optimizer": self.sharded,
            "actor_config.optimizer.opt_offload": self.offloaded,
            "actor_config.parallel_config.use_seq_parallel": self.splits_tokens,
            "ref_config.parallel_config.use_seq_parallel": self.splits_tokens,
            "rl_config.seq_length": self.seq_length,
        }
        for key, value in keys.items():
            words += [f"--{key}", str(value).lower()]
        return words


CASES = (
    Case("7b", 8, (2, 4, 1), (2, 4)),
    Case("7b", 8, (2, 4, 1), (2, 4), sharded=True),
    Case("7b", 8, (1, 4, 2), (2, 4)),
    Case("7b", 16, (2, 4, 2), (4, 4)),
    Case("7b", 64, (8, 4, 2), (16, 4)),
    Case("7b", 64, (8, 4, 2), (16, 4), sharded=True),
    Case("32b", 8, (1, 8, 1), (1, 8)),
    Case("32b", 16, (1, 8, 2), (2, 8)),
    Case("32b", 64, (4, 8, 2), (8, 8)),
    Case("32b", 64, (4, 8, 2), (8, 8), sharded=True),
    Case("72b", 8, (1, 8, 1), (1, 8)),
    Case("72b", 16, (1, 8, 2), (2, 8)),
    Case("72b", 64, (2, 8, 4), (8, 8)),
    Case("72b", 64, (2, 8, 4), (8, 8), sharded=True),
)
# What each setting saves of long rows.
LONGER = (
    *(
        replace(case, seq_length=seq_length, splits_tokens=split, offloaded=offloaded)
        for case in (Case("32b", 8, (1, 8, 1), (1, 8)), Case("72b", 16, (1, 8, 2), (2, 8)))
        for seq_length in (8192, 32768)
        for split, offloaded in ((False, False), (True, False), (True, True))
    ),
    *(
        Case(
            "32b",
            8 * cp,
            (1, 8, 1, cp),
            (cp, 8),
            sharded,
            not sharded,
            splits_tokens=True,
            seq_length=131072,
        )
        for cp in (2, 4)
        for sharded in (False, True)
    ),
)


def row(case: Case, with_length: bool = False) -> str:
    loaded = load_config(BASE, case.words())
    model, _ = shapes_of(loaded.config)
    plan = plan_run(loaded.config, model, case.devices)
    needs = {need.phase: need.total / 2**30 for need in phase_needs(plan)}
    sizes = " | ".join(f"{needs[phase]:.1f}" for phase in PHASES)
    fit = verdict(loaded, plan)
    trains = str(plan.train.mesh)
    trains += ", sequence parallel" * case.splits_tokens + ", optimizer sharded" * case.sharded
    trains += ", moments on the host" * case.offloaded
    length = f" | {case.seq_length:,}" if with_length else ""
    layouts = f"{trains} | {plan.infer.mesh}"
    return f"| {case.size.upper()} | {case.devices}{length} | {layouts} | {sizes} | {said(fit)} |"


def said(fit: Verdict) -> str:
    if fit.fits:
        return "fits"
    if not fit.remedies:
        return "no"
    first = fit.remedies[0]
    return f"no; {' and '.join(map(short, first.changes))}: {first.need.total / 2**30:.1f}"


def short(change: Change) -> str:
    """Its key, or in words what many keys do."""
    if len(change.values) > 1:
        return change.cost.partition(":")[0]
    ((key, value),) = change.values.items()
    return f"`--{key} {str(value).lower()}`"


def table(cases: Sequence[Case], with_length: bool = False) -> str:
    length = ["tokens a row"] if with_length else []
    head = ["model", "devices", *length, "trains in", "generates in", *PHASES, "58 GiB a device"]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return "\n".join([*lines, *(row(case, with_length) for case in cases), ""])


# Settings of BASE that are changed, and to what.
SETTINGS = {
    "": {},
    "two pipeline stages": {
        "actor_config.parallel_config.data_parallel": 1,
        "actor_config.parallel_config.pipeline_stage": 2,
    },
    "`pack_num: 1`": {"rl_config.pack_num": 1},
    "two samples an update (`updates_per_rollout: 32`)": {"rl_config.updates_per_rollout": 32},
}


def costs() -> str:
    """Formats the seconds of BASE's step with each of SETTINGS, and with all of them."""
    loaded = load_config(BASE)
    everything = {key: value for values in SETTINGS.values() for key, value in values.items()}
    columns = ("rollout", "reference", "old_logps", "update", "optimizer")
    lines = [f"| changed | a step | {' | '.join(columns)} |", f"|{' --- |' * (len(columns) + 2)}"]
    for name, values in (SETTINGS | {"all of them": everything}).items():
        config = config_with(loaded, values).config
        step = Roofline(plan_run(config, shapes_of(config)[0], None)).step()
        by_phase = {phase.phase: phase.seconds for phase in step.phases}
        seconds = " | ".join(f"{by_phase.get(phase, 0.0):.1f}" for phase in columns)
        lines.append(f"| {name or 'nothing'} | {step.total:.1f} | {seconds} |")
    return "\n".join([*lines, ""])


def plan_of(config: Path) -> str:
    """What `plan` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        print_plan(load_config(config))
    return printed.getvalue()


def filled(where: re.Pattern[str], text: str, page: Path) -> str:
    return where.sub(lambda _: text, page.read_text(encoding="utf-8"))


def pages() -> Iterator[tuple[Path, str]]:
    """Each file with what it should hold. Has to run in the repository's folder, where paths of examples count from."""
    longer = table(LONGER, with_length=True)
    yield PAGE, LONG_ROWS.sub(lambda _: longer, filled(TABLE, table(CASES), PAGE))
    for config in sorted(EXAMPLES.glob("*/grpo_config.yaml")):
        page = config.with_name("README.md")
        yield page, COSTS.sub(lambda _: costs(), filled(OUTPUT, plan_of(config), page))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the files instead of printing")
    write = parser.parse_args().write
    for path, text in pages():
        if write:
            path.write_text(text, encoding="utf-8")
        else:
            print(text)


if __name__ == "__main__":
    main()
