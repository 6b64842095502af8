/* The one pool of threads of this library, for kernels so short that waking a thread costs more than they do.
 *
 * MindSpore runs a kernel in one of its own threads and offers it no pool. OpenMP's threads either turn for
 * milliseconds after each loop, which takes the cores from MindSpore's matrix products between our kernels, or sleep at
 * once, which is slower than most of our kernels. A helper here turns for some 50 us after its work, for the next
 * part of a token follows within that, and then sleeps. As many threads as OpenMP would take
 * (OMP_NUM_THREADS, else a core each); with one there is no waiting at all. One piece of work at a time.
 */
#ifndef MINDGRPO_THREAD_POOL_H
#define MINDGRPO_THREAD_POOL_H

#include <stdint.h>

typedef struct {
    int index, size;
} Member;

/* Members that work has. */
int pool_size(void);

/* Calls `work` once in each member, among them the caller, and returns when all have. */
void pool_run(void (*work)(void *task, Member member), void *task);

/* All members of the running work meet. */
void pool_meet(Member member);

/* The member's stretch of `count` things. */
static inline void share_out(Member member, int64_t count, int64_t *begin, int64_t *end) {
    *begin = count * member.index / member.size;
    *end = count * (member.index + 1) / member.size;
}

#endif
