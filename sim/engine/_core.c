/* The compiled core: the leaps of one replica under vllm-sosp23, without the calls of Python.

The specification is Python: the loop of engine.py, carried out by executor.py, with the policy vllm_sosp23.py over the
blocks of paged.py. Every function here names what it follows, and computes the same integers. tests/sim/engine/test_core.py
compares all columns of both.

It serves an open loop with one sequence a request, in one KV group, where preempted sequences are recomputed and nothing
has ids. Three facts make its state small:

    first come, first served     All running sequences arrived before all waiting ones. So the last arrival is the last of
                                 the running list, and a preempted sequence goes to the front of the queue.
    the queue                    is a stack of preempted sequences before a range of requests that never ran.
    the calendar                 is ordered by (finish step, request), so any heap of it gives the same order.

    requests     0 .. 41   42 43 44   45 46 47 48 49   50 51 ...
                 running   preempted  arrived          to come
                                      ^ fresh          ^ arrived

Times and counts are int64; a time that exceeds that raises OverflowError. Columns are written as records into buffers of
the caller, who gets control back when one is full: no other state outlives a call than that of ``struct replica``.
*/

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef SOURCE_SHA256
#define SOURCE_SHA256 ""
#endif

/* Fields of a record, in the order of ledger.py. */
enum { ROW_FIELDS = 12, RESIDENCY_FIELDS = 7, EVICTION_FIELDS = 5 };
/* Kinds of a residency, sequence.py. */
enum { FRESH = 0, RECOMPUTED = 1 };
/* The steps of the longest leap, ``_LONGEST_LEAP`` of engine.py. */
#define LONGEST_LEAP ((int64_t)1 << 16)
/* No slot, and no end of a line. */
#define NONE (-1)
#define WITHOUT_END INT64_MAX

enum status { FAILED = -1, GOES_ON = 0, ENDED = 1, STUCK = 2 };

/* A running sequence; the names are those of sequence.py. */
struct sequence {
    int64_t request; /* its place among the served requests */
    int64_t start_tokens, generated_tokens, start_step, lag, finish_step;
    int32_t before, after; /* slots of its neighbours in the running list */
    int32_t place;         /* its place in the calendar */
};

/* A preempted sequence. */
struct preempted {
    int64_t request, generated_tokens, lost_tokens;
};

/* ``decode_line`` of the cost model for one batch size, valid in [from, until). */
struct line {
    int64_t from, until, base, slope;
};

/* A step that a decision begins: ``Begun`` of executor.py. */
struct step {
    int64_t ticks, prefill_tokens;
    bool steady, wakes, preempts;
};

struct records {
    Py_buffer view;
    int64_t *next, *end;
};

struct replica {
    /* Served requests. */
    Py_buffer views[4];
    const int64_t *index, *arrival_ticks, *prompt_tokens, *output_tokens;
    int64_t num_requests, fresh, arrived;
    /* The pool. */
    int64_t num_blocks, block_size, free;
    int64_t *phases; /* running sequences that take a block in a step of each phase */
    /* Limits. */
    int64_t max_num_seqs, max_num_batched_tokens, watermark_blocks;
    /* The running sequences. */
    struct sequence *slots;
    int32_t *unused, num_unused;   /* stack of free slots */
    int32_t *calendar, first, last; /* heap of slots; both ends of the running list */
    int64_t batch_size, lag_sum;
    struct preempted *preempted;
    int64_t num_preempted;
    /* Time. */
    int64_t now, decode_step, holds_until;
    int64_t edges[2];
    int num_edges, next_edge;
    /* Step times: of the cost model's methods, or the prefill of PaperCost in its five coefficients. */
    PyObject *step_ticks, *decode_line;
    bool linear;
    int64_t step, per_decode, per_token, steeper, knee;
    struct line *lines; /* by batch size */
    /* What a call writes. */
    struct records rows, residencies, evictions;
};

static int64_t ceil_div(int64_t amount, int64_t size) { return (amount + size - 1) / size; }

