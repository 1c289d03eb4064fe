/* What Python sees of the compiled core: a replica as a capsule, and the functions of _core.pyi. */

#include "_core.h"

#ifndef SOURCE_SHA256
#define SOURCE_SHA256 ""
#endif

static const char *CAPSULE = "fragmeter.sim.engine._core.replica";

static void drop(struct replica *r)
{
    for (int place = 0; place < 5; place++)
        PyBuffer_Release(&r->views[place]);
    if (r->cache != NULL)
        drop_cache(r->cache, r->max_num_seqs);
    drop_cost(&r->cost);
    drop_sent(r);
    drop_looks(r->looks);
    free(r->phases);
    free(r->slots);
    free(r->unused);
    free(r->calendar);
    free(r->ended);
    free(r->preempted);
    free(r);
}

static void drop_capsule(PyObject *capsule) { drop(PyCapsule_GetPointer(capsule, CAPSULE)); }

struct replica *replica_of(PyObject *capsule) { return PyCapsule_GetPointer(capsule, CAPSULE); }

/* The order of eviction, and for a prefix cache the names of blocks that requests share, from arguments of Python; false with an
   error set. */
static bool fill_names(struct cache *c, PyObject *given, int64_t num_requests)
{
    long long num_chains;
    const char *order;
    Py_buffer *names = c->names;
    int logs_contents = 0;
    if (!PyArg_ParseTuple(given, "s|y*y*y*y*Lp", &order, &names[0], &names[1], &names[2], &names[3], &num_chains, &logs_contents))
        return false;
    if (!set_order(&c->pool, order)) {
        PyErr_Format(PyExc_ValueError, "the core has no order of eviction named %s", order);
        return false;
    }
    if (!c->keeps)
        return true;
    c->shares = names[0].buf;
    c->offsets = names[1].buf, c->numbers = names[2].buf, c->stops = names[3].buf;
    int64_t links = (int64_t)(names[2].len / 8);
    c->pool.logs_contents = logs_contents;
    bool valid = names[0].len == num_requests && names[1].len == (num_requests + 1) * 8 && names[3].len == names[2].len &&
                 c->offsets[0] == 0 && c->offsets[num_requests] == links && num_chains >= 0;
    for (int64_t request = 0; valid && request < num_requests; request++)
        valid = c->offsets[request] <= c->offsets[request + 1];
    for (int64_t at = 0; valid && at < links; at++)
        valid = c->numbers[at] >= 0 && c->numbers[at] < num_chains;
    if (!valid) {
        PyErr_SetString(PyExc_ValueError, "a path of each request is needed, over chains below their number");
        return false;
    }
    return true;
}

/* Tables: of a prefix cache, if there are names, or without one. */
static bool fill_cache(struct replica *r, PyObject *given)
{
    r->cache = new_cache(r->num_blocks, r->block_size, r->max_num_seqs, PyTuple_Size(given) > 1);
    return r->cache != NULL && fill_names(r->cache, given, r->num_requests);
}

static bool allocate(struct replica *r)
{
    size_t slots = (size_t)r->max_num_seqs;
    r->phases = calloc((size_t)r->block_size, sizeof *r->phases);
    r->slots = calloc(slots, sizeof *r->slots);
    r->unused = calloc(slots, sizeof *r->unused);
    r->calendar = calloc(slots, sizeof *r->calendar);
    r->ended = calloc(slots, sizeof *r->ended);
    r->preempted = calloc(slots, sizeof *r->preempted);
    if (!r->phases || !r->slots || !r->unused || !r->calendar || !r->ended || !r->preempted)
        return false;
    while (r->num_unused < r->max_num_seqs) {
        r->unused[r->num_unused] = (int32_t)(r->max_num_seqs - 1 - r->num_unused);
        r->num_unused++;
    }
    r->first = r->last = r->prefilling = NONE;
    return true;
}

