"""The AscendJob of the examples against the operator's published schema.

SCHEMA has the types of the fields that the example uses, from the CustomResourceDefinition of MindCluster's
ascend-operator (build/ascend-operator.yaml of Ascend/mind-cluster, read by hand: it is 370 KB, most of it
Kubernetes' own pods), and test_the_operator_accepts_it the rules of its ascendjob_validate.go. A job with the
operator's variables is in test_two_hosts.py. Does not prove that an operator starts the job: none was ever run here.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindgrpo.launch.options import ASCENDJOB, Hosts, read_options
from mindgrpo.launch.plan import has_config

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "examples" / "cluster" / "ascendjob.yaml"
NPU = "huawei.com/Ascend910"
# A dictionary under "*" is of any keys; a list has one kind of entries; "!" are those that have to be there.
TEXTS = {"*": str}
CONTAINER: dict[str, Any] = {
    "!": ("name",),
    "name": str,
    "image": str,
    "imagePullPolicy": str,
    "command": [str],
    "args": [str],
    "env": [
        {
            "!": ("name",),
            "name": str,
            "value": str,
            "valueFrom": {"fieldRef": {"!": ("fieldPath",), "fieldPath": str}},
        }
    ],
    "ports": [{"!": ("containerPort",), "containerPort": int, "name": str}],
    "resources": {"requests": {"*": (int, str)}, "limits": {"*": (int, str)}},
    "volumeMounts": [{"!": ("mountPath", "name"), "mountPath": str, "name": str}],
}
EXPRESSION = {"!": ("key", "operator"), "key": str, "operator": str, "values": [str]}
TERM = {
    "!": ("topologyKey",),
    "labelSelector": {"matchExpressions": [EXPRESSION], "matchLabels": TEXTS},
    "topologyKey": str,
}
POD: dict[str, Any] = {
    "!": ("containers",),
    "terminationGracePeriodSeconds": int,
    "automountServiceAccountToken": bool,
    "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [TERM]}},
    "nodeSelector": TEXTS,
    "containers": [CONTAINER],
    "volumes": [
        {
            "!": ("name",),
            "name": str,
            "nfs": {"!": ("path", "server"), "path": str, "server": str},
            "hostPath": {"!": ("path",), "path": str},
            "emptyDir": {"medium": str, "sizeLimit": (int, str)},
        }
    ],
}
REPLICAS = {
    "replicas": int,
    "restartPolicy": str,
    # `metadata` has no schema there; Kubernetes wants labels to be texts.
    "template": {"metadata": {"labels": TEXTS}, "spec": POD},
}
SCHEMA: dict[str, Any] = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "labels": TEXTS},
    "spec": {
        "!": ("replicaSpecs",),
        "schedulerName": str,
        "successPolicy": str,
        "runPolicy": {
            "backoffLimit": int,
            "schedulingPolicy": {"minAvailable": int, "queue": str, "priorityClass": str},
        },
        "replicaSpecs": {"*": REPLICAS},
    },
}


def load() -> dict[str, Any]:
    """Without the anchors, through which both replicas would be one object."""
    return dict(json.loads(json.dumps(yaml.safe_load(FILE.read_text(encoding="utf-8")))))


def wrong(value: Any, schema: Any, path: str = "") -> list[str]:
    """Where a value is not of the schema's type, has a field too many, or lacks one."""
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{path} is no list"]
        return [w for i, entry in enumerate(value) for w in wrong(entry, schema[0], f"{path}[{i}]")]
    if not isinstance(schema, dict):
        is_number_of_bool = isinstance(value, bool) and schema is not bool
        good = isinstance(value, schema) and not is_number_of_bool
        return [] if good else [f"{path} is {value!r}"]
    if not isinstance(value, dict):
        return [f"{path} is no mapping"]
    missing = [f"{path}.{name} is missing" for name in schema.get("!", ()) if name not in value]
    for name, entry in value.items():
        kind = schema.get(name, schema.get("*"))
        if kind is None:
            missing.append(f"{path}.{name} is not in the schema")
        else:
            missing += wrong(entry, kind, f"{path}.{name}")
    return missing


def container(job: dict[str, Any], replica: str) -> dict[str, Any]:
    pod = job["spec"]["replicaSpecs"][replica]["template"]["spec"]
    return dict(next(entry for entry in pod["containers"] if entry["name"] == "ascend"))


def test_the_example_has_the_fields_and_types_of_the_published_schema() -> None:
    assert wrong(load(), SCHEMA) == []


def test_a_field_of_another_type_name_or_layout_is_seen() -> None:
    job = load()
    job["spec"]["replicaSpecs"]["Worker"]["replicas"] = "1"
    job["spec"]["runPolicy"]["minAvailable"] = 2
    del job["spec"]["replicaSpecs"]["Scheduler"]["template"]["spec"]["containers"]
    job["metadata"]["labels"]["fault-retry-times"] = 3
    assert sorted(wrong(job, SCHEMA)) == [
        ".metadata.labels.fault-retry-times is 3",
        ".spec.replicaSpecs.Scheduler.template.spec.containers is missing",
        ".spec.replicaSpecs.Worker.replicas is '1'",
        ".spec.runPolicy.minAvailable is not in the schema",
    ]


def test_the_operator_accepts_it_and_gives_every_pod_as_many_ranks() -> None:
    job = load()
    replicas = job["spec"]["replicaSpecs"]
    assert (job["apiVersion"], job["kind"]) == ("mindxdl.gitee.com/v1", "AscendJob")
    assert job["metadata"]["labels"]["framework"] == "mindspore"
    assert job["spec"]["successPolicy"] in ("", "AllWorkers")
    assert set(replicas) == {"Scheduler", "Worker"} and replicas["Scheduler"]["replicas"] == 1
    total = sum(replica["replicas"] for replica in replicas.values())
    assert job["spec"]["runPolicy"]["schedulingPolicy"]["minAvailable"] == total
    counts = set()
    for name in replicas:
        entry = container(job, name)
        assert entry["image"] and entry["resources"]["requests"] == entry["resources"]["limits"]
        assert [port["name"] for port in entry["ports"]] == ["ascendjob-port"]
        counts.add(entry["resources"]["requests"][NPU])
    assert len(counts) == 1 and counts.pop() > 0


def test_its_command_is_one_that_the_launcher_takes_in_every_pod(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the variables that the operator's source sets for this job."""
    job = load()
    monkeypatch.chdir(ROOT)
    for index, name in enumerate(("Scheduler", "Worker")):
        (line,) = container(job, name)["args"]
        _, _, command = line.partition("exec mindgrpo launch ")
        variables = variables_of(index, 8, 16, "172.16.0.9" if index == 0 else "10.96.7.7", 2222)
        options = read_options(shlex.split(command), variables)
        address = variables["MS_SCHED_HOST"]
        assert options.hosts == Hosts(2, index, (address, 2222)) and options.num_ranks == 16
        assert has_config(options.command) and "--resume_training" in options.command


def variables_of(
    index: int, num_local: int, num_ranks: int, address: str, port: int
) -> dict[str, str]:
    role = "MS_SCHED" if index == 0 else "MS_WORKER"
    values = (role, num_ranks, num_local, index, address, port)
    return {
        **dict(zip(ASCENDJOB, map(str, values), strict=True)),
        "MS_SERVER_NUM": "0",
        "NPU_POD": "true",
    }
