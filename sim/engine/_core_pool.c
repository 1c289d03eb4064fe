/* Blocks with reference counts and hashes, and the queue of those that are free: ``prefix/block_pool.py``, and the lives of
``prefix/residency.py``, over the same structure.

    free queue    front (a stack) | never taken (a counter) | first ... last (doubly linked, in ``blocks``)

Arrays grow with the blocks that were ever taken, and the map of hashes with those that have one. What happens is logged as
records, which Python reads.
*/

#include "_core.h"

/* So many more free blocks have a hash from a moment on. */
void log_change(struct pool *p, int64_t moment, int64_t blocks)
{
    struct change *record = blocks ? new_record(p, &p->changes, CHANGE_FIELDS) : NULL;
    if (record != NULL)
        *record = (struct change){.moment = moment, .slots = blocks * p->block_size};
}

/* A life without a hit has ended: ticks, or below 0 how many more blocks have those before. */
static void log_life(struct pool *p, int64_t ticks)
{
    int64_t *record, count = p->lives.count, *end = p->lives.items + count;
    if (count > 1 && end[-1] < 0 && end[-2] == ticks) {
        --end[-1];
        return;
    }
    bool repeats = count && end[-1] == ticks;
    record = new_record(p, &p->lives, 1);
    if (record != NULL)
        *record = repeats ? -1 : ticks;
}

/* A life with hits has ended; blocks with the same one are counted. */
static void log_hit_life(struct pool *p, int64_t ticks, int64_t idle_ticks)
{
    struct hit_life *end = (struct hit_life *)p->hit_lives.items + p->hit_lives.count;
    if (p->hit_lives.count && end[-1].ticks == ticks && end[-1].idle_ticks == idle_ticks) {
        end[-1].blocks++;
        return;
    }
    struct hit_life *record = new_record(p, &p->hit_lives, HIT_LIFE_FIELDS);
    if (record != NULL)
        *record = (struct hit_life){.ticks = ticks, .idle_ticks = idle_ticks, .blocks = 1};
}

/* --- The map of hashes --- */

enum { FIRST_BITS = 6, NEAR_BITS = 4 };

/* Where a hash belongs. Hashes of neighbours are near one another. */
static int64_t home_of(const struct pool *p, int64_t hash)
{
    uint64_t mixed = ((uint64_t)hash >> NEAR_BITS) * 0x9E3779B97F4A7C15u;
    return (int64_t)(mixed >> (64 - p->entry_bits + NEAR_BITS)) << NEAR_BITS | (hash & ((1 << NEAR_BITS) - 1));
}

static int64_t mask_of(const struct pool *p) { return ((int64_t)1 << p->entry_bits) - 1; }

static void put_entry(struct pool *p, struct entry entry)
{
    int64_t mask = mask_of(p), at = home_of(p, entry.hash);
    while (p->entries[at].hash)
        at = (at + 1) & mask;
    p->entries[at] = entry;
}

static bool widen_map(struct pool *p)
{
    struct entry *before = p->entries;
    int64_t count = before == NULL ? 0 : mask_of(p) + 1;
    int bits = before == NULL ? FIRST_BITS : p->entry_bits + 1;
    struct entry *entries = p->failed ? NULL : calloc((size_t)1 << bits, sizeof *entries);
    if (entries == NULL) {
        p->failed = true;
        return false;
    }
    p->entries = entries, p->entry_bits = bits;
    /* From a free entry on, so that blocks with the same hash stay in their order. */
    int64_t start = 0;
    while (start < count && before[start].hash)
        start++;
    for (int64_t at = 0; at < count; at++)
        if (before[(start + at) & (count - 1)].hash)
            put_entry(p, before[(start + at) & (count - 1)]);
    free(before);
    return true;
}