/* Fills a replica from arguments of Python; false with an error set. */
static bool fill_replica(struct replica *r, PyObject *args)
{
    long long edges[2];
    PyObject *numbers, *given_edges, *costs, *cache;
    int ahead, routed;
    struct limits limits;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*OO!OpOp", &r->views[0], &r->views[1], &r->views[2], &r->views[3], &r->views[4],
                          &numbers, &PyTuple_Type, &given_edges, &costs, &ahead, &cache, &routed) ||
        !take_numbers(numbers, &limits, LIMITS_FIELDS))
        return false;
    r->num_edges = (int)PyTuple_Size(given_edges);
    bool valid = r->num_edges == 0 || (r->num_edges == 2 && PyArg_ParseTuple(given_edges, "LL", &edges[0], &edges[1]));
    r->num_requests = (int64_t)(r->views[0].len / 8);
    for (int place = 1; place < 4; place++)
        valid = valid && r->views[place].len == r->views[0].len;
    if (!valid || r->views[4].len != r->num_requests || limits.num_blocks < 0 ||
        limits.block_size < 1 || limits.max_num_seqs < 1 || limits.max_num_seqs > INT32_MAX) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "columns of equal length, two edges or none, and positive limits are needed");
        return false;
    }
    r->index = r->views[0].buf;
    r->arrival_ticks = r->views[1].buf;
    r->prompt_tokens = r->views[2].buf;
    r->output_tokens = r->views[3].buf;
    r->ends_early = r->views[4].buf;
    r->num_blocks = r->free = limits.num_blocks;
    r->block_size = limits.block_size;
    r->max_num_seqs = limits.max_num_seqs;
    r->max_num_batched_tokens = limits.max_num_batched_tokens;
    r->watermark_blocks = limits.watermark_blocks;
    for (int place = 0; place < r->num_edges; place++)
        r->edges[place] = edges[place];
    r->ahead = ahead;
    r->steps_to_look = INT64_MAX;
    r->reserve = ahead ? 0 : 1;
    if (!allocate(r) || (routed && !allocate_sent(r))) {
        PyErr_NoMemory();
        return false;
    }
    return (cache == Py_None || fill_cache(r, cache)) && parse_cost(&r->cost, costs, limits.max_num_seqs);
}

