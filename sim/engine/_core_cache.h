/* The prefix cache of one KV group.

It follows ``FreeQueue`` (free_queue.py), ``SegmentPool`` (segments.py) and ``CachedMemory`` (cached.py), and writes their
logs, from which history.py reads evictions and lifetimes. The chains that name the blocks of requests with a common prefix
are numbered in Python (``Chains``). A request that shares no prefix has no names until it is preempted: its blocks go to the
queue at its end, in one record. The blocks of a preempted one are named by a chain of its own.

The head of the queue is brought up to date at every release, where Python defers that to the next look-up: the blocks are
taken in the same order.
*/

/* Fields of records, in the order of free_queue.py and history.py; a touched record has its number of moments first. */
enum { FREED_FIELDS = 9, HIT_FIELDS = 3, UNSTACKED_FIELDS = 5, TAKE_FIELDS = 6, GROWTH_FIELDS = 3, KEPT_TOUCHES = 4 };
enum { UNTOUCHED = -1, ALONE = -2, NO_LOOK_UP = -1 };

/* Records since the last ``logs``, and how many there were before. */
struct log {
    int64_t *items, count, room, before;
    int fields;
};

/* An unnamed block that is free: its place in its table, and ``grown_from``, ``born`` and ``lag`` of FREED. */
struct stacked {
    int64_t place, grown_from, born, lag;
};

struct hole {
    int64_t place, blocks;
};

/* ``Segment``: blocks at the places [first, stop) of a chain. */
struct segment {
    struct chain *chain;
    struct segment *next;
    int64_t first, stop, place, grown_from, born, lag, touches[KEPT_TOUCHES], references;
    int num_touches;
};

/* ``Chain``: its segments in the order of their publication, and the table that publishes more while it decodes. */
struct chain {
    struct segment **segments;
    struct table *author;
    int64_t count, room;
};

/* ``Path``: the chains of a request, and the blocks at which they end; or one chain of its own. */
struct path {
    bool is_given; /* else no block has a name */
    struct chain *own;
    int64_t first, count; /* in the names of the cache */
};

/* A part of a segment that a look-up found, or one of a table: the segment and its next ones up to ``stop``. */
struct part {
    struct segment *segment;
    int64_t first, stop;
};

struct parts {
    struct part *items;
    int64_t count, room;
};

struct taking {
    int64_t stop, born;
};

/* ``BlockTable``. */
struct table {
    struct path path;
    struct parts parts;
    struct taking *takes;
    int64_t num_takes, take_room, published, taken, lag;
    bool decodes;
};

struct cache {
    bool unnamed_first;
    int64_t block_size;
    /* ``FreeQueue``. */
    int64_t end, head, passed, hit, pushed;
    struct stacked *stack;
    struct hole *holes; /* heap by place */
    int64_t num_stack, stack_room, num_holes, hole_room;
    struct log freed, hits, unstacked, touches, takes, growths;
    int64_t decided_until; /* step up to which a decision has taken blocks, ``CachedMemory`` */
    struct parts found; /* of the last look-up */
    struct parts held;  /* segments of the table that is released */
    int64_t num_shared; /* table entries beyond the first of each block */
    /* Requests that share prefixes, and their paths, from offset to offset. */
    Py_buffer names[4];
    const char *shares;
    const int64_t *offsets, *numbers, *stops;
    struct chain **chains;
    int64_t num_chains, chain_room;
    bool failed; /* no memory was left */
};

/* --- Logs and lists --- */

/* Room for one more; else the cache has failed, and the caller's list keeps its length. */
static bool widen(struct cache *c, void **items, int64_t count, int64_t *room, size_t size)
{
    if (!c->failed && make_place(items, count, room, size))
        return true;
    c->failed = true;
    return false;
}

static void add_record(struct cache *c, struct log *log, const int64_t *record)
{
    size_t size = (size_t)log->fields * sizeof *record;
    if (!widen(c, (void **)&log->items, log->count, &log->room, size))
        return;
    memcpy(log->items + log->count * log->fields, record, size);
    log->count++;
}

static void add_part(struct cache *c, struct parts *parts, struct segment *segment, int64_t first, int64_t stop)
{
    if (widen(c, (void **)&parts->items, parts->count, &parts->room, sizeof *parts->items))
        parts->items[parts->count++] = (struct part){segment, first, stop};
}

static void log_take(struct cache *c, int64_t moment, int64_t step, int64_t blocks, int64_t index, int64_t known, int64_t hit)
{
    add_record(c, &c->takes, (int64_t[TAKE_FIELDS]){moment, step, blocks, index, known, hit});
}

