/* Sixteen floats at a time, what a register holds of them, and an exponential that vectorises. */
#ifndef MINDGRPO_VEC16_H
#define MINDGRPO_VEC16_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef float vec16 __attribute__((vector_size(64), aligned(4)));

/* F(lane, STEP) of all LANES, for a list of constants. */
#define FOUR_LANES(F, N, STEP) F(N, STEP), F(N + 1, STEP), F(N + 2, STEP), F(N + 3, STEP)
#define EIGHT_LANES(F, N, STEP) FOUR_LANES(F, N, STEP), FOUR_LANES(F, N + 4, STEP)
#if defined(__AVX512F__)
#define EACH_LANE(F, STEP) EIGHT_LANES(F, 0, STEP), EIGHT_LANES(F, 8, STEP)
#elif defined(__AVX__)
#define EACH_LANE(F, STEP) EIGHT_LANES(F, 0, STEP)
#else
#define EACH_LANE(F, STEP) FOUR_LANES(F, 0, STEP)
#endif

/* VEC floats; LANES of them fit one of the processor's REGISTERS, which is what sums that have to stay in registers are of:
 * GCC keeps wider vectors in memory. */
#if defined(__AVX512F__)
enum { VEC = 16, LANES = 16, REGISTERS = 32 };
#elif defined(__AVX__)
enum { VEC = 16, LANES = 8, REGISTERS = 16 };
#elif defined(__aarch64__)
enum { VEC = 16, LANES = 4, REGISTERS = 32 };
#else
enum { VEC = 16, LANES = 4, REGISTERS = 16 };
#endif
typedef float lanes __attribute__((vector_size(LANES * 4), aligned(4)));

#define ALWAYS_INLINE static inline __attribute__((always_inline))

static inline int64_t padded(int64_t n) { return (n + VEC - 1) / VEC * VEC; }

/* exp(x), relative error below 2e-7; 0 below -87, NaN stays NaN. Without a branch, so that loops over it vectorise. */
static inline float fast_exp(float x) {
    float clamped = x > 88.0f ? 88.0f : x;
    clamped = clamped < -87.0f ? -87.0f : clamped;
    float shifted = clamped * 1.44269504088896341f + 12582912.0f;
    float n = shifted - 12582912.0f;
    float r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union {
        float f;
        uint32_t i;
    } bits;
    bits.f = shifted;
    /* The low bits of `shifted` are n in two's complement. */
    bits.i = (bits.i + 127) << 23;
    float y = p * bits.f;
    return x < -87.0f ? 0.0f : y;
}

/* One of log2(LANES) stages of a transposition; indices are constants, as GCC makes those of a loop while it runs. */
#define LOW_LANE(I, STEP) (I) & (STEP) ? (I) - (STEP) + LANES : (I)
#define HIGH_LANE(I, STEP) (I) & (STEP) ? (I) + LANES : (I) + (STEP)
#define TRANSPOSE_STAGE(STEP)                                                        \
    for (int i = 0; i < LANES; i++) {                                                \
        if (i & (STEP)) continue;                                                    \
        const lane_order low = {EACH_LANE(LOW_LANE, STEP)}, high = {EACH_LANE(HIGH_LANE, STEP)}; \
        lanes a = x[i], b = x[i + (STEP)];                                           \
        x[i] = __builtin_shuffle(a, b, low);                                         \
        x[i + (STEP)] = __builtin_shuffle(a, b, high);                               \
    }

/* x [LANES][LANES] -> its transpose */
ALWAYS_INLINE void transpose_lanes(lanes *x) {
    typedef int32_t lane_order __attribute__((vector_size(LANES * 4)));
#pragma GCC unroll 16
    TRANSPOSE_STAGE(1)
#pragma GCC unroll 16
    TRANSPOSE_STAGE(2)
#if defined(__AVX__)
#pragma GCC unroll 16
    TRANSPOSE_STAGE(4)
#endif
#if defined(__AVX512F__)
#pragma GCC unroll 16
    TRANSPOSE_STAGE(8)
#endif
}

/* x [16][16] -> its transpose */
ALWAYS_INLINE void transpose16(vec16 *x) {
    if (LANES == VEC) {
        transpose_lanes((lanes *)x);
        return;
    }
    for (int i = 0; i < VEC; i += LANES)
        for (int j = 0; j <= i; j += LANES) {
            lanes below[LANES], above[LANES];
            for (int q = 0; q < LANES; q++) {
                memcpy(&below[q], (float *)&x[i + q] + j, sizeof below[q]);
                memcpy(&above[q], (float *)&x[j + q] + i, sizeof above[q]);
            }
            transpose_lanes(below);
            transpose_lanes(above);
            for (int q = 0; q < LANES; q++) {
                memcpy((float *)&x[j + q] + i, &below[q], sizeof below[q]);
                memcpy((float *)&x[i + q] + j, &above[q], sizeof above[q]);
            }
        }
}

static inline float dot(const float *a, const float *b, int64_t n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static inline float largest(const float *x, int64_t n) {
    float top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    return top;
}

/* 1 / rms(x) of arXiv:1910.07467. */
static inline float inverse_rms(const float *x, int64_t n, float eps) { return 1.0f / sqrtf(dot(x, x, n) / n + eps); }

static inline float silu(float x) { return x / (1.0f + fast_exp(-x)); }

#endif
