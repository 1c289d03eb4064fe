/* vllm-v1 with its defaults: chunked prefills, asynchronous scheduling, and a prefix cache. Without the cache, preempted
sequences compute all tokens again.

It follows VllmV1 and TokenBudget over CachedMemory, or over PagedMemory without a cache, where blocks are only counted; and
the loop of engine.py for a policy that schedules ahead. The budget
of a step is at least as large as the number of sequences, so every running sequence decodes in every step, and at most one
prefill goes on: that of the last arrival.
*/

#include "_core.h"

static int64_t at_row(const struct replica *r) { return MOMENT_KINDS * r->num_rows + AT_ROW; }

static int64_t after_step(const struct replica *r) { return MOMENT_KINDS * r->decode_step + AFTER_STEP; }

/* What the coming step has left: ``CachedTransaction``, and the budget. */
struct grants {
    int64_t free, budget, pairs;
};

/* --- Blocks: ``CachedMemory`` --- */

/* ``CachedMemory._known_tokens``. */
static int64_t known_tokens(const struct replica *r, const struct sequence *sequence)
{
    int64_t tokens = held_tokens(r, sequence);
    return tokens - (tokens > sequence->start_tokens);
}

/* ``CachedMemory._close`` and ``CachedTables._free``: a sequence gives up its table, with hashes for the full blocks of its first
   ``tokens``. Blocks that other tables have are not free. */
static void give_back(struct replica *r, int32_t slot, int64_t tokens, bool returns)
{
    struct cache *c = r->cache;
    struct table *table = &c->tables[slot];
    int64_t shared = num_shared(&c->pool);
    cache_full_blocks(c, table, tokens / r->block_size);
    if (returns && c->keeps && !has_hashes(&table->path))
        name_blocks(c, table);
    if (!c->pool.failed)
        free_blocks(&c->pool, table->blocks, table->count, table->cached, !has_hashes(&table->path), after_step(r));
    r->free += num_shared(&c->pool) - shared;
}

/* ``CachedMemory._release``, of a sequence that decoded in the last step. */
static void release_decoding(struct replica *r, int32_t slot, bool returns)
{
    struct sequence *sequence = &r->slots[slot];
    int64_t tokens = held_tokens(r, sequence);
    leave_phase(r, slot);
    r->free += ceil_div(tokens, r->block_size);
    if (r->cache != NULL)
        give_back(r, slot, returns ? known_tokens(r, sequence) : tokens, returns);
}

/* ``CachedMemory._drop``, of a sequence that does not decode. */
static void release_partial(struct replica *r, int32_t slot, bool returns)
{
    r->free += r->slots[slot].partial_blocks;
    if (r->cache != NULL)
        give_back(r, slot, r->slots[slot].computed_tokens, returns);
}

/* ``CachedMemory.hold``: a table grows to ``tokens``, and its full blocks have hashes. */
static void hold(struct replica *r, int32_t slot, int64_t tokens)
{
    struct cache *c = r->cache;
    if (c == NULL)
        return;
    struct table *table = &c->tables[slot];
    int64_t missing = ceil_div(tokens, r->block_size) - table->count;
    if (missing > 0)
        extend_table(c, table, missing, at_row(r), r->now);
    cache_full_blocks(c, table, tokens / r->block_size);
}

/* ``CachedTransaction.enter``: blocks for the next ``tokens`` after those that were found. */
static void enter(struct replica *r, int32_t slot, const struct path *path, int64_t known, int64_t tokens)
{
    struct cache *c = r->cache;
    struct sequence *sequence = &r->slots[slot];
    sequence->computed_tokens = known;
    if (c == NULL)
        return;
    int64_t shared = num_shared(&c->pool);
    enter_found(c, &c->tables[slot], path, at_row(r), r->now);
    /* Its admission later subtracts the blocks of all its tokens. */
    r->free += num_shared(&c->pool) - shared;
    struct look_up *record = c->keeps ? new_record(&c->pool, &c->pool.look_ups, LOOK_UP_FIELDS) : NULL;
    if (record != NULL)
        *record = (struct look_up){
            .index = r->index[sequence->request],
            .known_tokens = sequence->start_tokens,
            .hit_tokens = known,
            .moment = at_row(r),
        };
    log_look_up(&c->pool, has_hashes(path), c->num_found);
    hold(r, slot, known + tokens);
}

