/* Threads that share a kernel's work, for kernels so short that waking a sleeping thread would cost more than they do.
 *
 * A helper turns for a moment after its work, for the next kernel follows soon; then it sleeps. As many threads as
 * OpenMP would take; with one there is no waiting at all. One piece of work at a time.
 */
#ifndef MINDGRPO_THREAD_POOL_H
#define MINDGRPO_THREAD_POOL_H

#include <stdint.h>

typedef struct {
    int index, size;
} Member;

/* Calls `work` once in each member, among them the caller, and returns when all have. */
void pool_run(void (*work)(const void *task, Member member), const void *task);

/* All members of the running work meet. */
void pool_meet(Member member);

/* The member's stretch of `count` things. */
static inline void share_out(Member member, int64_t count, int64_t *begin, int64_t *end) {
    *begin = count * member.index / member.size;
    *end = count * (member.index + 1) / member.size;
}

#endif
