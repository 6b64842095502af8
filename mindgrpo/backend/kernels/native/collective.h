/* Sums and gathers over the ranks of a host, through memory that all of them have mapped.
 *
 * For other kernels: a group is known by the number that Python got for it (shared_group.py), so that no address
 * is ever part of a graph. Members make the same calls in the same order, one at a time. 0 is success.
 */
#ifndef MINDGRPO_COLLECTIVE_H
#define MINDGRPO_COLLECTIVE_H

#include "kernel.h"

enum { GROUP_UNKNOWN = 1, GROUP_OUT_OF_STEP = 2, GROUP_PEER_LOST = 3, GROUP_BUSY = 4, GROUP_NO_ROOM = 5 };

/* Where this process tells since when (seconds of CLOCK_MONOTONIC) it waits for another; 0 while it does not. */
void group_tell_waits_at(double *place);

/* out = the members' sum, added in member order: the same bits on every member. `out` may be `mine`. */
int group_sum(int32_t group, const float *mine, int64_t count, float *out);

/* The same in place, in a kernel, which ends with what is returned; nothing to do for group -1. */
int sum_over_ranks(const Call *call, int64_t group, float *x, int64_t count);

/* Member i's floats at all + i * count. */
int group_gather(int32_t group, const float *mine, int64_t count, float *all);

/* The same in a kernel, of a group that must have `size` members. */
int gather_over_ranks(const Call *call, int64_t group, int64_t size, const float *mine, int64_t count, float *all);

#endif
