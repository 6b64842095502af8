/* What the generator's kernels share: one table entry a generator, which Python lays out and registers.
 *
 * A graph carries the entry's number, never an address. Every field is 8 bytes wide, in the order that
 * native_rollout.py gives. Kernels of one entry run one after another: each takes what the one before gave.
 *
 * A slot holds the keys and values that one sample has made; an entry those of a prompt, which all samples of the
 * prompt read. Rows are what a kernel works on: the slots in use, in order, or the tokens of prompts.
 */
#ifndef MINDGRPO_ROLLOUT_H
#define MINDGRPO_ROLLOUT_H

#include "core.h"
#include "matrix.h"
#include "team.h"

/* Head by head: keys [dim, room], so that scores are sums of rows, and values [room, dim]. */
typedef struct {
    float *keys, *values;
    int64_t room;
} Region;

typedef struct {
    /* this rank's share of the model */
    int64_t hidden, inner, queries, kv, dim, vocab, first_token, ways, index;
    /* how tokens are drawn */
    int64_t greedy, top_k, candidates, min_tokens, num_stops;
    double eps, scale, penalty, top_p, min_p;
    /* rooms, in positions */
    int64_t slots, slot_room, entry_room, layer_floats;
    /* the job: `longest` columns in each of its [samples, longest] arrays */
    int64_t longest, num_rows, num_free, queue_head, queue_tail, prompt_rows, prompt_starts, steps, row_steps;
    /* memory */
    float *cache, *scratch, *next, *starts, *rotary;
    uint8_t *seen;
    double *above;
    int32_t *stops;
    /* by sample */
    int32_t *prompt_tokens;
    int64_t *prompt_at;
    int32_t *prompt_length, *limit;
    uint64_t *keys;
    int32_t *tokens;
    float *logps;
    int32_t *lengths, *stopped;
    /* by place in the queue, entry, free slot and row */
    int32_t *queue_sample, *queue_entry, *users, *free_slots;
    int32_t *row_sample, *row_slot, *row_entry, *row_shared, *row_own;
    /* tokens of prompts: entry and number of keys seen, the own included; entries of first inputs */
    int32_t *prompt_row_entry, *prompt_row_seen, *start_entry;
} Rollout;

/* NULL for a number that is not registered. */
Rollout *rollout_of(const void *meta);

static inline Region slot_region(const Rollout *g, int64_t layer, int64_t slot) {
    float *base = g->cache + layer * g->layer_floats + slot * g->slot_room * g->kv * g->dim;
    return (Region){base, base + g->layer_floats / 2, g->slot_room};
}

static inline Region entry_region(const Rollout *g, int64_t layer, int64_t entry) {
    int64_t position = g->slots * g->slot_room + entry * g->entry_room;
    float *base = g->cache + layer * g->layer_floats + position * g->kv * g->dim;
    return (Region){base, base + g->layer_floats / 2, g->entry_room};
}

static inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

#endif
