"""The checksum that goes with a tensor in shared memory. Standard library only: both sides import this file."""

from __future__ import annotations

import zlib

SAMPLE_BYTES = 1 << 16


def checksum(data: memoryview) -> int:
    """CRC-32 of the first and the last 64 KiB of a tensor, or of all where it is not longer."""
    if data.nbytes <= 2 * SAMPLE_BYTES:
        return zlib.crc32(data)
    return zlib.crc32(data[-SAMPLE_BYTES:], zlib.crc32(data[:SAMPLE_BYTES]))
