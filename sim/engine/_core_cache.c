/* The prefix cache of one KV group: block tables over the pool of _core_pool.c, as ``CachedTables`` and ``CachedMemory`` of
cached.py have them.

The chains that number the blocks of requests with a common prefix are those of Python (``Chains``). A request that shares no
prefix has no hashes until it is preempted.
*/

#include "_core.h"

/* --- Hashes --- */

/* The path of a request; one that shares no prefix has hashes if it ``returns`` after a preemption. */
struct path path_of(const struct cache *c, int64_t request, int64_t index, bool returns)
{
    struct path path = {.is_shared = c->shares[request], .own = -(index + 1) * ((int64_t)1 << PLACE_BITS)};
    path.is_own = returns && !path.is_shared;
    path.first = c->offsets[request];
    path.count = c->offsets[request + 1] - path.first;
    return path;
}

/* Blocks of a shared path. */
int64_t end_of(const struct cache *c, const struct path *path)
{
    return path->count ? c->stops[path->first + path->count - 1] : 0;
}

/* The hash of a block, and the place at which the hashes that follow it one after the other end; ``link`` is that of an earlier one. */
int64_t hash_at(const struct cache *c, const struct path *path, int64_t place, int64_t *link, int64_t *end)
{
    *end = INT64_MAX;
    if (path->is_own)
        return path->own + place;
    if (!path->is_shared || !path->count)
        return UNSHARED;
    while (*link + 1 < path->count && c->stops[path->first + *link] <= place)
        ++*link;
    if (*link + 1 < path->count)
        *end = c->stops[path->first + *link];
    return (c->numbers[path->first + *link] << PLACE_BITS) + place;
}

/* ``CachedMemory.find``, in ``found``: the longest cached prefix of the first ``most`` blocks. Returns its blocks. */
int64_t look_up(struct cache *c, const struct path *path, int64_t most)
{
    int64_t link = 0, end = 0;
    c->num_found = 0;
    while (c->found_room < most)
        if (!widen(&c->pool, (void **)&c->found, c->found_room, &c->found_room, sizeof *c->found))
            return 0;
    while (c->num_found == end && end < most) {
        int64_t hash = hash_at(c, path, c->num_found, &link, &end);
        end = least(end, most);
        c->num_found += cached_blocks(&c->pool, hash, end - c->num_found, c->found + c->num_found);
    }
    return c->num_found;
}

/* Blocks of the last look-up that tables have. */
int64_t found_in_tables(const struct cache *c)
{
    int64_t blocks = 0;
    for (int64_t at = 0; at < c->num_found; at++)
        blocks += c->pool.blocks[c->found[at]].ref_cnt > 0;
    return blocks;
}

/* --- Tables --- */

static bool make_room(struct cache *c, struct table *table, int64_t count)
{
    while (table->room < count)
        if (!widen(&c->pool, (void **)&table->blocks, table->room, &table->room, sizeof *table->blocks))
            return false;
    return true;
}

/* A table takes so many blocks more. */
void extend_table(struct cache *c, struct table *table, int64_t count, int64_t moment, int64_t now)
{
    if (make_room(c, table, table->count + count) && get_new_blocks(&c->pool, table->blocks + table->count, count, moment, now))
        table->count += count;
}

/* ``CachedTables.cache``: look-ups find the first ``full`` blocks from now on, if they ask for them. */
void cache_full_blocks(struct cache *c, struct table *table, int64_t full)
{
    if (!c->keeps)
        return;
    full = least(full, table->count);
    if (!has_hashes(&table->path)) {
        table->cached = most(table->cached, full);
        return;
    }
    while (table->cached < full && !c->pool.failed) {
        int64_t end, hash = hash_at(c, &table->path, table->cached, &table->link, &end);
        end = least(end, full);
        cache_blocks(&c->pool, table->blocks + table->cached, end - table->cached, hash);
        table->cached = end;
    }
}

/* A decoding sequence with full blocks has taken one more: the tokens of the last full one are known. */
static inline void cache_last_full(struct cache *c, struct table *table)
{
    int64_t full = least(table->cached + 1, table->count - 1);
    if (has_hashes(&table->path))
        cache_full_blocks(c, table, full);
    else if (c->keeps)
        table->cached = most(table->cached, full);
}