/* The first block with a hash, or NONE. */
int32_t cached_block(const struct pool *p, int64_t hash)
{
    if (p->entries == NULL)
        return NONE;
    int64_t mask = mask_of(p), at = home_of(p, hash);
    while (p->entries[at].hash && p->entries[at].hash != hash)
        at = (at + 1) & mask;
    return p->entries[at].hash ? (int32_t)p->entries[at].block : NONE;
}

/* Look-ups find a block under its hash from now on, after those that have it already. */
static void insert_hash(struct pool *p, int32_t block)
{
    if ((p->entries == NULL || 2 * (p->num_hashes + 1) > mask_of(p)) && !widen_map(p))
        return;
    put_entry(p, (struct entry){p->blocks[block].hash, block});
    p->num_hashes++;
}

/* Free an entry: those behind it that could not take their own place move up. */
static void drop_entry(struct pool *p, int64_t at)
{
    int64_t mask = mask_of(p), next = at;
    for (;;) {
        next = (next + 1) & mask;
        if (!p->entries[next].hash)
            break;
        int64_t home = home_of(p, p->entries[next].hash);
        if (((next - home) & mask) >= ((next - at) & mask)) {
            p->entries[at] = p->entries[next];
            at = next;
        }
    }
    p->entries[at].hash = 0;
    p->num_hashes--;
}

static void remove_hash(struct pool *p, int32_t block)
{
    int64_t mask = mask_of(p), at = home_of(p, p->blocks[block].hash);
    while (p->entries[at].block != block || p->entries[at].hash != p->blocks[block].hash)
        at = (at + 1) & mask;
    drop_entry(p, at);
}

/* --- Lives --- */

static void log_gaps(struct pool *p, struct touches *found)
{
    for (int at = 1; found->taken && at < found->count; at++) {
        struct hit_gap *record = new_record(p, &p->gaps, HIT_GAP_FIELDS);
        if (record != NULL)
            *record = (struct hit_gap){.ticks = found->times[at] - found->times[at - 1], .blocks = found->taken};
    }
    found->taken = 0;
}

/* So many blocks less have these touches. */
static void drop_touches(struct pool *p, int32_t touched, int64_t blocks)
{
    struct touches *found = &p->touches[touched];
    found->blocks -= (int32_t)blocks;
    if (!found->blocks) {
        log_gaps(p, found);
        found->count = p->unused_touches;
        p->unused_touches = touched;
    }
}

/* ``on_blocks_allocated``: a block is born, and its life before has ended. */
static void begin_life(struct pool *p, struct block *block, int64_t now)
{
    int64_t born = block->born;
    block->born = now;
    if (born == NEVER || !p->logs_lives)
        return;
    if (block->touched == NONE) {
        log_life(p, now - born);
        return;
    }
    struct touches *found = &p->touches[block->touched];
    log_hit_life(p, now - born, now - found->times[found->count - 1]);
    found->taken++;
    drop_touches(p, block->touched, 1);
    block->touched = NONE;
}

/* Touches of one more hit, after those of ``before`` or none; NONE if no memory is left. */
static int32_t more_touches(struct pool *p, int32_t before, int64_t now)
{
    int32_t at = p->unused_touches;
    if (at != NONE)
        p->unused_touches = p->touches[at].count;
    else if (widen(p, (void **)&p->touches, p->num_touches, &p->touch_room, sizeof *p->touches))
        at = (int32_t)p->num_touches++;
    else
        return NONE;
    struct touches *found = &p->touches[at];
    *found = (struct touches){.count = 0};
    if (before != NONE)
        *found = p->touches[before], found->blocks = 0, found->taken = 0;
    if (found->count == KEPT_TOUCHES)
        memmove(found->times, found->times + 1, (size_t)--found->count * sizeof *found->times);
    found->times[found->count++] = now;
    return at;
}

/* Bring the logs up to date. */
void settle_logs(struct pool *p)
{
    for (int64_t at = 0; at < p->num_touches; at++)
        if (p->touches[at].blocks)
            log_gaps(p, &p->touches[at]);
}

/* --- The free queue --- */

