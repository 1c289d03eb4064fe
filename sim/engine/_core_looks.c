/* What a block map shows of a pool: ``Tables`` of recording/blocks/tables.py, over the tables of a replica with ids.

A replica that ``pauses`` gives control back before each leap, step or rest that ends at ``until`` or later. It can then be looked
at in each of the steps to come, and is taken by the next call.
*/

#include "_core.h"

/* What the tables say of a block: how many entries it has, the sequence of the first one, and its slots before the end of the
   computed tokens, and of the tokens that will be, of the entry that has most. */
struct seen {
    int32_t references, sequence, computed, final;
};

/* Of the slots that are held, or not. */
struct census {
    int64_t computed, final, in_tables, in_use;
};

/* (whether it is a rest, start, end, steps, and ticks of the first step, of the second, and by which each later one is longer) of what
   is decided and not taken; None if there is nothing. */
PyObject *core_kept(PyObject *self, PyObject *capsule)
{
    struct replica *r = replica_of(capsule);
    if (r == NULL)
        return NULL;
    const struct leap *leap = &r->leap;
    if (!leap->kind)
        Py_RETURN_NONE;
    return Py_BuildValue("OLLLLLL", leap->kind == REST ? Py_True : Py_False, (long long)r->now, (long long)leap->end,
                         (long long)leap->steps, (long long)leap->first, (long long)leap->second, (long long)leap->growth);
}

static bool clear_seen(struct cache *c)
{
    while (c->seen_room < c->pool.num_touched)
        if (!grow_list((void **)&c->seen, &c->seen_room, sizeof *c->seen))
            return false;
    if (c->seen != NULL)
        memset(c->seen, 0, (size_t)c->pool.num_touched * sizeof *c->seen);
    return true;
}

/* The table of a sequence with so many computed tokens: all before it are of earlier requests. */
static void see_table(struct replica *r, int32_t slot, int64_t computed)
{
    const struct sequence *sequence = &r->slots[slot];
    const struct table *table = &r->cache->tables[slot];
    int64_t size = r->block_size, final = r->prompt_tokens[sequence->request] + r->output_tokens[sequence->request];
    final = most(final, computed);
    for (int64_t place = 0; place < table->count; place++) {
        struct seen *seen = &r->cache->seen[table->blocks[place]];
        if (!seen->references++)
            seen->sequence = (int32_t)r->index[sequence->request];
        int64_t before = place * size;
        seen->computed = (int32_t)most(seen->computed, least(size, computed - before));
        seen->final = (int32_t)most(seen->final, least(size, final - before));
    }
}

/* Counts the slots, and the maximal runs of free blocks by the power of two below their length. Returns the longest. */
static int64_t count_slots(const struct cache *c, struct census *census, int64_t *runs, int64_t sizes)
{
    int64_t free = 0, longest = 0, blocks = c->pool.num_blocks;
    for (int64_t block = 0; block <= blocks; block++) {
        bool touched = block < c->pool.num_touched, tabled = touched && c->seen[block].references;
        bool busy = block == blocks || tabled || (touched && c->pool.blocks[block].hash != NO_HASH);
        if (!touched && block < blocks) {
            free += blocks - block;
            block = blocks - 1;
        } else if (!busy) {
            free++;
        } else {
            if (free)
                runs[least(63 - __builtin_clzll((unsigned long long)free), sizes - 1)]++;
            longest = most(longest, free);
            free = 0;
            census->in_use += block < blocks;
        }
        if (tabled) {
            census->in_tables++;
            census->computed += c->seen[block].computed;
            census->final += c->seen[block].final;
        }
    }
    return longest;
}

/* Codes of the buckets that the blocks of a paged memory have. */
struct codes {
    int64_t live, reserved, tail, cached, free;
};

/* The columns of ``Rows``. */
struct shown {
    uint8_t *bucket;
    int32_t *sequence, *live, *references;
};

/* The bucket with most slots of a block, of several the first. */
static int64_t bucket_of(const struct codes *codes, const struct seen *seen, int64_t size)
{
    int64_t reserved = seen->final - seen->computed, tail = size - seen->final;
    int64_t largest = most(seen->computed, most(reserved, tail));
    return seen->computed == largest ? codes->live : reserved == largest ? codes->reserved : codes->tail;
}