/* --- The decision: ``VllmV1.schedule``, and ``Executor.carry_out`` --- */

static int64_t num_finished(const struct replica *r)
{
    int64_t count = 0;
    for (int32_t at = 0; at < r->num_ended; at++)
        count += r->ended[at] != NONE && r->slots[r->ended[at]].progress == HAS_FINISHED;
    return count;
}

/* The last arrival of those with blocks: in a prefill, decoding, or finished. */
static int32_t last_kept(const struct replica *r)
{
    int32_t last = r->last;
    if (r->prefilling != NONE)
        return r->prefilling;
    for (int32_t at = 0; at < r->num_ended; at++) {
        int32_t slot = r->ended[at];
        if (slot != NONE && (last == NONE || r->slots[slot].request > r->slots[last].request))
            last = slot;
    }
    return last;
}

/* ``Transaction.preempt``, and ``Executor._displace``. Returns the blocks that come free. */
static int64_t give_way(struct replica *r, int32_t slot)
{
    struct sequence *sequence = &r->slots[slot];
    bool finished = sequence->progress == HAS_FINISHED, over = finished || sequence->progress == OVERRUNS;
    int64_t before = r->free;
    if (sequence->progress == PREFILLS || finished)
        release_partial(r, slot, true);
    else
        release_decoding(r, slot, true);
    for (int32_t at = 0; over && at < r->num_ended; at++)
        if (r->ended[at] == slot)
            r->ended[at] = NONE;
    log_eviction(r, sequence, over ? COMPLETE : RECOMPUTE);
    if (!over)
        to_queue(r, sequence);
    if (sequence->progress == PREFILLS)
        r->prefilling = NONE;
    else if (!finished)
        unlink_sequence(r, slot);
    if (sequence->place != NONE)
        strike(r, slot);
    r->unused[r->num_unused++] = slot;
    return r->free - before;
}

/* ``VllmV1._schedule_in_order``, or ``_one_by_one`` beside finished sequences, for too few blocks: running sequences take
   theirs in order, and the last arrivals give way. */
static void take_in_order(struct replica *r, int64_t free)
{
    for (int32_t slot = r->first; slot != NONE; slot = r->slots[slot].after) {
        bool gone = false;
        if (held_tokens(r, &r->slots[slot]) % r->block_size)
            continue;
        while (!free && !gone) {
            int32_t victim = last_kept(r);
            gone = victim == slot;
            free += give_way(r, victim);
        }
        if (gone)
            break;
        free--;
        if (r->cache != NULL)
            take_block(r->cache, &r->cache->tables[slot], after_step(r), ticks_before(r, r->decode_step));
    }
    if (r->cache != NULL)
        r->cache->grown_until = r->decode_step + 1;
}

/* ``Executor._prefill``: a prefill goes on after the chunk. */
static void prefill_chunk(struct replica *r, int32_t slot, int64_t tokens)
{
    struct sequence *sequence = &r->slots[slot];
    int64_t computed = sequence->computed_tokens, blocks = ceil_div(computed + tokens, r->block_size);
    int64_t lost = least(most(0, sequence->lost_tokens - computed), tokens);
    struct chunk record = {
        .index = r->index[sequence->request],
        .start_ticks = r->now,
        .tokens = tokens,
        .recomputed_tokens = lost,
    };
    put_record(&r->chunks, &record, CHUNK_FIELDS);
    sequence->progress = PREFILLS;
    sequence->computed_tokens = computed + tokens;
    r->free -= blocks - sequence->partial_blocks;
    sequence->partial_blocks = blocks;
    r->prefilling = slot;
}

