/* The running sequences of a replica, their blocks, and the leap: what every policy of the core shares.

Two facts make the state small:

    first come, first served     All running sequences arrived before all waiting ones. So the last arrival is the last of
                                 the running list, and a preempted sequence goes to the front of the queue.
    the queue                    is a stack of preempted sequences before a range of requests that never ran.

    requests     0 .. 41   42 43 44   45 46 47 48 49   50 51 ...
                 running   preempted  arrived          to come
                                      ^ fresh          ^ arrived

The calendar is ordered by (finish step, request), so any heap of it gives the same order.
*/

#include "_core.h"

/* --- The calendar: ``State.calendar``, a binary heap --- */

static bool ends_before(const struct replica *r, int32_t one, int32_t other)
{
    const struct sequence *a = &r->slots[one], *b = &r->slots[other];
    return a->finish_step != b->finish_step ? a->finish_step < b->finish_step : a->request < b->request;
}

static void put(struct replica *r, int32_t slot, int32_t place)
{
    r->calendar[place] = slot;
    r->slots[slot].place = place;
}

static void sift_up(struct replica *r, int32_t slot, int32_t place)
{
    while (place > 0) {
        int32_t parent = (place - 1) / 2;
        if (!ends_before(r, slot, r->calendar[parent]))
            break;
        put(r, r->calendar[parent], place);
        place = parent;
    }
    put(r, slot, place);
}

static void sift_down(struct replica *r, int32_t slot, int32_t place, int32_t size)
{
    for (;;) {
        int32_t child = 2 * place + 1;
        if (child >= size)
            break;
        if (child + 1 < size && ends_before(r, r->calendar[child + 1], r->calendar[child]))
            child++;
        if (!ends_before(r, r->calendar[child], slot))
            break;
        put(r, r->calendar[child], place);
        place = child;
    }
    put(r, slot, place);
}

void strike(struct replica *r, int32_t slot)
{
    int32_t place = r->slots[slot].place, size = (int32_t)--r->num_calendar, moved = r->calendar[size];
    r->slots[slot].place = NONE;
    if (place < size) {
        sift_down(r, moved, place, size);
        sift_up(r, moved, r->slots[moved].place);
    }
}

/* Whether a sequence generates its last token in the step before the coming one. */
bool one_ends(const struct replica *r)
{
    return r->num_calendar && r->slots[r->calendar[0]].finish_step == r->decode_step;
}

/* --- Sequences --- */

static int64_t *phase_of(struct replica *r, const struct sequence *sequence)
{
    return &r->phases[modulo(1 - sequence->lag, r->block_size)];
}

/* A sequence grows from now on, behind those that arrived before it. */
static void join_phase(struct replica *r, int32_t slot)
{
    struct sequence *sequence = &r->slots[slot];
    int64_t *count = phase_of(r, sequence), phase = count - r->phases;
    struct cache *c = r->cache;
    ++*count;
    if (c == NULL)
        return;
    c->tables[slot].before = c->last_of[phase], c->tables[slot].after = NONE;
    *(c->last_of[phase] == NONE ? &c->first_of[phase] : &c->tables[c->last_of[phase]].after) = slot;
    c->last_of[phase] = slot;
}

void leave_phase(struct replica *r, int32_t slot)
{
    struct sequence *sequence = &r->slots[slot];
    int64_t *count = phase_of(r, sequence), phase = count - r->phases;
    struct cache *c = r->cache;
    --*count;
    if (c == NULL)
        return;
    int32_t before = c->tables[slot].before, after = c->tables[slot].after;
    *(before == NONE ? &c->first_of[phase] : &c->tables[before].after) = after;
    *(after == NONE ? &c->last_of[phase] : &c->tables[after].before) = before;
}

/* The end of the step before ``decode_step``, a step of the last leap or the one after it. */
int64_t ticks_before(const struct replica *r, int64_t decode_step)
{
    const struct taken *leap = &r->taken;
    int64_t steps = decode_step - leap->decode_step, more = steps - 1;
    return steps < 1 ? leap->before : leap->start + leap->first + leap->second * more + leap->growth * (more * (more - 1) / 2);
}

/* ``CachedTables.grow_until``: the blocks of the steps before ``decode_step``, in the order of steps and running sequences. */
void grow_until(struct replica *r, int64_t decode_step)
{
    struct cache *c = r->cache;
    int64_t phase = c->grown_until % r->block_size;
    for (; c->grown_until < decode_step; c->grown_until++) {
        if (c->first_of[phase] != NONE) {
            int64_t moment = MOMENT_KINDS * c->grown_until + AFTER_STEP;
            take_blocks(c, phase, r->phases[phase], moment, ticks_before(r, c->grown_until));
        }
        phase = phase + 1 == r->block_size ? 0 : phase + 1;
    }
}

