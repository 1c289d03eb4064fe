/* vllm-v1 with its defaults: chunked prefills, asynchronous scheduling, and a prefix cache. Without the cache, preempted
sequences compute all tokens again.

It follows VllmV1 and TokenBudget over CachedMemory, or over PagedMemory without a cache, where blocks are only counted; and
the loop of engine.py for a policy that schedules ahead. The budget
of a step is at least as large as the number of sequences, so every running sequence decodes in every step, and at most one
prefill goes on: that of the last arrival.
*/

/* Moments of moments.py. */
static int64_t at_row(const struct replica *r) { return 4 * r->num_rows; }

static int64_t after_step(const struct replica *r) { return 4 * r->decode_step + 2; }

/* What the coming step has left: ``CachedTransaction``, and the budget. */
struct grants {
    int64_t free, left, budget, pairs;
};

/* --- Blocks: ``CachedMemory`` --- */

static bool is_alone(const struct sequence *sequence) { return sequence->table == NULL; }

/* ``CachedMemory._pop``: the table of a sequence, which no list has any more. */
static struct table *pop_table(struct replica *r, struct sequence *sequence)
{
    struct cache *c = r->cache;
    struct table *table = sequence->table;
    sequence->table = NULL;
    if (table != NULL)
        return table;
    int64_t known = sequence->start_tokens, blocks = ceil_div(known, r->block_size);
    log_take(c, sequence->born, known - sequence->lag, blocks, r->index[sequence->request], known, 0);
    if ((table = new_table(c, blocks)) != NULL)
        add_taking(c, table, sequence->born);
    return table;
}

/* ``CachedMemory._known_tokens``. */
static int64_t known_tokens(const struct replica *r, const struct sequence *sequence)
{
    int64_t tokens = held_tokens(r, sequence);
    return tokens - (tokens > sequence->start_tokens);
}

/* ``SegmentPool.release``, and the count of free blocks: those that other tables have are not free. */
static struct chain *give_back(struct replica *r, struct table *table, int64_t held, int64_t filled, const int64_t *lag,
                               bool returns)
{
    int64_t shared = r->cache->num_shared;
    struct chain *own = release_table(r->cache, table, held, filled, after_step(r), lag, returns);
    r->free += r->cache->num_shared - shared;
    return own;
}

/* ``CachedMemory._release``, of a sequence that decoded in the last step; ``free`` blocks are free before it. */
static struct chain *release_decoding(struct replica *r, int32_t slot, bool returns, int64_t free, bool in_vain)
{
    struct sequence *sequence = &r->slots[slot];
    int64_t tokens = held_tokens(r, sequence), size = r->block_size;
    int64_t filled = (returns ? known_tokens(r, sequence) : tokens) / size;
    if (sequence->progress != HAS_FINISHED)
        --*phase_of(r, sequence);
    r->free += ceil_div(tokens, size);
    if (r->cache == NULL)
        return NULL;
    reach(r->cache, free);
    return give_back(r, pop_table(r, sequence), ceil_div(tokens + in_vain, size), filled, &sequence->lag, returns);
}

/* ``CachedMemory._drop``, of a sequence that does not decode. */
static struct chain *release_partial(struct replica *r, int32_t slot, bool returns, int64_t free)
{
    struct sequence *sequence = &r->slots[slot];
    int64_t blocks = sequence->partial_blocks, filled = sequence->computed_tokens / r->block_size;
    r->free += blocks;
    if (r->cache == NULL)
        return NULL;
    reach(r->cache, free);
    return give_back(r, pop_table(r, sequence), blocks, filled, NULL, returns);
}

/* ``CachedMemory.hold``: a table grows to ``tokens``. Returns the blocks that it takes. */
static int64_t hold(struct replica *r, struct sequence *sequence, int64_t tokens)
{
    struct table *table = sequence->table;
    if (table == NULL)
        return 0;
    int64_t blocks = ceil_div(tokens, r->block_size) - table->taken;
    if (blocks) {
        table->taken += blocks;
        add_taking(r->cache, table, at_row(r));
        log_take(r->cache, at_row(r), r->decode_step, blocks, NO_LOOK_UP, 0, 0);
    }
    if (table->path.is_given) {
        publish_prefill(r->cache, table, tokens / r->block_size, r->decode_step);
        if (tokens == sequence->start_tokens)
            decode(r->cache, table, tokens - r->decode_step);
    }
    return blocks;
}

