"""Defines what an engine's process and the one that drives it share: messages, checksums, and the process's variables.

A message is 4 bytes big-endian length, then a JSON object in UTF-8. Standard library only: both sides import this file.
"""

from __future__ import annotations

import json
import socket
import struct
import zlib
from collections.abc import Mapping
from typing import Any

Message = dict[str, Any]

_LENGTH = struct.Struct(">I")
# What the engine's process depends on. The engine and its only worker run in the process itself: what is done to them
# is done by calls. Other workers are spawned: forked ones would hold the parent's socket open.
FIXED_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
}
# What a user sets wins.
DEFAULT_VARIABLES = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks and engines share the cores
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the reload of vLLM 0.32 was tried with its first model runner only
    "TORCHDYNAMO_DISABLE": "1",  # else the first generation compiles for 15 s
    "HF_HUB_OFFLINE": "1",
    # By default oneDNN keeps 1,024 products, each with memory of its own: 150 MB more in 100 steps.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}
SAMPLE_BYTES = 1 << 16


class EngineFailure(Exception):
    """A request that failed: one sentence, and whether the user or the engine (or its driver) is to blame."""

    def __init__(self, sentence: str, kind: str = "engine") -> None:
        super().__init__(sentence)
        self.kind = kind

    def reply(self) -> Message:
        return {"type": "error", "error": str(self), "kind": self.kind}


class UserFailure(EngineFailure):
    """A request that failed because what the user asked for cannot be done."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, "user")


def engine_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an engine's variables that are added to `environment`; an empty variable there counts as not set."""
    defaults = {
        name: value for name, value in DEFAULT_VARIABLES.items() if not environment.get(name)
    }
    return defaults | FIXED_VARIABLES


def sentence(error: BaseException) -> str:
    """Describes the error in one line: the first lines of its text that say something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([f"{type(error).__name__}:", *lines[:3]]) if lines else type(error).__name__


def send(connection: socket.socket, message: Message) -> None:
    body = json.dumps(message, separators=(",", ":")).encode("utf-8")
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive(connection: socket.socket) -> Message | None:
    """Returns the next message; None where the other side has closed between two of them."""
    head = _read(connection, _LENGTH.size)
    if not head:
        return None
    length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else -1
    body = _read(connection, length)
    if len(body) != length:
        raise ConnectionError("the connection ended in the middle of a message")
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError(f"a message is a JSON object, not {type(message).__name__}")
    return message


def _read(connection: socket.socket, length: int) -> bytearray:
    """Reads that many bytes, or fewer where the other side has closed."""
    data = bytearray()
    while len(data) < length:
        chunk = connection.recv(min(length - len(data), 1 << 20))
        if not chunk:
            break
        data += chunk
    return data


def checksum(data: memoryview) -> int:
    """Computes the CRC-32 of the first and the last 64 KiB of a tensor, or of all where it is not longer."""
    if data.nbytes <= 2 * SAMPLE_BYTES:
        return zlib.crc32(data)
    return zlib.crc32(data[-SAMPLE_BYTES:], zlib.crc32(data[:SAMPLE_BYTES]))
