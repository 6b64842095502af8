/* bfloat16: the upper half of a float32. */
#ifndef MINDGRPO_BF16_H
#define MINDGRPO_BF16_H

#include <stdint.h>
#include <string.h>

/* To the nearest, ties to even. A number that is none stays none. */
static inline uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return x == x ? rounded : 0x7fc0;
}

static inline float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline void widen(const uint16_t *x, int64_t count, float *y) {
    for (int64_t i = 0; i < count; i++) y[i] = from_bf16(x[i]);
}

#endif
