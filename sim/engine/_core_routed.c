/* A replica behind a router that looks: ``RoutedEngine`` of routed.py.

Requests are sent one by one, each at its arrival. Everything that happens before an arrival is computed by then, and the leap
in progress is kept back, as the arrival may end it earlier:

    taken         |--------|--------|
    kept back                       |--------|--------|--------|
    arrival                                       ^
    ends                                              |               the first boundary at or after it, or the one after that

Its length is computed anew with each arrival that is sent here; so it is that of an open loop in which all arrivals are known.
A router reads the replica at the last boundary before the arrival. What it reads follows from the steps of this leap that are
over.
*/

#include "_core.h"

enum { COLUMNS = 4 };

/* Requests sent so far: the columns of the replica, and the names of its cache. */
struct sent {
    void *columns[COLUMNS], *ends_early, *shares, *offsets, *numbers, *stops;
    int64_t rooms[COLUMNS], early_room, share_room, offset_room, number_room, stop_room, num_links;
};

bool allocate_sent(struct replica *r)
{
    r->open = true;
    r->sent = calloc(1, sizeof *r->sent);
    return r->sent != NULL;
}

void drop_sent(struct replica *r)
{
    struct sent *sent = r->sent;
    struct records *all[] = {&r->rows, &r->residencies, &r->evictions, &r->chunks};
    if (sent == NULL)
        return;
    for (size_t place = 0; place < sizeof all / sizeof *all; place++)
        free(all[place]->view.buf);
    for (int place = 0; place < COLUMNS; place++)
        free(sent->columns[place]);
    free(sent->ends_early);
    free(sent->shares);
    free(sent->offsets);
    free(sent->numbers);
    free(sent->stops);
    free(sent);
}

/* Append to a list of integers. */
static bool append(void **items, int64_t count, int64_t *room, int64_t value)
{
    if (!make_place(items, count, room, sizeof value))
        return false;
    ((int64_t *)*items)[count] = value;
    return true;
}

static bool append_flag(void **items, int64_t count, int64_t *room, bool value)
{
    if (!make_place(items, count, room, 1))
        return false;
    ((char *)*items)[count] = value;
    return true;
}

/* A chain of the path of the next request, and the block at which it ends, from a tuple that has one after the other. */
static bool add_link(struct replica *r, PyObject *names, Py_ssize_t at)
{
    struct sent *sent = r->sent;
    int64_t number = PyLong_AsLongLong(PyTuple_GetItem(names, at)), stop = PyLong_AsLongLong(PyTuple_GetItem(names, at + 1));
    if (PyErr_Occurred())
        return false;
    if (number < 0) {
        PyErr_SetString(PyExc_ValueError, "chains have numbers from 0");
        return false;
    }
    return append(&sent->numbers, sent->num_links, &sent->number_room, number) &&
           append(&sent->stops, sent->num_links++, &sent->stop_room, stop);
}

/* Names of the blocks of the next request; None if it shares no prefix. */
static bool add_names(struct replica *r, PyObject *names)
{
    struct sent *sent = r->sent;
    struct cache *c = r->cache;
    bool shares = names != Py_None;
    Py_ssize_t length = shares ? PyTuple_Size(names) : 0;
    if (length < 0 || !append_flag(&sent->shares, r->num_requests, &sent->share_room, shares) ||
        !append(&sent->offsets, r->num_requests, &sent->offset_room, sent->num_links))
        return false;
    for (Py_ssize_t at = 0; at + 1 < length; at += 2)
        if (!add_link(r, names, at))
            return false;
    if (!append(&sent->offsets, r->num_requests + 1, &sent->offset_room, sent->num_links))
        return false;
    c->shares = sent->shares, c->offsets = sent->offsets, c->numbers = sent->numbers, c->stops = sent->stops;
    return true;
}

/* ``RoutedEngine.send``: a request arrives, after all that were sent before. */
bool send_request(struct replica *r, int64_t ticks, int64_t prompt_tokens, int64_t output_tokens, bool ends_early,
                         PyObject *names)
{
    struct sent *sent = r->sent;
    int64_t request = r->num_requests, values[COLUMNS] = {request, ticks, prompt_tokens, output_tokens};
    if (r->cache != NULL && !add_names(r, names))
        return false;
    for (int place = 0; place < COLUMNS; place++)
        if (!append(&sent->columns[place], request, &sent->rooms[place], values[place]))
            return false;
    if (!append_flag(&sent->ends_early, request, &sent->early_room, ends_early))
        return false;
    r->index = sent->columns[0], r->arrival_ticks = sent->columns[1];
    r->prompt_tokens = sent->columns[2], r->output_tokens = sent->columns[3];
    r->ends_early = sent->ends_early;
    r->num_requests++;
    r->queued_tokens += prompt_tokens;
    return true;
}

/* Records have room for ``count`` more integers. */
static bool widen_records(struct records *records, int64_t count)
{
    int64_t used = records->next - (int64_t *)records->view.buf, size = records->end - (int64_t *)records->view.buf;
    if (size - used >= count)
        return true;
    size = 2 * size + count;
    int64_t *grown = realloc(records->view.buf, (size_t)size * sizeof *grown);
    if (grown == NULL) {
        PyErr_NoMemory();
        return false;
    }
    records->view.buf = grown;
    records->next = grown + used;
    records->end = grown + size;
    return true;
}

bool make_room_for_records(struct replica *r)
{
    return widen_records(&r->rows, ROW_FIELDS) && widen_records(&r->residencies, r->max_num_seqs * RESIDENCY_FIELDS) &&
           widen_records(&r->evictions, r->max_num_seqs * EVICTION_FIELDS) && widen_records(&r->chunks, CHUNK_FIELDS);
}

/* --- What a router reads --- */

/* ``RoutedEngine._steps_over``: steps of the leap in progress that ended before ``now``. */
static int64_t steps_over(const struct replica *r, int64_t now)
{
    int64_t ahead = now - r->now - r->leap.first - 1;
    if (!r->leap.waits || r->leap.steps < 2 || ahead < 0)
        return 0;
    return 1 + whole_steps(ahead, r->leap.second, r->leap.growth, r->leap.steps);
}

/* ``RoutedEngine.num_requests``. */
int64_t num_unfinished(const struct replica *r)
{
    return r->num_requests - r->arrived + num_waiting(r) + (r->prefilling != NONE) + r->batch_size;
}

/* ``RoutedEngine.outstanding_tokens``. */
int64_t outstanding_tokens(const struct replica *r, int64_t now)
{
    return r->queued_tokens + r->batch_size * (r->decode_step + steps_over(r, now)) + r->lag_sum;
}

/* ``RoutedEngine.kv_tokens``. */
int64_t kv_tokens(const struct replica *r, int64_t now)
{
    int64_t computed = r->prefilling == NONE ? 0 : r->slots[r->prefilling].computed_tokens;
    int64_t taken = r->num_blocks - r->free + growth_of(r, steps_over(r, now));
    return taken * r->block_size + r->queued_tokens - computed;
}