/* --- The free queue --- */

static int64_t num_free(const struct cache *c) { return c->end - c->hit - c->head + c->passed + c->num_stack; }

static int64_t num_taken(const struct cache *c)
{
    return c->head - c->passed + c->unstacked.before + c->unstacked.count;
}

static struct hole pop_hole(struct cache *c)
{
    struct hole top = c->holes[0], moved = c->holes[--c->num_holes];
    int64_t place = 0;
    for (;;) {
        int64_t child = 2 * place + 1;
        if (child + 1 < c->num_holes && c->holes[child + 1].place < c->holes[child].place)
            child++;
        if (child >= c->num_holes || moved.place <= c->holes[child].place)
            break;
        c->holes[place] = c->holes[child];
        place = child;
    }
    c->holes[place] = moved;
    return top;
}

static void push_hole(struct cache *c, int64_t at, int64_t blocks)
{
    if (!widen(c, (void **)&c->holes, c->num_holes, &c->hole_room, sizeof *c->holes))
        return;
    int64_t place = c->num_holes++;
    for (; place && c->holes[(place - 1) / 2].place > at; place = (place - 1) / 2)
        c->holes[place] = c->holes[(place - 1) / 2];
    c->holes[place] = (struct hole){at, blocks};
}

/* ``FreeQueue._take``. */
static void take_blocks(struct cache *c, int64_t count)
{
    for (; count > 0 && c->num_stack; count--) {
        const struct stacked *top = &c->stack[--c->num_stack];
        add_record(c, &c->unstacked,
                   (int64_t[UNSTACKED_FIELDS]){c->head - c->passed, top->place, top->grown_from, top->born, top->lag});
    }
    while (count > 0) {
        int64_t stop = c->head + count, blocks = 0;
        if (c->num_holes && c->holes[0].place < stop) {
            struct hole hole = pop_hole(c);
            stop = hole.place, blocks = hole.blocks;
            c->passed += blocks;
        }
        count -= stop - c->head;
        c->head = stop + blocks;
    }
}

/* ``FreeQueue.reach``: ``free`` blocks are free now. */
static void reach(struct cache *c, int64_t free) { take_blocks(c, num_free(c) - free); }

/* ``FreeQueue.push``. */
static void push_block(struct cache *c, int64_t place, int64_t grown_from, int64_t born, int64_t lag)
{
    if (widen(c, (void **)&c->stack, c->num_stack, &c->stack_room, sizeof *c->stack))
        c->stack[c->num_stack++] = (struct stacked){place, grown_from, born, lag};
    c->pushed++;
}

/* ``FreeQueue.put``; the head is up to date. Returns the place of the last block on the tape. */
static int64_t put_blocks(struct cache *c, int64_t first, int64_t stop, int64_t named, int64_t grown_from, int64_t born,
                          int64_t lag, int64_t touched, int64_t moment)
{
    int64_t place = c->end;
    if (c->unnamed_first && named < stop) {
        for (int64_t block = most(first, named); block < stop; block++)
            push_block(c, block, grown_from, born, lag);
        stop = most(first, named);
    }
    if (first < stop) {
        add_record(c, &c->freed,
                   (int64_t[FREED_FIELDS]){first, stop, named, grown_from, born, lag, touched, moment, 0});
        c->end += stop - first;
    }
    return place;
}

/* A row of LEFT, as ``FreeQueue._free_left`` frees it: a table without names, with ``tokens`` in so many ``blocks``. */
static void put_alone(struct cache *c, int64_t size, int64_t tokens, int64_t blocks, int64_t lag, int64_t index,
                      int64_t known, int64_t born, int64_t moment, int64_t free)
{
    int64_t stop = blocks, named = tokens / size, grown_from = ceil_div(known, size);
    if (named < stop && c->unnamed_first) {
        /* All blocks that were free at first or freed since, less those that are free, were taken before. */
        take_blocks(c, c->end - c->hit + c->pushed - free - num_taken(c));
        push_block(c, named, grown_from, born, lag);
        stop = named, named = blocks;
    }
    add_record(c, &c->freed,
               (int64_t[FREED_FIELDS]){0, stop, named, grown_from, born, lag, ALONE - index, moment, known});
    c->end += stop;
}

/* --- Tables and segments --- */

/* Have at least ``count`` chains; false with an error set. */
static bool add_chains(struct cache *c, int64_t count)
{
    for (; c->num_chains < count; c->num_chains++) {
        if (!make_place((void **)&c->chains, c->num_chains, &c->chain_room, sizeof *c->chains))
            return false;
        if ((c->chains[c->num_chains] = calloc(1, sizeof **c->chains)) == NULL) {
            PyErr_NoMemory();
            return false;
        }
    }
    return true;
}