static PyObject *core_start(PyObject *self, PyObject *args)
{
    struct replica *r = calloc(1, sizeof *r);
    if (r == NULL)
        return PyErr_NoMemory();
    PyObject *capsule = fill_replica(r, args) ? PyCapsule_New(r, CAPSULE, drop_capsule) : NULL;
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

static int serve(struct replica *r, int64_t until)
{
    return r->ahead ? serve_v1(r, until) : serve_sosp23(r, until);
}

static PyObject *core_serve(PyObject *self, PyObject *args)
{
    PyObject *capsule, *found = NULL;
    Py_buffer rows, residencies, evictions, chunks;
    long long until;
    if (!PyArg_ParseTuple(args, "OLw*w*w*w*", &capsule, &until, &rows, &residencies, &evictions, &chunks))
        return NULL;
    struct replica *r = replica_of(capsule);
    if (r != NULL && r->sent != NULL)
        PyErr_SetString(PyExc_ValueError, "the records of a replica behind a router are its own");
    else if (r != NULL) {
        r->rows.view = rows, r->residencies.view = residencies, r->evictions.view = evictions;
        r->chunks.view = chunks;
        open_records(&r->rows);
        open_records(&r->residencies);
        open_records(&r->evictions);
        open_records(&r->chunks);
        if (!has_room(r)) {
            PyErr_SetString(PyExc_ValueError, "a buffer has no room for the records of one step");
        } else {
            int status = serve(r, until);
            if (status != FAILED)
                found = Py_BuildValue("iLLLLLLL", status, (long long)r->now, (long long)r->arrived,
                                      (long long)num_waiting(r), num_records(&r->rows, ROW_FIELDS),
                                      num_records(&r->residencies, RESIDENCY_FIELDS),
                                      num_records(&r->evictions, EVICTION_FIELDS),
                                      num_records(&r->chunks, CHUNK_FIELDS));
        }
    }
    PyBuffer_Release(&rows);
    PyBuffer_Release(&residencies);
    PyBuffer_Release(&evictions);
    PyBuffer_Release(&chunks);
    return found;
}

/* The replica of a handle that requests are sent to; else NULL with an error set. */
static struct replica *routed_replica(PyObject *capsule)
{
    struct replica *r = replica_of(capsule);
    if (r != NULL && r->sent == NULL) {
        PyErr_SetString(PyExc_ValueError, "no requests are sent to this replica one by one");
        return NULL;
    }
    return r;
}

static PyObject *bytes_of(const void *items, size_t size) { return PyBytes_FromStringAndSize(items, (Py_ssize_t)size); }

static PyObject *bytes_so_far(const struct records *records)
{
    return bytes_of(records->view.buf, (size_t)(records->next - (int64_t *)records->view.buf) * sizeof *records->next);
}

/* --- Behind a router --- */

/* A request arrives: (replica, ticks, prompt tokens, output tokens, ends early, names of its blocks or None). */
static PyObject *core_send(PyObject *self, PyObject *args)
{
    PyObject *capsule, *names;
    long long ticks, prompt_tokens, output_tokens;
    int ends_early;
    if (!PyArg_ParseTuple(args, "OLLLpO", &capsule, &ticks, &prompt_tokens, &output_tokens, &ends_early, &names))
        return NULL;
    struct replica *r = routed_replica(capsule);
    if (r == NULL || !send_request(r, ticks, prompt_tokens, output_tokens, ends_early, names))
        return NULL;
    Py_RETURN_NONE;
}

/* No more requests arrive. */
static PyObject *core_close(PyObject *self, PyObject *capsule)
{
    struct replica *r = routed_replica(capsule);
    if (r == NULL)
        return NULL;
    r->open = false;
    Py_RETURN_NONE;
}

/* All that happens before ``until``. Returns the status, when the leap in progress ends or the clock stands, and how many
   wait. */
static PyObject *core_advance(PyObject *self, PyObject *args)
{
    PyObject *capsule;
    long long until;
    if (!PyArg_ParseTuple(args, "OL", &capsule, &until))
        return NULL;
    struct replica *r = routed_replica(capsule);
    if (r == NULL)
        return NULL;
    int status;
    do {
        if (!make_room_for_records(r))
            return NULL;
        status = serve(r, until);
    } while (status == GOES_ON && !has_room(r));
    if (status == FAILED)
        return NULL;
    long long end = r->leap.waits ? r->leap.end : r->now;
    return Py_BuildValue("iLL", status, end, (long long)num_waiting(r));
}

/* What a router reads at a tick (``Seen``): unfinished requests, outstanding tokens, tokens of the KV cache. */
static PyObject *core_look(PyObject *self, PyObject *args)
{
    PyObject *capsule;
    long long now;
    if (!PyArg_ParseTuple(args, "OL", &capsule, &now))
        return NULL;
    struct replica *r = routed_replica(capsule);
    if (r == NULL)
        return NULL;
    return Py_BuildValue("LLL", (long long)num_unfinished(r), (long long)outstanding_tokens(r, now),
                         (long long)kv_tokens(r, now));
}

/* The records of rows, residencies, evictions and chunks so far. */
static PyObject *core_records(PyObject *self, PyObject *capsule)
{
    struct replica *r = routed_replica(capsule);
    if (r == NULL)
        return NULL;
    return Py_BuildValue("NNNN", bytes_so_far(&r->rows), bytes_so_far(&r->residencies), bytes_so_far(&r->evictions),
                         bytes_so_far(&r->chunks));
}

/* The records of a log, which then has none: to be read before the core goes on. */
static PyObject *flush(struct log *log)
{
    static char nothing[1];
    size_t size = (size_t)(log->count * log->fields) * sizeof *log->items;
    log->count = 0;
    return PyMemoryView_FromMemory(size ? (char *)log->items : nothing, (Py_ssize_t)size, PyBUF_READ);
}

/* What a prefix cache has logged since the last call, and its evictions so far. */
static PyObject *core_logs(PyObject *self, PyObject *capsule)
{
    struct replica *r = replica_of(capsule);
    if (r == NULL)
        return NULL;
    if (r->cache == NULL) {
        PyErr_SetString(PyExc_ValueError, "this replica has no prefix cache");
        return NULL;
    }
    struct pool *p = &r->cache->pool;
    settle_logs(p);
    return Py_BuildValue("NNNNNNNL", flush(&p->lives), flush(&p->hit_lives), flush(&p->gaps), flush(&p->changes), flush(&p->look_ups),
                         flush(&p->stays), flush(&p->events), (long long)p->evicted);
}

/* Stays of the blocks that are cached now, after all ``logs``. */
static PyObject *core_kept(PyObject *self, PyObject *capsule)
{
    struct replica *r = replica_of(capsule);
    if (r == NULL)
        return NULL;
    if (r->cache == NULL) {
        PyErr_SetString(PyExc_ValueError, "this replica has no prefix cache");
        return NULL;
    }
    log_kept(&r->cache->pool);
    return flush(&r->cache->pool.stays);
}

static PyMethodDef METHODS[] = {
    {"start", core_start, METH_VARARGS, NULL},
    {"serve", core_serve, METH_VARARGS, NULL},
    {"send", core_send, METH_VARARGS, NULL},
    {"close", core_close, METH_O, NULL},
    {"advance", core_advance, METH_VARARGS, NULL},
    {"look", core_look, METH_VARARGS, NULL},
    {"records", core_records, METH_O, NULL},
    {"logs", core_logs, METH_O, NULL},
    {"kept", core_kept, METH_O, NULL},
    {"record", core_record, METH_VARARGS, NULL},
    {"recorded", core_recorded, METH_O, NULL},
    {"moments", core_moments, METH_VARARGS, NULL},
    {"date", core_date, METH_VARARGS, NULL},
    {"count", core_count, METH_VARARGS, NULL},
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
