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

/* Fields of a record, in the order of ledger.py. */
enum { ROW_FIELDS = 12, RESIDENCY_FIELDS = 7, EVICTION_FIELDS = 5, CHUNK_FIELDS = 4 };
/* How moments.py numbers a moment: its row or step times four, plus one of these. */
enum { AT_ROW, IN_STEP, AFTER_STEP, AFTER_ROW, MOMENT_KINDS };
/* Kinds of a residency, sequence.py. */
enum { FRESH = 0, RECOMPUTED = 1, NOT_DECODING = -2 };
/* The steps of the longest leap, ``_LONGEST_LEAP`` of engine.py. */
#define LONGEST_LEAP ((int64_t)1 << 16)

enum status { FAILED = -1, GOES_ON = 0, ENDED = 1, STUCK = 2, UNPUBLISHED = 3, RESTS = 4, OVERDRAWN = 5 };
/* What a sequence in a slot does: the last two are those of ``State.finished`` and ``State.in_vain``. */
enum progress { DECODES, PREFILLS, HAS_FINISHED, IN_VAIN };

/* A sequence with blocks; the names are those of sequence.py. */
struct sequence {
    int64_t request; /* its place among the served requests */
    int64_t start_tokens, generated_tokens, start_step, lag, finish_step, computed_tokens, lost_tokens;
    int64_t kind, partial_blocks; /* ``Partial.blocks`` of paged.py, of one that does not decode */
    int32_t before, after; /* slots of its neighbours in the running list */
    int32_t place;         /* its place in the calendar, or NONE */
    enum progress progress;
    int32_t phase_before, phase_after; /* with a prefix cache: its neighbours among those of its phase */
};

/* Kinds of evictions, as in ledger.py: the core has neither a swap nor a stall. */
enum eviction { RECOMPUTE = 0, COMPLETE = 3 };

/* A preempted sequence. */
struct preempted {
    int64_t request, generated_tokens, lost_tokens, kind;
};

/* A step that a decision begins: ``Begun`` of executor.py. */
struct step {
    int64_t ticks, prefill_tokens;
    bool valid_until_horizon, stops_at_arrival, preempts;
};

/* A leap that an arrival may yet end. */
struct leap {
    int64_t steps, first, second, growth, end;
};

struct records {
    Py_buffer view;
    int64_t *next, *end;
};

struct replica {
    /* Served requests. */
    Py_buffer views[5];
    const int64_t *index, *arrival_ticks, *prompt_tokens, *output_tokens;
    const char *ends_early; /* whether a token is computed in vain: before max_tokens and the model's length */
    int64_t num_requests, fresh, arrived;
    /* The pool. */
    int64_t num_blocks, block_size, free;
    int64_t *phases; /* running sequences that take a block in a step of each phase */
    int64_t reserve; /* blocks that a horizon leaves free */
    /* Limits. */
    int64_t max_num_seqs, max_num_batched_tokens, watermark_blocks;
    /* The running sequences. */
    struct sequence *slots;
    int32_t *unused, num_unused;    /* stack of free slots */
    int32_t *calendar, first, last; /* heap of slots; both ends of the running list */
    int64_t num_calendar, batch_size, lag_sum;
    struct preempted *preempted;
    int64_t num_preempted;
    /* Time. */
    int64_t now, decode_step, holds_until;
    bool unpublished; /* whether the head lacks a block that a running sequence has filled */
    bool overdrawn;   /* whether more blocks were taken than there are */
    int64_t steps_to_look; /* until the head of the queue may find more blocks, from the last decision on */
    int64_t edges[2];
    int num_edges, next_edge;
    struct cost cost;
    /* What a call writes, and the rows of all calls. */
    struct records rows, residencies, evictions, chunks;
    int64_t num_rows;
    /* Of vllm-v1, _core_v1.h: steps are decided with what was known at ``seen``. */
    bool ahead;
    int64_t seen;
    int32_t prefilling;          /* slot of the sequence in a chunked prefill, or NONE */
    int32_t *ended, num_ended;   /* slots of those that ended in the last step, NONE where they were preempted since */
    struct cache *cache;         /* NULL: without a prefix cache, blocks are only counted */
    struct step step;            /* the coming step, and whether its decision is another than CARRY_ON */
    bool begins;
    /* Behind a router, _core_routed.h. */
    struct sent *sent;     /* NULL: all requests are known */
    bool open;             /* more may be sent */
    struct leap leap;      /* decided and not taken yet, with 0 steps if there is none */
    int64_t queued_tokens; /* of ``RoutedState`` */
};

