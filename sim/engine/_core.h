/* The compiled core: the leaps of one replica under vllm-sosp23 or vllm-v1, without the calls of Python.

The specification is Python: the loop of engine.py, carried out by executor.py, with the policy over the blocks of a memory.
Every function names what it follows, and computes the same integers. tests/sim/engine/test_core.py compares all columns of
both. It serves an open loop with one sequence a request, in one KV group, where preempted sequences are recomputed; core.py
lists what it serves.

    _core_cost.c      step times
    _core_pool.c      blocks with reference counts and hashes, and the free queue
    _core_cache.c     the block tables of a prefix cache
    _core_batch.c     the running sequences and their blocks, the queue, the leap
    _core_sosp23.c    the decisions of vllm-sosp23
    _core_v1.c        the decisions of vllm-v1
    _core_routed.c    requests that a router sends one by one, and what it reads
    _core_looks.c     the block map of a run
    _core_history.c   passes over the logs of a run
    _core.c           what Python sees

Each of them compiles alone with this header. Columns of records, and numbers that Python knows, are in _core_columns.h, which
setup.py writes from the declarations in Python.

Times and counts are int64; a time that exceeds that raises OverflowError. Columns are written as records into buffers of
the caller, who gets control back when one is full: no other state outlives a call than that of ``struct replica``.
*/

#ifndef FRAGMETER_CORE_H
#define FRAGMETER_CORE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "_core_columns.h"

/* Nothing but the module's entry is visible outside of the library. */
#pragma GCC visibility push(hidden)

/* --- Step times --- */

/* No slot, no count kept, and no end of a line. */
#define NONE (-1)
#define WITHOUT_END INT64_MAX

/* ``decode_line`` of the cost model for one batch size, valid in [from, until). */
struct line {
    int64_t from, until, base, slope;
};

/* The lines found so far for one batch size, in the order of the context. */
struct lines {
    struct line *found;
    int64_t count, room;
};

/* Ticks by a count, NONE where they are not known yet. */
struct memo {
    int64_t *ticks, room;
};

/* A node of ``Surface`` (curves.py). */
struct node {
    int64_t x, y, ticks;
};

/* Ticks of a pair of query and key, in layers with a window of so many tokens; 0: without one. */
struct pair_ticks {
    int64_t window, ticks;
};

struct cost {
    PyObject *step_ticks, *decode_line;
    int64_t max_num_seqs;
    struct lines *steps; /* by batch size */
    bool linear; /* whether it is ``PaperCost``, with its terms */
    struct terms terms;
    bool in_parts; /* whether it is ``StepParts``: */
    struct part_numbers numbers;
    PyObject *of_tokens, *of_rows, *mixed_decode, *prefill_node;
    struct memo tokens, rows;
    struct lines *attention; /* by batch size */
    struct node *nodes;      /* a hash table with open addressing; ticks are NONE where it is empty */
    int64_t num_nodes, node_room;
    struct pair_ticks *pairs;
    int64_t num_pairs;
};

/* --- Blocks --- */

/* Lives that gather before Python reads them. */
enum { MOST_LIVES = 1 << 17 };

/* Records since the last ``logs``. */
struct log {
    int64_t *items, count, room;
    int fields;
};

/* What a block keeps: nothing; tokens that no look-up asks for, known once it is free; or tokens with a hash, perhaps ``UNSHARED``. */
enum content { EMPTY, UNASKED, HASHED };

/* Of a block that is HASHED. */
struct block {
    int64_t hash;
    int32_t ref_cnt, place, next_in_chain; /* its place in the ring of free blocks; the next one with a hash like its own */
    int32_t touched;                       /* its touches, or NONE */
};

/* The last hits of some blocks, and those of them that were taken since and whose gaps are to be logged. */
struct touches {
    int64_t times[KEPT_TOUCHES], taken;
    int32_t count, blocks; /* without blocks ``count`` is the next one that is unused */
};

/* The last record of the log of lives: where it is, the ticks, and how many more blocks lived as long. It has one field, or two. */
struct last_life {
    int64_t at, ticks, more;
};

