/* Which sample sits in which slot, from one token to the next. See rollout.h.
 *
 * A slot that becomes free takes the next sample of the queue at once; the queue holds samples whose
 * prompts are in their prefix blocks. Every rank of a group decides alike, as all have the same tokens.
 */
#include "collective.h"
#include "rollout.h"

static void mark_seen(const Rollout *g, int64_t slot, int32_t token) {
    int64_t at = token - g->first_token;
    if (at >= 0 && at < g->vocab) g->seen[slot * g->vocab + at] = 1;
}

void admit(Rollout *g) {
    while (g->num_free > 0 && g->queue_head < g->queue_tail) {
        int32_t sample = g->queue_sample[g->queue_head], prefix = g->queue_prefix[g->queue_head];
        int32_t slot = g->free_slots[--g->num_free];
        int64_t row = g->num_rows++;
        g->queue_head++;
        g->row_sample[row] = sample;
        g->row_slot[row] = slot;
        g->row_prefix[row] = prefix;
        g->row_shared[row] = g->prompt_length[sample] - 1;
        g->row_own[row] = 0;
        g->sample_slot[sample] = slot;
        g->sample_prefix[sample] = prefix;
        memcpy(g->next + row * g->hidden, g->starts + prefix * g->hidden, g->hidden * sizeof(float));
        if (g->penalty == 1.0) continue;
        memset(g->seen + slot * g->vocab, 0, g->vocab);
        for (int64_t i = 0; i < g->prompt_length[sample]; i++)
            mark_seen(g, slot, g->prompt_tokens[g->prompt_at[sample] + i]);
    }
}

/* 1 where the row's sample has ended with this token. */
static int keep_token(Rollout *g, int64_t row, int32_t token, float logp) {
    int32_t sample = g->row_sample[row];
    int64_t at = g->row_own[row]++;
    if (g->penalty != 1.0) mark_seen(g, g->row_slot[row], token);
    if (at < g->first_drawn[sample]) return 0;
    g->tokens[sample * g->longest + at] = token;
    g->logps[sample * g->longest + at] = logp;
    g->lengths[sample] = at + 1;
    for (int64_t i = 0; i < g->stops_count; i++)
        if (g->stops[i] == token) g->stopped[sample] = 1;
    return g->stopped[sample] || at + 1 == g->limit[sample];
}

int look_ahead(const Call *call, Rollout *g, int64_t samples) {
    const int32_t *guessed = g->guessed;
    for (int64_t row = 0; row < samples; guessed += g->num_guessed[row], row++) {
        int32_t sample = g->row_sample[row], own = g->row_own[row];
        int64_t count = g->first_drawn[sample] - own, share = (g->max_rows - g->num_rows) / (samples - row);
        const int32_t *tokens = g->tokens + sample * g->longest + own;
        if (count <= 0) tokens = guessed, count = g->num_guessed[row];
        if (count > g->limit[sample] - 1 - own) count = g->limit[sample] - 1 - own;
        if (count > share) count = share;
        /* What a slot has seen is kept for one of its tokens at a time. */
        if (g->penalty != 1.0) count = 0;
        if (tokens == guessed) g->drafted += count;
        g->num_ahead[row] = (int32_t)count;
        for (int64_t i = 0; i < count; i++) {
            int64_t at = g->num_rows++;
            int32_t *columns[] = {g->row_sample, g->row_slot, g->row_prefix, g->row_shared};
            for (int j = 0; j < 4; j++) columns[j][at] = columns[j][row];
            g->row_own[at] = own + 1 + (int32_t)i;
            g->row_token[at] = tokens[i];
            embed_token(g, tokens[i], g->next + at * g->hidden);
        }
    }
    if (g->num_rows == samples) return 0;
    return sum_over_ranks(call, g->group, g->next + samples * g->hidden, (g->num_rows - samples) * g->hidden);
}

void commit(Rollout *g, int64_t samples, const float *drawn) {
    int64_t width = g->hidden + 2, left = 0, ahead = samples;
    g->steps += g->num_rows > 0;
    g->row_steps += g->num_rows;
    for (int64_t row = 0; row < samples; row++) {
        const float *one = drawn + row * width;
        int64_t end = ahead + g->num_ahead[row];
        int is_guess = g->row_own[row] >= g->first_drawn[g->row_sample[row]];
        int ended = keep_token(g, row, (int32_t)one[g->hidden], one[g->hidden + 1]);
        for (; ahead < end && !ended && g->row_token[ahead] == (int32_t)one[g->hidden]; ahead++) {
            g->accepted += is_guess;
            one = drawn + ahead * width;
            ended = keep_token(g, row, (int32_t)one[g->hidden], one[g->hidden + 1]);
        }
        ahead = end;
        if (ended) {
            g->free_slots[g->num_free++] = g->row_slot[row];
            g->users[g->row_prefix[row]]--;
            if (g->parked_count)
                memcpy(g->parked + g->row_slot[row] * g->hidden, one, g->hidden * sizeof(float));
            continue;
        }
        int32_t *columns[] = {g->row_sample, g->row_slot, g->row_prefix, g->row_shared, g->row_own};
        for (int i = 0; i < 5; i++) columns[i][left] = columns[i][row];
        memcpy(g->next + left * g->hidden, one, g->hidden * sizeof(float));
        left++;
    }
    g->num_rows = left;
    memset(g->num_guessed, 0, g->max_rows * sizeof(int32_t));
    admit(g);
}
