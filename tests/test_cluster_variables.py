"""What `launch --cluster` reads in the variables of Slurm and of MindCluster's AscendJob, and what it refuses.

The variables are those that Slurm 22.05 set in a step of two nodes, and those that the operator's source sets. Does
not prove that other versions set the same: test_slurm_job.py and test_ascendjob.py start jobs with them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tables import each_row

from mindgrpo.errors import UserError
from mindgrpo.launch.options import Hosts, Options, first_name, read_options, without_cluster
from mindgrpo.launch.plan import LocalHost, make_plan

PROGRAM = str(Path(__file__))
# A shell of salloc or the script of sbatch, which is no step of srun.
ALLOCATION = {
    "SLURM_JOB_ID": "41",
    "SLURM_JOB_NODELIST": "node[1-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
}
STEP = ALLOCATION | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[2-3]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
}
ONE_NODE = {
    "SLURM_STEP_NODELIST": "node2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
}
# The shell that salloc starts on the first node is a step of one task.
SHELL = STEP | ONE_NODE | {"SLURM_STEP_ID": "4294967290", "SLURM_NODEID": "0"}
POD = {
    "MS_WORKER_NUM": "16",
    "MS_LOCAL_WORKER": "8",
    "MS_SCHED_HOST": "10.96.7.7",
    "MS_SCHED_PORT": "2222",
    "MS_NODE_RANK": "1",
    "MS_ROLE": "MS_WORKER",
    "MS_SERVER_NUM": "0",
    "NPU_POD": "true",
}
FIRST_POD = POD | {"MS_NODE_RANK": "0", "MS_ROLE": "MS_SCHED", "MS_SCHED_HOST": "172.16.0.9"}


def read(environment: dict[str, str], *words: str) -> Options:
    return read_options([*words, "--", PROGRAM], environment)


@each_row(
    ("environment", "words", "num_ranks", "hosts"),
    [
        (STEP, ("--cluster", "slurm", "--ranks", "4"), 4, Hosts(2, 1, ("node2", 10041))),
        (STEP, ("--cluster", "auto", "--ranks", "4"), 4, Hosts(2, 1, ("node2", 10041))),
        # A second step of the job, and the job after it, meet elsewhere.
        (
            STEP | {"SLURM_STEP_ID": "1", "SLURM_NODEID": "0"},
            ("--cluster=slurm", "--ranks=4"),
            4,
            Hosts(2, 0, ("node2", 11050)),
        ),
        (
            STEP | {"SLURM_JOB_ID": "22042"},
            ("--cluster=slurm", "--ranks=4"),
            4,
            Hosts(2, 1, ("node2", 10042)),
        ),
        # What the user says of the meeting point counts.
        (
            STEP | {"MINDGRPO_PORT": "17800"},
            ("--cluster=slurm", "--ranks=4"),
            4,
            Hosts(2, 1, ("node2", 17800)),
        ),
        (
            STEP,
            ("--cluster=slurm", "--ranks=4", "--master=10.0.0.2:18000"),
            4,
            Hosts(2, 1, ("10.0.0.2", 18000)),
        ),
        (STEP | ONE_NODE | {"SLURM_NODEID": "0"}, ("--cluster=slurm", "--ranks=4"), 4, Hosts()),
        # Shells of an allocation wait for no other node, and neither does who does not ask.
        (ALLOCATION, ("--cluster", "auto", "--ranks", "2"), 2, Hosts()),
        (SHELL, ("--cluster", "auto", "--ranks", "2"), 2, Hosts()),
        (STEP, ("--ranks", "4"), 4, Hosts()),
        (STEP | POD, ("--cluster", "msrun", "--ranks", "4"), 4, Hosts()),
        (
            STEP,
            ("--ranks=4", "--hosts=2", "--host_index=0", "--master=a:17000"),
            4,
            Hosts(2, 0, ("a", 17000)),
        ),
        (POD, ("--cluster", "ascendjob"), 16, Hosts(2, 1, ("10.96.7.7", 2222))),
        (FIRST_POD, ("--cluster", "auto"), 16, Hosts(2, 0, ("172.16.0.9", 2222))),
        (FIRST_POD, ("--cluster=ascendjob", "--ranks=16"), 16, Hosts(2, 0, ("172.16.0.9", 2222))),
        (FIRST_POD | {"MS_WORKER_NUM": "8"}, ("--cluster", "ascendjob"), 8, Hosts()),
    ],
)
def test_a_schedulers_variables_say_what_the_flags_of_hosts_say(
    environment: dict[str, str], words: tuple[str, ...], num_ranks: int, hosts: Hosts
) -> None:
    options = read(environment, *words)
    assert (options.num_ranks, options.hosts) == (num_ranks, hosts)


SLURM, JOB = ("--cluster", "slurm", "--ranks", "4"), ("--cluster", "ascendjob")


@each_row(
    ("environment", "words", "sentence"),
    [
        (
            {},
            ("--cluster", "pbs", "--ranks", "4"),
            "--cluster pbs is none of msrun, auto, slurm, ascendjob",
        ),
        (ALLOCATION, SLURM, "--cluster slurm needs SLURM_STEP_NODELIST, which srun sets"),
        (STEP, ("--cluster", "slurm"), "usage: "),
        (STEP | {"SLURM_STEP_NUM_TASKS": "4"}, SLURM, "SLURM_STEP_NUM_TASKS is 4 on 2 nodes"),
        (
            STEP | {"SLURM_NODEID": "2"},
            SLURM,
            "SLURM_NODEID is '2', but must be a whole number from 0 to 1",
        ),
        (STEP | {"SLURM_JOB_ID": ""}, SLURM, "SLURM_JOB_ID is not set"),
        (STEP | {"SLURM_STEP_NODELIST": "node[1-"}, SLURM, "SLURM_STEP_NODELIST is 'node[1-'"),
        (STEP, (*SLURM[:3], "5"), "--ranks 5 cannot be shared by 2 nodes (SLURM_STEP_NUM_NODES)"),
        (STEP, (*SLURM, "--hosts", "2"), "--hosts 2 is for --cluster msrun"),
        (
            STEP,
            ("--cluster=auto", "--ranks=4", "--host_index=0"),
            "--host_index 0 is for --cluster msrun",
        ),
        (STEP, (*SLURM, "--max_restarts", "1"), "--max_restarts 1 is for one host"),
        (STEP | {"MINDGRPO_PORT": "80"}, SLURM, "'node2:80' is not ADDRESS:PORT"),
        (
            STEP | POD,
            ("--cluster", "auto", "--ranks", "4"),
            "both Slurm (SLURM_STEP_NUM_NODES) and AscendJob",
        ),
        ({}, JOB, "MS_WORKER_NUM is not set"),
        (
            POD | {"MS_LOCAL_WORKER": "7"},
            JOB,
            "MS_WORKER_NUM is 16, which is not a multiple of MS_LOCAL_WORKER, 7",
        ),
        (
            POD | {"MS_NODE_RANK": "2"},
            JOB,
            "MS_NODE_RANK is '2', but must be a whole number from 0 to 1",
        ),
        (POD | {"MS_SCHED_PORT": "x"}, JOB, "MS_SCHED_PORT is 'x'"),
        (POD | {"MS_SCHED_HOST": ""}, JOB, "MS_SCHED_HOST is not set"),
        (POD | {"MS_ROLE": "MS_PSERVER"}, JOB, "MS_ROLE is 'MS_PSERVER'"),
        (POD, (*JOB, "--ranks", "8"), "--ranks 8 is not MS_WORKER_NUM, 16"),
        # A scheduler in a pod without devices, as that pod and the first worker see it.
        (
            FIRST_POD | {"NPU_POD": "false"},
            JOB,
            "MS_ROLE is MS_SCHED and MS_NODE_RANK 0, and NPU_POD is false",
        ),
        (
            POD | {"MS_NODE_RANK": "0"},
            JOB,
            "the scheduler of this AscendJob is a pod without devices",
        ),
    ],
)
def test_variables_that_cannot_work_are_refused_by_their_names(
    environment: dict[str, str], words: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(UserError) as refused:
        read(environment, *words)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("node_list", "name"),
    [
        ("node7", "node7"),
        ("node[1-2]", "node1"),
        ("node[001-128,200]", "node001"),
        ("node[3,5-7],login", "node3"),
        ("a-1.example.org,b2", "a-1.example.org"),
        ("rack[2-3]n[10-19]-ib,other[1-2]", "rack2n10-ib"),
    ],
)
def test_the_first_node_of_a_compressed_list_is_its_first_name(node_list: str, name: str) -> None:
    assert first_name(node_list) == name


@pytest.mark.parametrize("node_list", ["", ",a", "a[", "a[1-2", "a]", "a b", "a[x]"])
def test_what_is_no_list_of_nodes_is_refused(node_list: str) -> None:
    with pytest.raises(UserError, match="SLURM_STEP_NODELIST is"):
        first_name(node_list)


def test_ranks_get_none_of_the_operators_variables_and_all_others() -> None:
    assert without_cluster(FIRST_POD | {"HOME": "/me", "MS_NODE_TIMEOUT": "9"}) == {
        "NPU_POD": "true",
        "HOME": "/me",
        "MS_NODE_TIMEOUT": "9",
    }


def test_the_command_that_resumes_a_run_names_the_cluster_and_no_node_of_it() -> None:
    options = read(STEP, "--cluster", "auto", "--ranks", "4")
    plan = make_plan(
        options, {}, LocalHost("/python", 7, "/msrun", 2), Path("/logs/a-b"), 10041, 0.0
    )
    prefix = plan.main.environment["MINDGRPO_LAUNCH_PREFIX"]
    assert prefix == "mindgrpo launch --ranks 4 --cluster slurm --"
