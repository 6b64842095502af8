/* See collective.h. An operation has a number, and every member goes through them in turn.
 *
 * A member copies its data into its slot and arrives; the last to arrive wakes the others once. A small sum it adds
 * by itself first; a larger one is cut into chunks that any member which runs may take, so that nobody waits for a
 * member that has no core. Slots alternate between two halves: one is written again two operations later, when every
 * member has arrived at the operation in between and so has read it.
 */
#include "collective.h"

#include <time.h>

#include "futex.h"

#define MAX_GROUPS 256
#define CHUNK_BYTES 65536
#define BLOCK 1024 /* elements that are added at a time: they stay in the first cache */
#define LIFE_CHECK_MS 500

typedef enum { FLOAT32, FLOAT64, INT32, INT64 } Kind;
static const int64_t item_bytes[] = {4, 8, 4, 8};

/* At the start of the shared memory; `asked` is what each member believes its operation to be, by half. */
typedef struct {
    Futex opened; /* the last operation whose chunks may be taken */
    Futex done;   /* the last operation whose result stands */
    _Alignas(64) _Atomic uint32_t arrived;
    _Alignas(64) _Atomic uint32_t taken[2];
    _Alignas(64) _Atomic uint32_t added[2];
    _Atomic uint32_t out_of_step;
    _Alignas(64) int64_t asked[];
} Control;

typedef struct {
    int32_t id, index, size;
    Control *control;
    char *slots;
    int64_t slot_bytes;
    int64_t *pids; /* then one more: the process whose end was noticed first, 0 if none was */
    uint32_t spins, number;
    _Atomic int busy;
} Group;

static Group groups[MAX_GROUPS];
static _Atomic int64_t lost_pid;
static _Atomic double *waits_since;

/* -- registration, from Python ------------------------------------------------------------------------------- */

int64_t group_control_bytes(int32_t size) {
    int64_t bytes = sizeof(Control) + 2 * size * (int64_t)sizeof(int64_t);
    return (bytes + 4095) / 4096 * 4096;
}

/* `memory`: the control's bytes, then 2 * size slots. The id, which no other group of this process has had; -1 where
 * there are MAX_GROUPS. */
int32_t group_register(void *memory, int64_t slot_bytes, int32_t index, int32_t size, int64_t *pids, uint32_t spins) {
    static int32_t next;
    for (int i = 0; i < MAX_GROUPS; i++, next++) {
        Group *place = &groups[next % MAX_GROUPS];
        if (place->control) continue;
        *place = (Group){.id = next, .index = index, .size = size, .control = memory, .slot_bytes = slot_bytes,
                         .slots = (char *)memory + group_control_bytes(size), .pids = pids, .spins = spins};
        return next++;
    }
    return -1;
}

static Group *find(int32_t id) {
    Group *group = &groups[(uint32_t)id % MAX_GROUPS];
    return group->control && group->id == id ? group : NULL;
}

void group_forget(int32_t id) {
    Group *group = find(id);
    if (group) group->control = NULL;
}

/* The process whose end made an operation of this process fail, 0 if none did. */
int64_t group_lost_pid(void) { return lost_pid; }

/* -- one operation ------------------------------------------------------------------------------------------- */

static inline char *slot(const Group *g, int half, int index) {
    return g->slots + (half * g->size + index) * g->slot_bytes;
}

static inline int64_t piece_of(int64_t total, int64_t at, int64_t limit) {
    return total - at < limit ? total - at : limit; /* not above 0: nothing is left of it */
}

/* The process that ended first of the `count` at `pids`, 0 if all live; behind them it is kept for all members. One that
 * ended because another had is not the one to name. */
int64_t first_lost(int64_t *pids, int32_t count) {
    _Atomic int64_t *first = (_Atomic int64_t *)&pids[count];
    for (int i = 0; i < count && !atomic_load(first); i++) {
        int64_t none = 0;
        if (!process_lives(pids[i])) atomic_compare_exchange_strong(first, &none, pids[i]);
    }
    return atomic_load(first);
}