static int64_t floor_div(int64_t amount, int64_t size)
{
    return amount / size - (amount % size != 0 && (amount < 0) != (size < 0));
}

static int64_t modulo(int64_t amount, int64_t size) { return amount - floor_div(amount, size) * size; }

static int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

/* *sum += factor * amount. Returns whether it fits; else an error is set. */
static bool add_product(int64_t *sum, int64_t factor, int64_t amount)
{
    int64_t product;
    if (!__builtin_mul_overflow(factor, amount, &product) && !__builtin_add_overflow(*sum, product, sum))
        return true;
    PyErr_SetString(PyExc_OverflowError, "a time of the run exceeds 64 bits");
    return false;
}

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

/* --- Sequences --- */

static int64_t held_tokens(const struct replica *r, const struct sequence *sequence)
{
    return r->decode_step - 1 + sequence->lag;
}

/* A running sequence stops and gives back its blocks: ``State._stop`` or ``take_finished``, and ``PagedMemory.release``. */
static void leave(struct replica *r, int32_t slot)
{
    struct sequence *sequence = &r->slots[slot];
    int32_t place = sequence->place, size = (int32_t)r->batch_size - 1, moved = r->calendar[size];
    if (place < size) {
        sift_down(r, moved, place, size);
        sift_up(r, moved, r->slots[moved].place);
    }
    *(sequence->before == NONE ? &r->first : &r->slots[sequence->before].after) = sequence->after;
    *(sequence->after == NONE ? &r->last : &r->slots[sequence->after].before) = sequence->before;
    r->phases[modulo(1 - sequence->lag, r->block_size)]--;
    r->free += ceil_div(held_tokens(r, sequence), r->block_size);
    r->batch_size--;
    r->lag_sum -= sequence->lag;
    r->unused[r->num_unused++] = slot;
}

/* ``State.start``, ``PagedMemory.admit`` and ``Ledger.open``. */
static void start(struct replica *r, int64_t request, int64_t generated_tokens, int64_t lost_tokens, int kind)
{
    int32_t slot = r->unused[--r->num_unused];
    struct sequence *sequence = &r->slots[slot];
    int64_t tokens = r->prompt_tokens[request] + generated_tokens, decode_step = r->decode_step, size = r->block_size;
    *sequence = (struct sequence){
        .request = request,
        .start_tokens = tokens,
        .generated_tokens = generated_tokens,
        .start_step = decode_step,
        .lag = tokens - decode_step,
        .finish_step = decode_step + r->output_tokens[request] - generated_tokens,
        .before = r->last,
        .after = NONE,
    };
    *(r->last == NONE ? &r->first : &r->slots[r->last].after) = slot;
    r->last = slot;
    r->phases[modulo(1 - sequence->lag, size)]++;
    r->free -= ceil_div(tokens - 1, size);
    sift_up(r, slot, (int32_t)r->batch_size);
    r->batch_size++;
    r->lag_sum += sequence->lag;
    int64_t record[RESIDENCY_FIELDS] = {
        r->index[request], decode_step, r->now, tokens, generated_tokens, kind, lost_tokens,
    };
    memcpy(r->residencies.next, record, sizeof record);
    r->residencies.next += RESIDENCY_FIELDS;
}

/* ``Ledger.evict`` and ``State.preempt`` of the last arrival. */
static void preempt(struct replica *r)
{
    int32_t slot = r->last;
    struct sequence *sequence = &r->slots[slot];
    int64_t record[EVICTION_FIELDS] = {
        r->index[sequence->request], sequence->start_step, r->decode_step, r->now, 0,
    };
    memcpy(r->evictions.next, record, sizeof record);
    r->evictions.next += EVICTION_FIELDS;
    r->preempted[r->num_preempted++] = (struct preempted){
        .request = sequence->request,
        .generated_tokens = sequence->generated_tokens + r->decode_step - sequence->start_step,
        .lost_tokens = held_tokens(r, sequence),
    };
    leave(r, slot);
}

