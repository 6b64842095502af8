/* Boxes of tensors into boxes of tensors, from a table made once. Stores go past the caches, as memcpy's do for long
 * blocks: what is moved is not read again soon, and a line that is written whole need not be fetched first. */
#include <stdint.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

static void stream_run(char *to, const char *from, int64_t bytes) {
#ifdef __AVX2__
    int64_t head = -(intptr_t)to & 31;
    if (bytes >= 256) {
        memcpy(to, from, head);
        int64_t i = head;
        for (; i + 128 <= bytes; i += 128)
            for (int q = 0; q < 4; q++)
                _mm256_stream_si256((__m256i *)(to + i + 32 * q), _mm256_loadu_si256((const __m256i *)(from + i + 32 * q)));
        memcpy(to + i, from + i, bytes - i);
        return;
    }
#endif
    memcpy(to, from, bytes);
}

/* `count` copies of `rows` runs each: a row of `table` is to, from (addresses), rows, bytes a run, and the bytes from
 * one run to the next in the target and in the source. */
void copy_runs(const int64_t *table, int64_t count) {
    for (const int64_t *job = table; job < table + 6 * count; job += 6) {
        char *to = (char *)(intptr_t)job[0];
        const char *from = (const char *)(intptr_t)job[1];
        int64_t rows = job[2], bytes = job[3];
        if (job[4] == bytes && job[5] == bytes) bytes *= rows, rows = 1;
        for (int64_t i = 0; i < rows; i++) stream_run(to + i * job[4], from + i * job[5], bytes);
    }
#ifdef __AVX2__
    _mm_sfence();
#endif
}