static int64_t floor_div(int64_t amount, int64_t size)
{
    return amount / size - (amount % size != 0 && (amount < 0) != (size < 0));
}

static int64_t modulo(int64_t amount, int64_t size) { return amount - floor_div(amount, size) * size; }

/* ``causal_pairs`` of sums.py. */
static int64_t causal_pairs(int64_t tokens) { return tokens * (tokens + 1) / 2; }

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

static void strike(struct replica *r, int32_t slot)
{
    int32_t place = r->slots[slot].place, size = (int32_t)--r->num_calendar, moved = r->calendar[size];
    r->slots[slot].place = NONE;
    if (place < size) {
        sift_down(r, moved, place, size);
        sift_up(r, moved, r->slots[moved].place);
    }
}

/* Whether a sequence generates its last token in the step before the coming one. */
static bool one_ends(const struct replica *r)
{
    return r->num_calendar && r->slots[r->calendar[0]].finish_step == r->decode_step;
}

/* --- Sequences --- */

static int64_t held_tokens(const struct replica *r, const struct sequence *sequence)
{
    return r->decode_step - 1 + sequence->lag;
}

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
    sequence->phase_before = c->last_of[phase], sequence->phase_after = NONE;
    *(c->last_of[phase] == NONE ? &c->first_of[phase] : &r->slots[c->last_of[phase]].phase_after) = slot;
    c->last_of[phase] = slot;
}

static void leave_phase(struct replica *r, int32_t slot)
{
    struct sequence *sequence = &r->slots[slot];
    int64_t *count = phase_of(r, sequence), phase = count - r->phases;
    struct cache *c = r->cache;
    int32_t before = sequence->phase_before, after = sequence->phase_after;
    --*count;
    if (c == NULL)
        return;
    *(before == NONE ? &c->first_of[phase] : &r->slots[before].phase_after) = after;
    *(after == NONE ? &c->last_of[phase] : &r->slots[after].phase_before) = before;
}

/* ``CachedTables.grow_until``: the blocks of the steps before ``decode_step``, in the order of steps and running sequences. */
static void grow_until(struct replica *r, int64_t decode_step)
{
    struct cache *c = r->cache;
    int64_t phase = c->grown_until % r->block_size;
    for (; c->grown_until < decode_step; c->grown_until++) {
        int64_t moment = MOMENT_KINDS * c->grown_until + AFTER_STEP, evicted = c->pool.evicted;
        for (int32_t slot = c->first_of[phase]; slot != NONE; slot = r->slots[slot].phase_after)
            take_block(c, &c->tables[slot], moment);
        log_change(&c->pool, moment, evicted - c->pool.evicted);
        phase = phase + 1 == r->block_size ? 0 : phase + 1;
    }
}

/* A sequence leaves the batch: ``State._end``. */
static void unlink_sequence(struct replica *r, int32_t slot)
{
    struct sequence *sequence = &r->slots[slot];
    *(sequence->before == NONE ? &r->first : &r->slots[sequence->before].after) = sequence->after;
    *(sequence->after == NONE ? &r->last : &r->slots[sequence->after].before) = sequence->before;
    r->batch_size--;
    r->lag_sum -= sequence->lag;
}

/* A running sequence stops and gives back its blocks: ``State._stop`` or ``take_finished``, and ``PagedMemory.release``. */
static void leave(struct replica *r, int32_t slot)
{
    struct sequence *sequence = &r->slots[slot];
    strike(r, slot);
    unlink_sequence(r, slot);
    leave_phase(r, slot);
    r->free += ceil_div(held_tokens(r, sequence), r->block_size);
    r->unused[r->num_unused++] = slot;
}

/* The head of the queue takes a slot. Its start is yet to come. */
static int32_t leave_queue(struct replica *r)
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
static void start(struct replica *r, int32_t slot)
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
    int64_t record[RESIDENCY_FIELDS] = {
        r->index[sequence->request], decode_step, r->now, tokens, sequence->generated_tokens, sequence->kind, lost,
    };
    memcpy(r->residencies.next, record, sizeof record);
    r->residencies.next += RESIDENCY_FIELDS;
}

