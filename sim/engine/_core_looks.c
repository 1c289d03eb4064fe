/* The block map of a run: the grid, the budget and the looks of recording/blocks/recording.py (``Grid``, ``_Budget``,
``BlockRecording``), and what ``Tables`` of recording/blocks/tables.py shows of a pool, over the tables of a replica with ids.

    times of the grid    0  s  2s  3s  ...    each has a column, the number of a look; a look may stand for several times
    looks                one buffer of records (``look_type`` of recording.py), which Python reads when the run has ended

Each leap, step and rest is looked at before it is taken, in those of its steps that are on the grid. When the grid is full, every
second column is dropped, with the looks that no column names any more.
*/

#include "_core.h"

/* What the tables say of a block: how many entries it has, the sequence of the first one, and its slots before the end of the
   computed tokens, and of the tokens that will be, of the entry that has most. */
struct seen {
    int32_t references, sequence, computed, final;
};

struct looks {
    Py_buffer view;
    const int64_t *shown; /* blocks, ascending */
    int64_t num_shown;
    struct map_limits limits;
    int64_t stride, most, next; /* of the grid; and its first time without a column */
    int64_t dearest, spent;     /* of the budget */
    int32_t *columns;           /* the look of each time, ascending */
    int64_t num_columns;
    char *items;
    int64_t count, room, width; /* looks, and bytes of each */
    struct seen *seen;          /* of each block */
    int64_t seen_room;
};

/* Where a look has its fields. */
struct look {
    int64_t *start, *longest, *census, *runs;
    int32_t *sequence, *live, *references;
    uint8_t *bucket;
};

static struct look look_at(const struct looks *l, int64_t number)
{
    int64_t *start = (int64_t *)(l->items + number * l->width), *census = start + 2, *runs = census + l->limits.num_buckets;
    int32_t *sequence = (int32_t *)(runs + l->limits.num_sizes), *live = sequence + l->num_shown;
    int32_t *references = live + l->num_shown;
    return (struct look){start, start + 1, census, runs, sequence, live, references, (uint8_t *)(references + l->num_shown)};
}

/* --- The grid and the budget --- */

static int64_t times_before(const struct looks *l, int64_t end) { return end / l->stride + (end % l->stride != 0); }

static void set_columns(struct looks *l, int64_t count)
{
    l->num_columns = count;
    if (__builtin_mul_overflow(count, l->stride, &l->next))
        l->next = INT64_MAX;
}

static void move_look(const struct looks *l, int64_t from, int64_t to)
{
    if (from != to)
        memcpy(l->items + to * l->width, l->items + from * l->width, (size_t)l->width);
}

/* Every second column goes. A last look that no column names yet stays. */
static void thin_out(struct looks *l)
{
    int64_t looks = 0, columns = 0;
    int32_t before = NONE;
    bool is_new = l->count && (!l->num_columns || l->columns[l->num_columns - 1] < l->count - 1);
    for (int64_t at = 0; at < l->num_columns; at += 2) {
        int32_t look = l->columns[at];
        if (look != before)
            move_look(l, look, looks++);
        before = look;
        l->columns[columns++] = (int32_t)(looks - 1);
    }
    if (is_new)
        move_look(l, l->count - 1, looks++);
    l->count = looks;
    set_columns(l, columns);
}

/* ``Grid.reach``: a stride with which all times before ``end`` have room. False with an error set. */
static bool reach(struct looks *l, int64_t end)
{
    while (times_before(l, end) > l->most) {
        if (__builtin_mul_overflow(l->stride, 2, &l->stride))
            return too_long();
        thin_out(l);
    }
    return true;
}

/* ``_Budget.most_after``. */
static int64_t most_after(struct looks *l, int64_t blocks)
{
    const struct map_limits *limits = &l->limits;
    l->dearest = most(l->dearest, blocks);
    l->spent += blocks;
    return most(1, least(limits->most_columns, limits->most_read / l->dearest) >> least(62, l->spent / limits->most_read));
}

/* Room for a look after the last one, and for what it sees of each block, all 0. False with an error set. */
static bool make_room(struct looks *l, int64_t blocks)
{
    enum { FIRST_LOOKS = 64 };
    if (l->count == l->room) {
        int64_t room = l->room ? 2 * l->room : FIRST_LOOKS;
        char *items = realloc(l->items, (size_t)(room * l->width));
        if (items == NULL)
            return PyErr_NoMemory() != NULL;
        l->items = items, l->room = room;
    }
    while (l->seen_room < blocks)
        if (!grow_list((void **)&l->seen, &l->seen_room, sizeof *l->seen))
            return false;
    if (blocks)
        memset(l->seen, 0, (size_t)blocks * sizeof *l->seen);
    memset(l->items + l->count * l->width, 0, 8 * (size_t)(2 + l->limits.num_buckets + l->limits.num_sizes));
    return true;
}

