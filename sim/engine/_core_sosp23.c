/* vllm-sosp23: the decision of vllm_sosp23.py, carried out as executor.py does, and the loop around it. */

#include "_core.h"

/* ``VllmSosp23._make_room``: preempts last arrivals until the last one that is left finds a free block. */
static bool make_room(struct replica *r, int64_t *need)
{
    bool preempts = false;
    while (r->last != NONE) {
        int64_t own = held_tokens(r, &r->slots[r->last]) % r->block_size == 0;
        if (r->free > *need - own)
            break;
        *need -= own;
        log_eviction(r, &r->slots[r->last], RECOMPUTE);
        to_queue(r, &r->slots[r->last]);
        leave(r, r->last);
        preempts = true;
    }
    return preempts;
}

/* ``BlockTables.admit``. */
static void take_prompt(struct replica *r, int32_t slot, int64_t tokens)
{
    struct table *table = &r->cache->tables[slot];
    grow_until(r, r->decode_step + 1);
    table->count = 0;
    extend_table(r->cache, table, ceil_div(tokens, r->block_size), 0, r->now);
}

/* ``VllmSosp23._admit``; returns the pairs of query and key that the prefills compute. */
static int64_t admit(struct replica *r, int64_t free, struct step *step)
{
    int64_t pairs = 0, budget = r->max_num_batched_tokens - r->batch_size;
    bool any = false;
    for (; num_waiting(r) > 0; any = true) {
        const struct preempted *head = r->num_preempted ? &r->preempted[r->num_preempted - 1] : NULL;
        int64_t prefill = r->prompt_tokens[head ? head->request : r->fresh] + (head ? head->generated_tokens : 0);
        free -= ceil_div(prefill, r->block_size);
        if (free < (r->batch_size ? r->watermark_blocks : 0) || r->batch_size == r->max_num_seqs) {
            step->stops_at_arrival = false;
            break;
        }
        if (r->batch_size && prefill > budget) {
            step->valid_until_horizon = step->valid_until_horizon && !any;
            step->stops_at_arrival = false;
            break;
        }
        budget -= prefill;
        step->prefill_tokens += prefill;
        pairs += causal_pairs(prefill);
        int32_t slot = leave_queue(r);
        if (r->cache != NULL)
            take_prompt(r, slot, prefill);
        start(r, slot);
    }
    return pairs;
}

/* Decide the coming step and carry it out. ``begins``: whether the decision is another than CARRY_ON. */
static bool decide(struct replica *r, struct step *step, bool *begins)
{
    int64_t need = r->phases[r->decode_step % r->block_size], pairs = 0;
    *step = (struct step){.valid_until_horizon = true, .stops_at_arrival = true};
    *begins = true;
    if (r->free - need < 1 && r->batch_size) {
        step->preempts = make_room(r, &need);
        step->valid_until_horizon = !step->preempts;
    } else if (!num_waiting(r)) {
        *begins = false;
        return true;
    }
    r->holds_until = 0;
    int64_t decodes = r->batch_size, context = decodes ? decodes * r->decode_step + r->lag_sum : 0;
    if (!step->preempts)
        /* Else all that wait arrived after the preempted sequences. */
        pairs = admit(r, r->free - need, step);
    if (decodes || step->prefill_tokens)
        return step_ticks(&r->cost, decodes, context, step->prefill_tokens, pairs, &step->ticks);
    step->valid_until_horizon = false;
    return true;
}

/* The coming step, if a decision is due. */
static bool next_sosp23(struct replica *r)
{
    r->begins = false;
    return !(deliver(r, r->now) || r->decode_step >= r->holds_until) || decide(r, &r->step, &r->begins);
}

/* ``Engine._serve``, until a buffer is full, the clock has passed ``until``, a leap is not taken, or the run is over. */
int serve_sosp23(struct replica *r, int64_t until)
{
    while (has_room(r) && r->now < until && !has_failed(r)) {
        int64_t last;
        if (!r->leap.waits && !next_sosp23(r))
            return FAILED;
        if (r->batch_size) {
            if (!leap_over(r, r->begins ? &r->step : NULL, until, &last))
                return FAILED;
            if (r->overdrawn)
                return OVERDRAWN;
            if (r->leap.waits)
                break;
            while (one_ends(r))
                leave(r, r->calendar[0]);
        } else if (r->begins && r->step.preempts) {
            r->step.ticks = 0;
            if (!stand_still(r, &r->step, 0))
                return FAILED;
        } else if (num_waiting(r)) {
            return STUCK;
        } else if (r->arrived < r->num_requests) {
            if (!rest(r))
                return FAILED;
        } else {
            return r->open ? RESTS : ENDED;
        }
    }
    return after_failure(r);
}
