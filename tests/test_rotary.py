"""The rotary table's bits wherever memory lies. That its values are transformers' is shown in test_families.py."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from small_runs import MODEL

from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.rotary import rotary_table

TESTS = Path(__file__).parent
ROWS = (16, 100)
# Hands out memory without gaps, as allocators do that keep no header before each block, and takes none back. 48 bytes,
# a table's 12 frequencies, then end where the next 48 begin.
ALLOCATOR = """
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#define ROOM (1L << 31)
static char room[ROOM] __attribute__((aligned(4096)));
static uint32_t sizes[ROOM / 16]; /* in units of 16 bytes */
static long end;
static void *take(size_t size, long align) {
    long units = (size + 15) / 16, at = __atomic_fetch_add(&end, units * 16 + align - 16, __ATOMIC_RELAXED);
    at = (at + align - 1) / align * align;
    if (at + (long)size > ROOM) return NULL;
    sizes[at / 16] = units;
    return room + at;
}
void *malloc(size_t size) { return take(size, 16); }
void *calloc(size_t n, size_t size) { return take(n * size, 16); }
void *aligned_alloc(size_t align, size_t size) { return take(size, align < 16 ? 16 : align); }
void *memalign(size_t align, size_t size) { return aligned_alloc(align, size); }
int posix_memalign(void **to, size_t align, size_t size) { return !(*to = aligned_alloc(align, size)) * 12; }
size_t malloc_usable_size(void *p) { return p ? sizes[((char *)p - room) / 16] * 16L : 0; }
void free(void *p) { (void)p; }
void *realloc(void *p, size_t size) {
    size_t old = malloc_usable_size(p);
    void *to = p && size <= old ? p : take(size, 16);
    return to == p || !p ? to : memcpy(to, p, old);
}
"""


def digest(rows: int) -> str:
    config = decoder_config(MODEL | {"head_dim": 24}, "here")
    return hashlib.sha256(rotary_table(config, rows).tobytes()).hexdigest()


def test_arrays_that_touch_in_memory_give_the_same_bits(tmp_path: Path) -> None:
    library = tmp_path / "allocator.so"
    source = tmp_path / "allocator.c"
    source.write_text(ALLOCATOR)
    subprocess.run(
        ["cc", "-O1", "-fno-builtin", "-shared", "-fPIC", "-mcmodel=large", "-o", library, source],
        check=True,
    )
    program = "from test_rotary import ROWS, digest; print(*map(digest, ROWS))"
    environment = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "LD_PRELOAD": str(library)}
    told = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.split() == [digest(rows) for rows in ROWS]