static struct table *new_table(struct cache *c, int64_t taken)
{
    struct table *table = calloc(1, sizeof *table);
    if (table == NULL) {
        c->failed = true;
        return NULL;
    }
    table->taken = taken;
    return table;
}

static void add_taking(struct cache *c, struct table *table, int64_t born)
{
    if (widen(c, (void **)&table->takes, table->num_takes, &table->take_room, sizeof *table->takes))
        table->takes[table->num_takes++] = (struct taking){table->taken, born};
}

static void drop_table(struct table *table)
{
    if (table != NULL) {
        free(table->parts.items);
        free(table->takes);
    }
    free(table);
}

static void drop_segments(struct chain *chain)
{
    for (int64_t place = 0; place < chain->count; place++)
        free(chain->segments[place]);
    free(chain->segments);
}

static void drop_chain(struct chain *chain)
{
    if (chain != NULL)
        drop_segments(chain);
    free(chain);
}

/* --- Names --- */

/* The path of a request; ``own`` is the chain of one that was preempted and shares no prefix, or NULL. */
static struct path path_of(const struct cache *c, int64_t request, struct chain *own)
{
    if (own != NULL)
        return (struct path){.is_given = true, .own = own, .count = 1};
    if (!c->shares[request])
        return (struct path){.is_given = false};
    int64_t first = c->offsets[request];
    return (struct path){.is_given = true, .first = first, .count = c->offsets[request + 1] - first};
}

static struct chain *chain_at(const struct cache *c, const struct path *path, int64_t at)
{
    return path->own != NULL ? path->own : c->chains[c->numbers[path->first + at]];
}

static int64_t stop_at(const struct cache *c, const struct path *path, int64_t at)
{
    return path->own != NULL ? INT64_MAX : c->stops[path->first + at];
}

/* Put a segment into its chain at a place. */
static struct segment *insert_segment(struct cache *c, struct chain *chain, int64_t at, const struct segment *like)
{
    struct segment *segment = malloc(sizeof *segment);
    if (segment == NULL || !widen(c, (void **)&chain->segments, chain->count, &chain->room, sizeof segment)) {
        free(segment);
        c->failed = true;
        return NULL;
    }
    memmove(&chain->segments[at + 1], &chain->segments[at], (size_t)(chain->count - at) * sizeof segment);
    *segment = *like;
    segment->chain = chain;
    chain->segments[at] = segment;
    chain->count++;
    return segment;
}

/* ``Segment.split``: it keeps the places before ``at``. Returns the rest. */
static struct segment *split(struct cache *c, struct segment *segment, int64_t at)
{
    struct chain *chain = segment->chain;
    int64_t place = 0;
    while (chain->segments[place] != segment)
        place++;
    struct segment *rest = insert_segment(c, chain, place + 1, segment);
    if (rest != NULL) {
        rest->first = at;
        segment->place += segment->stop - at;
        segment->stop = at;
        segment->next = rest;
    }
    return rest;
}

/* Blocks of a table from place ``first`` up to ``stop`` get names in a chain, by their takings (``BlockTable.spans``). */
static void publish_in(struct cache *c, struct table *table, struct chain *chain, int64_t first, int64_t stop)
{
    for (int64_t at = 0; first < stop && at < table->num_takes; at++) {
        bool is_last = at == table->num_takes - 1;
        int64_t end = is_last ? stop : least(table->takes[at].stop, stop);
        if (first >= end)
            continue;
        struct segment segment = {
            .first = first,
            .stop = end,
            .grown_from = table->taken,
            .born = table->takes[at].born,
            .lag = table->lag,
            .references = 1,
        };
        add_part(c, &table->parts, insert_segment(c, chain, chain->count, &segment), first, end);
        first = end;
    }
}

/* ``SegmentPool._publish``: full blocks of a table before ``stop`` that have no name yet. */
static void publish(struct cache *c, struct table *table, int64_t stop)
{
    const struct path *path = &table->path;
    int64_t place = table->published;
    for (int64_t at = 0; place < stop && at < path->count; at++) {
        int64_t end = least(stop_at(c, path, at), stop);
        if (end <= place)
            continue;
        publish_in(c, table, chain_at(c, path, at), place, end);
        place = end;
    }
    table->published = most(stop, table->published);
}

/* ``SegmentPool._publish_filled``: what the author of a chain has filled and is known to have when ``decode_step`` is decided. */
static void publish_filled(struct cache *c, struct table *author, int64_t decode_step)
{
    if (author != NULL)
        publish(c, author, (decode_step - 1 + author->lag) / c->block_size);
}

