/* Blocks with reference counts and hashes, and the queue of those that are free: ``prefix/block_pool.py``, and the lives of
``prefix/residency.py``, over the same structure.

    free queue    front (a stack) | never taken (a counter) | first ... end (a ring, with holes where blocks were hit)

Arrays grow with the blocks that were ever taken, and the map of hashes with those that have one. Of a block that no look-up asks for
only its birth and its content are read and written, each in an array of its own. What happens is logged as records, which Python
reads.
*/

#include "_core.h"

/* So many more free blocks have a hash from a moment on. */
void log_change(struct pool *p, int64_t moment, int64_t blocks)
{
    struct change *record = blocks ? new_record(p, &p->changes, CHANGE_FIELDS) : NULL;
    if (record != NULL)
        *record = (struct change){.moment = moment, .slots = blocks * p->block_size};
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

/* The stay of a free block that is HASHED is over at a moment. */
static void log_stay(struct pool *p, int32_t id, int64_t moment, bool hit)
{
    int64_t name = p->blocks[id].hash, since = p->since[id];
    if (name == UNSHARED)
        return;
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
        bool hashed = p->content[id] == HASHED, kept = hashed ? !p->blocks[id].ref_cnt : p->content[id] == UNASKED;
        struct stay *record = kept ? new_record(p, &p->stays, STAY_FIELDS) : NULL;
        if (record != NULL)
            *record = (struct stay){p->since[id], -1, false, p->num_look_ups, hashed ? p->blocks[id].hash : UNSHARED, 1};
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

/* Full blocks of one table get their hashes: ``hash`` and those that follow it. */
void cache_blocks(struct pool *p, const int32_t *blocks, int64_t count, int64_t hash)
{
    for (int64_t place = 0; place < count && !p->failed; place++) {
        p->content[blocks[place]] = HASHED;
        p->blocks[blocks[place]] = (struct block){.hash = hash == UNSHARED ? hash : hash + place, .ref_cnt = 1, .touched = NONE};
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
static void end_hit_life(struct pool *p, int32_t id, int64_t now)
{
    struct touches *found = &p->touches[p->blocks[id].touched];
    log_hit_life(p, now - p->born[id], now - found->times[found->count - 1]);
    found->taken++;
    drop_touches(p, p->blocks[id].touched, 1);
}

/* Room for so many lives more. */
static bool make_room_for_lives(struct pool *p, int64_t count)
{
    struct log *log = &p->lives;
    while (p->logs_lives && p->last_life.at + 2 * (count + 1) >= log->room)
        if (!widen(p, (void **)&log->items, log->room, &log->room, sizeof *log->items))
            return false;
    return true;
}

/* A life without hits has ended, for which there is room. Without a branch: whether it is as long as the last one nobody foresees. */
static inline void log_life(int64_t *items, struct last_life *last, int64_t ticks)
{
    bool same = ticks == last->ticks;
    last->at += same ? 0 : 1 + (last->more != 0);
    last->more = same ? last->more + 1 : 0;
    last->ticks = ticks;
    items[last->at] = ticks;
    items[last->at + 1] = -last->more;
}

/* ``on_blocks_allocated``: a block without hits is born again, and its life before has ended. */
static inline void begin_life(struct pool *p, struct last_life *last, int32_t id, int64_t now)
{
    if (p->logs_lives)
        log_life(p->lives.items, last, now - p->born[id]);
    p->born[id] = now;
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
    p->lives.count = p->last_life.at + 1 + (p->last_life.more != 0);
    p->last_life = (struct last_life){NONE, NONE, 0};
    for (int64_t at = 0; at < p->num_touches; at++)
        if (p->touches[at].blocks)
            log_gaps(p, &p->touches[at]);
}

/* --- The free queue --- */

enum { FIRST_RING = 64, PREFETCHED = 8 };

/* Twice as many items, or false: the pool has failed. */
static bool resize(struct pool *p, void **items, int64_t room, size_t size)
{
    void *more = p->failed ? NULL : realloc(*items, (size_t)room * size);
    p->failed = more == NULL;
    *items = more == NULL ? *items : more;
    return !p->failed;
}

/* Twice as much room for blocks. */
static bool widen_blocks(struct pool *p)
{
    enum { FIRST_BLOCKS = 64 };
    int64_t room = p->block_room ? 2 * p->block_room : FIRST_BLOCKS;
    bool resized = resize(p, (void **)&p->blocks, room, sizeof *p->blocks) && resize(p, (void **)&p->born, room, sizeof *p->born) &&
                   resize(p, (void **)&p->content, room, sizeof *p->content) &&
                   (!p->logs_contents || resize(p, (void **)&p->since, room, sizeof *p->since));
    p->block_room = resized ? room : p->block_room;
    return resized;
}

/* A block that was never taken; NONE if no memory is left. */
static int32_t untouched(struct pool *p)
{
    if (p->num_touched == p->block_room && !widen_blocks(p))
        return NONE;
    p->content[p->num_touched] = EMPTY;
    return (int32_t)p->num_touched++;
}

/* A free block is taken that is not EMPTY. */
static inline void evict(struct pool *p, struct last_life *last, int32_t id, int64_t moment, int64_t now)
{
    bool hashed = p->content[id] == HASHED, hit = hashed && p->blocks[id].touched != NONE;
    p->content[id] = EMPTY;
    if (hashed && p->logs_contents)
        log_stay(p, id, moment, false);
    if (hashed && p->blocks[id].hash != UNSHARED)
        remove_hash(p, id);
    if (hit)
        end_hit_life(p, id, now), p->born[id] = now;
    else
        begin_life(p, last, id, now);
}

/* Take the oldest blocks of the ring. Those that follow one another are far from one another in memory: one is asked for in advance.
   Returns how many were not EMPTY. */
static int64_t pop_oldest(struct pool *p, int32_t *blocks, int64_t count, int64_t moment, int64_t now)
{
    int64_t first = p->first, evicted = 0;
    struct last_life last = p->last_life;
    for (int64_t at = 0; at < count; at++) {
        int32_t id, coming = p->ring[(first + PREFETCHED) & p->ring_mask];
        if (coming != NONE && p->content[coming] == HASHED) {
            __builtin_prefetch(&p->blocks[coming], 1);
            __builtin_prefetch(&p->born[coming], 1);
            if (p->logs_contents)
                __builtin_prefetch(&p->since[coming]);
        }
        do
            id = p->ring[first++ & p->ring_mask];
        while (id == NONE);
        blocks[at] = id;
        if (p->content[id] == EMPTY) {
            begin_life(p, &last, id, now);
        } else {
            evict(p, &last, id, moment, now);
            evicted++;
        }
    }
    p->first = first, p->last_life = last;
    return evicted;
}

/* A ring without the places of blocks that were hit, and with room for as many blocks again and for ``more``. */
static bool widen_ring(struct pool *p, int64_t more)
{
    int64_t room = FIRST_RING, count = 0;
    for (int64_t at = p->first; at < p->end; at++)
        count += p->ring[at & p->ring_mask] != NONE;
    while (room < 2 * (count + more))
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
        if (p->content[id] == HASHED)
            p->blocks[id].place = (int32_t)count;
        ring[count++] = id;
    }
    free(p->ring);
    p->ring = ring, p->ring_mask = room - 1, p->first = 0, p->end = count;
    return true;
}

/* Room in the ring for so many blocks more; false if no memory is left. */
static inline bool has_places(struct pool *p, int64_t count)
{
    return (p->ring != NULL && p->end + count - p->first <= p->ring_mask) || widen_ring(p, count);
}

/* The first blocks of the queue, at a moment which is ``now``: they are EMPTY and born. False if there are too few. */
bool get_new_blocks(struct pool *p, int32_t *blocks, int64_t count, int64_t moment, int64_t now)
{
    int64_t at = 0, evicted = 0;
    if (count > p->num_free || p->failed) {
        p->overdrawn = !p->failed;
        return false;
    }
    if (!make_room_for_lives(p, count))
        return false;
    for (; at < count && p->num_front; at++)
        begin_life(p, &p->last_life, blocks[at] = p->front[--p->num_front], now);
    for (; at < count && p->num_touched < p->num_blocks; at++) {
        blocks[at] = untouched(p);
        if (blocks[at] == NONE)
            return false;
        p->born[blocks[at]] = now;
    }
    evicted = at < count ? pop_oldest(p, blocks + at, count - at, moment, now) : 0;
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

/* Blocks of a table go to the tail of the queue, the last one first: none has a hash, and no other table has them. */
static void append_unhashed(struct pool *p, const int32_t *table, int64_t count, enum content content, int64_t moment)
{
    if (!has_places(p, count))
        return;
    for (int64_t place = count - 1; place >= 0; place--) {
        p->ring[p->end++ & p->ring_mask] = table[place];
        p->content[table[place]] = (uint8_t)content;
        if (p->logs_contents)
            p->since[table[place]] = moment;
    }
}

/* As ``append_unhashed``, of blocks that are HASHED, which other tables may have. Returns how many came free. */
static int64_t append_hashed(struct pool *p, const int32_t *table, int64_t count, struct event *released, int64_t moment)
{
    int64_t came_free = 0;
    if (!has_places(p, count))
        return 0;
    for (int64_t place = count - 1; place >= 0; place--) {
        struct block *block = &p->blocks[table[place]];
        if (place >= PREFETCHED) {
            __builtin_prefetch(&p->blocks[table[place - PREFETCHED]], 1);
            if (p->logs_contents)
                __builtin_prefetch(&p->since[table[place - PREFETCHED]], 1);
        }
        if (p->logs_contents && block->hash + 1 != released->name) {
            log_released(p, released);
            released->blocks = 0;
        }
        if (p->logs_contents)
            released->name = block->hash, released->blocks++;
        if (--block->ref_cnt)
            continue;
        block->place = (int32_t)(p->end & p->ring_mask);
        p->ring[p->end++ & p->ring_mask] = table[place];
        if (p->logs_contents)
            p->since[table[place]] = moment;
        came_free++;
    }
    return came_free;
}

/* Free the blocks of a table, its last one first: the first ``cached`` are full, and HASHED unless they are ``unshared``, and no other
   table has the others. */
void free_blocks(struct pool *p, const int32_t *table, int64_t count, int64_t cached, bool unshared, int64_t moment)
{
    int64_t came_free = cached, events = p->events.count;
    struct event released = {.kind = RELEASED};
    for (int64_t place = cached; p->order == UNHASHED_FIRST && place < count; place++)
        if (widen(p, (void **)&p->front, p->num_front, &p->front_room, sizeof *p->front))
            p->front[p->num_front++] = table[place];
    if (p->order == LEAST_RECENTLY_USED)
        append_unhashed(p, table + cached, count - cached, EMPTY, moment);
    p->num_free += count - cached;
    if (unshared)
        append_unhashed(p, table, cached, UNASKED, moment);
    else
        came_free = append_hashed(p, table, cached, &released, moment);
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
                if (p->logs_contents)
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
