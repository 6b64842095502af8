"""What of a rank's variables reaches a process that runs vLLM.

Does not prove that a later MindSpore sets no others, nor that vLLM reads none of those that stay.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from mindgrpo.launch.plan import SET_HERE_VARIABLE
from mindgrpo.rollout.vllm.child.mindgrpo_engine.protocol import engine_variables
from mindgrpo.rollout.vllm.environment import SET_BY_LAUNCHER, child_environment

PYTHON = Path("/opt/engine/bin/python")


def test_nothing_of_the_rank_its_launcher_or_its_python_reaches_an_engine() -> None:
    of_the_parent = {
        **{"MS_ROLE": "MS_WORKER", "MS_NODE_TIMEOUT": "60", "MSRUN_CPU_LIST": "0", "GLOG_v": "3"},
        **{"RANK_ID": "3", "RANK_SIZE": "8", "RANK_TABLE_FILE": "hccl.json", "DEVICE_ID": "3"},
        **{"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"},
        **{"MASTER_ADDR": "node1", "MASTER_PORT": "8118", "MINDGRPO_STATUS_DIR": "/logs/status"},
        **{"PYTHONPATH": "/work", "PYTHONHOME": "/usr", "VIRTUAL_ENV": "/work/.venv"},
        **{"LD_PRELOAD": "libjemalloc.so", "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"},
        **{"OMP_NUM_THREADS": "1", SET_BY_LAUNCHER: "OMP_NUM_THREADS GLOG_v"},
        **{"MINDSPORE_HCCL_CONFIG_PATH": "hccl.json", "GLOG_log_dir": "/logs"},
    }
    ours = child_environment({**of_the_parent, "PATH": "/work/.venv/bin:/usr/bin"}, PYTHON)
    assert sorted(of_the_parent.keys() & ours.keys()) == []
    assert ours == {"PATH": "/opt/engine/bin:/usr/bin", **engine_variables({})}


def test_what_the_user_set_reaches_an_engine() -> None:
    users = {
        **{"HOME": "/home/me", "HF_HOME": "/models", "HF_ENDPOINT": "https://mirror", "LANG": "C"},
        **{
            "VLLM_LOGGING_LEVEL": "DEBUG",
            "VLLM_CPU_KVCACHE_SPACE": "40",
            "TORCHDYNAMO_DISABLE": "0",
        },
        **{"ASCEND_HOME_PATH": "/usr/local/Ascend", "ASCEND_RT_VISIBLE_DEVICES": "0,1"},
        **{"HCCL_CONNECT_TIMEOUT": "600", "https_proxy": "http://proxy", "NO_PROXY": "localhost"},
        **{"OMP_NUM_THREADS": "4", "TMPDIR": "/scratch", "PYTHONUNBUFFERED": "1", "TRANK_": "mine"},
        "PATH": "/opt/engine/bin:/usr/bin",
    }
    ours = child_environment({**users, "HF_HUB_OFFLINE": ""}, PYTHON)
    assert {name: ours[name] for name in users} == users
    assert ours["HF_HUB_OFFLINE"] == "1", "an empty variable counts as not set"


def test_of_library_folders_only_mindspores_are_left_out() -> None:
    own = "/work/.venv/lib/python3.11/site-packages/mindspore/lib"
    user = {"LD_LIBRARY_PATH": f"/usr/local/Ascend/lib64:{own}:/home/me/mindspore/lib"}
    kept = child_environment(user, PYTHON)["LD_LIBRARY_PATH"]
    assert kept == "/usr/local/Ascend/lib64:/home/me/mindspore/lib"
    assert "LD_LIBRARY_PATH" not in child_environment({"LD_LIBRARY_PATH": own}, PYTHON)
    assert "LD_LIBRARY_PATH" not in child_environment({}, PYTHON)


def test_launcher_and_engine_agree_on_the_variable_that_tells_what_the_launcher_set() -> None:
    assert SET_HERE_VARIABLE == SET_BY_LAUNCHER


def test_variables_that_msrun_sets_are_all_known() -> None:
    """Of the installed MindSpore: a later one may set others."""
    mindspore = subprocess.run(
        [
            sys.executable,
            "-c",
            "import importlib.util as u; print(u.find_spec('mindspore').origin)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    folder = Path(mindspore.stdout.strip()).parent / "parallel" / "cluster"
    sources = "".join(path.read_text() for path in folder.rglob("*.py"))
    names = set(re.findall(r"""environ\[["'](\w+)["']\] *=""", sources))
    assert {"MS_ROLE", "RANK_ID", "DEVICE_ID"} <= names
    ours = child_environment(dict.fromkeys(names, "1"), PYTHON)
    assert sorted(names & ours.keys()) == []
