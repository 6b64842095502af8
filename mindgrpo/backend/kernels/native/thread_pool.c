/* See thread_pool.h. */
#define _GNU_SOURCE
#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "futex.h"

/* A turn takes some 50 ns: kernels follow each other within a few hundred turns. */
enum { HELPER_TURNS = 1000, MEETING_TURNS = 2000, SLEEP_MS = 1000, MAX_MEMBERS = 64 };

static struct {
    Futex started;
    _Alignas(64) _Atomic uint32_t done;
    _Alignas(64) _Atomic uint32_t arrived;
    void (*work)(void *task, Member member);
    void *task;
    int size;
    pid_t process;
    pthread_mutex_t busy;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER};

static void *help(void *index) {
    Member member = {(int)(intptr_t)index, 0};
    for (uint32_t round = 1;; round++) {
        while (futex_wait(&pool.started, round, HELPER_TURNS, SLEEP_MS) != WAIT_OVER) continue;
        member.size = pool.size;
        pool.work(pool.task, member);
        atomic_fetch_add(&pool.done, 1);
    }
    return NULL;
}

static int wanted_size(void) {
    const char *number = getenv("OMP_NUM_THREADS");
    cpu_set_t cores;
    int size = number ? atoi(number) : 0;
    if (size < 1) size = sched_getaffinity(0, sizeof cores, &cores) ? 1 : CPU_COUNT(&cores);
    return size < MAX_MEMBERS ? size : MAX_MEMBERS;
}

/* Holds the pool for the caller. A forked process has none of its parent's threads. */
static void take_pool(void) {
    pthread_mutex_lock(&pool.busy);
    if (pool.process == getpid()) return;
    int wanted = wanted_size();
    pool.process = getpid();
    pool.size = 1;
    atomic_store(&pool.started.value, 0);
    for (; pool.size < wanted; pool.size++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, (void *)(intptr_t)pool.size)) break;
        pthread_detach(thread);
    }
}

int pool_size(void) {
    take_pool();
    int size = pool.size;
    pthread_mutex_unlock(&pool.busy);
    return size;
}

static void wait_for(_Atomic uint32_t *count, uint32_t wanted) {
    for (int turns = 0; (int32_t)(atomic_load_explicit(count, memory_order_acquire) - wanted) < 0; turns++)
        if (turns < MEETING_TURNS)
            futex_spin();
        else
            sched_yield();
}

void pool_run(void (*work)(void *task, Member member), void *task) {
    take_pool();
    pool.work = work;
    pool.task = task;
    atomic_store(&pool.done, 0);
    atomic_store(&pool.arrived, 0);
    if (pool.size > 1) futex_post(&pool.started, atomic_load(&pool.started.value) + 1);
    work(task, (Member){0, pool.size});
    wait_for(&pool.done, pool.size - 1);
    pthread_mutex_unlock(&pool.busy);
}

void pool_meet(Member member) {
    if (member.size == 1) return;
    uint32_t ticket = atomic_fetch_add(&pool.arrived, 1);
    wait_for(&pool.arrived, (ticket / member.size + 1) * member.size);
}