struct pool {
    int order; /* of eviction: one of those that ``set_order`` knows by name */
    bool logs_lives, logs_contents; /* contents where some requests share them */
    bool failed, overdrawn; /* whether no memory was left; whether a block was taken and none was free */
    int64_t block_size, num_blocks, num_touched, num_free, num_entries, num_cached, evicted;
    struct block *blocks;
    int64_t *born;    /* of each block, apart: blocks that are not HASHED need no more, and are most of many loads */
    uint8_t *content; /* of each block: an ``enum content`` */
    int64_t block_room;
    int32_t *front, *ring;
    int64_t num_front, front_room, first, end, ring_mask;
    int32_t *chains; /* blocks by hash: the first one of each chain */
    int64_t num_hashes;
    int chain_bits;
    struct touches *touches;
    int64_t num_touches, touch_room;
    int32_t unused_touches;
    struct last_life last_life;
    struct log lives, hit_lives, gaps, changes, look_ups, stays, events;
    int64_t *since, num_look_ups; /* when each block with a hash came free; look-ups so far */
};

/* --- Block tables --- */

/* Chains of a request's blocks, ``Path``: a range in the names of the cache; or hashes of its own, ``Chains.own_names``. */
struct path {
    bool is_shared, is_own; /* neither: no look-up asks for its blocks */
    int64_t first, count, own;
};

/* The table of a sequence: its blocks, of which the first ``cached`` are full and can be found, if they have hashes; the chain of the next one without; and its
   neighbours among the running sequences of its phase. */
struct table {
    int32_t before, after;
    int32_t *blocks;
    int64_t count, room, cached, link;
    struct path path;
};

struct cache {
    struct pool pool;
    bool keeps; /* whether full blocks get hashes: else it is block tables alone, for a block map */
    int64_t grown_until;
    struct table *tables; /* of each slot */
    int32_t *taken;              /* blocks that the sequences of a phase take */
    int32_t *first_of, *last_of; /* of each phase: the running sequences that take a block in its steps, in order */
    int32_t *found;              /* blocks of the last look-up */
    int64_t num_found, found_room;
    /* Requests that share prefixes, and their paths, from offset to offset. */
    Py_buffer names[4];
    const char *shares;
    const int64_t *offsets, *numbers, *stops;
};

/* --- A replica --- */

/* What a call ends with beside ``STATUSES``: an error of Python is set. */
enum { FAILED = -1 };
/* What a sequence in a slot does: the last two are those of ``State.finished`` and ``State.overrunning``. */
enum progress { DECODES, PREFILLS, HAS_FINISHED, OVERRUNS };

/* A sequence with blocks; the names are those of sequence.py. */
struct sequence {
    int64_t request; /* its place among the served requests */
    int64_t start_tokens, generated_tokens, start_step, lag, finish_step, computed_tokens, lost_tokens;
    int64_t kind, partial_blocks; /* ``Partial.blocks`` of paged.py, of one that does not decode */
    int32_t before, after; /* slots of its neighbours in the running list */
    int32_t place;         /* its place in the calendar, or NONE */
    enum progress progress;
};

/* A preempted sequence. */
struct preempted {
    int64_t request, generated_tokens, lost_tokens, kind;
};

/* A step that a decision begins: ``Begun`` of executor.py. */
struct step {
    int64_t ticks, prefill_tokens;
    bool valid_until_horizon, stops_at_arrival, preempts;
};

/* A leap, or a step without decodes; whether it is not taken yet, as an arrival may end it. */
struct leap {
    bool waits;
    int64_t steps, first, second, growth, end;
};

/* The last leap that was taken, and the end of the step before it, in ticks. */
struct taken {
    int64_t decode_step, before, start, first, second, growth;
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
    struct taken taken;
    bool unpublished; /* whether the head lacks a block that a running sequence has filled */
    bool overdrawn;   /* whether more blocks were taken than there are */
    int64_t steps_to_look; /* until the head of the queue may find more blocks, from the last decision on */
    int64_t edges[2];
    int num_edges, next_edge;
    struct cost cost;
    /* What a call writes, and the rows of all calls. */
    struct records rows, residencies, evictions, chunks;
    int64_t num_rows;
    /* Of vllm-v1, _core_v1.c: steps are decided with what was known at ``seen``. */
    bool ahead;
    int64_t seen;
    int32_t prefilling;          /* slot of the sequence in a chunked prefill, or NONE */
    int32_t *ended, num_ended;   /* slots of those that ended in the last step, NONE where they were preempted since */
    struct cache *cache;         /* NULL: without a prefix cache, blocks are only counted */
    struct step step;            /* the coming step, and whether its decision is another than CARRY_ON */
    bool begins;
    /* Behind a router, _core_routed.c. */
    struct sent *sent;     /* NULL: all requests are known */
    bool open;             /* more may be sent */
    struct leap leap;      /* the last one */
    int64_t queued_tokens; /* of ``RoutedState`` */
    struct looks *looks;   /* NULL: no block map is recorded */
};

