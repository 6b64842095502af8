"""A Slurm cluster of two nodes on this machine: its daemons, their configuration and its commands.

The nodes are two networks with host names of their own; munged, slurmctld and both slurmd are those of the system's
packages, with all their files in one folder. Everything is taken down again, whatever happens.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from job import ROOT
from two_hosts import ADDRESSES, Networks, missing, two_networks

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "nsenter", "unshare")
NODES = ("node1", "node2")
CPUS = 6
START_SECONDS, STOP_SECONDS = 30.0, 40.0
# A node has a name of its own, and finds all by their names.
AS_NODE = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
CONFIGURATION = """
ClusterName=mindgrpo
SlurmctldHost={nodes[0]}({addresses[0]})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=2
SlurmUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=1
KillWait=90
NodeName={nodes[0]} NodeAddr={addresses[0]} CPUs={cpus}
NodeName={nodes[1]} NodeAddr={addresses[1]} CPUs={cpus}
PartitionName=mine Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE Default=YES
PartitionName=safe Nodes=ALL PriorityTier=1 PreemptMode=OFF
PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF
"""


def cannot() -> str:
    """Why there can be no such cluster here; empty if there can."""
    for program in PROGRAMS:
        if shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
            return f"there is no program {program} (packages slurm-wlm, munge and util-linux)"
    if not os.path.ismount("/sys/fs/cgroup"):
        return "slurmd needs /sys/fs/cgroup"
    return missing()


class Slurm:
    """`run` runs a command on the first node; jobs are submitted in the clone's folder."""

    def __init__(self, folder: Path, networks: Networks, environment: Mapping[str, str]) -> None:
        self._folder, self._networks = folder.absolute(), networks
        self._environment = {
            **os.environ,
            **environment,
            "PATH": f"{environment.get('PATH', os.environ['PATH'])}:/usr/sbin:/sbin",
            "SLURM_CONF": str(self._folder / "slurm.conf"),
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Raises RuntimeError, with the last lines of the daemons' logs, if the nodes do not become idle."""
        folder = self._folder
        (folder / "state").mkdir(parents=True)
        lines = [f"{address} {name}\n" for address, name in zip(ADDRESSES, NODES, strict=True)]
        (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
        text = CONFIGURATION.format(nodes=NODES, addresses=ADDRESSES, folder=folder, cpus=CPUS)
        (folder / "slurm.conf").write_text(text)
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(256))
        files = [
            f"--{name}={folder}/munge.{name[:3]}" for name in ("pid-file", "log-file", "seed-file")
        ]
        socket = f"--socket={folder}/munge.socket"
        self._daemon(
            "munged", ["munged", "--foreground", "--force", socket, f"--key-file={key}", *files]
        )
        self._await(lambda: (folder / "munge.socket").exists())
        self._daemon("slurmctld", self._on(0, ["slurmctld", "-D"]))
        for index, name in enumerate(NODES):
            (folder / name).mkdir()
            self._daemon(name, self._on(index, ["slurmd", "-D"]))
        self._await(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").startswith("2"))

    def stop(self) -> None:
        if self._daemons:
            self.run("scancel", "--user=root")
            until = time.monotonic() + STOP_SECONDS
            while time.monotonic() < until and self.run("squeue", "-h"):
                time.sleep(0.3)
            self.run("scancel", "--user=root", "--signal=KILL", "--full")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def run(self, *command: str) -> str:
        """What it prints; empty if it fails."""
        ended = subprocess.run(
            self._on(0, command), env=self._environment, cwd=ROOT, capture_output=True, text=True
        )
        return ended.stdout.strip() if ended.returncode == 0 else ""

    def submit(self, *words: str) -> str:
        """The job's number. Raises RuntimeError."""
        number = self.run("sbatch", "--parsable", *words)
        if not number:
            raise RuntimeError(f"sbatch did not take the job: {words}")
        return number

    def state(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says, such as JobState and Restarts."""
        words = self.run("scontrol", "-o", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def _on(self, index: int, command: Sequence[str]) -> list[str]:
        network = ["nsenter", f"--net=/var/run/netns/{self._networks.names[index]}"]
        names = ["unshare", "--uts", "--mount", "sh", "-c", AS_NODE, "sh"]
        return [*network, *names, str(self._folder / "hosts"), NODES[index], *command]

    def _daemon(self, name: str, command: Sequence[str]) -> None:
        with (self._folder / f"{name}.screen").open("w") as screen:
            self._daemons.append(
                subprocess.Popen(command, env=self._environment, stdout=screen, stderr=screen)
            )

    def _await(self, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + START_SECONDS
        while not is_so():
            if time.monotonic() > until:
                last = [
                    line
                    for path in sorted(self._folder.glob("*.screen"))
                    for line in path.read_text().splitlines()[-4:]
                ]
                raise RuntimeError("Slurm does not start here:\n" + "\n".join(last))
            time.sleep(0.2)


@contextmanager
def two_nodes(folder: Path, environment: Mapping[str, str]) -> Iterator[Slurm]:
    with two_networks() as networks:
        slurm = Slurm(folder, networks, environment)
        try:
            slurm.start()
            yield slurm
        finally:
            slurm.stop()