/* ``CachedTables._take``. */
void take_block(struct cache *c, struct table *table, int64_t moment, int64_t now)
{
    extend_table(c, table, 1, moment, now);
    cache_last_full(c, table);
}

/* As ``take_block``, for each of the ``count`` running sequences of a phase, in order: their blocks come from the queue at once. */
void take_blocks(struct cache *c, int64_t phase, int64_t count, int64_t moment, int64_t now)
{
    const int32_t *taken = c->taken;
    if (!get_new_blocks(&c->pool, c->taken, count, moment, now))
        return;
    for (int32_t slot = c->first_of[phase]; slot != NONE; slot = c->tables[slot].after) {
        struct table *table = &c->tables[slot];
        if (!make_room(c, table, table->count + 1))
            return;
        table->blocks[table->count++] = *taken++;
        cache_last_full(c, table);
    }
}

/* ``CachedTables.enter``, with the blocks of the last look-up. */
void enter_found(struct cache *c, struct table *table, const struct path *path, int64_t moment, int64_t now)
{
    table->count = table->cached = table->link = 0;
    table->path = *path;
    if (!c->num_found || !make_room(c, table, c->num_found))
        return;
    memcpy(table->blocks, c->found, (size_t)c->num_found * sizeof *c->found);
    table->cached = table->count = c->num_found;
    touch(&c->pool, c->found, c->num_found, moment, now);
}

/* ``CachedTables.name``: the blocks of a preempted sequence may be looked up from now on. */
void name_blocks(struct cache *c, struct table *table)
{
    table->path.is_own = true;
    cache_blocks(&c->pool, table->blocks, table->cached, table->path.own);
}

/* --- Memory --- */

void drop_cache(struct cache *c, int64_t slots)
{
    struct pool *p = &c->pool;
    struct log *logs[] = {&p->lives, &p->hit_lives, &p->gaps, &p->changes, &p->look_ups, &p->stays, &p->events};
    for (size_t place = 0; place < sizeof logs / sizeof *logs; place++)
        free(logs[place]->items);
    for (int64_t slot = 0; c->tables != NULL && slot < slots; slot++)
        free(c->tables[slot].blocks);
    free(c->tables);
    free(c->first_of);
    free(c->last_of);
    free(c->taken);
    free(c->found);
    free(p->blocks);
    free(p->born);
    free(p->content);
    free(p->front);
    free(p->chains);
    free(p->ring);
    free(p->touches);
    free(p->since);
    for (int place = 0; place < 4; place++)
        PyBuffer_Release(&c->names[place]);
    free(c);
}

/* A cache of an empty pool; NULL with an error set. */
struct cache *new_cache(int64_t num_blocks, int64_t block_size, int64_t slots, bool keeps)
{
    struct cache *c = calloc(1, sizeof *c);
    if (c == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    c->keeps = c->pool.logs_lives = keeps;
    c->pool.block_size = block_size;
    c->pool.num_blocks = c->pool.num_free = num_blocks;
    c->pool.unused_touches = NONE;
    c->pool.last_life = (struct last_life){NONE, NONE, 0};
    c->pool.lives.fields = 1, c->pool.hit_lives.fields = HIT_LIFE_FIELDS, c->pool.gaps.fields = HIT_GAP_FIELDS;
    c->pool.changes.fields = CHANGE_FIELDS, c->pool.look_ups.fields = LOOK_UP_FIELDS;
    c->pool.stays.fields = STAY_FIELDS, c->pool.events.fields = EVENT_FIELDS;
    c->tables = calloc((size_t)slots, sizeof *c->tables);
    c->taken = malloc((size_t)slots * sizeof *c->taken);
    c->first_of = malloc((size_t)block_size * sizeof *c->first_of);
    c->last_of = malloc((size_t)block_size * sizeof *c->last_of);
    if (c->tables == NULL || c->taken == NULL || c->first_of == NULL || c->last_of == NULL) {
        drop_cache(c, slots);
        PyErr_NoMemory();
        return NULL;
    }
    for (int64_t phase = 0; phase < block_size; phase++)
        c->first_of[phase] = c->last_of[phase] = NONE;
    return c;
}
