/* See team.h. */
#include "team.h"

#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

#include "waiting.h"

/* A turn takes some 50 ns: kernels follow each other within a few hundred turns. */
enum { HELPER_TURNS = 1000, MEETING_TURNS = 2000, SLEEP_MS = 1000, MAX_MEMBERS = 64 };

static struct {
    Cell started;
    _Alignas(64) _Atomic uint32_t done;
    _Alignas(64) _Atomic uint32_t arrived;
    void (*work)(const void *task, Member member);
    const void *task;
    int size;
    pid_t process;
    pthread_mutex_t busy;
} team = {.busy = PTHREAD_MUTEX_INITIALIZER};

static void *help(void *index) {
    Member member = {(int)(intptr_t)index, 0};
    for (uint32_t round = 1;; round++) {
        while (cell_wait(&team.started, round, HELPER_TURNS, SLEEP_MS) != WAIT_OVER) continue;
        member.size = team.size;
        team.work(team.task, member);
        atomic_fetch_add(&team.done, 1);
    }
    return NULL;
}

/* A forked process has none of its parent's threads. */
static void gather_team(void) {
    if (team.process == getpid()) return;
    int wanted = omp_get_max_threads();
    team.process = getpid();
    team.size = 1;
    atomic_store(&team.started.value, 0);
    for (; team.size < wanted && team.size < MAX_MEMBERS; team.size++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, (void *)(intptr_t)team.size)) break;
        pthread_detach(thread);
    }
}

static void wait_for(_Atomic uint32_t *count, uint32_t wanted) {
    for (int turns = 0; (int32_t)(atomic_load_explicit(count, memory_order_acquire) - wanted) < 0; turns++)
        if (turns < MEETING_TURNS)
            cell_turn();
        else
            sched_yield();
}

void team_run(void (*work)(const void *task, Member member), const void *task) {
    pthread_mutex_lock(&team.busy);
    gather_team();
    team.work = work;
    team.task = task;
    atomic_store(&team.done, 0);
    atomic_store(&team.arrived, 0);
    if (team.size > 1) cell_post(&team.started, atomic_load(&team.started.value) + 1);
    work(task, (Member){0, team.size});
    wait_for(&team.done, team.size - 1);
    pthread_mutex_unlock(&team.busy);
}

void team_meet(Member member) {
    if (member.size == 1) return;
    uint32_t ticket = atomic_fetch_add(&team.arrived, 1);
    wait_for(&team.arrived, (ticket / member.size + 1) * member.size);
}