/* ``CachedTransaction.enter``: blocks for the next ``tokens`` after those that were found. Returns the blocks that it takes. */
static int64_t enter(struct replica *r, struct sequence *sequence, const struct path *path, int64_t known, int64_t tokens)
{
    struct cache *c = r->cache;
    int64_t index = r->index[sequence->request], size = r->block_size, now = at_row(r);
    sequence->computed_tokens = known;
    if (c == NULL)
        return 0;
    sequence->born = now;
    if (!path->is_given && tokens == sequence->start_tokens)
        return ceil_div(tokens, size);
    if (!path->is_given) {
        int64_t blocks = ceil_div(tokens, size);
        log_take(c, now, r->decode_step, blocks, index, sequence->start_tokens, 0);
        if ((sequence->table = new_table(c, blocks)) != NULL)
            add_taking(c, sequence->table, now);
        return blocks;
    }
    int64_t shared = c->num_shared;
    sequence->table = enter_found(c, path, now);
    shared = c->num_shared - shared;
    /* Its admission later subtracts the blocks of all its tokens. */
    r->free += shared;
    log_take(c, now, r->decode_step, 0, index, sequence->start_tokens, known);
    return known / size - shared + hold(r, sequence, known + tokens);
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
static int64_t give_way(struct replica *r, int32_t slot, int64_t free)
{
    struct sequence *sequence = &r->slots[slot];
    bool finished = sequence->progress == HAS_FINISHED, over = finished || sequence->progress == IN_VAIN;
    bool is_partial = sequence->progress == PREFILLS || (finished && !is_alone(sequence));
    int64_t before = r->free;
    struct chain *own;
    if (r->cache != NULL)
        r->cache->decided_until = r->decode_step + 1;
    own = is_partial ? release_partial(r, slot, true, free) : release_decoding(r, slot, true, free, false);
    for (int32_t at = 0; over && at < r->num_ended; at++)
        if (r->ended[at] == slot)
            r->ended[at] = NONE;
    log_eviction(r, sequence, over ? COMPLETE : RECOMPUTE);
    if (over)
        drop_chain(own);
    else
        to_queue(r, sequence, own);
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
            free += give_way(r, victim, free);
        }
        if (gone)
            return;
        free--;
    }
}

/* ``Executor._prefill``: a prefill goes on after the chunk. */
static void prefill_chunk(struct replica *r, int32_t slot, int64_t tokens)
{
    struct sequence *sequence = &r->slots[slot];
    int64_t computed = sequence->computed_tokens, blocks = ceil_div(computed + tokens, r->block_size);
    int64_t lost = least(most(0, sequence->lost_tokens - computed), tokens);
    int64_t record[CHUNK_FIELDS] = {r->index[sequence->request], r->now, tokens, lost};
    memcpy(r->chunks.next, record, sizeof record);
    r->chunks.next += CHUNK_FIELDS;
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
    if (r->cache == NULL)
        return (struct path){.is_given = false};
    return path_of(r->cache, head ? head->request : r->fresh, head ? head->own : NULL);
}

/* Places of a prompt that are looked up, ``lookup_blocks``. */
static int64_t num_places(const struct replica *r, int64_t start_tokens) { return (start_tokens - 1) / r->block_size; }

/* Blocks of the head of the queue that are cached, in tokens; ``CachedTransaction.look_up``. */
static int64_t known_of_head(struct replica *r, const struct path *path, int64_t start_tokens, int64_t left)
{
    if (!path->is_given)
        return 0;
    reach(r->cache, left);
    r->cache->decided_until = r->decode_step + 1;
    return look_up(r->cache, path, num_places(r, start_tokens), r->decode_step) * r->block_size;
}