static int64_t num_waiting(const struct replica *r) { return r->num_preempted + r->arrived - r->fresh; }

/* --- Step times --- */

/* ``StepCost.decode_line``; a line is the same for all contexts that it is valid for. */
static const struct line *decode_line(struct replica *r, int64_t decodes, int64_t context)
{
    struct line *line = &r->lines[decodes];
    if (context >= line->from && context < line->until)
        return line;
    PyObject *until, *found = PyObject_CallFunction(r->decode_line, "LL", (long long)decodes, (long long)context);
    long long base, slope, end = WITHOUT_END;
    if (found == NULL || !PyArg_ParseTuple(found, "LLO", &base, &slope, &until)) {
        Py_XDECREF(found);
        return NULL;
    }
    if (until != Py_None)
        end = PyLong_AsLongLong(until);
    Py_DECREF(found);
    if (PyErr_Occurred())
        return NULL;
    *line = (struct line){.from = context, .until = end, .base = base, .slope = slope};
    return line;
}

/* ``StepCost.step_ticks``, or NONE with an error set. */
static int64_t step_ticks(struct replica *r, int64_t decodes, int64_t context, int64_t tokens, int64_t pairs)
{
    if (!r->linear) {
        PyObject *found = PyObject_CallFunction(
            r->step_ticks, "LLLL", (long long)decodes, (long long)context, (long long)tokens, (long long)pairs);
        int64_t ticks = found == NULL ? NONE : PyLong_AsLongLong(found);
        Py_XDECREF(found);
        return ticks;
    }
    int64_t ticks = r->step, beyond = tokens - r->knee;
    if (!add_product(&ticks, r->per_decode, decodes) || !add_product(&ticks, r->per_token, tokens))
        return NONE;
    return beyond <= 0 || add_product(&ticks, r->steeper, beyond) ? ticks : NONE;
}

/* --- The decision: ``VllmSosp23.schedule``, and ``Executor.carry_out`` --- */

/* ``VllmSosp23._make_room``: preempts last arrivals until the last one that is left finds a free block. */
static bool make_room(struct replica *r, int64_t *need)
{
    bool preempts = false;
    while (r->last != NONE) {
        int64_t own = held_tokens(r, &r->slots[r->last]) % r->block_size == 0;
        if (r->free > *need - own)
            break;
        *need -= own;
        preempt(r);
        preempts = true;
    }
    return preempts;
}

/* ``VllmSosp23._admit``; returns the pairs of query and key that the prefills compute. */
static int64_t admit(struct replica *r, int64_t free, struct step *step)
{
    int64_t pairs = 0, budget = r->max_num_batched_tokens - r->batch_size;
    bool any = false;
    for (; num_waiting(r) > 0; any = true) {
        const struct preempted *head = r->num_preempted ? &r->preempted[r->num_preempted - 1] : NULL;
        int64_t request = head ? head->request : r->fresh;
        int64_t prefill = r->prompt_tokens[request] + (head ? head->generated_tokens : 0);
        free -= ceil_div(prefill, r->block_size);
        if (free < (r->batch_size ? r->watermark_blocks : 0) || r->batch_size == r->max_num_seqs) {
            step->wakes = false;
            break;
        }
        if (r->batch_size && prefill > budget) {
            step->steady = step->steady && !any;
            step->wakes = false;
            break;
        }
        budget -= prefill;
        step->prefill_tokens += prefill;
        pairs += prefill * (prefill + 1) / 2;
        if (head) {
            r->num_preempted--;
            start(r, request, head->generated_tokens, head->lost_tokens, RECOMPUTED);
        } else {
            r->fresh++;
            start(r, request, 0, 0, FRESH);
        }
    }
    return pairs;
}

