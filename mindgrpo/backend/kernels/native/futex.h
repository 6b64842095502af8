/* Waiting for a counter in shared memory without keeping a core: a few turns, then asleep until it is posted. */
#ifndef MINDGRPO_FUTEX_H
#define MINDGRPO_FUTEX_H

#include <stdatomic.h>
#include <stdint.h>

/* A counter that only grows, by wrapping steps; what was written before a post is seen after the wait for it. */
typedef struct {
    _Alignas(64) _Atomic uint32_t value;
    _Atomic uint32_t waiting;
} Futex;

enum { WAIT_OVER = 0, WAIT_TIMED_OUT = 1 };

/* What a core does while it waits. */
static inline void futex_spin(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void futex_post(Futex *cell, uint32_t value);

/* Returns when the value is `wanted` or later, or after `milliseconds`. */
int futex_wait(Futex *cell, uint32_t wanted, uint32_t spins, int32_t milliseconds);

/* 0 for a process that has ended, also while nobody has collected its status. */
int process_lives(int64_t pid);

#endif