/* ``SegmentPool.publish``: full blocks of a prefill, after those that the authors of its chains have filled. */
static void publish_prefill(struct cache *c, struct table *table, int64_t stop, int64_t decode_step)
{
    for (int64_t at = 0; stop > table->published && at < table->path.count; at++)
        if (stop_at(c, &table->path, at) > table->published)
            publish_filled(c, chain_at(c, &table->path, at)->author, decode_step);
    publish(c, table, stop);
}

/* ``SegmentPool.decode``. */
static void decode(struct cache *c, struct table *table, int64_t lag)
{
    table->lag = lag, table->decodes = true;
    for (int64_t at = 0; at < table->path.count; at++)
        if (stop_at(c, &table->path, at) > table->published)
            chain_at(c, &table->path, at)->author = table;
}

/* ``SegmentPool._close``: a table with ``filled`` full blocks publishes no more. */
static void close_table(struct cache *c, struct table *table, int64_t filled)
{
    publish(c, table, filled);
    for (int64_t at = 0; at < table->path.count; at++) {
        struct chain *chain = chain_at(c, &table->path, at);
        if (chain->author == table)
            chain->author = NULL;
    }
}

/* ``SegmentPool._put``: free blocks of a table that are in no segment, those taken last first. */
static void put_unpublished(struct cache *c, const struct table *table, int64_t first, int64_t stop, int64_t named,
                            int64_t moment)
{
    for (int64_t at = table->num_takes - 1; at >= 0; at--) {
        bool is_last = at == table->num_takes - 1;
        int64_t from = most(first, at ? table->takes[at - 1].stop : 0);
        int64_t end = is_last ? stop : least(table->takes[at].stop, stop);
        if (from < end)
            put_blocks(c, from, end, named, table->taken, table->takes[at].born, table->lag, UNTOUCHED, moment);
    }
}

/* ``BlockTable.segments``, in ``held``. */
static void list_segments(struct cache *c, const struct table *table)
{
    c->held.count = 0;
    for (int64_t at = 0; at < table->parts.count; at++) {
        struct part part = table->parts.items[at];
        struct segment *segment = part.segment;
        for (; segment != NULL; segment = segment->stop < part.stop ? segment->next : NULL)
            add_part(c, &c->held, segment, segment->first, segment->stop);
    }
}

/* The last reference to a segment is gone: its blocks join the free queue. */
static void free_segment(struct cache *c, struct segment *segment, int64_t moment)
{
    int64_t touched = UNTOUCHED;
    if (segment->num_touches) {
        int64_t record[1 + KEPT_TOUCHES] = {segment->num_touches};
        memcpy(&record[1], segment->touches, sizeof segment->touches);
        touched = c->touches.before + c->touches.count;
        add_record(c, &c->touches, record);
    }
    segment->place = put_blocks(c, segment->first, segment->stop, segment->stop, segment->grown_from, segment->born,
                                segment->lag, touched, moment);
}

/* ``SegmentPool.release``. Who decoded has a ``lag``. Who ``returns`` and shares no prefix may find the blocks again, under
   the names returned. */
static struct chain *release_table(struct cache *c, struct table *table, int64_t held, int64_t filled, int64_t moment,
                                   const int64_t *lag, bool returns)
{
    if (table == NULL)
        return NULL;
    if (lag != NULL)
        table->lag = *lag, table->decodes = true;
    if (table->decodes)
        add_record(c, &c->growths, (int64_t[GROWTH_FIELDS]){table->taken, held, table->lag});
    if (!table->path.is_given && returns) {
        struct chain *chain = calloc(1, sizeof *chain);
        table->path = (struct path){.is_given = true, .own = chain, .count = 1};
        c->failed = c->failed || chain == NULL;
    }
    struct chain *own = table->path.own;
    if (!table->path.is_given || c->failed) {
        put_unpublished(c, table, 0, held, filled, moment);
    } else {
        close_table(c, table, filled);
        put_unpublished(c, table, table->published, held, 0, moment);
    }
    list_segments(c, table);
    for (int64_t at = c->held.count - 1; at >= 0 && !c->failed; at--) {
        struct segment *segment = c->held.items[at].segment;
        if (--segment->references)
            c->num_shared -= segment->stop - segment->first;
        else
            free_segment(c, segment, moment);
    }
    drop_table(table);
    if (returns)
        return own;
    drop_chain(own);
    return NULL;
}

/* --- Look-ups --- */