/* --- One look --- */

/* The table of a sequence with so many computed tokens: all before it are of earlier requests. */
static void see_table(struct replica *r, int32_t slot, int64_t computed)
{
    const struct sequence *sequence = &r->slots[slot];
    const struct table *table = &r->cache->tables[slot];
    int64_t size = r->block_size, final = r->prompt_tokens[sequence->request] + r->output_tokens[sequence->request];
    final = most(final, computed);
    for (int64_t place = 0; place < table->count; place++) {
        struct seen *seen = &r->looks->seen[table->blocks[place]];
        if (!seen->references++)
            seen->sequence = (int32_t)r->index[sequence->request];
        int64_t before = place * size;
        if (computed - before >= size) {
            seen->computed = seen->final = (int32_t)size;
            continue;
        }
        seen->computed = (int32_t)most(seen->computed, computed - before);
        seen->final = (int32_t)most(seen->final, least(size, final - before));
    }
}

/* Slots that tables hold before both ends; blocks of tables, and of those with contents. */
struct census {
    int64_t computed, final, in_tables, in_use;
};

static void count_run(const struct looks *l, const struct look *look, int64_t free)
{
    if (free)
        look->runs[least(63 - __builtin_clzll((unsigned long long)free), l->limits.num_sizes - 1)]++;
    *look->longest = most(*look->longest, free);
}

/* The bucket with most slots of a block, of several the first. */
static int64_t bucket_of(const struct map_limits *codes, const struct seen *seen, int64_t size)
{
    int64_t reserved = seen->final - seen->computed, tail = size - seen->final;
    int64_t largest = most(seen->computed, most(reserved, tail));
    return seen->computed == largest ? codes->live : reserved == largest ? codes->reserved : codes->block_tail;
}

/* A row of a look. */
static void show(const struct look *look, int64_t at, int64_t bucket, struct seen seen)
{
    look->bucket[at] = (uint8_t)bucket;
    look->sequence[at] = seen.sequence;
    look->live[at] = seen.computed;
    look->references[at] = seen.references;
}

/* Shows blocks, and counts all of them, and the maximal runs of free ones by the power of two below their length. */
static struct census show_blocks(const struct replica *r, const struct look *look)
{
    static const struct seen nothing = {.sequence = NONE};
    const struct looks *l = r->looks;
    const struct map_limits *codes = &l->limits;
    const struct pool *p = &r->cache->pool;
    struct census census = {0};
    int64_t free = 0, at = 0;
    for (int64_t block = 0; block < p->num_touched; block++) {
        const struct seen *seen = &l->seen[block];
        int64_t bucket = p->content[block] == EMPTY ? codes->free : codes->cached;
        if (seen->references) {
            bucket = bucket_of(codes, seen, r->block_size);
            census.in_tables++;
            census.computed += seen->computed;
            census.final += seen->final;
        } else {
            seen = &nothing;
        }
        if (bucket == codes->free) {
            free++;
        } else {
            count_run(l, look, free);
            free = 0;
            census.in_use++;
        }
        if (at < l->num_shown && l->shown[at] == block)
            show(look, at++, bucket, *seen);
    }
    while (at < l->num_shown)
        show(look, at++, codes->free, nothing);
    count_run(l, look, free + p->num_blocks - p->num_touched);
    return census;
}

static void put_census(const struct census *census, const struct replica *r, int64_t *slots)
{
    const struct map_limits *codes = &r->looks->limits;
    int64_t size = r->block_size;
    slots[codes->live] = census->computed;
    slots[codes->reserved] = census->final - census->computed;
    slots[codes->block_tail] = census->in_tables * size - census->final;
    slots[codes->cached] = (census->in_use - census->in_tables) * size;
    slots[codes->free] = (r->num_blocks - census->in_use) * size;
}

/* A look at the end of so many of the steps to come, in a step that begins at ``start``, NONE if nothing runs; so it is until ``end``.
   ``BlockRecording._look``. False with an error set. */
static bool take_look(struct replica *r, int64_t steps, int64_t start, int64_t end)
{
    struct looks *l = r->looks;
    int64_t decode_step = r->decode_step + steps, held = 0;
    grow_until(r, decode_step);
    if (has_failed(r)) {
        /* So will the leap. */
        l->next = INT64_MAX;
        return true;
    }
    if (!make_room(l, r->cache->pool.num_touched))
        return false;
    for (int32_t slot = r->first; slot != NONE; slot = r->slots[slot].after, held++)
        see_table(r, slot, decode_step - 1 + r->slots[slot].lag);
    if (r->prefilling != NONE)
        see_table(r, r->prefilling, r->slots[r->prefilling].computed_tokens), held++;
    struct look look = look_at(l, l->count++);
    *look.start = start;
    struct census census = show_blocks(r, &look);
    put_census(&census, r, look.census);
    l->most = most_after(l, l->limits.of_sequence * held + census.in_use);
    if (!reach(l, end))
        return false;
    int64_t columns = l->num_columns;
    while (columns < times_before(l, end))
        l->columns[columns++] = (int32_t)(l->count - 1);
    l->count -= columns == l->num_columns;
    set_columns(l, columns);
    return true;
}