/* Compute ``tokens`` of a prefill in this step. Returns whether it ends. */
static bool prefill(struct replica *r, int32_t slot, int64_t tokens, struct grants *grants, struct step *step)
{
    struct sequence *sequence = &r->slots[slot];
    int64_t computed = sequence->computed_tokens, until = computed + tokens;
    bool ends = until == sequence->start_tokens;
    grants->pairs += causal_pairs(until) - causal_pairs(computed);
    grants->budget -= tokens;
    step->prefill_tokens += tokens;
    if (ends) {
        r->prefilling = r->prefilling == slot ? NONE : r->prefilling;
        start(r, slot);
    } else {
        prefill_chunk(r, slot, tokens);
        step->valid_until_horizon = false;
    }
    return ends;
}

/* The path of the head of the queue. */
static struct path path_of_head(const struct replica *r)
{
    const struct preempted *head = r->num_preempted ? &r->preempted[r->num_preempted - 1] : NULL;
    int64_t request = head ? head->request : r->fresh;
    if (r->cache == NULL || !r->cache->keeps)
        return (struct path){.is_shared = false};
    return path_of(r->cache, request, r->index[request], head != NULL && head->lost_tokens > 0);
}

/* Places of a prompt that are looked up, ``lookup_blocks``. */
static int64_t num_places(const struct replica *r, int64_t start_tokens) { return (start_tokens - 1) / r->block_size; }

/* Blocks of the head of the queue that are cached, in tokens; ``CachedTransaction.look_up``. */
static int64_t known_of_head(struct replica *r, const struct path *path, int64_t start_tokens)
{
    if (r->cache == NULL)
        return 0;
    r->cache->num_found = 0;
    if (!has_hashes(path))
        return 0;
    return look_up(r->cache, path, num_places(r, start_tokens)) * r->block_size;
}

/* Steps until a running sequence fills the block that the head of the queue looks for next. */
static int64_t steps_to_publication(const struct replica *r, const struct path *path, int64_t place, int64_t start_tokens)
{
    int64_t link = 0, end, steps = INT64_MAX;
    if (!path->is_shared || place >= num_places(r, start_tokens))
        return steps;
    int64_t wanted = hash_at(r->cache, path, place, &link, &end);
    for (int32_t slot = r->first; slot != NONE; slot = r->slots[slot].after) {
        const struct path *own = &r->cache->tables[slot].path;
        link = 0;
        if (own->is_shared && place < end_of(r->cache, own) && hash_at(r->cache, own, place, &link, &end) == wanted)
            steps = least(steps, (place + 1) * r->block_size - r->slots[slot].lag - r->decode_step + 1);
    }
    return steps;
}

/* ``TokenBudget._admit``. */
static void admit_waiting(struct replica *r, struct grants *grants, struct step *step)
{
    int64_t held = r->batch_size + num_finished(r), size = r->block_size;
    for (; num_waiting(r) > 0; held++) {
        const struct preempted *head = r->num_preempted ? &r->preempted[r->num_preempted - 1] : NULL;
        int64_t prompt = r->prompt_tokens[head ? head->request : r->fresh];
        int64_t tokens = prompt + (head ? head->generated_tokens : 0);
        if (!grants->budget || held == r->max_num_seqs) {
            /* If this step also computed prompts, the next step has more budget for this one. */
            step->valid_until_horizon = step->valid_until_horizon && (grants->budget || !step->prefill_tokens);
            step->stops_at_arrival = false;
            return;
        }
        struct path path = path_of_head(r);
        int64_t known = known_of_head(r, &path, tokens);
        int64_t now = least(tokens - known, grants->budget);
        /* Found blocks that are free count as taken. */
        int64_t in_tables = r->cache == NULL ? 0 : found_in_tables(r->cache);
        if (grants->free - (ceil_div(tokens, size) - in_tables) < (held ? r->watermark_blocks : 0)) {
            step->stops_at_arrival = false;
            if (has_hashes(&path))
                r->steps_to_look = steps_to_publication(r, &path, known / size, tokens);
            return;
        }
        int32_t slot = leave_queue(r);
        grants->free -= ceil_div(known + now, size) - in_tables;
        enter(r, slot, &path, known, now);
        prefill(r, slot, now, grants, step);
    }
}