static void show(const struct cache *c, const struct codes *codes, const int64_t *blocks, int64_t number, struct shown *out)
{
    for (int64_t at = 0; at < number; at++) {
        bool touched = blocks[at] < c->pool.num_touched;
        const struct seen *seen = touched ? &c->seen[blocks[at]] : NULL;
        bool named = touched && seen->references, hashed = touched && c->pool.blocks[blocks[at]].hash != NO_HASH;
        out->bucket[at] = (uint8_t)(named ? bucket_of(codes, seen, c->pool.block_size) : hashed ? codes->cached : codes->free);
        out->sequence[at] = named ? seen->sequence : NONE;
        out->live[at] = named ? seen->computed : 0;
        out->references[at] = named ? seen->references : 0;
    }
}

/* All sequences on the device, after so many of the steps to come. Returns how many they are, NONE with an error set. */
static int64_t see_tables(struct replica *r, int64_t steps)
{
    int64_t decode_step = r->decode_step + steps, count = 0;
    grow_until(r, decode_step);
    if (has_failed(r) || !clear_seen(r->cache)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_RuntimeError, "the tables of a look have no room");
        return NONE;
    }
    for (int32_t slot = r->first; slot != NONE; slot = r->slots[slot].after, count++)
        see_table(r, slot, decode_step - 1 + r->slots[slot].lag);
    if (r->prefilling != NONE)
        see_table(r, r->prefilling, r->slots[r->prefilling].computed_tokens);
    return count + (r->prefilling != NONE);
}

static void put_census(const struct census *census, const struct codes *codes, const struct replica *r, int64_t *slots)
{
    int64_t size = r->block_size;
    slots[codes->live] = census->computed;
    slots[codes->reserved] = census->final - census->computed;
    slots[codes->tail] = census->in_tables * size - census->final;
    slots[codes->cached] = (census->in_use - census->in_tables) * size;
    slots[codes->free] = (r->num_blocks - census->in_use) * size;
}

/* A look after so many of the steps to come. Args: (replica, steps, codes, shown blocks, and the columns of their rows, slots by code and
   runs of free blocks, to be filled). Returns the longest run, blocks in use and sequences on the device. */
PyObject *core_blocks(PyObject *self, PyObject *args)
{
    enum { VIEWS = 7 };
    PyObject *capsule, *given, *found = NULL;
    long long steps;
    struct codes codes;
    Py_buffer v[VIEWS];
    if (!PyArg_ParseTuple(args, "OLOy*w*w*w*w*w*w*", &capsule, &steps, &given, &v[0], &v[1], &v[2], &v[3], &v[4], &v[5], &v[6]))
        return NULL;
    struct replica *r = replica_of(capsule);
    int64_t number = (int64_t)(v[0].len / 8), held, buckets = (int64_t)(v[5].len / 8);
    bool valid = r != NULL && take_numbers(given, &codes, sizeof codes / sizeof codes.live) && r->cache != NULL && v[1].len == number &&
                 v[2].len == 4 * number && v[3].len == 4 * number && v[4].len == 4 * number && v[6].len >= 8;
    for (int place = 0; valid && place < 5; place++)
        valid = ((int64_t *)&codes)[place] >= 0 && ((int64_t *)&codes)[place] < buckets;
    if (!valid && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a replica with tables, and columns of equal length are needed");
    if (valid && (held = see_tables(r, steps)) != NONE) {
        struct census census = {0};
        struct shown out = {.bucket = v[1].buf, .sequence = v[2].buf, .live = v[3].buf, .references = v[4].buf};
        int64_t longest = count_slots(r->cache, &census, v[6].buf, (int64_t)(v[6].len / 8));
        put_census(&census, &codes, r, v[5].buf);
        show(r->cache, &codes, v[0].buf, number, &out);
        found = Py_BuildValue("LLL", (long long)longest, (long long)census.in_use, (long long)held);
    }
    for (int place = 0; place < VIEWS; place++)
        PyBuffer_Release(&v[place]);
    return found;
}