/* ``Ledger.evict``. */
static void log_eviction(struct replica *r, const struct sequence *sequence, enum eviction swapped)
{
    int64_t record[EVICTION_FIELDS] = {
        r->index[sequence->request], sequence->start_step, r->decode_step, r->now, swapped,
    };
    memcpy(r->evictions.next, record, sizeof record);
    r->evictions.next += EVICTION_FIELDS;
}

/* ``State.preempt``: a sequence goes to the front of the queue. Its blocks are given back elsewhere. */
static void to_queue(struct replica *r, const struct sequence *sequence)
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

static int64_t num_waiting(const struct replica *r) { return r->num_preempted + r->arrived - r->fresh; }

/* Requests that have arrived by ``now`` join the queue: ``OpenLoop.deliver``. Returns whether there are any. */
static bool deliver(struct replica *r, int64_t now)
{
    int64_t before = r->arrived;
    while (r->arrived < r->num_requests && r->arrival_ticks[r->arrived] <= now)
        r->arrived++;
    return r->arrived > before;
}

/* --- Blocks of the steps to come --- */

/* ``PagedMemory.growth``: blocks that the running sequences take in the ``steps`` steps from the coming one on. */
static int64_t growth_of(const struct replica *r, int64_t steps)
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
static int64_t whole_steps(int64_t ticks, int64_t second, int64_t growth, int64_t limit)
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
static void write_row(struct replica *r, const int64_t leap[9], int64_t live, int64_t held_blocks)
{
    int64_t tail = 0;
    if (r->prefilling != NONE) {
        const struct sequence *sequence = &r->slots[r->prefilling];
        int64_t target = r->prompt_tokens[sequence->request] + r->output_tokens[sequence->request];
        live += sequence->computed_tokens;
        tail = most(0, sequence->partial_blocks * r->block_size - target);
    }
    memcpy(r->rows.next, leap, 9 * sizeof *leap);
    r->rows.next[9] = live - (r->cache == NULL ? 0 : num_shared(&r->cache->pool) * r->block_size);
    r->rows.next[10] = held_blocks * r->block_size;
    r->rows.next[11] = tail;
    r->rows.next += ROW_FIELDS;
    r->num_rows++;
}

/* A leap and its row; ``step`` is NULL where the decision stays the same. ``last`` is when its last step starts. While more
   requests may be sent, a leap that ends at ``until`` or later is not taken: one of them may end it earlier. */
static bool leap_over(struct replica *r, const struct step *step, int64_t until, int64_t *last)
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
    int64_t more = limit - 1, end = r->now;
    if (!add_product(&end, 1, first) || !add_product(&end, more, second) ||
        !add_product(&end, growth, more * (more - 1) / 2))
        return false;
    r->leap = (struct leap){r->open && end >= until ? limit : 0, first, second, growth, end};
    if (r->leap.steps)
        return true;
    int64_t row[9] = {r->now, limit, first, second, growth, batch, prefill, 0, waiting};
    write_row(r, row, context, r->num_blocks - r->free + r->phases[r->decode_step % r->block_size]);
    r->free -= growth_of(r, limit);
    r->overdrawn |= r->free < 0;
    *last = more ? end - second - growth * (more - 1) : r->now;
    r->now = end;
    r->decode_step += limit;
    if (r->cache != NULL && !r->overdrawn)
        grow_until(r, r->decode_step);
    return true;
}

/* A row in which no sequence decodes: ``Engine._stand_still``. */
static bool stand_still(struct replica *r, const struct step *step, int64_t batch_size)
{
    int64_t row[9] = {r->now, 0, step->ticks, 0, 0, batch_size, step->prefill_tokens, 0, num_waiting(r)};
    write_row(r, row, 0, r->num_blocks - r->free);
    return add_product(&r->now, 1, step->ticks);
}

/* Whether the buffers have room for all that one turn of the loop can write. */
static bool has_room(const struct replica *r)
{
    bool reads = r->cache == NULL || r->sent != NULL || r->cache->pool.lives.count < MOST_LIVES;
    return reads && r->rows.end - r->rows.next >= ROW_FIELDS &&
           r->residencies.end - r->residencies.next >= r->max_num_seqs * RESIDENCY_FIELDS &&
           r->evictions.end - r->evictions.next >= r->max_num_seqs * EVICTION_FIELDS &&
           r->chunks.end - r->chunks.next >= CHUNK_FIELDS;
}