/* ``TokenBudget._continue_prefill``. */
static void continue_prefill(struct replica *r, struct grants *grants, struct step *step)
{
    struct sequence *sequence = &r->slots[r->prefilling];
    int64_t tokens = least(sequence->start_tokens - sequence->computed_tokens, grants->budget);
    int64_t until = sequence->computed_tokens + tokens;
    int64_t blocks = most(0, ceil_div(until, r->block_size) - sequence->partial_blocks);
    if (blocks > grants->free) {
        give_way(r, r->prefilling);
        step->preempts = true;
        step->valid_until_horizon = step->stops_at_arrival = false;
        return;
    }
    grants->free -= blocks;
    hold(r, r->prefilling, until);
    if (prefill(r, r->prefilling, tokens, grants, step))
        admit_waiting(r, grants, step);
}

/* Decide the coming step and carry it out. ``begins``: whether the decision is another than CARRY_ON. */
static bool decide_v1(struct replica *r, struct step *step, bool *begins)
{
    int64_t takes = r->phases[r->decode_step % r->block_size];
    bool short_of_blocks = r->free < takes;
    *step = (struct step){.valid_until_horizon = true, .stops_at_arrival = true};
    *begins = short_of_blocks || r->prefilling != NONE || num_waiting(r) > 0;
    if (!*begins)
        return true;
    r->holds_until = 0;
    r->steps_to_look = INT64_MAX;
    struct grants grants = {r->free - takes, r->max_num_batched_tokens - r->batch_size, 0};
    if (short_of_blocks) {
        take_in_order(r, r->free);
        step->preempts = true;
        step->valid_until_horizon = step->stops_at_arrival = false;
    }
    int64_t decodes = r->batch_size, context = decodes ? decodes * r->decode_step + r->lag_sum : 0;
    if (!short_of_blocks && r->cache != NULL)
        grow_until(r, r->decode_step + 1);
    if (!short_of_blocks && r->prefilling != NONE)
        continue_prefill(r, &grants, step);
    else if (!short_of_blocks)
        admit_waiting(r, &grants, step);
    if (decodes || step->prefill_tokens)
        return step_ticks(&r->cost, decodes, context, step->prefill_tokens, grants.pairs, &step->ticks);
    step->valid_until_horizon = false;
    return true;
}

/* --- Ends, which the decision taken during the last step does not know: ``Engine._hold_finished`` and ``_finish`` --- */

/* ``State.note_finished``, and ``CachedMemory.hold_finished``. */
static void hold_finished(struct replica *r)
{
    while (one_ends(r)) {
        int32_t slot = r->calendar[0];
        struct sequence *sequence = &r->slots[slot];
        strike(r, slot);
        r->ended[r->num_ended++] = slot;
        if (r->ends_early[sequence->request]) {
            sequence->progress = OVERRUNS;
            continue;
        }
        unlink_sequence(r, slot);
        leave_phase(r, slot);
        sequence->progress = HAS_FINISHED;
        sequence->partial_blocks = ceil_div(held_tokens(r, sequence), r->block_size);
        sequence->computed_tokens = known_tokens(r, sequence);
        if (r->cache != NULL)
            cache_full_blocks(r->cache, &r->cache->tables[slot], sequence->computed_tokens / r->block_size);
    }
}