/* Decide the coming step and carry it out. Returns false where the decision is CARRY_ON; ``ticks`` is NONE on an error. */
static bool decide(struct replica *r, struct step *step)
{
    int64_t need = r->phases[r->decode_step % r->block_size], pairs = 0;
    *step = (struct step){.steady = true, .wakes = true};
    if (r->free - need < 1 && r->batch_size) {
        step->preempts = make_room(r, &need);
        step->steady = !step->preempts;
    } else if (!num_waiting(r)) {
        return false;
    }
    r->holds_until = 0;
    int64_t decodes = r->batch_size, context = decodes * r->decode_step + r->lag_sum;
    if (!step->preempts)
        /* Else all that wait arrived after the preempted sequences. */
        pairs = admit(r, r->free - need, step);
    if (decodes || step->prefill_tokens)
        step->ticks = step_ticks(r, decodes, decodes ? context : 0, step->prefill_tokens, pairs);
    else
        step->steady = false;
    return true;
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

/* ``PagedMemory.growth``: blocks that the running sequences take in the ``steps`` steps from the coming one on. */
static int64_t growth_of(const struct replica *r, int64_t steps)
{
    int64_t start = r->decode_step % r->block_size, blocks = steps / r->block_size * r->batch_size;
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

/* ``Engine._ask_horizon``, with ``VllmSosp23.horizon`` and ``PagedMemory.steps_with``. */
static int64_t ask_horizon(struct replica *r, int64_t limit)
{
    int64_t blocks = r->free - 1, steps = floor_div(blocks, r->batch_size) * r->block_size;
    if (steps < limit)
        steps = growth_of(r, limit) <= blocks ? limit : steps_within(r, blocks);
    steps = least(steps < 1 ? 1 : steps, LONGEST_LEAP);
    if (!num_waiting(r))
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

static void write_row(struct replica *r, const int64_t leap[9], int64_t live, int64_t held)
{
    memcpy(r->rows.next, leap, 9 * sizeof *leap);
    r->rows.next[9] = live;
    r->rows.next[10] = held;
    r->rows.next[11] = 0; /* prefill_tail: no prefill goes on */
    r->rows.next += ROW_FIELDS;
}

/* A leap, its row, and the finishes at its end; ``step`` is NULL where the decision stays the same. */
static bool leap_over(struct replica *r, const struct step *step)
{
    int64_t batch = r->batch_size, context = batch * r->decode_step + r->lag_sum, prefill = 0, waiting = 0, first;
    bool steady = true, wakes = true;
    const struct line *line = decode_line(r, batch, step ? context + batch : context);
    if (line == NULL)
        return false;
    if (step) {
        first = step->ticks, prefill = step->prefill_tokens, steady = step->steady, wakes = step->wakes;
        waiting = num_waiting(r);
    } else {
        first = line->base;
        if (!add_product(&first, line->slope, context))
            return false;
    }
    int64_t second = line->base, growth = line->slope * batch;
    if (line->slope && !add_product(&second, line->slope, context + batch))
        return false;
    int64_t limit = steady ? r->slots[r->calendar[0]].finish_step - r->decode_step : 1;
    if (wakes && limit > 1 && r->arrived < r->num_requests) {
        int64_t ahead = r->arrival_ticks[r->arrived] - r->now - first - 1;
        limit = ahead < 0 ? 1 : least(limit, 2 + whole_steps(ahead, second, growth, limit));
    }
    if (limit > 1) {
        if (line->until != WITHOUT_END)
            limit = least(limit, 1 + floor_div(line->until - 1 - context, batch));
        if (r->num_edges)
            limit = stop_at_edge(r, limit, first, second, growth);
        if (r->decode_step + limit > r->holds_until)
            limit = ask_horizon(r, limit);
    }
    int64_t more = limit - 1, end = r->now;
    if (!add_product(&end, 1, first) || !add_product(&end, more, second) ||
        !add_product(&end, growth, more * (more - 1) / 2))
        return false;
    int64_t row[9] = {r->now, limit, first, second, growth, batch, prefill, 0, waiting};
    /* ``PagedMemory.advance``. */
    int64_t held = (r->num_blocks - r->free + r->phases[r->decode_step % r->block_size]) * r->block_size;
    write_row(r, row, context, held);
    r->free -= growth_of(r, limit);
    r->now = end;
    r->decode_step += limit;
    while (r->batch_size && r->slots[r->calendar[0]].finish_step == r->decode_step)
        leave(r, r->calendar[0]);
    return true;
}

/* Whether the buffers have room for all that one turn of the loop can write. */
static bool has_room(const struct replica *r)
{
    return r->rows.end - r->rows.next >= ROW_FIELDS &&
           r->residencies.end - r->residencies.next >= r->max_num_seqs * RESIDENCY_FIELDS &&
           r->evictions.end - r->evictions.next >= r->max_num_seqs * EVICTION_FIELDS;
}

/* ``Engine._serve``, until a buffer is full, the clock has passed ``until``, or the run is over. */
static enum status serve_until(struct replica *r, int64_t until)
{
    while (has_room(r) && r->now < until) {
        struct step step;
        bool begins = false;
        if (r->arrived < r->num_requests && r->arrival_ticks[r->arrived] <= r->now) {
            while (r->arrived < r->num_requests && r->arrival_ticks[r->arrived] <= r->now)
                r->arrived++;
            begins = decide(r, &step);
        } else if (r->decode_step >= r->holds_until) {
            begins = decide(r, &step);
        }
        if (begins && step.ticks == NONE)
            return FAILED;
        if (r->batch_size) {
            if (!leap_over(r, begins ? &step : NULL))
                return FAILED;
        } else if (begins && step.preempts) {
            int64_t row[9] = {r->now, 0, 0, 0, 0, 0, 0, 0, num_waiting(r)};
            write_row(r, row, 0, (r->num_blocks - r->free) * r->block_size);
        } else if (num_waiting(r)) {
            return STUCK;
        } else if (r->arrived < r->num_requests) {
            r->now = r->arrival_ticks[r->arrived];
        } else {
            return ENDED;
        }
    }
    return GOES_ON;
}

/* --- What Python sees: ``_core.pyi`` --- */

static const char *CAPSULE = "fragmeter.sim.engine._core.replica";

static void drop(struct replica *r)
{
    for (int place = 0; place < 4; place++)
        PyBuffer_Release(&r->views[place]);
    Py_XDECREF(r->step_ticks);
    Py_XDECREF(r->decode_line);
    free(r->phases);
    free(r->slots);
    free(r->unused);
    free(r->calendar);
    free(r->preempted);
    free(r->lines);
    free(r);
}

static void drop_capsule(PyObject *capsule) { drop(PyCapsule_GetPointer(capsule, CAPSULE)); }

static bool allocate(struct replica *r)
{
    size_t slots = (size_t)r->max_num_seqs;
    r->phases = calloc((size_t)r->block_size, sizeof *r->phases);
    r->slots = calloc(slots, sizeof *r->slots);
    r->unused = calloc(slots, sizeof *r->unused);
    r->calendar = calloc(slots, sizeof *r->calendar);
    r->preempted = calloc(slots, sizeof *r->preempted);
    r->lines = calloc(slots + 1, sizeof *r->lines);
    if (!r->phases || !r->slots || !r->unused || !r->calendar || !r->preempted || !r->lines)
        return false;
    while (r->num_unused < r->max_num_seqs) {
        r->unused[r->num_unused] = (int32_t)(r->max_num_seqs - 1 - r->num_unused);
        r->num_unused++;
    }
    r->first = r->last = NONE;
    return true;
}

static PyObject *core_start(PyObject *self, PyObject *args)
{
    struct replica *r = calloc(1, sizeof *r);
    long long blocks, size, seqs, tokens, watermark, edges[2], terms[5] = {0};
    PyObject *step, *line, *given_edges, *given_terms;
    if (r == NULL)
        return PyErr_NoMemory();
    if (!PyArg_ParseTuple(args, "y*y*y*y*(LLLLL)O!OOO", &r->views[0], &r->views[1], &r->views[2], &r->views[3], &blocks,
                          &size, &seqs, &tokens, &watermark, &PyTuple_Type, &given_edges, &step, &line, &given_terms)) {
        drop(r);
        return NULL;
    }
    r->step_ticks = Py_NewRef(step);
    r->decode_line = Py_NewRef(line);
    r->num_edges = (int)PyTuple_Size(given_edges);
    r->linear = given_terms != Py_None;
    bool parsed = (r->num_edges == 0 || (r->num_edges == 2 && PyArg_ParseTuple(given_edges, "LL", &edges[0], &edges[1]))) &&
                  (!r->linear || PyArg_ParseTuple(given_terms, "LLLLL", &terms[0], &terms[1], &terms[2], &terms[3], &terms[4]));
    r->num_requests = (int64_t)(r->views[0].len / 8);
    for (int place = 1; place < 4; place++)
        parsed = parsed && r->views[place].len == r->views[0].len;
    if (!parsed || blocks < 1 || size < 1 || seqs < 1 || seqs > INT32_MAX) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "columns of equal length, two edges or none, and positive limits are needed");
        drop(r);
        return NULL;
    }
    r->index = r->views[0].buf;
    r->arrival_ticks = r->views[1].buf;
    r->prompt_tokens = r->views[2].buf;
    r->output_tokens = r->views[3].buf;
    r->num_blocks = r->free = blocks;
    r->block_size = size;
    r->max_num_seqs = seqs;
    r->max_num_batched_tokens = tokens;
    r->watermark_blocks = watermark;
    for (int place = 0; place < r->num_edges; place++)
        r->edges[place] = edges[place];
    r->step = terms[0], r->per_decode = terms[1], r->per_token = terms[2], r->steeper = terms[3], r->knee = terms[4];
    if (!allocate(r)) {
        drop(r);
        return PyErr_NoMemory();
    }
    PyObject *capsule = PyCapsule_New(r, CAPSULE, drop_capsule);
    if (capsule == NULL)
        drop(r);
    return capsule;
}

static void open_records(struct records *records)
{
    records->next = records->view.buf;
    records->end = records->next + records->view.len / 8;
}

static long long num_records(const struct records *records, int fields)
{
    return (records->next - (int64_t *)records->view.buf) / fields;
}

static PyObject *core_serve(PyObject *self, PyObject *args)
{
    PyObject *capsule;
    Py_buffer rows, residencies, evictions;
    long long until;
    if (!PyArg_ParseTuple(args, "OLw*w*w*", &capsule, &until, &rows, &residencies, &evictions))
        return NULL;
    struct replica *r = PyCapsule_GetPointer(capsule, CAPSULE);
    PyObject *found = NULL;
    if (r != NULL) {
        r->rows.view = rows, r->residencies.view = residencies, r->evictions.view = evictions;
        open_records(&r->rows);
        open_records(&r->residencies);
        open_records(&r->evictions);
        if (!has_room(r)) {
            PyErr_SetString(PyExc_ValueError, "a buffer has no room for the records of one step");
        } else {
            enum status status = serve_until(r, until);
            if (status != FAILED)
                found = Py_BuildValue("iLLLLLL", (int)status, (long long)r->now, (long long)r->arrived,
                                      (long long)num_waiting(r), num_records(&r->rows, ROW_FIELDS), num_records(&r->residencies, RESIDENCY_FIELDS),
                                      num_records(&r->evictions, EVICTION_FIELDS));
        }
    }
    PyBuffer_Release(&rows);
    PyBuffer_Release(&residencies);
    PyBuffer_Release(&evictions);
    return found;
}

static PyMethodDef METHODS[] = {
    {"start", core_start, METH_VARARGS, NULL},
    {"serve", core_serve, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int fill(PyObject *module) { return PyModule_AddStringConstant(module, "SOURCE_SHA256", SOURCE_SHA256); }

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, fill}, {0, NULL}};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_core",
    .m_size = 0,
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&MODULE); }
