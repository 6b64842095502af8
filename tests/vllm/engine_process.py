"""An engine's process as its parent sees it: started, spoken to over the socket, given weights in shared memory."""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
CHILD = ROOT / "mindgrpo" / "rollout" / "vllm" / "child"
sys.path.insert(0, str(CHILD))

from mindgrpo_engine.protocol import Message, receive, send  # noqa: E402

Tensors = dict[str, np.ndarray]

START_SECONDS = 240
SAMPLE = 65536
# Small blocks, so that the prompts of the tests have prefixes that vLLM keeps.
LIMITS = {"max_num_seqs": 32, "block_size": 32}
PLAIN: Message = {"temperature": 1.0, "max_tokens": 12, "stop_ids": []}


def engine_python() -> str | None:
    """The Python of vLLM's environment."""
    named = os.environ.get("MINDGRPO_VLLM_PYTHON")
    own = ROOT / ".venv-vllm" / "bin" / "python"
    return named or (str(own) if own.exists() else None)


def checksum(data: bytes) -> int:
    short = len(data) <= 2 * SAMPLE
    return zlib.crc32(data if short else data[:SAMPLE] + data[-SAMPLE:])


def encoded(array: np.ndarray, dtype: str) -> bytes:
    """Bytes of a float32 array in the engine's dtype, bfloat16 by rounding to nearest even."""
    if dtype == "float32":
        return array.astype("<f4").tobytes()
    bits = np.ascontiguousarray(array, "<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def chunks(names: list[str]) -> Iterator[list[str]]:
    """Tensors before the layers, of each layer, and after them."""
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        before = name == "model.embed_tokens.weight"
        groups.setdefault(layer[1] if layer else "before" if before else "after", []).append(name)
    yield from groups.values()


class EngineProcess:
    """One process of the engine and its socket."""

    def __init__(self, model: Path, dtype: str = "float32", tensor_parallel: int = 1) -> None:
        self.dtype = dtype
        self.model = model
        self.tensor_parallel = tensor_parallel
        self.progress: list[Message] = []
        self.memory = os.memfd_create("weights")
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(START_SECONDS)
        python = engine_python()
        assert python is not None
        words = ["--socket", str(theirs.fileno()), "--memory", str(self.memory)]
        self.process = subprocess.Popen(
            [python, "-m", "mindgrpo_engine", *words],
            env=environment(),
            pass_fds=(theirs.fileno(), self.memory),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE if os.environ.get("ENGINE_QUIET") else None,
        )
        theirs.close()
        self.ready: Message = {}

    def start(self, **arguments: Any) -> Message:
        request = {
            "type": "start",
            "model": str(self.model),
            "dtype": self.dtype,
            "tensor_parallel": self.tensor_parallel,
            "max_model_len": 128,
            "seed": 0,
            "arguments": LIMITS | arguments,
        }
        self.ready = self.ask(request)
        return self.ready

    def ask(self, request: Message) -> Message:
        send(self.socket, request)
        return self.answer()

    def answer(self) -> Message:
        while True:
            reply = receive(self.socket)
            assert reply is not None, "the engine has closed its socket"
            if reply["type"] != "progress":
                return reply
            self.progress.append(reply)

    def begin(self, tensors: Tensors, version: int) -> Message:
        shapes = [[name, list(array.shape)] for name, array in tensors.items()]
        return self.ask({"type": "begin_weights", "version": version, "tensors": shapes})

    def load(self, tensors: Tensors, wrong_crc: str = "") -> Message:
        """One chunk, and the memory overwritten when the engine has answered."""
        entries, offset, data = [], 0, bytearray()
        for name, array in tensors.items():
            part = encoded(array, self.dtype)
            crc = checksum(part) ^ (name == wrong_crc)
            entries.append({"name": name, "shape": array.shape, "offset": offset, "crc": crc})
            data += part + bytes(-len(part) % 64)
            offset = len(data)
        if os.fstat(self.memory).st_size < offset:
            os.ftruncate(self.memory, offset)
        with mmap.mmap(self.memory, 0) as mapping:
            mapping[:offset] = bytes(data)
            reply = self.ask({"type": "load_weights", "tensors": entries})
            mapping[:] = b"\xff" * len(mapping)
        return reply

    def load_all(self, tensors: Tensors, wrong_crc: str = "") -> list[Message]:
        groups = chunks(list(tensors))
        return [self.load({name: tensors[name] for name in group}, wrong_crc) for group in groups]

    def commit(self, version: int) -> Message:
        return self.ask({"type": "commit_weights", "version": version})

    def publish(self, tensors: Tensors, version: int) -> None:
        assert self.begin(tensors, version) == {"type": "begun"}
        assert all(reply == {"type": "loaded"} for reply in self.load_all(tensors))
        versions = [version] * self.tensor_parallel
        assert self.commit(version) == {"type": "committed", "versions": versions}

    def generate(self, version: int, requests: list[Message], **sampling: Any) -> Message:
        message = {"type": "generate", "version": version, "sampling": PLAIN | sampling}
        return self.ask(message | {"requests": requests})

    def close(self) -> None:
        self.socket.close()
        os.close(self.memory)
        self.process.kill()
        self.process.wait()
        if self.ready.get("folder"):
            shutil.rmtree(self.ready["folder"], ignore_errors=True)


def environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(CHILD),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
    }


class Oracle:
    """transformers in vLLM's environment, one process for all questions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked = 0
        python = engine_python()
        assert python is not None
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name("transformers_log_probs.py"))],
            env=environment() | {"HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def log_probs(self, model: Path, temperature: float, rows: list[list[int]]) -> list[np.ndarray]:
        """For each row, log-probs of the next token (positions, vocabulary)."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.asked += 1
        out = self.folder / f"{self.asked}.npz"
        job = {"model": str(model), "temperature": temperature, "rows": rows, "out": str(out)}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "written\n", "transformers failed"
        with np.load(out) as arrays:
            return [arrays[str(number)] for number in range(len(rows))]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