/* The first block of the queue: it loses its hash, which the caller logs, and has one reference. NONE if there is none. */
int32_t get_new_block(struct pool *p, int64_t now)
{
    int32_t id;
    if (!p->num_free) {
        p->overdrawn = true;
        return NONE;
    }
    if (p->num_front) {
        id = p->front[--p->num_front];
    } else if (p->num_touched < p->num_blocks) {
        if (!widen(p, (void **)&p->blocks, p->num_touched, &p->block_room, sizeof *p->blocks))
            return NONE;
        id = (int32_t)p->num_touched++;
        p->blocks[id] = (struct block){.hash = NO_HASH, .born = NEVER, .touched = NONE};
    } else {
        id = p->first;
        p->first = p->blocks[id].after;
        *(p->first == NONE ? &p->last : &p->blocks[p->first].before) = NONE;
    }
    struct block *block = &p->blocks[id];
    if (block->hash != NO_HASH) {
        if (block->hash != UNSHARED)
            remove_hash(p, id);
        block->hash = NO_HASH;
        p->num_cached--;
        p->evicted++;
    }
    begin_life(p, block, now);
    block->ref_cnt = 1;
    p->num_free--;
    p->num_entries++;
    return id;
}

static void append_free(struct pool *p, int32_t id)
{
    struct block *block = &p->blocks[id];
    block->before = p->last, block->after = NONE;
    *(p->last == NONE ? &p->first : &p->blocks[p->last].after) = id;
    p->last = id;
}

static void unlink_free(struct pool *p, const struct block *block)
{
    *(block->before == NONE ? &p->first : &p->blocks[block->before].after) = block->after;
    *(block->after == NONE ? &p->last : &p->blocks[block->after].before) = block->before;
}

/* Free the blocks of a table, its last one first: the first ``cached`` have hashes, and the others no other reference. */
void free_blocks(struct pool *p, const int32_t *table, int64_t count, int64_t cached, int64_t moment)
{
    int64_t before = p->num_cached;
    for (int64_t place = cached; p->unhashed_first && place < count; place++)
        if (widen(p, (void **)&p->front, p->num_front, &p->front_room, sizeof *p->front))
            p->front[p->num_front++] = table[place];
    for (int64_t place = count - 1; place >= cached; place--) {
        p->blocks[table[place]].ref_cnt = 0;
        if (!p->unhashed_first)
            append_free(p, table[place]);
    }
    p->num_free += count - cached;
    for (int64_t place = cached - 1; place >= 0; place--) {
        if (--p->blocks[table[place]].ref_cnt)
            continue;
        append_free(p, table[place]);
        p->num_free++;
        p->num_cached++;
    }
    p->num_entries -= count;
    log_change(p, moment, p->num_cached - before);
}

/* One table more has blocks that were found by their hashes. */
void touch(struct pool *p, const int32_t *found, int64_t count, int64_t moment, int64_t now)
{
    int64_t cached = p->num_cached;
    for (int64_t place = 0, end; place < count && !p->failed; place = end) {
        /* Blocks that were hit together have touches in common. */
        int32_t before = p->blocks[found[place]].touched, more = more_touches(p, before, now);
        for (end = place; end < count && more != NONE; end++) {
            struct block *block = &p->blocks[found[end]];
            if (block->touched != before)
                break;
            block->touched = more;
            if (!block->ref_cnt++) {
                unlink_free(p, block);
                p->num_free--;
                p->num_cached--;
            }
        }
        if (more == NONE)
            return;
        p->touches[more].blocks += (int32_t)(end - place);
        if (before != NONE)
            drop_touches(p, before, end - place);
    }
    p->num_entries += count;
    log_change(p, moment, p->num_cached - cached);
}

/* A full block gets its hash. */
void cache_block(struct pool *p, int32_t block, int64_t hash)
{
    p->blocks[block].hash = hash;
    if (hash != UNSHARED)
        insert_hash(p, block);
}