/* End of the blocks of a segment that were not taken again; the last place is taken first. */
static int64_t cached_until(const struct cache *c, const struct segment *segment)
{
    return segment->references ? segment->stop : least(segment->stop, segment->place + segment->stop - c->head);
}

/* ``SegmentPool._first_published``. Returns whether it found a part. */
static bool first_published(struct cache *c, struct chain *chain, int64_t place, int64_t stop, struct part *part)
{
    bool gone = false, any = false;
    for (int64_t at = 0; at < chain->count && !any; at++) {
        struct segment *segment = chain->segments[at];
        int64_t end = cached_until(c, segment);
        if (end <= segment->first)
            gone = true;
        else if (segment->first <= place && place < end) {
            *part = (struct part){segment, place, least(stop, end)};
            any = true;
        } else if (place < segment->first && segment->first < stop)
            stop = segment->first;
    }
    if (gone) {
        int64_t kept = 0;
        for (int64_t at = 0; at < chain->count; at++) {
            struct segment *segment = chain->segments[at];
            if (cached_until(c, segment) > segment->first)
                chain->segments[kept++] = segment;
            else
                free(segment);
        }
        chain->count = kept;
    }
    return any;
}

/* ``SegmentPool.look_up``: the longest cached prefix before place ``stop``, in ``found``. Returns its blocks. */
static int64_t look_up(struct cache *c, const struct path *path, int64_t stop, int64_t decode_step)
{
    int64_t place = 0;
    struct part part;
    c->found.count = 0;
    /* The author of the first chain publishes even if no place is looked up. */
    for (int64_t at = 0; (at == 0 || place < stop) && at < path->count; at++) {
        struct chain *chain = chain_at(c, path, at);
        int64_t end = least(stop_at(c, path, at), stop);
        publish_filled(c, chain->author, decode_step);
        while (place < end) {
            if (!first_published(c, chain, place, end, &part))
                return place;
            add_part(c, &c->found, part.segment, part.first, part.stop);
            place = part.stop;
        }
    }
    return place;
}

/* Blocks of the last look-up that tables have. */
static int64_t found_in_tables(const struct cache *c)
{
    int64_t blocks = 0;
    for (int64_t at = 0; at < c->found.count; at++)
        blocks += c->found.items[at].segment->references ? c->found.items[at].stop - c->found.items[at].first : 0;
    return blocks;
}

/* ``CachedMemory.steps_before_admission``, of a waiting sequence that found the blocks before ``place``. */
static int64_t steps_to_publication(const struct cache *c, const struct path *path, int64_t place, int64_t stop,
                                    int64_t decode_step)
{
    if (place >= stop)
        return INT64_MAX;
    int64_t at = 0;
    while (stop_at(c, path, at) <= place)
        at++;
    const struct chain *chain = chain_at(c, path, at);
    const struct table *author = chain->author;
    /* The author may have gone on to another chain before ``place``. */
    bool fills = false;
    for (int64_t own = 0; author != NULL && own < author->path.count; own++)
        fills = fills || (chain_at(c, &author->path, own) == chain && place < stop_at(c, &author->path, own));
    return fills ? (place + 1) * c->block_size - author->lag - decode_step + 1 : INT64_MAX;
}

/* ``SegmentPool.enter``: a table with the blocks found. */
static struct table *enter_found(struct cache *c, const struct path *path, int64_t now)
{
    struct table *table = new_table(c, 0);
    if (table == NULL)
        return NULL;
    table->path = *path;
    for (int64_t at = 0; at < c->found.count && !c->failed; at++) {
        struct part part = c->found.items[at];
        struct segment *segment = part.segment;
        int64_t blocks = part.stop - part.first;
        /* An earlier part may have split this segment. */
        while (segment->stop <= part.first && segment->next != NULL)
            segment = segment->next;
        if (segment->first < part.first && (segment = split(c, segment, part.first)) == NULL)
            break;
        if (part.stop < segment->stop && split(c, segment, part.stop) == NULL)
            break;
        if (segment->references) {
            c->num_shared += blocks;
        } else {
            add_record(c, &c->hits, (int64_t[HIT_FIELDS]){segment->place, blocks, now});
            push_hole(c, segment->place, blocks);
            c->hit += blocks;
        }
        segment->references++;
        if (segment->num_touches == KEPT_TOUCHES)
            memmove(segment->touches, segment->touches + 1, --segment->num_touches * sizeof *segment->touches);
        segment->touches[segment->num_touches++] = now;
        add_part(c, &table->parts, segment, part.first, part.stop);
        table->published = table->taken = part.stop;
    }
    return table;
}
