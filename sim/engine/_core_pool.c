/* Blocks with reference counts and hashes, and the queue of those that are free: ``prefix/block_pool.py``, and the lives of
``prefix/residency.py``, over the same structure.

    free queue    front (a stack) | never taken (a counter) | first ... end (a ring, with holes where blocks were hit)

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

/* Lives of so many blocks without a hit have ended: ticks, and if they are several, below 0 how many more there are. */
static inline void log_lives(struct pool *p)
{
    struct lives *ended = &p->ended;
    struct log *log = &p->lives;
    if (ended->blocks && widen(p, (void **)&log->items, log->count + 1, &log->room, sizeof *log->items)) {
        log->items[log->count++] = ended->ticks;
        if (ended->blocks > 1)
            log->items[log->count++] = 1 - ended->blocks;
    }
    ended->blocks = 0;
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

/* --- Contents: ``prefix/contents_log.py`` --- */

/* The fewest free blocks since the last event. */
static void log_taken(struct pool *p)
{
    struct event *last = (struct event *)p->events.items + p->events.count;
    if (p->events.count) {
        last[-1].free = least(last[-1].free, p->num_free);
        return;
    }
    struct event *record = new_record(p, &p->events, EVENT_FIELDS);
    if (record != NULL)
        *record = (struct event){.kind = TAKEN, .free = p->num_free};
}

/* An event of blocks with consecutive hashes; it joins the last one of the same kind, which it may follow or precede. */
static void log_event(struct pool *p, int64_t kind, int64_t name, int64_t blocks)
{
    struct event *last = (struct event *)p->events.items + p->events.count;
    if (p->events.count && last[-1].kind == kind && last[-1].free == p->num_free && kind != LOOKED_UP) {
        bool follows = last[-1].name + last[-1].blocks == name, precedes = name + blocks == last[-1].name;
        if (follows || precedes) {
            last[-1].name = follows ? last[-1].name : name;
            last[-1].blocks += blocks;
            return;
        }
    }
    struct event *record = new_record(p, &p->events, EVENT_FIELDS);
    if (record != NULL)
        *record = (struct event){.kind = kind, .name = name, .blocks = blocks, .free = p->num_free};
}

/* Some blocks of a table that is given back, with consecutive hashes. The caller adds how many are free then. */
static void log_released(struct pool *p, const struct event *released)
{
    struct event *record = released->blocks ? new_record(p, &p->events, EVENT_FIELDS) : NULL;
    if (record != NULL)
        *record = *released;
}

/* A sequence has looked up its blocks, if they have hashes, and has entered. */
void log_look_up(struct pool *p, bool asks, int64_t found)
{
    if (asks && p->logs_contents)
        log_event(p, LOOKED_UP, p->num_look_ups, found);
    p->num_look_ups++;
}

/* The stay of a free block with a hash is over at a moment. */
static void log_stay(struct pool *p, int32_t id, int64_t moment, bool hit)
{
    int64_t name = p->blocks[id].hash;
    if (name == UNSHARED || !p->logs_contents)
        return;
    int64_t since = p->since[id];
    struct stay *last = (struct stay *)p->stays.items + p->stays.count;
    if (p->stays.count) {
        struct stay *s = &last[-1];
        bool follows = s->name + s->blocks == name, precedes = name + 1 == s->name;
        if ((follows || precedes) && s->since == since && s->until == moment && s->hit == hit && s->look_ups == p->num_look_ups) {
            s->name = follows ? s->name : name;
            s->blocks++;
            return;
        }
    }
    struct stay *record = new_record(p, &p->stays, STAY_FIELDS);
    if (record != NULL)
        *record = (struct stay){since, moment, hit, p->num_look_ups, name, 1};
}

/* Stays that have not ended, of all free blocks with a hash, as ``ContentsLog.kept``. They replace those that have. */
void log_kept(struct pool *p)
{
    p->stays.count = 0;
    for (int32_t id = 0; p->logs_contents && id < p->num_touched; id++) {
        struct block *block = &p->blocks[id];
        struct stay *record = block->ref_cnt || block->hash == NO_HASH ? NULL : new_record(p, &p->stays, STAY_FIELDS);
        if (record != NULL)
            *record = (struct stay){p->since[id], -1, false, p->num_look_ups, block->hash, 1};
    }
}

/* --- The map of hashes: ``cached_block_hash_to_block`` --- */

enum { FIRST_BITS = 6, NEAR_BITS = 4 };

/* The first block of the chain that a hash belongs to. Chains of consecutive hashes are near one another. */
static int32_t *chain_of(const struct pool *p, int64_t hash)
{
    uint64_t mixed = ((uint64_t)hash >> NEAR_BITS) * 0x9E3779B97F4A7C15u;
    return &p->chains[(mixed >> (64 - p->chain_bits + NEAR_BITS)) << NEAR_BITS | (hash & ((1 << NEAR_BITS) - 1))];
}

/* At the end of its chain: look-ups find the first of several blocks with the same hash. */
static void append_to_chain(struct pool *p, int32_t block)
{
    int32_t *end = chain_of(p, p->blocks[block].hash);
    while (*end != NONE)
        end = &p->blocks[*end].next_in_chain;
    *end = block;
    p->blocks[block].next_in_chain = NONE;
}

/* Twice as many chains, or the first ones. */
static bool widen_map(struct pool *p)
{
    int32_t *before = p->chains;
    int64_t count = before == NULL ? 0 : (int64_t)1 << p->chain_bits;
    int bits = before == NULL ? FIRST_BITS : p->chain_bits + 1;
    int32_t *chains = p->failed ? NULL : malloc(sizeof *chains << bits);
    if (chains == NULL) {
        p->failed = true;
        return false;
    }
    for (int64_t at = 0; at < (int64_t)1 << bits; at++)
        chains[at] = NONE;
    p->chains = chains, p->chain_bits = bits;
    for (int64_t at = 0; at < count; at++)
        for (int32_t block = before[at], next; block != NONE; block = next) {
            next = p->blocks[block].next_in_chain;
            append_to_chain(p, block);
        }
    free(before);
    return true;
}

/* Look-ups find a block under its hash from now on, after those that have it already. */
static void insert_hash(struct pool *p, int32_t block)
{
    if ((p->chains == NULL || p->num_hashes >> p->chain_bits) && !widen_map(p))
        return;
    append_to_chain(p, block);
    p->num_hashes++;
}

static void remove_hash(struct pool *p, int32_t block)
{
    int32_t *place = chain_of(p, p->blocks[block].hash);
    while (*place != block)
        place = &p->blocks[*place].next_in_chain;
    *place = p->blocks[block].next_in_chain;
    p->num_hashes--;
}

/* The first block of each hash from ``hash`` on, one after the other, until one has none; at most ``most``. Returns how many. */
int64_t cached_blocks(const struct pool *p, int64_t hash, int64_t most, int32_t *found)
{
    int64_t count = 0;
    if (p->chains == NULL || hash == UNSHARED)
        return 0;
    for (; count < most; count++) {
        int32_t block = *chain_of(p, hash + count);
        while (block != NONE && p->blocks[block].hash != hash + count)
            block = p->blocks[block].next_in_chain;
        if (block == NONE)
            break;
        found[count] = block;
    }
    return count;
}

/* Full blocks of a table get their hashes: ``hash`` and those that follow it. */
void cache_blocks(struct pool *p, const int32_t *blocks, int64_t count, int64_t hash)
{
    for (int64_t place = 0; place < count && !p->failed; place++) {
        p->blocks[blocks[place]].hash = hash == UNSHARED ? hash : hash + place;
        if (hash != UNSHARED)
            insert_hash(p, blocks[place]);
    }
    if (hash != UNSHARED && count > 0 && p->logs_contents)
        log_event(p, NAMED, hash, count);
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

/* A life with hits has ended. */
static void end_hit_life(struct pool *p, struct block *block, int64_t now)
{
    struct touches *found = &p->touches[block->touched];
    log_hit_life(p, now - block->born, now - found->times[found->count - 1]);
    found->taken++;
    drop_touches(p, block->touched, 1);
    block->touched = NONE;
}

/* ``on_blocks_allocated``: a block is born, and its life before has ended. */
static inline void begin_life(struct pool *p, struct block *block, int64_t now)
{
    int64_t ticks = now - block->born;
    if (block->touched != NONE) {
        end_hit_life(p, block, now);
    } else if (block->born != NEVER && p->logs_lives) {
        if (ticks != p->ended.ticks)
            log_lives(p);
        p->ended.ticks = ticks;
        p->ended.blocks++;
    }
    block->born = now;
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
    log_lives(p);
    for (int64_t at = 0; at < p->num_touches; at++)
        if (p->touches[at].blocks)
            log_gaps(p, &p->touches[at]);
}

/* --- The free queue --- */

enum { FIRST_RING = 64, PREFETCHED = 8 };

/* Twice as much room for blocks. Aligned, none has parts in two cache lines: what is read of it is one wait for memory. */
static bool widen_blocks(struct pool *p)
{
    enum { FIRST_BLOCKS = 64, LINE = 64 };
    int64_t room = p->block_room ? 2 * p->block_room : FIRST_BLOCKS;
    struct block *blocks = p->failed ? NULL : aligned_alloc(LINE, (size_t)room * sizeof *blocks);
    if (blocks == NULL) {
        p->failed = true;
        return false;
    }
    if (p->num_touched)
        memcpy(blocks, p->blocks, (size_t)p->num_touched * sizeof *blocks);
    free(p->blocks);
    p->blocks = blocks, p->block_room = room;
    if (!p->logs_contents)
        return true;
    int64_t *since = realloc(p->since, (size_t)room * sizeof *since);
    p->failed = since == NULL;
    p->since = since == NULL ? p->since : since;
    return !p->failed;
}

/* A block that was never taken; NONE if no memory is left. */
static int32_t untouched(struct pool *p)
{
    if (p->num_touched == p->block_room && !widen_blocks(p))
        return NONE;
    p->blocks[p->num_touched] = (struct block){.hash = NO_HASH, .born = NEVER, .touched = NONE};
    return (int32_t)p->num_touched++;
}

/* The oldest block of the ring, which begins at ``*first``. Those that follow it are far from one another in memory: one of them is
   asked for in advance. */
static inline int32_t pop_oldest(const struct pool *p, int64_t *first)
{
    int32_t id, coming = p->ring[(*first + PREFETCHED) & p->ring_mask];
    if (coming != NONE) {
        __builtin_prefetch(&p->blocks[coming], 1);
        if (p->logs_contents)
            __builtin_prefetch(&p->since[coming]);
    }
    do
        id = p->ring[(*first)++ & p->ring_mask];
    while (id == NONE);
    return id;
}

/* A ring without the places of blocks that were hit, and with room for as many blocks again. */
static bool widen_ring(struct pool *p)
{
    int64_t room = FIRST_RING, count = 0;
    for (int64_t at = p->first; at < p->end; at++)
        count += p->ring[at & p->ring_mask] != NONE;
    while (room < 2 * count)
        room *= 2;
    int32_t *ring = p->failed ? NULL : malloc((size_t)room * sizeof *ring);
    if (ring == NULL) {
        p->failed = true;
        return false;
    }
    for (int64_t at = 0; at < room; at++)
        ring[at] = NONE;
    count = 0;
    for (int64_t at = p->first; at < p->end; at++) {
        int32_t id = p->ring[at & p->ring_mask];
        if (id == NONE)
            continue;
        p->blocks[id].place = (int32_t)count;
        ring[count++] = id;
    }
    free(p->ring);
    p->ring = ring, p->ring_mask = room - 1, p->first = 0, p->end = count;
    return true;
}

static inline void append_free(struct pool *p, int32_t id)
{
    if ((p->ring == NULL || p->end - p->first > p->ring_mask) && !widen_ring(p))
        return;
    p->blocks[id].place = (int32_t)(p->end & p->ring_mask);
    p->ring[p->end++ & p->ring_mask] = id;
}

/* The first blocks of the queue, at a moment which is ``now``: they lose their hashes and have one reference. False if there are too few. */
bool get_new_blocks(struct pool *p, int32_t *blocks, int64_t count, int64_t moment, int64_t now)
{
    if (count > p->num_free || p->failed) {
        p->overdrawn = !p->failed;
        return false;
    }
    int64_t first = p->first, evicted = 0;
    for (int64_t at = 0; at < count; at++) {
        int32_t id = p->num_front                      ? p->front[--p->num_front]
                     : p->num_touched < p->num_blocks ? untouched(p)
                                                       : pop_oldest(p, &first);
        if (id == NONE)
            return false;
        struct block *block = &p->blocks[id];
        if (block->hash != NO_HASH) {
            log_stay(p, id, moment, false);
            if (block->hash != UNSHARED)
                remove_hash(p, id);
            block->hash = NO_HASH;
            evicted++;
        }
        begin_life(p, block, now);
        block->ref_cnt = 1;
        blocks[at] = id;
    }
    p->first = first;
    p->num_cached -= evicted;
    p->evicted += evicted;
    p->num_free -= count;
    p->num_entries += count;
    log_change(p, moment, -evicted);
    if (p->logs_contents)
        log_taken(p);
    return true;
}

/* The orders of eviction, ``FREE_QUEUES``. */
enum { UNHASHED_FIRST, LEAST_RECENTLY_USED, NUM_ORDERS };
static const char *const ORDERS[NUM_ORDERS] = {"unhashed-first", "least-recently-used"};

/* False if there is no order of this name. */
bool set_order(struct pool *p, const char *name)
{
    p->order = 0;
    while (p->order < NUM_ORDERS && strcmp(ORDERS[p->order], name) != 0)
        p->order++;
    return p->order < NUM_ORDERS;
}

/* Free the blocks of a table, its last one first: the first ``cached`` are full, with hashes unless they are ``unshared``, and no other
   table has the others. */
void free_blocks(struct pool *p, const int32_t *table, int64_t count, int64_t cached, bool unshared, int64_t moment)
{
    int64_t came_free = 0, events = p->events.count;
    struct event released = {.kind = RELEASED};
    for (int64_t place = cached; p->order == UNHASHED_FIRST && place < count; place++)
        if (widen(p, (void **)&p->front, p->num_front, &p->front_room, sizeof *p->front))
            p->front[p->num_front++] = table[place];
    for (int64_t place = count - 1; place >= cached; place--) {
        p->blocks[table[place]].ref_cnt = 0;
        if (p->order == LEAST_RECENTLY_USED)
            append_free(p, table[place]);
    }
    p->num_free += count - cached;
    for (int64_t place = cached - 1; place >= 0; place--) {
        struct block *block = &p->blocks[table[place]];
        if (place >= PREFETCHED) {
            __builtin_prefetch(&p->blocks[table[place - PREFETCHED]], 1);
            if (p->logs_contents)
                __builtin_prefetch(&p->since[table[place - PREFETCHED]], 1);
        }
        if (p->logs_contents && !unshared && block->hash + 1 != released.name) {
            log_released(p, &released);
            released.blocks = 0;
        }
        if (p->logs_contents && !unshared)
            released.name = block->hash, released.blocks++;
        if (unshared)
            block->hash = UNSHARED, block->ref_cnt = 0;
        else if (--block->ref_cnt)
            continue;
        append_free(p, table[place]);
        if (p->logs_contents)
            p->since[table[place]] = moment;
        came_free++;
    }
    p->num_free += came_free;
    p->num_cached += came_free;
    p->num_entries -= count;
    log_change(p, moment, came_free);
    log_released(p, &released);
    for (int64_t at = events; at < p->events.count; at++)
        ((struct event *)p->events.items)[at].free = p->num_free;
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
                log_stay(p, found[end], moment, true);
                p->ring[block->place] = NONE;
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