void group_tell_waits_at(double *place) { waits_since = (_Atomic double *)place; }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int wait_for(const Group *g, Futex *cell) {
    int told = 0, status = 0;
    while (!status && futex_wait(cell, g->number, g->spins, LIFE_CHECK_MS) != WAIT_OVER) {
        if (waits_since && !told++) *waits_since = now();
        int64_t lost = first_lost(g->pids, g->size);
        /* It may have posted as its last deed. */
        if (lost && futex_wait(cell, g->number, 0, 0) != WAIT_OVER) {
            lost_pid = lost;
            status = GROUP_PEER_LOST;
        }
    }
    if (told && waits_since) *waits_since = 0;
    return status;
}

/* Counts this member in. Returns 1 for the last of them, who sees what all others wrote before. */
static int arrive(Group *g, int half, int64_t operation) {
    Control *c = g->control;
    c->asked[half * g->size + g->index] = operation;
    if (atomic_fetch_add(&c->arrived, 1) + 1 != g->number * (uint32_t)g->size) return 0;
    for (int i = 0; i < g->size; i++)
        if (c->asked[half * g->size + i] != operation) atomic_store(&c->out_of_step, 1);
    atomic_store(&c->taken[half], 0);
    atomic_store(&c->added[half], 0);
    return 1;
}

static int in_step(const Group *g) { return atomic_load(&g->control->out_of_step) ? GROUP_OUT_OF_STEP : 0; }

/* Everybody has come; what they wrote into their slots of the half can be read. */
static int meet(Group *g, int64_t operation) {
    if (arrive(g, g->number & 1, operation)) futex_post(&g->control->done, g->number);
    int status = wait_for(g, &g->control->done);
    return status ? status : in_step(g);
}

/* In a binary tree: with the tree of products' leaves below it (gemm.h) a sum has the same bits on any number of ranks
 * that is a power of two. */
#define ADD(TYPE)                                                                                 \
    for (int64_t at = 0; at < bytes; at += BLOCK * sizeof(TYPE)) {                                \
        int64_t left = (bytes - at) / (int64_t)sizeof(TYPE), n = left < BLOCK ? left : BLOCK;     \
        for (int step = 1; step < g->size; step *= 2)                                             \
            for (int m = 0; m + step < g->size; m += 2 * step) {                                  \
                TYPE *total = (TYPE *)(slot(g, half, m) + from + at);                             \
                const TYPE *part = (const TYPE *)(slot(g, half, m + step) + from + at);           \
                for (int64_t i = 0; i < n; i++) total[i] += part[i];                              \
            }                                                                                     \
    }

/* Adds the slots' bytes [from, from + bytes) into the first. */
static void add(const Group *g, int half, Kind kind, int64_t from, int64_t bytes) {
    if (kind == FLOAT32) ADD(float)
    if (kind == FLOAT64) ADD(double)
    if (kind == INT32) ADD(int32_t)
    if (kind == INT64) ADD(int64_t)
}

static void add_chunks(Group *g, int half, Kind kind, int64_t bytes, uint32_t chunks) {
    Control *c = g->control;
    for (uint32_t i; (i = atomic_fetch_add(&c->taken[half], 1)) < chunks;) {
        int64_t from = i * (int64_t)CHUNK_BYTES;
        add(g, half, kind, from, piece_of(bytes, from, CHUNK_BYTES));
        if (atomic_fetch_add(&c->added[half], 1) + 1 == chunks) futex_post(&c->done, g->number);
    }
}

