/* The noise of sampling, as rollout/noise.py defines it, bit for bit. */
#ifndef MINDGRPO_GUMBEL_H
#define MINDGRPO_GUMBEL_H

#include <math.h>
#include <stdint.h>

/* SplitMix64: number `position` of the stream that starts at a sample's key. */
static inline uint64_t position_key(uint64_t sample_key, int64_t position) {
    uint64_t x = sample_key + ((uint64_t)position + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

#define STRIDE 0x9E3779B9u

/* triple32 of a number times STRIDE, with half of the key before the first round and half before the second. */
static inline uint32_t triple32(uint64_t key, uint32_t strides) {
    uint32_t x = strides + (uint32_t)key;
    x = (x ^ (x >> 17)) * 0xED5AD4BBu;
    x = ((x ^ (x >> 11)) + (uint32_t)(key >> 32)) * 0xAC4C1B51u;
    x = (x ^ (x >> 15)) * 0x31848BABu;
    return x ^ (x >> 14);
}

/* The upper half is half of the hash of a pair of tokens, so that a search for large noise hashes half as many numbers:
 * tokens t and t + 16 are a pair. */
static inline uint32_t token_bits(uint64_t key, uint32_t token) {
    uint32_t pair = triple32(key, (token / 32 * 16 + token % 16) * STRIDE);
    uint32_t own = triple32(key << 32 | key >> 32, token * STRIDE);
    return (token / 16 % 2 ? pair & 0xFFFF0000u : pair << 16) | own >> 16;
}

/* In float64, so that the rounding to float32 hides the last bit, in which C libraries may differ. */
static inline float gumbel_of(uint32_t bits) { return (float)-log(-log((bits + 0.5) * 0x1p-32)); }

#endif
