"""How soon MindSpore's cluster notices that a rank or a host of several is lost: variables of its processes.

MS_NODE_TIMEOUT means two things. In the scheduler it is how long a rank may be without a heartbeat, which a thread of
MindSpore's own sends, whatever the rank computes. In a rank, where no device has a limit of its own, it is how long a
sum waits for its neighbour, which may compile or score for minutes. So the variable is the scheduler's, and ranks have
PEER_SECONDS instead.
"""

from __future__ import annotations

from collections.abc import MutableMapping

# From the loss to the last line of every host's launcher; docs/hosts.md has the sum.
LOST_WITHIN_SECONDS = 20.0
SILENT_SECONDS = 10
ANSWER_SECONDS = 4
# As before for ranks of one host, whose ends the launcher sees itself.
SILENT_SECONDS_ON_ONE_HOST = 60
# Hangs are for the deadlines of phases to find, which know what a rank does.
PEER_SECONDS = 24 * 3600
TIMEOUT = "MS_NODE_TIMEOUT"


def cluster_variables(num_hosts: int) -> dict[str, str]:
    """For every process of a job; what a user sets wins."""
    if num_hosts == 1:
        return {TIMEOUT: str(SILENT_SECONDS_ON_ONE_HOST)}
    return {
        TIMEOUT: str(SILENT_SECONDS),
        # How long a rank waits for the scheduler's answer to a heartbeat, and then tries to reach it again.
        "MS_RECEIVE_MSG_TIMEOUT": str(ANSWER_SECONDS),
        "MS_HEARTBEAT_RETRY_TIMEOUT": str(ANSWER_SECONDS),
        "MS_RETRY_INTERVAL_LOWER": "1",
        "MS_RETRY_INTERVAL_UPPER": "2",
        # Warnings of this module alone: cluster_watch.py reads them, and no screen shows them.
        "MS_SUBMODULE_LOG_v": "{DISTRIBUTED:2}",
    }


def set_for_rank(environment: MutableMapping[str, str]) -> None:
    environment[TIMEOUT] = str(PEER_SECONDS)
