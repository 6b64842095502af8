"""A process that speaks the protocol of mindgrpo_engine and has no model: it keeps what it was handed, and answers.

Completions are numbers made of what was asked. `arguments` of the start say how it misbehaves: {"misbehave": NAME}.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import socket
import struct
import sys
import time
import zlib
from pathlib import Path
from typing import Any

# Tests of other jobs that look for what theirs leave in shared memory take no account of a name that begins so.
SHARED = f"mindgrpo-double-{os.getpid()}"


def receive(connection: socket.socket) -> Any:
    head = connection.recv(4, socket.MSG_WAITALL)
    if len(head) < 4:
        os._exit(0)
    return json.loads(connection.recv(struct.unpack(">I", head)[0], socket.MSG_WAITALL))


def send(connection: socket.socket, message: Any) -> None:
    text = json.dumps(message).encode()
    connection.sendall(struct.pack(">I", len(text)) + text)


class Double:
    def __init__(self, memory: int) -> None:
        self.memory, self.version, self.tensors = memory, None, {}
        self.misbehave = ""

    def start(self, request: Any) -> Any:
        self.misbehave = request["arguments"].get("misbehave", "")
        if self.misbehave == "never_starts":
            time.sleep(3600)
        self.folder = Path(request["model"])
        self.dtype = request["dtype"]
        (self.folder / "start.json").write_text(json.dumps(request))
        (self.folder / "environment.json").write_text(json.dumps(dict(os.environ)))
        if self.misbehave == "never_ready":
            with Path(f"/dev/shm/{SHARED}").open("wb+") as file:
                file.truncate(4096)
                self.kept = mmap.mmap(file.fileno(), 4096)
            return {"type": "error", "kind": "engine", "error": "no kernel for this"}
        if self.misbehave == "user_error":
            return {"type": "error", "kind": "user", "error": "max_num_sequences is no argument"}
        Path(f"/dev/shm/{SHARED}").write_text("mine")
        return {"type": "ready", "engine": "vllm", "version": "9.9", "shared_memory": [SHARED]}

    def begin_weights(self, request: Any) -> Any:
        self.version, self.tensors = None, {}
        self.due = dict(request["tensors"])
        return {"type": "begun"}

    def load_weights(self, request: Any) -> Any:
        size = os.fstat(self.memory).st_size
        itemsize = 4 if self.dtype == "float32" else 2
        with mmap.mmap(self.memory, size, prot=mmap.PROT_READ) as pages:
            for tensor in request["tensors"]:
                count = itemsize
                for extent in tensor["shape"]:
                    count *= extent
                data = pages[tensor["offset"] : tensor["offset"] + count]
                ends = data if len(data) <= 1 << 17 else data[: 1 << 16] + data[-(1 << 16) :]
                if zlib.crc32(ends) != tensor["crc"] or tensor["offset"] % 64:
                    return {"type": "error", "kind": "engine", "error": "damaged " + tensor["name"]}
                if self.due.pop(tensor["name"]) != tensor["shape"]:
                    return {"type": "error", "kind": "engine", "error": "shape " + tensor["name"]}
                self.tensors[tensor["name"]] = (tensor["shape"], tensor["transposed"])
                (self.folder / f"{tensor['name']}.bin").write_bytes(data)
        return {"type": "loaded"}

    def commit_weights(self, request: Any) -> Any:
        if self.due:
            return {"type": "error", "kind": "engine", "error": f"lacks {sorted(self.due)[0]}"}
        self.version = request["version"]
        (self.folder / "tensors.json").write_text(json.dumps(self.tensors))
        workers = [self.version] if self.misbehave != "stale_worker" else [self.version - 1]
        return {"type": "committed", "versions": workers}

    def generate(self, request: Any) -> Any:
        if self.misbehave == "dies":
            print("something terrible", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.misbehave == "silent":
            time.sleep(3600)
        (self.folder / "generate.json").write_text(json.dumps(request))
        completions = [
            {
                "tokens": [sample["seed"] % 97, len(row["prompt"])][: sample["max_tokens"]],
                "logps": [-0.5, -0.25][: sample["max_tokens"]],
                "stopped": sample["max_tokens"] > 1,
            }
            for row in request["requests"]
            for sample in row["samples"]
        ]
        return {
            "type": "completions",
            "completions": completions,
            "versions": [self.version],
            "prompt_tokens": 7,
            "drafted": 3,
            "accepted": 2,
        }

    def stop(self, request: Any) -> Any:
        Path(f"/dev/shm/{SHARED}").unlink(missing_ok=True)
        return {"type": "stopped"}

    def sleep(self, request: Any) -> Any:
        return {"type": "asleep", "bytes": 0}

    def wake(self, request: Any) -> Any:
        return {"type": "awake", "bytes": 0}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int)
    parser.add_argument("--memory", type=int)
    arguments = parser.parse_args()
    connection = socket.socket(fileno=arguments.socket)
    double = Double(arguments.memory)
    while True:
        request = receive(connection)
        send(connection, {"type": "progress", "finished": 0, "of": 1, "tokens": 0})
        send(connection, getattr(double, request["type"])(request))
        if request["type"] == "stop":
            return


main()
