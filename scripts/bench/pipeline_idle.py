"""How long pipeline stages idle in the updates of a traced run, beside the formula of the schedule.

pipeline_idle.py TRACE prints one JSON line per update in a run's trace.json (profiler_config.profile) that compiled
nothing. Of the time that the busiest stage computes: `idle` is the rest of the time from the first pass to the last,
`formula` is (stages - 1) / (chunks micro-batches), which holds for stages that take equally long. `schedule` is what
the same passes leave idle in the schedule if hand-overs take no time. On a device, where graphs run while the host goes
on, passes are no times: use the device's own profile.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindgrpo.algorithm.schedule import Pass, pipeline_schedule

NAME = re.compile(r"(forward|backward) (\d+)(?:, chunk (\d+))?")
Bars = Mapping[Pass, tuple[float, float]]


def updates(events: list[dict[str, Any]]) -> list[dict[int, Bars]]:
    """The passes of each rank in each update, with their starts and seconds."""
    bars = [event for event in events if event["ph"] == "X"]
    by_rank: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for bar in bars:
        by_rank[bar["pid"]].append(bar)
    found: list[dict[int, Bars]] = []
    for rank, own in by_rank.items():
        phases = [bar for bar in own if bar["cat"] == "phase" and bar["name"] == "update"]
        for number, phase in enumerate(sorted(phases, key=lambda bar: bar["ts"])):
            inside = [b for b in own if phase["ts"] <= b["ts"] <= phase["ts"] + phase["dur"]]
            if number == len(found):
                found.append({})
            if any(bar["cat"] == "compile" for bar in inside):
                found[number][-1] = {}
            passes = {}
            for bar in inside:
                if match := NAME.fullmatch(bar["name"]):
                    kind, micro_batch, chunk = match.groups(default="0")
                    own_pass = Pass(kind, int(micro_batch), int(chunk))  # type: ignore[arg-type]
                    # Of several updates in a phase the last.
                    passes[own_pass] = bar["ts"] * 1e-6, bar["dur"] * 1e-6
            found[number][rank] = passes
    return [update for update in found if -1 not in update]


def in_schedule(stages: list[Bars], num_chunks: int, count: int) -> float:
    """Seconds of the passes in the schedule, where each waits for what it needs alone."""
    num_stages = len(stages)
    last = num_stages * num_chunks - 1
    left = [
        deque(action for action in actions if isinstance(action, Pass))
        for actions in pipeline_schedule(num_stages, num_chunks, count)
    ]
    clock, ended = [0.0] * num_stages, dict[tuple[str, int, int], float]()
    while any(left):
        for stage, own in enumerate(left):
            while own:
                kind, i, chunk = own[0]
                part = chunk * num_stages + stage
                source = part + (-1 if kind == "forward" else 1)
                if 0 <= source <= last and (kind, i, source) not in ended:
                    break
                _, seconds = stages[stage].get(own[0], (0.0, 0.0))
                clock[stage] = max(clock[stage], ended.get((kind, i, source), 0.0)) + seconds
                ended[kind, i, part] = clock[stage]
                own.popleft()
    return max(clock)


def main() -> None:
    events = json.loads(Path(sys.argv[1]).read_text())["traceEvents"]
    for update in updates(events):
        # One rank of each stage: those of a stage have equally many passes, and start at the same part of the model.
        ranks = sorted(update)
        first = {rank: min(start for start, _ in update[rank].values()) for rank in ranks}
        count = 1 + max(own.micro_batch for own in update[ranks[0]])
        num_chunks = 1 + max(own.chunk for own in update[ranks[0]])
        num_stages = int(sys.argv[2]) if len(sys.argv) > 2 else len(ranks)
        stages = [update[rank] for rank in ranks[:: len(ranks) // num_stages]]
        computing = [sum(seconds for _, seconds in own.values()) for own in stages]
        busy = max(computing)
        whole = max(s + d for own in stages for s, d in own.values()) - min(first.values())
        figures = {
            "stages": num_stages,
            "chunks": num_chunks,
            "micro_batches": count,
            "computing_s": [round(seconds, 4) for seconds in computing],
            "idle": round(whole / busy - 1, 4),
            "schedule": round(in_schedule(stages, num_chunks, count) / busy - 1, 4),
            "formula": round((num_stages - 1) / (num_chunks * count), 4),
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