/* ``TokenBudget._admit``. */
static void admit_waiting(struct replica *r, struct grants *grants, struct step *step)
{
    int64_t held = r->batch_size + num_finished(r), size = r->block_size;
    for (; num_waiting(r) > 0; held++) {
        const struct preempted *head = r->num_preempted ? &r->preempted[r->num_preempted - 1] : NULL;
        int64_t tokens = r->prompt_tokens[head ? head->request : r->fresh] + (head ? head->generated_tokens : 0);
        if (!grants->budget || held == r->max_num_seqs) {
            /* If this step also computed prompts, the next step has more budget for this one. */
            step->valid_until_horizon = step->valid_until_horizon && (grants->budget || !step->prefill_tokens);
            step->stops_at_arrival = false;
            return;
        }
        struct path path = path_of_head(r);
        int64_t known = known_of_head(r, &path, tokens, grants->left), now = least(tokens - known, grants->budget);
        /* Found blocks that are free count as taken. */
        int64_t in_tables = path.is_given ? found_in_tables(r->cache) : 0;
        if (grants->free - (ceil_div(tokens, size) - in_tables) < (held ? r->watermark_blocks : 0)) {
            step->stops_at_arrival = false;
            if (path.is_given)
                r->steps_to_look = steps_to_publication(r->cache, &path, known / size, num_places(r, tokens), r->decode_step);
            return;
        }
        struct chain *own;
        int32_t slot = leave_queue(r, &own);
        grants->free -= ceil_div(known + now, size) - in_tables;
        grants->left -= enter(r, &r->slots[slot], &path, known, now);
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
        give_way(r, r->prefilling, grants->free);
        step->preempts = true;
        step->valid_until_horizon = step->stops_at_arrival = false;
        return;
    }
    grants->free -= blocks;
    grants->left -= hold(r, sequence, until);
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
    struct grants grants = {r->free - takes, r->free - takes, r->max_num_batched_tokens - r->batch_size, 0};
    if (short_of_blocks) {
        take_in_order(r, r->free);
        step->preempts = true;
        step->valid_until_horizon = step->stops_at_arrival = false;
    }
    int64_t decodes = r->batch_size, context = decodes ? decodes * r->decode_step + r->lag_sum : 0;
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
            sequence->progress = IN_VAIN;
            continue;
        }
        unlink_sequence(r, slot);
        --*phase_of(r, sequence);
        sequence->progress = HAS_FINISHED;
        if (is_alone(sequence))
            continue;
        sequence->partial_blocks = ceil_div(held_tokens(r, sequence), r->block_size);
        sequence->computed_tokens = known_tokens(r, sequence);
        sequence->table->lag = sequence->lag, sequence->table->decodes = true;
        if (sequence->table->path.is_given)
            close_table(r->cache, sequence->table, sequence->computed_tokens / r->block_size);
    }
}

/* ``CachedMemory._release_alone``: of all that ended, where none has a table; ``PagedMemory.release_finished``. */
static void release_alone(struct replica *r)
{
    int64_t size = r->block_size, free = r->free - r->phases[r->decode_step % size];
    for (int32_t at = 0; at < r->num_ended; at++) {
        if (r->ended[at] == NONE)
            continue;
        struct sequence *sequence = &r->slots[r->ended[at]];
        int64_t tokens = held_tokens(r, sequence), blocks = ceil_div(tokens, size), stop = blocks;
        if (sequence->progress == IN_VAIN) {
            --*phase_of(r, sequence);
            stop = tokens / size + 1;
        }
        if (r->cache != NULL)
            put_alone(r->cache, size, tokens, stop, sequence->lag, r->index[sequence->request], sequence->start_tokens,
                      sequence->born, after_step(r), free);
        free += stop;
        r->free += blocks;
    }
}

/* ``CachedMemory.release_finished``. */
static void release_finished(struct replica *r)
{
    bool all_alone = true;
    if (r->cache != NULL)
        r->cache->decided_until = r->decode_step + 1;
    for (int32_t at = 0; at < r->num_ended; at++)
        all_alone = all_alone && (r->ended[at] == NONE || is_alone(&r->slots[r->ended[at]]));
    if (all_alone) {
        release_alone(r);
        return;
    }
    for (int32_t at = 0; at < r->num_ended; at++) {
        int32_t slot = r->ended[at];
        if (slot == NONE)
            continue;
        struct sequence *sequence = &r->slots[slot];
        int64_t free = r->free - r->phases[r->decode_step % r->block_size];
        if (sequence->progress == HAS_FINISHED && !is_alone(sequence)) {
            sequence->computed_tokens = held_tokens(r, sequence);
            release_partial(r, slot, false, free);
        } else {
            release_decoding(r, slot, false, free, sequence->progress == IN_VAIN);
        }
    }
}