/* A sequence leaves the batch: ``State._end``. */
void unlink_sequence(struct replica *r, int32_t slot)
{
    struct sequence *sequence = &r->slots[slot];
    *(sequence->before == NONE ? &r->first : &r->slots[sequence->before].after) = sequence->after;
    *(sequence->after == NONE ? &r->last : &r->slots[sequence->after].before) = sequence->before;
    r->batch_size--;
    r->lag_sum -= sequence->lag;
}

/* A running sequence stops and gives back its blocks: ``State._stop`` or ``take_finished``, and ``PagedMemory.release``. */
void leave(struct replica *r, int32_t slot)
{
    struct sequence *sequence = &r->slots[slot];
    strike(r, slot);
    unlink_sequence(r, slot);
    leave_phase(r, slot);
    r->free += ceil_div(held_tokens(r, sequence), r->block_size);
    if (r->cache != NULL)
        free_blocks(&r->cache->pool, r->cache->tables[slot].blocks, r->cache->tables[slot].count, 0, true, 0);
    r->unused[r->num_unused++] = slot;
}

/* The head of the queue takes a slot. Its start is yet to come. */
int32_t leave_queue(struct replica *r)
{
    int32_t slot = r->unused[--r->num_unused];
    struct sequence *sequence = &r->slots[slot];
    if (r->num_preempted) {
        const struct preempted *head = &r->preempted[--r->num_preempted];
        *sequence = (struct sequence){
            .request = head->request,
            .generated_tokens = head->generated_tokens,
            .lost_tokens = head->lost_tokens,
            .kind = head->kind,
        };
    } else {
        *sequence = (struct sequence){.request = r->fresh++, .kind = FRESH};
    }
    sequence->start_tokens = r->prompt_tokens[sequence->request] + sequence->generated_tokens;
    sequence->start_step = NOT_DECODING;
    sequence->place = NONE;
    return slot;
}

/* The prefill of a sequence ends: ``State.start``, ``PagedMemory.admit`` and ``Ledger.open``. */
void start(struct replica *r, int32_t slot)
{
    struct sequence *sequence = &r->slots[slot];
    int64_t tokens = sequence->start_tokens, decode_step = r->decode_step;
    sequence->progress = DECODES;
    sequence->start_step = decode_step;
    sequence->lag = tokens - decode_step;
    sequence->finish_step = decode_step + r->output_tokens[sequence->request] - sequence->generated_tokens;
    sequence->before = r->last;
    sequence->after = NONE;
    *(r->last == NONE ? &r->first : &r->slots[r->last].after) = slot;
    r->last = slot;
    join_phase(r, slot);
    r->free += sequence->partial_blocks - ceil_div(tokens - 1, r->block_size);
    sequence->partial_blocks = 0;
    sift_up(r, slot, (int32_t)r->num_calendar++);
    r->batch_size++;
    r->lag_sum += sequence->lag;
    r->queued_tokens -= tokens;
    int64_t lost = most(0, sequence->lost_tokens - sequence->computed_tokens);
    struct residency record = {
        .index = r->index[sequence->request],
        .start_step = decode_step,
        .start_ticks = r->now,
        .tokens = tokens,
        .generated_tokens = sequence->generated_tokens,
        .kind = sequence->kind,
        .recomputed_tokens = lost,
    };
    put_record(&r->residencies, &record, RESIDENCY_FIELDS);
}

/* ``Ledger.evict``. */
void log_eviction(struct replica *r, const struct sequence *sequence, int swapped)
{
    struct eviction record = {
        .index = r->index[sequence->request],
        .start_step = sequence->start_step,
        .decode_step = r->decode_step,
        .ticks = r->now,
        .swapped = swapped,
    };
    put_record(&r->evictions, &record, EVICTION_FIELDS);
}

/* ``State.preempt``: a sequence goes to the front of the queue. Its blocks are given back elsewhere. */
void to_queue(struct replica *r, const struct sequence *sequence)
{
    struct preempted *head = &r->preempted[r->num_preempted++];
    *head = (struct preempted){
        .request = sequence->request,
        .generated_tokens = sequence->generated_tokens,
        .kind = sequence->kind,
    };
    if (sequence->progress == PREFILLS) {
        head->lost_tokens = most(sequence->lost_tokens, sequence->computed_tokens);
        return;
    }
    head->kind = RECOMPUTED;
    head->generated_tokens += r->decode_step - sequence->start_step;
    head->lost_tokens = held_tokens(r, sequence);
    r->queued_tokens += r->prompt_tokens[head->request] + head->generated_tokens;
}