/* --- Small functions that every part needs --- */

static inline int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

static inline int64_t most(int64_t one, int64_t other) { return one > other ? one : other; }

static inline int64_t ceil_div(int64_t amount, int64_t size) { return (amount + size - 1) / size; }

static inline int64_t floor_div(int64_t amount, int64_t size)
{
    return amount / size - (amount % size != 0 && (amount < 0) != (size < 0));
}

static inline int64_t modulo(int64_t amount, int64_t size) { return amount - floor_div(amount, size) * size; }

/* ``causal_pairs`` of sums.py. */
static inline int64_t causal_pairs(int64_t tokens) { return tokens * (tokens + 1) / 2; }

/* Sets OverflowError, and returns false. */
bool too_long(void);

/* *sum += factor * amount. Returns whether it fits; else an error is set. */
static inline bool add_product(int64_t *sum, int64_t factor, int64_t amount)
{
    int64_t product;
    if (!__builtin_mul_overflow(factor, amount, &product) && !__builtin_add_overflow(*sum, product, sum))
        return true;
    return too_long();
}

bool grow_list(void **items, int64_t *room, size_t size);

/* *items has room for one more after ``count``; else an error is set. */
static inline bool make_place(void **items, int64_t count, int64_t *room, size_t size)
{
    return count < *room || grow_list(items, room, size);
}

/* Room for one more; else the pool has failed, and the caller's list keeps its length. */
static inline bool widen(struct pool *p, void **items, int64_t count, int64_t *room, size_t size)
{
    p->failed = p->failed || !make_place(items, count, room, size);
    return !p->failed;
}

/* Place for one more record of so many fields, or NULL: the pool has failed. */
static inline void *new_record(struct pool *p, struct log *log, int fields)
{
    if (!widen(p, (void **)&log->items, log->count, &log->room, (size_t)fields * sizeof *log->items))
        return NULL;
    return log->items + log->count++ * fields;
}

/* Integers of a tuple of Python, as many as the fields of a struct; false with an error set. */
bool take_numbers(PyObject *given, void *fields, int count);

/* Append a record of so many fields; the caller knows that there is room. */
static inline void put_record(struct records *records, const void *record, int fields)
{
    memcpy(records->next, record, (size_t)fields * sizeof *records->next);
    records->next += fields;
}

static inline int64_t num_shared(const struct pool *p) { return p->num_entries - p->num_blocks + p->num_free; }

static inline bool has_hashes(const struct path *path) { return path->is_shared || path->is_own; }

static inline int64_t held_tokens(const struct replica *r, const struct sequence *sequence)
{
    return r->decode_step - 1 + sequence->lag;
}

/* Whether no memory was left for the tables, or a block was taken and none was free. */
static inline bool has_failed(const struct replica *r)
{
    return r->cache != NULL && (r->cache->pool.failed || r->cache->pool.overdrawn);
}

static inline int64_t num_waiting(const struct replica *r) { return r->num_preempted + r->arrived - r->fresh; }

/* --- _core.c --- */

/* The replica of a handle; else NULL with an error set. */
struct replica *replica_of(PyObject *capsule);

/* --- _core_cost.c: each function has its meaning there --- */

bool decode_line(struct cost *c, int64_t decodes, int64_t context, struct line *line);
bool decode_ticks(struct cost *c, int64_t decodes, int64_t context, int64_t *ticks);
bool step_ticks(struct cost *c, int64_t decodes, int64_t context, int64_t tokens, int64_t pairs, int64_t *ticks);
bool parse_cost(struct cost *c, PyObject *given, int64_t max_num_seqs);
void drop_cost(struct cost *c);

/* --- _core_pool.c: each function has its meaning there --- */

