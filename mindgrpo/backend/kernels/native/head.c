/* Logits of the next token of every row, and what the other ranks must know of this rank's. See logits.h.
 *
 * The vocabulary itself never leaves a rank: the caller gathers the pieces, a few numbers a row.
 */
#include "winner.h"

/* The `candidates` largest logits of this rank, the smallest last, and their tokens; of what equals the smallest, the number that is not
 * among them and the best of these. `room` takes 3 floats a logit. */
static void find_candidates(const Row *row, float *pieces, float *room) {
    const Rollout *g = row->g;
    int64_t vocab = g->vocab, wanted = g->candidates, stretches = (vocab + BLOCK - 1) / BLOCK * (BLOCK / LANES);
    int64_t size = 0, listed = 0;
    int64_t count = wanted < vocab ? wanted : vocab;
    float *all = room, *values = all + stretches * LANES, *tokens = values + stretches * LANES, least = -INFINITY;
    for (int64_t start = 0; start < vocab; start += BLOCK)
        for (int64_t i = load(row, start, BLOCK, all + start); i < BLOCK; i++) all[start + i] = -INFINITY;
    if (stretches >= count) {
        /* As many stretches have their largest above the count-th of these: so have the logits. */
        for (int64_t i = 0; i < stretches; i++) values[i] = largest(all + i * LANES, LANES);
        least = select_largest(values, stretches, count);
    }
    for (int64_t start = 0; start < stretches * LANES; start += LANES) {
        if (!(largest(all + start, LANES) >= least)) continue;
        for (int64_t i = start; i < start + LANES; i++) {
            values[size] = all[i];
            tokens[size] = g->first_token + i;
            size += all[i] >= least && all[i] > -INFINITY;
        }
    }
    count = size < count ? size : count;
    memcpy(all, values, size * sizeof(float));
    float smallest = count ? select_largest(all, size, count) : NONE;
    Winner ties = NO_WINNER;
    for (int is_tie = 0; is_tie < 2; is_tie++)
        for (int64_t i = 0; i < size; i++) {
            if (is_tie ? values[i] != smallest : values[i] <= smallest) continue;
            if (listed < count) {
                pieces[FIRST + listed] = values[i];
                pieces[FIRST + wanted + listed++] = tokens[i];
                continue;
            }
            pieces[MORE]++;
            consider(&ties, smallest, token_bits(row->key, (uint32_t)tokens[i]), tokens[i]);
        }
    if (ties.token >= 0) give_winner(ties, pieces + SCORE);
    for (; listed < wanted; listed++) pieces[FIRST + listed] = NONE;
}

typedef struct {
    const Rollout *g;
    const float *x, *added, *norm, *table;
    float *logits, *pieces;
    int64_t width, columns;
} Task;

static void give_pieces(const Task *t, int64_t number, float *room) {
    const Rollout *g = t->g;
    float *pieces = t->pieces + number * t->columns;
    Row row = row_of(g, number, t->logits, t->width), raw = row;
    raw.seen = NULL;
    raw.is_banned = 0;
    double mass;
    int is_raw = !row.seen && !row.is_banned, decides = decides_alone(g);
    pieces[RAW_TOP] = pieces[TOP] = find_largest(&raw, room);
    if (!is_raw) pieces[TOP] = find_largest(&row, room);
    if (!is_raw || !decides) mass = mass_of(&raw, pieces[RAW_TOP]);
    /* There may be more columns than these rules fill; what is gathered must be numbers. */
    memset(pieces + MORE, 0, (t->columns - MORE) * sizeof(float));
    if (g->top_k)
        find_candidates(&row, pieces, room);
    else if (has_nucleus(g))
        histogram(&row, 0, 0, pieces[TOP], pieces + FIRST);
    else if (decides)
        give_winner(winner_of(&row, room, pieces[TOP], min_p_threshold(g, pieces[TOP]), is_raw ? &mass : NULL),
                    pieces + SCORE);
    pieces[RAW_SUM] = mass;
}

static void head(const void *task, Member member) {
    const Task *t = task;
    const Rollout *g = t->g;
    int64_t hidden = g->hidden, begin, end;
    float *sum = thread_room(hidden), *turned = g->scratch, *room;
    share_out(member, g->num_rows, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        for (int64_t j = 0; j < hidden; j++) sum[j] = t->x[i * hidden + j] + t->added[i * hidden + j];
        float scale = 1.0f / sqrtf(dot(sum, sum, hidden) / hidden + (float)g->eps);
        float *to = turned + i / LANES * LANES * hidden + i % LANES;
        for (int64_t j = 0; j < hidden; j++) to[j * LANES] = sum[j] * scale * t->norm[j];
    }
    team_meet(member);
    multiply_turned(member, g->num_rows, g->vocab, hidden, turned, t->table, t->logits, t->width);
    team_meet(member);
    room = thread_room(3 * num_blocks(g) * BLOCK);
    for (int64_t i = begin; i < end; i++) give_pieces(t, i, room);
}

/* (x [B, H], added [B, H], norm [H], table [V, H], number int32 [1]) -> (logits [B, V], pieces [B, C]) */
int rollout_head(KERNEL_ARGS) {
    UNUSED_ARGS;
    const Rollout *g = rollout_of(params[4]);
    if (!g) return 1;
    Task t = {g, params[0], params[1], params[2], params[3], params[5], params[6], shapes[5][1], shapes[6][1]};
    /* Zero where no row is, so that what is gathered are numbers. */
    memset(t.pieces + g->num_rows * t.columns, 0, (shapes[6][0] - g->num_rows) * t.columns * sizeof(float));
    if (g->num_rows) team_run(head, &t);
    return 0;
}