/* Requests that have arrived by ``now`` join the queue: ``OpenLoop.deliver``. Returns whether there are any. */
bool deliver(struct replica *r, int64_t now)
{
    int64_t before = r->arrived;
    while (r->arrived < r->num_requests && r->arrival_ticks[r->arrived] <= now)
        r->arrived++;
    return r->arrived > before;
}

/* --- Blocks of the steps to come --- */

/* ``PagedMemory.growth``: blocks that the running sequences take in the ``steps`` steps from the coming one on. */
int64_t growth_of(const struct replica *r, int64_t steps)
{
    int64_t start = r->decode_step % r->block_size, blocks = 0;
    if (steps >= r->block_size)
        for (int64_t phase = 0; phase < r->block_size; phase++)
            blocks += steps / r->block_size * r->phases[phase];
    for (int64_t left = steps % r->block_size; left; left--) {
        blocks += r->phases[start];
        if (++start == r->block_size)
            start = 0;
    }
    return blocks;
}

/* ``PagedMemory.steps_within``. */
static int64_t steps_within(const struct replica *r, int64_t blocks)
{
    int64_t cycles = floor_div(blocks, r->batch_size), left = blocks - cycles * r->batch_size;
    int64_t steps = cycles * r->block_size, start = r->decode_step % r->block_size;
    for (int64_t phase = start; phase < start + r->block_size; phase++) {
        int64_t need = r->phases[phase < r->block_size ? phase : phase - r->block_size];
        if (need > left)
            break;
        left -= need;
        steps++;
    }
    return steps;
}

/* --- The leap: ``Engine._leap_over`` --- */

