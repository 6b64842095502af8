"""What the launcher of one of several hosts reads in the logs of MindSpore's cluster, and what it says of it.

The lines are those of MindSpore 2.9.0 and 2.10.0. Does not prove that another version writes them: test_two_hosts.py
does, where networks can be made.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mindgrpo.backend.targets import RANKS_PER_HOST
from mindgrpo.cli import check
from mindgrpo.errors import UserError
from mindgrpo.health.failure import (
    failure_of_code,
    first_failure,
    read_failure,
    write_failure,
)
from mindgrpo.health.rank_health import RankHealth
from mindgrpo.launch.exit_report import (
    CLUSTER_NAME,
    ClusterNews,
    ClusterWatch,
    failure_of_cluster,
    numbers,
    report,
    worker_log,
)
from mindgrpo.launch.log_follower import Screen
from mindgrpo.launch.options import (
    LOST_WITHIN_SECONDS,
    Hosts,
    Options,
    cluster_variables,
    set_for_rank,
)

EXAMPLE = "examples/grpo/tiny_arithmetic/grpo_config.yaml"
CLUSTER = "DISTRIBUTED(17,7fb8,python):2026-11-22-13:51:32.298.885 [mindspore/ccsrc/cluster/"
REGISTERED = (
    f"[WARNING] {CLUSTER}topology/meta_server_node.cc:254] ProcessRegister] The new node: {{rank}}(role: MS_WORKER), "
    "rank id: {rank}, device id: 1, hostname: node2, ip: 10.0.0.2 is registered successfully. Currently registered "
    "node number: 4, expected node number: 4\n"
)
SILENT = (
    f"[ERROR] {CLUSTER}topology/meta_server_node.cc:548] UpdateTopoState] The node: {{rank}} is timed out. It may exit "
    "with exception, please check this node's log.\n"
)
NO_ROUTE = (
    f"[ERROR] {CLUSTER}rpc/tcp/tcp_comm.cc:473] Connect] Failed to do connect and link fail destination: "
    "10.0.0.1:17800\n"
)
NO_ANSWER = (
    f"[WARNING] {CLUSTER}topology/compute_graph_node.cc:313] Heartbeat] Failed to send heartbeat message to meta "
    "server node and try to reconnect to the meta server.\n"
)
GIVES_UP = f"[WARNING] {CLUSTER}init.cc:123] operator()] Callback on exception is called.\n"
FIRST = "host 0 (10.0.0.1, ranks 0 and 1)"


def options(host_index: int, num_hosts: int = 2) -> Options:
    return Options(2 * num_hosts, ("x",), Hosts(num_hosts, host_index, ("10.0.0.1", 17800)))


def news(*lines: str) -> ClusterNews:
    all_news = ClusterNews()
    for line in lines:
        all_news.read(line)
    return all_news


@pytest.mark.parametrize(
    ("lines", "host_index", "num_hosts", "message"),
    [
        (
            (REGISTERED.format(rank=2), REGISTERED.format(rank=3), SILENT.format(rank=3)),
            0,
            2,
            "host 1 (node2, 10.0.0.2, ranks 2 and 3) is lost: rank 3 ended or cannot be reached",
        ),
        (
            (SILENT.format(rank=2), SILENT.format(rank=5)),
            0,
            3,
            "host 1 (ranks 2 and 3) and host 2 (ranks 4 and 5) are lost: ranks 2 and 5 ended or cannot be reached",
        ),
        (
            (SILENT.format(rank=1),),
            0,
            2,
            f"rank 1 of this host, {FIRST}, gave no sign of life",
        ),
        ((NO_ANSWER, NO_ROUTE, GIVES_UP), 1, 2, f"{FIRST} is lost: it ended or cannot be reached"),
        ((GIVES_UP,), 1, 2, f"{FIRST} is lost: a rank there ended or cannot be reached"),
        (
            (GIVES_UP,),
            2,
            3,
            f"a rank of another host ended or cannot be reached, as {FIRST} was the first to see",
        ),
    ],
)
def test_a_loss_is_told_with_the_host_and_its_ranks(
    lines: tuple[str, ...], host_index: int, num_hosts: int, message: str
) -> None:
    assert failure_of_cluster(options(host_index, num_hosts), news(*lines), []).message == message


def test_a_stopped_rank_of_this_host_is_not_blamed_on_another() -> None:
    message = failure_of_cluster(options(1), news(GIVES_UP), [3]).message
    assert message == "rank 3 of this host, host 1 (ranks 2 and 3), gave no sign of life"


def test_lines_of_a_job_that_is_well_or_just_starts_are_no_loss() -> None:
    quiet = news(REGISTERED.format(rank=2), NO_ROUTE, NO_ANSWER, "loss 0.1\n")
    assert quiet.lost_at is None and quiet.addresses == {2: "node2, 10.0.0.2"}


def test_ranks_are_counted_in_words() -> None:
    assert numbers([3]) == "rank 3" and numbers({5, 4}) == "ranks 4 and 5"
    assert numbers(range(8, 16)) == "ranks 8 to 15" and numbers([1, 3, 4]) == "ranks 1, 3 and 4"


def make_logs(tmp_path: Path) -> Path:
    (tmp_path / "status").mkdir()
    (tmp_path / "msrun.log").write_text("what msrun says\n")
    return tmp_path


def test_a_line_counts_once_it_is_whole_and_becomes_the_last_line_of_the_job(
    tmp_path: Path,
) -> None:
    logs = make_logs(tmp_path)
    watch = ClusterWatch(options(0), logs)
    watch.look()
    text = REGISTERED.format(rank=3) + SILENT.format(rank=3)
    (logs / "scheduler.log").write_text(text[:-40])
    watch.look()
    assert read_failure(logs / "status", CLUSTER_NAME) is None
    (logs / "scheduler.log").write_text(text)
    watch.look()
    lines, status = report(logs, 4, 0, -9)
    assert status == 1 and len(lines) == 1
    assert lines[0].startswith("mindgrpo: host 1 (node2, 10.0.0.2, ranks 2 and 3) is lost: rank 3")
    assert lines[0].endswith(f"full logs: {logs}")


def test_a_rank_of_this_host_that_failed_before_stays_the_reason(tmp_path: Path) -> None:
    logs = make_logs(tmp_path)
    health = RankHealth(3, 4, logs / "status")
    health.enter("rollout")
    write_failure(logs / "status", 3, failure_of_code(logs / "status", 3, -9, 1.0))
    worker_log(logs, 2).write_text(NO_ANSWER + GIVES_UP)
    ClusterWatch(options(1), logs).look()
    assert read_failure(logs / "status", CLUSTER_NAME) is not None
    first = first_failure(logs / "status")
    assert first is not None and first.message.startswith("rank 3 was killed by signal 9")


def test_a_rank_waits_long_for_its_peers_and_the_scheduler_short_for_ranks() -> None:
    variables = cluster_variables(2)
    for_rank = dict(variables)
    set_for_rank(for_rank)
    assert int(variables["MS_NODE_TIMEOUT"]) < LOST_WITHIN_SECONDS
    assert int(for_rank["MS_NODE_TIMEOUT"]) > 3600


def test_a_scheduler_that_answers_again_is_not_the_one_that_is_lost() -> None:
    later = GIVES_UP.replace("13:51:32", "13:58:00")
    told_so = failure_of_cluster(options(1), news(NO_ANSWER, later), [])
    assert told_so.message == f"{FIRST} is lost: a rank there ended or cannot be reached"


def test_a_loss_has_the_time_of_its_first_line() -> None:
    both = news(GIVES_UP.replace("13:51:32.298", "13:51:33.000"), GIVES_UP)
    expected = time.mktime((2026, 11, 22, 13, 51, 32, 0, 0, -1)) + 0.298
    assert both.lost_at == pytest.approx(expected)
    assert failure_of_cluster(options(1), both, []).time == both.lost_at


def test_lines_of_the_cluster_are_on_no_screen_however_they_arrive() -> None:
    text = (GIVES_UP + "loss 1\n[WARN" + "ING] of a program\nstep 1 " + "...\n" + GIVES_UP).encode()
    for size in (1, 7, 1000):
        screen = Screen()
        chunks = [screen.pass_on(text[i : i + size]) for i in range(0, len(text), size)]
        shown = b"".join([*chunks, screen.rest()])
        assert shown == b"loss 1\n[WARNING] of a program\nstep 1 ...\n"


def test_shared_memory_on_several_hosts_is_refused_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(RANKS_PER_HOST, "4")
    monkeypatch.chdir(Path(__file__).resolve().parent.parent)
    words = ["--quiet", "--ranks", "8", "--config", EXAMPLE]
    with pytest.raises(UserError) as refused:
        check.main(words)
    assert "8 ranks are on 2 hosts; set context.backend: device" in str(refused.value)
    check.main([*words, "--context.backend", "device"])
    assert os.environ[RANKS_PER_HOST] == "4"
