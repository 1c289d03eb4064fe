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

/* The hash of a block; ``link`` is that of an earlier one. */
int64_t hash_at(const struct cache *c, const struct path *path, int64_t place, int64_t *link)
{
    if (path->is_own)
        return path->own + place;
    if (!path->is_shared || !path->count)
        return UNSHARED;
    while (*link + 1 < path->count && c->stops[path->first + *link] <= place)
        ++*link;
    return (c->numbers[path->first + *link] << PLACE_BITS) + place;
}

/* ``CachedMemory.find``, in ``found``: the longest cached prefix of the first ``most`` blocks. Returns its blocks. */
int64_t look_up(struct cache *c, const struct path *path, int64_t most)
{
    int64_t link = 0;
    c->num_found = 0;
    while (c->num_found < most) {
        int32_t block = cached_block(&c->pool, hash_at(c, path, c->num_found, &link));
        if (block == NONE || !widen(&c->pool, (void **)&c->found, c->num_found, &c->found_room, sizeof *c->found))
            break;
        c->found[c->num_found++] = block;
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

void add_block(struct cache *c, struct table *table, int32_t block)
{
    if (block != NONE && widen(&c->pool, (void **)&table->blocks, table->count, &table->room, sizeof *table->blocks))
        table->blocks[table->count++] = block;
}

/* ``CachedTables.cache``: the first ``full`` blocks have hashes from now on. */
void cache_full_blocks(struct cache *c, struct table *table, int64_t full)
{
    if (!c->keeps)
        return;
    if (!has_hashes(&table->path)) {
        for (; table->cached < least(full, table->count); table->cached++)
            c->pool.blocks[table->blocks[table->cached]].hash = UNSHARED;
        return;
    }
    for (; table->cached < least(full, table->count) && !c->pool.failed; table->cached++)
        cache_block(&c->pool, table->blocks[table->cached], hash_at(c, &table->path, table->cached, &table->link));
}

/* ``CachedTables._take``: a decoding sequence with full blocks takes one more; the tokens of the last full one are known. */
void take_block(struct cache *c, struct table *table, int64_t now)
{
    add_block(c, table, get_new_block(&c->pool, now));
    cache_full_blocks(c, table, least(table->cached + 1, table->count - 1));
}

/* ``CachedTables.enter``, with the blocks of the last look-up. */
void enter_found(struct cache *c, struct table *table, const struct path *path, int64_t moment, int64_t now)
{
    table->count = table->link = 0;
    table->path = *path;
    for (int64_t at = 0; at < c->num_found; at++)
        add_block(c, table, c->found[at]);
    table->cached = table->count;
    touch(&c->pool, c->found, c->num_found, moment, now);
}

/* ``CachedTables.name``: the blocks of a preempted sequence may be looked up from now on. */
void name_blocks(struct cache *c, struct table *table)
{
    table->path.is_own = true;
    for (int64_t place = 0; place < table->cached && !c->pool.failed; place++)
        cache_block(&c->pool, table->blocks[place], table->path.own + place);
}

/* --- Memory --- */

void drop_cache(struct cache *c, int64_t slots)
{
    struct pool *p = &c->pool;
    struct log *logs[] = {&p->lives, &p->hit_lives, &p->gaps, &p->changes, &p->look_ups};
    for (size_t place = 0; place < sizeof logs / sizeof *logs; place++)
        free(logs[place]->items);
    for (int64_t slot = 0; c->tables != NULL && slot < slots; slot++)
        free(c->tables[slot].blocks);
    free(c->tables);
    free(c->first_of);
    free(c->last_of);
    free(c->found);
    free(c->seen);
    free(p->blocks);
    free(p->front);
    free(p->entries);
    free(p->touches);
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
    c->pool.first = c->pool.last = c->pool.unused_touches = NONE;
    c->pool.lives.fields = 1, c->pool.hit_lives.fields = HIT_LIFE_FIELDS, c->pool.gaps.fields = HIT_GAP_FIELDS;
    c->pool.changes.fields = CHANGE_FIELDS, c->pool.look_ups.fields = LOOK_UP_FIELDS;
    c->tables = calloc((size_t)slots, sizeof *c->tables);
    c->first_of = malloc((size_t)block_size * sizeof *c->first_of);
    c->last_of = malloc((size_t)block_size * sizeof *c->last_of);
    if (c->tables == NULL || c->first_of == NULL || c->last_of == NULL) {
        drop_cache(c, slots);
        PyErr_NoMemory();
        return NULL;
    }
    for (int64_t phase = 0; phase < block_size; phase++)
        c->first_of[phase] = c->last_of[phase] = NONE;
    return c;
}