/* The smallest of ``limit`` and of the decode steps that fit in ``ticks`` (``whole_steps`` of sums.py). */
int64_t whole_steps(int64_t ticks, int64_t second, int64_t growth, int64_t limit)
{
    int64_t low = 0, high = limit;
    if (!growth)
        return second ? least(limit, ticks / second) : limit;
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2, one, more, sum;
        bool fits = !__builtin_mul_overflow(middle, second, &one) &&
                    !__builtin_mul_overflow(middle * (middle - 1) / 2, growth, &more) &&
                    !__builtin_add_overflow(one, more, &sum) && sum <= ticks;
        if (fits)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* ``Engine._ask_horizon``, with the policy's ``horizon`` and ``PagedMemory.steps_with``. */
static int64_t ask_horizon(struct replica *r, int64_t limit)
{
    int64_t blocks = r->free - r->reserve, steps = floor_div(blocks, r->batch_size) * r->block_size;
    if (steps < limit)
        steps = growth_of(r, limit) <= blocks ? limit : steps_within(r, blocks);
    steps = least(steps < 1 ? 1 : steps, LONGEST_LEAP);
    if (num_waiting(r))
        /* Less than 1: a fault, which ends the run. */
        r->unpublished = r->steps_to_look < 1, steps = least(steps, most(1, r->steps_to_look));
    else
        r->holds_until = r->decode_step + steps;
    return least(steps, limit);
}

/* ``Engine._stop_at_edge``. */
static int64_t stop_at_edge(struct replica *r, int64_t limit, int64_t first, int64_t second, int64_t growth)
{
    while (r->next_edge < r->num_edges && r->edges[r->next_edge] <= r->now)
        r->next_edge++;
    if (r->next_edge == r->num_edges)
        return limit;
    int64_t ahead = r->edges[r->next_edge] - r->now - first;
    return ahead < 0 ? 1 : least(limit, 1 + whole_steps(ahead, second, growth, limit));
}

/* The row of a leap: its columns, and ``CachedMemory.advance`` for what the memory holds before it; shared slots live once. */
static void write_row(struct replica *r, struct row *row, int64_t live, int64_t held_blocks)
{
    if (r->prefilling != NONE) {
        const struct sequence *sequence = &r->slots[r->prefilling];
        int64_t target = r->prompt_tokens[sequence->request] + r->output_tokens[sequence->request];
        live += sequence->computed_tokens;
        row->prefill_tail = most(0, sequence->partial_blocks * r->block_size - target);
    }
    row->live = live - (r->cache == NULL ? 0 : num_shared(&r->cache->pool) * r->block_size);
    row->held = held_blocks * r->block_size;
    put_record(&r->rows, row, ROW_FIELDS);
    r->num_rows++;
}

/* A leap and its row; ``step`` is NULL where the decision stays the same. ``last`` is when its last step starts. It is not taken now if
   it ends at ``until`` or later and a request may yet end it earlier. */
bool leap_over(struct replica *r, const struct step *step, int64_t until, int64_t *last)
{
    int64_t batch = r->batch_size, context = batch * r->decode_step + r->lag_sum, prefill = 0, waiting = 0, first;
    bool valid_until_horizon = true, stops_at_arrival = true;
    struct line line;
    if (!decode_line(&r->cost, batch, step ? context + batch : context, &line))
        return false;
    if (step) {
        first = step->ticks, prefill = step->prefill_tokens, valid_until_horizon = step->valid_until_horizon, stops_at_arrival = step->stops_at_arrival;
        waiting = num_waiting(r);
    } else {
        first = line.base;
        if (!add_product(&first, line.slope, context))
            return false;
    }
    int64_t second = line.base, growth = line.slope * batch;
    if (line.slope && !add_product(&second, line.slope, context + batch))
        return false;
    int64_t limit = valid_until_horizon ? r->slots[r->calendar[0]].finish_step - r->decode_step : 1;
    if (stops_at_arrival && limit > 1 && r->arrived < r->num_requests) {
        int64_t arrival = r->arrival_ticks[r->arrived], ahead = arrival - r->now - first - 1;
        int64_t reach = ahead < 0 ? 1 : 2 + whole_steps(ahead, second, growth, limit);
        limit = least(limit, reach + (r->ahead && arrival > r->now));
    }
    if (limit > 1) {
        if (line.until != WITHOUT_END)
            limit = least(limit, 1 + floor_div(line.until - 1 - context, batch));
        if (r->num_edges)
            limit = stop_at_edge(r, limit, first, second, growth);
        if (r->decode_step + limit > r->holds_until)
            limit = ask_horizon(r, limit);
    }
    int64_t more = limit - 1, end = r->now, before = ticks_before(r, r->decode_step);
    if (!add_product(&end, 1, first) || !add_product(&end, more, second) ||
        !add_product(&end, growth, more * (more - 1) / 2))
        return false;
    r->leap = (struct leap){r->open && end >= until, limit, first, second, growth, end};
    r->taken = (struct taken){r->decode_step, before, r->now, first, second, growth};
    if (r->leap.waits)
        return true;
    if (!look_over(r, &r->leap))
        return false;
    struct row row = {
        .start_ticks = r->now,
        .steps = limit,
        .first_ticks = first,
        .next_ticks = second,
        .slope_ticks = growth,
        .batch_size = batch,
        .prefill_tokens = prefill,
        .waiting = waiting,
    };
    write_row(r, &row, context, r->num_blocks - r->free + r->phases[r->decode_step % r->block_size]);
    r->free -= growth_of(r, limit);
    r->overdrawn |= r->free < 0;
    *last = more ? end - second - growth * (more - 1) : r->now;
    r->now = end;
    r->decode_step += limit;
    if (r->cache != NULL && !r->overdrawn)
        grow_until(r, r->decode_step);
    return true;
}

/* A row in which no sequence decodes: ``Engine._stand_still``. Nothing ends it earlier. */
bool stand_still(struct replica *r, const struct step *step, int64_t batch_size)
{
    int64_t end = r->now;
    if (!add_product(&end, 1, step->ticks))
        return false;
    if (!look_over(r, &(struct leap){.first = step->ticks, .end = end}))
        return false;
    struct row row = {
        .start_ticks = r->now,
        .first_ticks = step->ticks,
        .batch_size = batch_size,
        .prefill_tokens = step->prefill_tokens,
        .waiting = num_waiting(r),
    };
    write_row(r, &row, 0, r->num_blocks - r->free);
    r->now = end;
    return true;
}

/* Nothing runs until the next arrival: ``Engine._rest``. */
bool rest(struct replica *r)
{
    int64_t end = r->arrival_ticks[r->arrived];
    if (!look_at_rest(r, end))
        return false;
    r->now = end;
    return true;
}

/* Whether the buffers have room for all that one turn of the loop can write. */
bool has_room(const struct replica *r)
{
    bool reads = r->cache == NULL || r->sent != NULL || r->cache->pool.last_life.at < MOST_LIVES;
    return reads && r->rows.end - r->rows.next >= ROW_FIELDS &&
           r->residencies.end - r->residencies.next >= r->max_num_seqs * RESIDENCY_FIELDS &&
           r->evictions.end - r->evictions.next >= r->max_num_seqs * EVICTION_FIELDS &&
           r->chunks.end - r->chunks.next >= CHUNK_FIELDS;
}

/* What the loop ends with if it has room and time. */
int after_failure(const struct replica *r)
{
    if (!has_failed(r))
        return GOES_ON;
    if (!r->cache->pool.failed)
        return OVERDRAWN;
    PyErr_NoMemory();
    return FAILED;
}