/* ``CachedMemory.release_finished``. */
static void release_finished(struct replica *r)
{
    if (r->cache != NULL)
        grow_until(r, r->decode_step + 1);
    for (int32_t at = 0; at < r->num_ended; at++) {
        int32_t slot = r->ended[at];
        if (slot == NONE)
            continue;
        struct sequence *sequence = &r->slots[slot];
        if (sequence->progress == HAS_FINISHED) {
            sequence->computed_tokens = held_tokens(r, sequence);
            release_partial(r, slot, false);
        } else {
            release_decoding(r, slot, false);
        }
    }
}

/* ``Engine._finish``: the decision is carried out; now the sequences leave that ended in the last step. */
static bool finish(struct replica *r, struct step *step, bool *begins)
{
    bool any_overrun = false;
    for (int32_t at = 0; at < r->num_ended; at++)
        any_overrun = any_overrun || (r->ended[at] != NONE && r->slots[r->ended[at]].progress == OVERRUNS);
    if (!*begins && any_overrun) {
        int64_t context = r->batch_size * r->decode_step + r->lag_sum;
        *step = (struct step){.valid_until_horizon = true, .stops_at_arrival = true};
        *begins = true;
        if (!decode_ticks(&r->cost, r->batch_size, context, &step->ticks))
            return false;
    }
    release_finished(r);
    for (int32_t at = 0; at < r->num_ended; at++) {
        int32_t slot = r->ended[at];
        if (slot == NONE)
            continue;
        if (r->slots[slot].progress == OVERRUNS)
            unlink_sequence(r, slot);
        r->unused[r->num_unused++] = slot;
    }
    if (*begins && num_waiting(r))
        step->valid_until_horizon = false;
    return true;
}

/* --- The loop: ``Engine._serve`` --- */

/* The coming step, if a decision is due or sequences have ended. */
static bool next_v1(struct replica *r)
{
    r->begins = false;
    if ((deliver(r, r->seen) || r->decode_step >= r->holds_until) && !decide_v1(r, &r->step, &r->begins))
        return false;
    if (r->num_ended && !finish(r, &r->step, &r->begins))
        return false;
    r->num_ended = 0;
    return true;
}

/* Until a buffer is full, the clock has passed ``until``, a leap is not taken, or the run is over. */
int serve_v1(struct replica *r, int64_t until)
{
    while (has_room(r) && r->now < until && !has_failed(r)) {
        bool any_ended = r->num_ended > 0;
        int64_t last = r->now;
        if (!r->leap.waits && !next_v1(r))
            return FAILED;
        if (r->batch_size) {
            if (!leap_over(r, r->begins ? &r->step : NULL, until, &last))
                return FAILED;
            if (r->unpublished)
                return UNPUBLISHED;
            if (r->overdrawn)
                return OVERDRAWN;
            if (r->leap.waits)
                break;
        } else if (r->begins && (r->step.ticks || r->step.preempts)) {
            if (any_ended && !r->open && r->arrived == r->num_requests && !num_waiting(r) && r->prefilling == NONE) {
                /* What the last step computes in vain is no part of the run, but looked at. */
                struct leap leap = {.first = r->step.ticks, .end = r->now};
                bool seen = r->looks == NULL || (add_product(&leap.end, 1, leap.first) && look_over(r, &leap));
                return seen ? ENDED : FAILED;
            }
            if (!stand_still(r, &r->step, r->prefilling != NONE))
                return FAILED;
        } else if (any_ended || r->seen < r->now) {
            /* Nothing was scheduled ahead, so the next decision is taken at once, with all that is known by now. */
            r->seen = r->now;
            continue;
        } else if (num_waiting(r)) {
            return STUCK;
        } else if (r->arrived < r->num_requests) {
            if (!rest(r))
                return FAILED;
            last = r->now;
        } else {
            return r->open ? RESTS : ENDED;
        }
        r->seen = last;
        hold_finished(r);
    }
    return after_failure(r);
}