/* ``Engine._finish``: the decision is carried out; now the sequences leave that ended in the last step. */
static bool finish(struct replica *r, struct step *step, bool *begins)
{
    bool any_in_vain = false;
    for (int32_t at = 0; at < r->num_ended; at++)
        any_in_vain = any_in_vain || (r->ended[at] != NONE && r->slots[r->ended[at]].progress == IN_VAIN);
    if (!*begins && any_in_vain) {
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
        if (r->slots[slot].progress == IN_VAIN)
            unlink_sequence(r, slot);
        r->unused[r->num_unused++] = slot;
    }
    if (*begins && num_waiting(r))
        step->valid_until_horizon = false;
    return true;
}

/* --- The loop: ``Engine._serve`` --- */

/* What a sequence on the device holds, as records of GROWTH and TAKE: ``CachedMemory._growing`` and ``_take_alone``. */
static void log_held(struct replica *r, const struct sequence *sequence, struct log *growing, struct log *alone)
{
    struct cache *c = r->cache;
    int64_t lag = sequence->lag, until = most(r->decode_step, c->decided_until) - 1 + lag, size = r->block_size;
    bool finished = sequence->progress == HAS_FINISHED;
    const struct table *table = sequence->table;
    if (table == NULL) {
        int64_t known = sequence->start_tokens, blocks = ceil_div(known, size), index = r->index[sequence->request];
        add_record(c, growing, (int64_t[GROWTH_FIELDS]){blocks, ceil_div(finished ? r->decode_step - 1 + lag : until, size), lag});
        add_record(c, alone, (int64_t[TAKE_FIELDS]){sequence->born, known - lag, blocks, index, known, 0});
    } else if (sequence->progress != PREFILLS && !finished) {
        add_record(c, growing, (int64_t[GROWTH_FIELDS]){table->taken, ceil_div(until, size), lag});
    } else if (table->decodes) {
        add_record(c, growing, (int64_t[GROWTH_FIELDS]){table->taken, sequence->partial_blocks, table->lag});
    }
}

static bool has_failed(const struct replica *r) { return r->cache != NULL && r->cache->failed; }

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
static enum status serve_v1(struct replica *r, int64_t until)
{
    while (has_room(r) && r->now < until && !has_failed(r)) {
        bool any_ended = r->num_ended > 0;
        int64_t last = r->now;
        if (!r->leap.steps && !next_v1(r))
            return FAILED;
        if (r->batch_size) {
            if (!leap_over(r, r->begins ? &r->step : NULL, until, &last))
                return FAILED;
            if (r->unpublished)
                return UNPUBLISHED;
            if (r->overdrawn)
                return OVERDRAWN;
            if (r->leap.steps)
                break;
        } else if (r->begins && (r->step.ticks || r->step.preempts)) {
            if (any_ended && !r->open && r->arrived == r->num_requests && !num_waiting(r) && r->prefilling == NONE)
                /* What the last step computes in vain is no part of the run. */
                return ENDED;
            if (!stand_still(r, &r->step, r->prefilling != NONE))
                return FAILED;
        } else if (any_ended || r->seen < r->now) {
            /* Nothing was scheduled ahead, so the next decision is taken at once, with all that is known by now. */
            r->seen = r->now;
            continue;
        } else if (num_waiting(r)) {
            return STUCK;
        } else if (r->arrived < r->num_requests) {
            r->now = last = r->arrival_ticks[r->arrived];
        } else {
            return r->open ? RESTS : ENDED;
        }
        r->seen = last;
        hold_finished(r);
    }
    if (has_failed(r))
        PyErr_NoMemory();
    return has_failed(r) ? FAILED : GOES_ON;
}
