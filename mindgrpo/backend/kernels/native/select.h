/* The best of many numbers, and where a share of their mass ends. */
#ifndef MINDGRPO_SELECT_H
#define MINDGRPO_SELECT_H

#include "vec16.h"

/* Reorders x so that its `count` largest come first, in any order; returns the smallest of them. */
static inline float select_largest(float *x, int64_t size, int64_t count) {
    int64_t low = 0, high = size - 1, at = count - 1;
    while (low < high) {
        float pivot = x[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i > j) break;
            float other = x[i];
            x[i++] = x[j];
            x[j--] = other;
        }
        if (at <= j)
            high = j;
        else if (at >= i)
            low = i;
        else
            break;
    }
    return x[at];
}

static inline int descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* Rises with the number, over all floats that are not NaN. */
static inline uint32_t rank_of(float x) {
    union { float f; uint32_t i; } bits = {.f = x};
    return bits.i & 0x80000000u ? ~bits.i : bits.i | 0x80000000u;
}

static inline float of_rank(uint32_t rank) {
    union { uint32_t i; float f; } bits = {.i = rank & 0x80000000u ? rank & 0x7fffffffu : ~rank};
    return bits.f;
}

#endif
