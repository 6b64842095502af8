"""Exponentials, logarithms and the rotary table have the same bits wherever memory lies, unlike NumPy's own.

That the table's values are transformers' is shown in test_families.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from algorithms import loss_of
from small_generators import HAS_AVX512
from small_runs import MODEL

from mindgrpo.algorithm.exponentials import exp, log
from mindgrpo.algorithm.losses import kl_estimate
from mindgrpo.algorithm.rollout_correction import correct_rollout
from mindgrpo.algorithm.surrogates import LOSS_TYPES, Tokens
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.rotary import rotary_table
from mindgrpo.rollout.embedded.sampling import draw

TESTS = Path(__file__).parent
# Hands out memory without gaps, as allocators do that keep no header before each block, and takes none back: an array
# of a multiple of 16 bytes ends where the next begins.
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


def digest(arrays: Iterable[np.ndarray]) -> str:
    """Of their bytes; all are made before any is read, so that allocators cannot use one's memory again."""
    return hashlib.sha256(b"".join([array.tobytes() for array in [*arrays]])).hexdigest()


def rotary_tables() -> Iterator[np.ndarray]:
    config = decoder_config(MODEL | {"head_dim": 24}, "here")
    return (rotary_table(config, rows) for rows in (16, 100))


def numpys_own() -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    for _ in range(40):
        exponents = rng.random(64, np.float32)
        yield np.power(np.full_like(exponents, 10_000), exponents)


def exponentials() -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.float64):
        for size in (4, 16, 64, 1000):
            x = rng.normal(size=size).astype(dtype)
            yield exp(x)
            yield log(x * x)


def losses() -> Iterator[np.ndarray]:
    rng = np.random.default_rng(1)
    for size in (16, 64):
        of = [rng.normal(-2.0, 0.3, size).astype(np.float32) for _ in range(7)]
        tokens = Tokens(*of, lengths=np.array([size - 4, 4]))
        yield kl_estimate(tokens.logps, tokens.reference, "k3")
        mask = np.ones(size, bool)
        yield from correct_rollout([of[0]], [of[1]], [mask], "token_truncate", 2.0, 0.0).weights
        for loss_type, loss in LOSS_TYPES.items():
            config = loss_of(loss_type=loss_type)
            yield loss.surrogate(tokens, config, tokens.logps)


def drawn() -> Iterator[np.ndarray]:
    """Log-probs of what the plain decoder draws of 4 candidates on each of two ranks."""
    rng = np.random.default_rng(2)
    sampling = SamplingParams(top_p=0.9)
    for size in (4, 16, 64):
        columns = rng.normal(size=(size, 2, 15)).astype(np.float32)
        columns[:, :, -2:] = np.abs(columns[:, :, -2:]) + 1
        yield draw(sampling, columns, np.arange(size, dtype=np.uint64), 32).logps


SUBJECTS = (rotary_tables, exponentials, losses, drawn)


@pytest.fixture(scope="module")
def gapless(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of a process whose allocator leaves no gaps."""
    folder = tmp_path_factory.mktemp("allocator")
    library, source = folder / "allocator.so", folder / "allocator.c"
    source.write_text(ALLOCATOR)
    subprocess.run(
        ["cc", "-O1", "-fno-builtin", "-shared", "-fPIC", "-mcmodel=large", "-o", library, source],
        check=True,
    )
    return digests_under(str(library))


def digests_under(library: str) -> dict[str, str]:
    """Of a process that preloads `library`; none: the system's allocator, which leaves gaps."""
    program = (
        "import json, test_exponentials as t;"
        "print(json.dumps({each.__name__: t.digest(each()) for each in (*t.SUBJECTS, t.numpys_own)}))"
    )
    environment = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "LD_PRELOAD": library}
    told = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    digests: dict[str, str] = json.loads(told.stdout)
    return digests


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.__name__)
def test_arrays_that_touch_in_memory_give_the_same_bits(
    gapless: dict[str, str], subject: Callable[[], Iterator[np.ndarray]]
) -> None:
    assert gapless[subject.__name__] == digest(subject())


def test_numpy_s_own_power_depends_on_where_memory_lies(gapless: dict[str, str]) -> None:
    """Else the allocator shows nothing, or NumPy needs nothing of exponentials.py any more."""
    if not HAS_AVX512:
        pytest.skip("NumPy has one power of float32 on other processors")
    assert gapless["numpys_own"] != digests_under("")["numpys_own"]