void log_change(struct pool *p, int64_t moment, int64_t blocks);
int64_t cached_blocks(const struct pool *p, int64_t hash, int64_t most, int32_t *found);
void cache_blocks(struct pool *p, const int32_t *blocks, int64_t count, int64_t hash);
void settle_logs(struct pool *p);
bool set_order(struct pool *p, const char *name);
bool get_new_blocks(struct pool *p, int32_t *blocks, int64_t count, int64_t moment, int64_t now);
void free_blocks(struct pool *p, const int32_t *table, int64_t count, int64_t cached, bool unshared, int64_t moment);
void log_look_up(struct pool *p, bool asks, int64_t found);
void log_kept(struct pool *p);
void touch(struct pool *p, const int32_t *found, int64_t count, int64_t moment, int64_t now);

/* --- _core_cache.c: each function has its meaning there --- */

struct path path_of(const struct cache *c, int64_t request, int64_t index, bool returns);
int64_t end_of(const struct cache *c, const struct path *path);
int64_t hash_at(const struct cache *c, const struct path *path, int64_t place, int64_t *link, int64_t *end);
int64_t look_up(struct cache *c, const struct path *path, int64_t most);
int64_t found_in_tables(const struct cache *c);
void extend_table(struct cache *c, struct table *table, int64_t count, int64_t moment, int64_t now);
void cache_full_blocks(struct cache *c, struct table *table, int64_t full);
void take_block(struct cache *c, struct table *table, int64_t moment, int64_t now);
void take_blocks(struct cache *c, int64_t phase, int64_t count, int64_t moment, int64_t now);
void enter_found(struct cache *c, struct table *table, const struct path *path, int64_t moment, int64_t now);
void name_blocks(struct cache *c, struct table *table);
void drop_cache(struct cache *c, int64_t slots);
struct cache *new_cache(int64_t num_blocks, int64_t block_size, int64_t slots, bool keeps);

/* --- _core_batch.c: each function has its meaning there --- */

void strike(struct replica *r, int32_t slot);
bool one_ends(const struct replica *r);
void leave_phase(struct replica *r, int32_t slot);
int64_t ticks_before(const struct replica *r, int64_t decode_step);
void grow_until(struct replica *r, int64_t decode_step);
void unlink_sequence(struct replica *r, int32_t slot);
void leave(struct replica *r, int32_t slot);
int32_t leave_queue(struct replica *r);
void start(struct replica *r, int32_t slot);
void log_eviction(struct replica *r, const struct sequence *sequence, int swapped);
void to_queue(struct replica *r, const struct sequence *sequence);
bool deliver(struct replica *r, int64_t now);
int64_t growth_of(const struct replica *r, int64_t steps);
int64_t whole_steps(int64_t ticks, int64_t second, int64_t growth, int64_t limit);
bool leap_over(struct replica *r, const struct step *step, int64_t until, int64_t *last);
bool stand_still(struct replica *r, const struct step *step, int64_t batch_size);
bool rest(struct replica *r);
bool has_room(const struct replica *r);
int after_failure(const struct replica *r);

/* --- _core_looks.c: each function has its meaning there --- */

bool look_over(struct replica *r, const struct leap *leap);
bool look_at_rest(struct replica *r, int64_t end);
void drop_looks(struct looks *l);
PyObject *core_record(PyObject *self, PyObject *args);
PyObject *core_recorded(PyObject *self, PyObject *capsule);

/* --- _core_sosp23.c: each function has its meaning there --- */

int serve_sosp23(struct replica *r, int64_t until);

/* --- _core_v1.c: each function has its meaning there --- */

int serve_v1(struct replica *r, int64_t until);

/* --- _core_routed.c: each function has its meaning there --- */

bool allocate_sent(struct replica *r);
void drop_sent(struct replica *r);
bool send_request(struct replica *r, int64_t ticks, int64_t prompt_tokens, int64_t output_tokens, bool ends_early, PyObject *names);
bool make_room_for_records(struct replica *r);
int64_t num_unfinished(const struct replica *r);
int64_t outstanding_tokens(const struct replica *r, int64_t now);
int64_t kv_tokens(const struct replica *r, int64_t now);

/* --- _core_history.c: each function has its meaning there --- */

PyObject *core_moments(PyObject *self, PyObject *args);
PyObject *core_date(PyObject *self, PyObject *args);
PyObject *core_count(PyObject *self, PyObject *args);

#pragma GCC visibility pop

#endif
