/* See futex.h. The shared form of FUTEX_WAIT and FUTEX_WAKE: the waiters are other processes. */
#define _GNU_SOURCE
#include "futex.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static inline int reached(uint32_t value, uint32_t wanted) { return (int32_t)(value - wanted) >= 0; }

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

void futex_post(Futex *cell, uint32_t value) {
    /* Sequentially consistent on both sides: either the waiter sees the value or this sees the waiter. */
    atomic_store(&cell->value, value);
    if (atomic_load(&cell->waiting)) syscall(SYS_futex, &cell->value, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

int futex_wait(Futex *cell, uint32_t wanted, uint32_t spins, int32_t milliseconds) {
    for (uint32_t i = 0; i <= spins; i++) {
        if (reached(atomic_load_explicit(&cell->value, memory_order_acquire), wanted)) return WAIT_OVER;
        futex_spin();
    }
    int64_t give_up = now_ms() + milliseconds, left = milliseconds;
    uint32_t value;
    atomic_fetch_add(&cell->waiting, 1);
    while (!reached(value = atomic_load(&cell->value), wanted) && left > 0) {
        struct timespec limit = {left / 1000, left % 1000 * 1000000};
        syscall(SYS_futex, &cell->value, FUTEX_WAIT, value, &limit, NULL, 0);
        left = give_up - now_ms();
    }
    atomic_fetch_sub(&cell->waiting, 1);
    return reached(value, wanted) ? WAIT_OVER : WAIT_TIMED_OUT;
}

int process_lives(int64_t pid) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    if (size <= 0) return 0;
    text[size] = 0;
    /* The state follows the program's name, which may hold brackets itself. */
    const char *end = strrchr(text, ')');
    return end && end[1] == ' ' && end[2] != 'Z' && end[2] != 'X';
}
