/* Ranks as threads that share what ranks share, for tests/test_ordering.py, which builds this with the library's sources
 * under ThreadSanitizer. Prints "right" if what they read is. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "collective.h"
#include "futex.h"
#include "thread_pool.h"

enum { RANKS = 3, SLOT_BYTES = 1 << 18, ROUNDS = 4, LARGE = 50000, LINK_SLOTS = 4, MESSAGES = 200 };

int64_t group_control_bytes(int32_t size);
int32_t group_register(void *memory, int64_t slot_bytes, int32_t index, int32_t size, int64_t *pids, uint32_t spins);
int group_barrier(int32_t id);

static int32_t ids[RANKS];
static _Atomic int wrong;
static struct {
    Futex sent, received;
    int64_t slots[LINK_SLOTS][8];
} link_memory;

static void *rank(void *number) {
    int index = (int)(intptr_t)number;
    float *mine = calloc(LARGE, sizeof *mine), *all = calloc(RANKS * 100, sizeof *all);
    for (int round = 0; round < ROUNDS; round++) {
        /* One that a rank adds alone, and one in chunks. */
        for (int count = 10; count <= LARGE; count *= LARGE / 10) {
            for (int i = 0; i < count; i++) mine[i] = index + round;
            if (group_sum(ids[index], mine, count, mine)) wrong = 1;
            for (int i = 0; i < count; i++)
                if (mine[i] != 3 + 3 * round) wrong = 1;
        }
        for (int i = 0; i < 100; i++) mine[i] = index;
        if (group_gather(ids[index], mine, 100, all) || all[299] != 2 || group_barrier(ids[index])) wrong = 1;
    }
    free(mine), free(all);
    return NULL;
}

static void wait_until(Futex *cell, uint32_t wanted, uint32_t spins) {
    while (futex_wait(cell, wanted, spins, 1000) != WAIT_OVER) continue;
}

/* As SharedLink of backend/cpu/host.py, with turns before the sleep and without. */
static void *sender(void *unused) {
    for (uint32_t i = 0; i < MESSAGES; i++) {
        wait_until(&link_memory.received, i < LINK_SLOTS ? 0 : i + 1 - LINK_SLOTS, i % 2);
        for (int j = 0; j < 8; j++) link_memory.slots[i % LINK_SLOTS][j] = i + j;
        futex_post(&link_memory.sent, i + 1);
    }
    return unused;
}

static void *receiver(void *unused) {
    for (uint32_t i = 0; i < MESSAGES; i++) {
        wait_until(&link_memory.sent, i + 1, i % 2);
        for (int j = 0; j < 8; j++)
            if (link_memory.slots[i % LINK_SLOTS][j] != i + j) wrong = 1;
        futex_post(&link_memory.received, i + 1);
    }
    return unused;
}

static int64_t shares[64];

static void work(void *task, Member member) {
    int64_t sum = 0;
    shares[member.index] = member.index + 1;
    pool_meet(member);
    for (int i = 0; i < member.size; i++) sum += shares[i];
    pool_meet(member);
    ((int64_t *)task)[member.index] = sum;
}

int main(void) {
    int64_t pids[RANKS + 1] = {getpid(), getpid(), getpid(), 0}, totals[64];
    void *memory = aligned_alloc(4096, group_control_bytes(RANKS) + 2 * RANKS * SLOT_BYTES);
    memset(memory, 0, group_control_bytes(RANKS));
    pthread_t threads[RANKS + 2];
    for (int i = 0; i < RANKS; i++) ids[i] = group_register(memory, SLOT_BYTES, i, RANKS, pids, 100);
    for (int i = 0; i < RANKS; i++) pthread_create(&threads[i], NULL, rank, (void *)(intptr_t)i);
    pthread_create(&threads[RANKS], NULL, sender, NULL);
    pthread_create(&threads[RANKS + 1], NULL, receiver, NULL);
    for (int i = 0; i < RANKS + 2; i++) pthread_join(threads[i], NULL);
    int size = pool_size();
    for (int round = 0; round < 20; round++) {
        pool_run(work, totals);
        for (int i = 0; i < size; i++)
            if (totals[i] != size * (size + 1) / 2) wrong = 1;
    }
    free(memory);
    puts(wrong ? "wrong" : "right");
    return 0;
}
