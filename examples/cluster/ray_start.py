"""Runs a program on the nodes of a Ray cluster: one actor a node starts `mindgrpo launch` there. Ray moves no tensors.

    python examples/cluster/ray_start.py --hosts 2 --ranks 8 [--resources NPU=4] -- PROGRAM [ARGUMENTS]

Ranks meet in MindSpore's cluster at an address of the first node, as with `mindgrpo launch --hosts`. Each node needs
this clone and what the program reads at the paths of the node that runs this. Ends with the status of the host that
failed first. When Ray loses a node, this names it and stops the launchers of the others. Ctrl-C and SIGTERM are passed
on to all launchers as SIGTERM, with which ranks save and end.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mindgrpo.processes.linux import set_parent_death_signal

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "examples/grpo/tiny_arithmetic/grpo_config.yaml"
DEFAULT = (
    "examples/grpo/qwen_grpo_tutorial/main.py",
    "--config",
    EXAMPLE,
    "--context.backend",
    "device",
)
PLACEMENT_SECONDS = 120
# Above those of Ray's workers, below those that the system gives to connections.
PORTS, NUM_PORTS_TRIED = range(20000, 32000), 100
POLL_SECONDS = 0.5
# Longer than MINDGRPO_STOP_SECONDS, in which ranks save.
STOP_SECONDS = 90.0


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


class Host:
    """The actor of one node. Its launcher does not outlive it."""

    def __init__(self) -> None:
        self._launcher: subprocess.Popen[bytes] | None = None

    def node(self) -> tuple[str, str, int]:
        """Ray's id and the address of the node, and a port that is free there."""
        context = ray.get_runtime_context()
        free = next(filter(is_free, random.sample(PORTS, NUM_PORTS_TRIED)))
        return context.get_node_id(), ray.util.get_node_ip_address(), free

    def start(self, command: Sequence[str], folder: str, environment: dict[str, str]) -> None:
        self._launcher = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: set_parent_death_signal(signal.SIGTERM),
        )

    def status(self) -> int | None:
        """Of the launcher; None while it runs."""
        return self._launcher.poll() if self._launcher else None

    def stop(self) -> None:
        if self._launcher and self._launcher.poll() is None:
            self._launcher.terminate()


@dataclass
class Node:
    """A host of the job; `status` is how its launcher ended."""

    actor: Any
    name: str
    address: str
    free_port: int
    is_here: bool
    index: int = 0
    status: int | None = None
    is_lost: bool = False

    def __str__(self) -> str:
        return f"node {self.name} ({self.address}, host {self.index})"


def place_hosts(num_hosts: int, resources: dict[str, float]) -> list[Node]:
    """One actor on each of so many nodes, in the order of the hosts. Exits where Ray has too few nodes."""
    alive = [node["NodeName"] for node in ray.nodes() if node["Alive"]]
    group = placement_group([resources] * num_hosts, strategy="STRICT_SPREAD")
    if len(alive) < num_hosts or not group.wait(PLACEMENT_SECONDS):
        sys.exit(
            f"mindgrpo: Ray has no {num_hosts} nodes with {resources} free; alive are {', '.join(alive)}: start Ray on "
            "more nodes, or change --hosts or --resources."
        )
    names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
    here = ray.get_runtime_context().get_node_id()
    nodes = []
    for index in range(num_hosts):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        amounts = dict(resources)
        num_cpus = amounts.pop("CPU", 0)
        actor: Any = (
            ray.remote(Host)
            .options(num_cpus=num_cpus, resources=amounts, scheduling_strategy=strategy)
            .remote()
        )
        node_id, address, free_port = ray.get(actor.node.remote())
        nodes.append(Node(actor, names[node_id], address, free_port, node_id == here))
    # Host 0, which writes the run, is the node of this process if that is among them; Ray has no order of its own.
    nodes.sort(key=lambda node: (not node.is_here, node.name))
    for index, node in enumerate(nodes):
        node.index = index
    return nodes


def start(nodes: list[Node], num_ranks: int, program: Sequence[str], launch: str) -> None:
    """The launcher of each node gets the environment of this process: paths are the same on all nodes."""
    first = nodes[0]
    for node in nodes:
        flags = ["--ranks", str(num_ranks)]
        if len(nodes) > 1:
            master = f"{first.address}:{first.free_port}"
            flags += [
                "--hosts",
                str(len(nodes)),
                "--host_index",
                str(node.index),
                "--master",
                master,
            ]
        command = [*shlex.split(launch), *flags, "--", *program]
        ray.get(node.actor.start.remote(command, os.getcwd(), dict(os.environ)))
        print(f"mindgrpo: {node} starts its ranks", flush=True)


def look(nodes: list[Node]) -> Node | None:
    """The first node that has failed or is lost, after asking each that still runs."""
    for node in nodes:
        if node.status is not None or node.is_lost:
            continue
        try:
            node.status = ray.get(node.actor.status.remote(), timeout=30)
        except (RayError, TimeoutError) as error:
            node.is_lost = True
            print(
                f"mindgrpo: {node} is lost: Ray says {type(error).__name__}; the other hosts are stopped",
                file=sys.stderr,
                flush=True,
            )
    return next((node for node in nodes if node.is_lost or node.status), None)


def stop(nodes: list[Node]) -> None:
    """Tells all launchers, and waits for them."""
    for node in nodes:
        if node.status is None and not node.is_lost:
            node.actor.stop.remote()
    until = time.monotonic() + STOP_SECONDS
    while time.monotonic() < until and any(n.status is None and not n.is_lost for n in nodes):
        look(nodes)
        time.sleep(POLL_SECONDS)


def wait(nodes: list[Node]) -> int:
    """The status of the host that failed first, 1 for a lost node; the others are stopped then."""
    while any(node.status is None for node in nodes):
        failed = look(nodes)
        if failed is not None:
            stop(nodes)
            if not failed.is_lost:
                return failed.status or 1
            print(
                f"mindgrpo: the job has ended because {failed} is lost", file=sys.stderr, flush=True
            )
            return 1
        time.sleep(POLL_SECONDS)
    return next((node.status for node in nodes if node.status), 0)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, help="number of nodes")
    parser.add_argument("--ranks", type=int, default=8, help="of the whole job")
    parser.add_argument(
        "--resources", nargs="*", default=["CPU=1"], help="of each node, such as NPU=8"
    )
    parser.add_argument(
        "--address", default="auto", help="of Ray's head; auto: the cluster of this node"
    )
    parser.add_argument("--launch", default=f"bash {ROOT}/scripts/launch.sh", help="the launcher")
    own, program = sys.argv[1:], []
    if "--" in own:
        own, program = own[: own.index("--")], own[own.index("--") + 1 :]
    asked = parser.parse_args(own)
    asked.program = program or list(DEFAULT)
    return asked


def main() -> int:
    asked = read_arguments()
    resources = {
        name: float(value) for name, _, value in (w.partition("=") for w in asked.resources)
    }
    ray.init(address=asked.address, log_to_driver=True)
    # As the interrupts that `wait` raises.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    nodes = place_hosts(asked.hosts, resources)
    try:
        start(nodes, asked.ranks, asked.program, asked.launch)
        return wait(nodes)
    except BaseException:
        stop(nodes)
        raise


if __name__ == "__main__":
    sys.exit(main())