/* --- What the loop calls, where there is a map --- */

/* ``BlockRecording.step_started``, for a leap that starts now. False with an error set. */
bool look_over(struct replica *r, const struct leap *leap)
{
    struct looks *l = r->looks;
    if (l == NULL || l->next >= leap->end)
        return true;
    if (!reach(l, leap->end))
        return false;
    while (l->next < leap->end) {
        int64_t ahead = l->next - r->now - leap->first, before = 0, start = r->now, until = r->now + leap->first;
        if (ahead >= 0) {
            before = 1 + whole_steps(ahead, leap->second, leap->growth, leap->steps);
            start = until + (before - 1) * leap->second + leap->growth * ((before - 1) * (before - 2) / 2);
            until = start + leap->second + leap->growth * (before - 1);
        }
        /* Of a step that only prefills nothing grows. */
        if (!take_look(r, least(before + 1, leap->steps), start, until))
            return false;
    }
    return true;
}

/* ``BlockRecording.idle_started``. False with an error set. */
bool look_at_rest(struct replica *r, int64_t end)
{
    struct looks *l = r->looks;
    return l == NULL || (reach(l, end) && (l->next >= end || take_look(r, 0, NONE, end)));
}

/* --- What Python sees --- */

void drop_looks(struct looks *l)
{
    if (l == NULL)
        return;
    PyBuffer_Release(&l->view);
    free(l->columns);
    free(l->items);
    free(l->seen);
    free(l);
}

static bool fill_looks(struct looks *l, PyObject *given)
{
    const struct map_limits *limits = &l->limits;
    if (!take_numbers(given, &l->limits, MAP_LIMITS_FIELDS))
        return false;
    const int64_t codes[] = {limits->live, limits->reserved, limits->block_tail, limits->cached, limits->free};
    bool valid = limits->stride_ticks > 0 && limits->most_columns > 0 && limits->most_columns <= INT32_MAX &&
                 limits->most_read > 0 && limits->num_sizes > 0;
    for (size_t place = 0; place < sizeof codes / sizeof *codes; place++)
        valid = valid && codes[place] >= 0 && codes[place] < limits->num_buckets;
    if (!valid) {
        PyErr_SetString(PyExc_ValueError, "a block map needs positive limits, and codes below their number");
        return false;
    }
    l->shown = l->view.buf, l->num_shown = (int64_t)(l->view.len / 8);
    l->stride = limits->stride_ticks, l->most = limits->most_columns, l->dearest = 1;
    l->width = ceil_div(8 * (2 + limits->num_buckets + limits->num_sizes) + 13 * l->num_shown, 8) * 8;
    l->columns = malloc((size_t)limits->most_columns * sizeof *l->columns);
    return l->columns != NULL || PyErr_NoMemory() != NULL;
}

/* A block map from now on: (replica with tables, blocks to show, ``MapLimits``). */
PyObject *core_record(PyObject *self, PyObject *args)
{
    PyObject *capsule, *given;
    struct looks *looks = calloc(1, sizeof *looks);
    if (looks == NULL)
        return PyErr_NoMemory();
    if (!PyArg_ParseTuple(args, "Oy*O", &capsule, &looks->view, &given)) {
        free(looks);
        return NULL;
    }
    struct replica *r = replica_of(capsule);
    if (r != NULL && (r->cache == NULL || r->looks != NULL))
        PyErr_SetString(PyExc_ValueError, "a map is recorded once, of a replica with tables");
    else if (r != NULL && fill_looks(looks, given))
        r->looks = looks;
    if (PyErr_Occurred()) {
        drop_looks(looks);
        return NULL;
    }
    Py_RETURN_NONE;
}

/* The stride of the grid, the look of each of its times, int32, and the looks, in memory of the replica. */
PyObject *core_recorded(PyObject *self, PyObject *capsule)
{
    static char nothing[1];
    struct replica *r = replica_of(capsule);
    if (r == NULL)
        return NULL;
    struct looks *l = r->looks;
    if (l == NULL) {
        PyErr_SetString(PyExc_ValueError, "no block map is recorded of this replica");
        return NULL;
    }
    Py_ssize_t columns = (Py_ssize_t)(l->num_columns * (int64_t)sizeof *l->columns), looks = (Py_ssize_t)(l->count * l->width);
    return Py_BuildValue("LNN", (long long)l->stride, PyMemoryView_FromMemory((char *)l->columns, columns, PyBUF_READ),
                         PyMemoryView_FromMemory(looks ? l->items : nothing, looks, PyBUF_READ));
}