/* Leaves the sum in the first slot, until the next operation but one. */
static int sum_piece(Group *g, Kind kind, const char *mine, int64_t bytes) {
    int half = ++g->number & 1, status = 0;
    uint32_t chunks = (bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
    memcpy(slot(g, half, g->index), mine, bytes);
    int last = arrive(g, half, bytes * 8 + kind);
    if (chunks > 1) {
        if (last) futex_post(&g->control->opened, g->number);
        else status = wait_for(g, &g->control->opened);
    }
    if (!status && (last || chunks > 1)) add_chunks(g, half, kind, bytes, chunks);
    if (!status) status = wait_for(g, &g->control->done);
    return status ? status : in_step(g);
}

static int sum_all(Group *g, Kind kind, const void *mine, int64_t total, void *out) {
    int status = 0;
    for (int64_t at = 0; at < total && !status; at += g->slot_bytes) {
        int64_t bytes = piece_of(total, at, g->slot_bytes);
        status = sum_piece(g, kind, (const char *)mine + at, bytes);
        if (!status) memcpy((char *)out + at, slot(g, g->number & 1, 0), bytes);
    }
    return status;
}

/* Which bytes [start, stop) of an array are member `of`'s. */
typedef struct {
    int64_t start, stop, of;
} Share;

/* Copies what a share has of the piece [at, at + bytes) between the array and a slot with the piece. */
static void copy_share(char *array, char *piece, int into_array, const Share *share, int64_t at, int64_t bytes) {
    int64_t start = share->start > at ? share->start : at, end = at + bytes;
    int64_t stop = share->stop < end ? share->stop : end;
    if (start >= stop) return;
    if (into_array) memcpy(array + start, piece + (start - at), stop - start);
    else memcpy(piece + (start - at), array + start, stop - start);
}

static Group *begin(int32_t id, int *status) {
    Group *g = find(id);
    *status = g ? 0 : GROUP_UNKNOWN;
    if (g && atomic_exchange(&g->busy, 1)) *status = GROUP_BUSY;
    return *status ? NULL : g;
}

static int end(Group *g, int status) {
    atomic_store(&g->busy, 0);
    return status;
}

/* -- what is offered ----------------------------------------------------------------------------------------- */

int group_barrier(int32_t id) {
    int status;
    Group *g = begin(id, &status);
    if (!g) return status;
    g->number++;
    return end(g, meet(g, -1));
}

int group_sum_of(int32_t id, int32_t kind, const void *mine, int64_t count, void *out) {
    int status;
    Group *g = begin(id, &status);
    if (!g) return status;
    return end(g, sum_all(g, kind, mine, count * item_bytes[kind], out));
}

int group_sum(int32_t id, const float *mine, int64_t count, float *out) {
    return group_sum_of(id, FLOAT32, mine, count, out);
}

/* Of member i's sizes[i] bytes those from begins[i] to ends[i], which follow each other at `out`; every member knows all
 * sizes, and what it takes itself. */
int group_take_bytes(int32_t id, const void *mine, const int64_t *sizes, const int64_t *begins, const int64_t *ends, void *out) {
    int status;
    Group *g = begin(id, &status);
    if (!g) return status;
    int64_t longest = 0;
    for (int i = 0; i < g->size; i++) longest = sizes[i] > longest ? sizes[i] : longest;
    for (int64_t at = 0; at < longest && !status; at += g->slot_bytes) {
        int half = ++g->number & 1;
        int64_t bytes = piece_of(sizes[g->index], at, g->slot_bytes);
        if (bytes > 0) memcpy(slot(g, half, g->index), (const char *)mine + at, bytes);
        status = meet(g, -2 - longest);
        char *to = out;
        for (int i = 0; i < g->size && !status; to += ends[i] - begins[i], i++) {
            int64_t first = begins[i] > at ? begins[i] : at, last = ends[i] < at + g->slot_bytes ? ends[i] : at + g->slot_bytes;
            if (first < last) memcpy(to + first - begins[i], (char *)slot(g, half, i) + first - at, last - first);
        }
    }
    return end(g, status);
}

/* As group_sum_of, in place, of which a member gets its own shares alone. */
int group_sum_shares(int32_t id, int32_t kind, void *data, int64_t count, const Share *shares, int64_t num_shares) {
    int status;
    Group *g = begin(id, &status);
    if (!g) return status;
    int64_t total = count * item_bytes[kind];
    for (int64_t at = 0; at < total && !status; at += g->slot_bytes) {
        int64_t bytes = piece_of(total, at, g->slot_bytes);
        status = sum_piece(g, kind, (const char *)data + at, bytes);
        char *sums = slot(g, g->number & 1, 0);
        for (int64_t i = 0; i < num_shares && !status; i++)
            if (shares[i].of == g->index) copy_share(data, sums, 1, &shares[i], at, bytes);
    }
    return end(g, status);
}

/* Every member gets the others' shares of `total` bytes, in place. */
int group_gather_shares(int32_t id, void *data, int64_t total, const Share *shares, int64_t num_shares) {
    int status;
    Group *g = begin(id, &status);
    if (!g) return status;
    for (int64_t at = 0; at < total && !status; at += g->slot_bytes) {
        int half = ++g->number & 1;
        int64_t bytes = piece_of(total, at, g->slot_bytes);
        for (int64_t i = 0; i < num_shares; i++)
            if (shares[i].of == g->index) copy_share(data, slot(g, half, g->index), 0, &shares[i], at, bytes);
        status = meet(g, INT64_MIN / 2 + total);
        for (int64_t i = 0; i < num_shares && !status; i++)
            if (shares[i].of != g->index)
                copy_share(data, slot(g, half, (int)shares[i].of), 1, &shares[i], at, bytes);
    }
    return end(g, status);
}

int group_gather(int32_t id, const float *mine, int64_t count, float *all) {
    const Group *g = find(id);
    if (!g) return GROUP_UNKNOWN;
    int64_t sizes[g->size], begins[g->size];
    for (int i = 0; i < g->size; i++) sizes[i] = count * (int64_t)sizeof(float), begins[i] = 0;
    return group_take_bytes(id, mine, sizes, begins, sizes, all);
}

/* Of every member's block `index` of `count` floats: with `sums`, out is their sum, added as group_sum adds, by each member
 * its own block alone; else out[i] is member i's. */
static int share_blocks(int32_t id, const float *mine, int64_t count, int sums, float *out) {
    int status;
    Group *g = begin(id, &status);
    if (!g) return status;
    int64_t block = count * (int64_t)sizeof(float), room = g->slot_bytes / g->size / 64 * 64, own = g->index * room;
    if (!room) return end(g, GROUP_NO_ROOM);
    for (int64_t at = 0; at < block && !status; at += room) {
        int half = ++g->number & 1;
        int64_t bytes = piece_of(block, at, room);
        for (int i = 0; i < g->size; i++)
            memcpy(slot(g, half, g->index) + i * room, (const char *)mine + i * block + at, bytes);
        if ((status = meet(g, (sums ? INT64_MIN : INT64_MIN / 4) + block))) break;
        if (sums) add(g, half, FLOAT32, own, bytes);
        for (int i = 0; i < (sums ? 1 : g->size); i++)
            memcpy((char *)out + i * block + at, slot(g, half, i) + own, bytes);
    }
    return end(g, status);
}

/* -- in graphs ----------------------------------------------------------------------------------------------- */

static int reported(const Call *call, int status) {
    if (status == GROUP_PEER_LOST)
        return refuse(call, "process %ld of this job has ended; its log says why", lost_pid);
    return status ? refuse(call, "the group's status is %d (collective.h)", status) : 0;
}

int sum_over_ranks(const Call *call, int64_t group, float *x, int64_t count) {
    return group < 0 ? 0 : reported(call, group_sum((int32_t)group, x, count, x));
}

KERNEL(shared_sum, "x f32[...], group i32[1] -> sum f32[...]") {
    int32_t id = *(const int32_t *)call->params[1];
    return reported(call, group_sum(id, call->params[0], call->dims[ANY_SHAPE], call->params[2]));
}

static int check_parts(const Call *call, int64_t group, int64_t parts) {
    const Group *g = find((int32_t)group);
    if (!g || g->size == parts) return 0;
    return refuse(call, "%ld parts for the %d members of group %ld", parts, g->size, group);
}

int gather_over_ranks(const Call *call, int64_t group, int64_t size, const float *mine, int64_t count, float *all) {
    if (check_parts(call, group, size)) return KERNEL_REFUSED;
    return reported(call, group_gather((int32_t)group, mine, count, all));
}

KERNEL(shared_gather, "x f32[...], group i32[1] -> all f32[S, ...]") {
    int32_t id = *(const int32_t *)call->params[1];
    return gather_over_ranks(call, id, dim(call, 'S'), call->params[0], call->dims[ANY_SHAPE], call->params[2]);
}

KERNEL(shared_scatter_sum, "x f32[S, ...], group i32[1] -> sum f32[...]") {
    int32_t id = *(const int32_t *)call->params[1];
    if (check_parts(call, id, dim(call, 'S'))) return KERNEL_REFUSED;
    return reported(call, share_blocks(id, call->params[0], call->dims[ANY_SHAPE], 1, call->params[2]));
}

KERNEL(shared_exchange, "x f32[S, ...], group i32[1] -> y f32[S, ...]") {
    int32_t id = *(const int32_t *)call->params[1];
    if (check_parts(call, id, dim(call, 'S'))) return KERNEL_REFUSED;
    return reported(call, share_blocks(id, call->params[0], call->dims[ANY_SHAPE], 0, call->params[2]));
}
