/* Step times of a cost model: ``sim/cost``.

A decode step is a line over the context; the lines that the model gave are kept for each batch size. A step with prompts is
the closed form of ``PaperCost``, or a sum of parts (``StepParts`` of base.py), each of which is over one or two counts and
kept from the first time that it is asked for:

    max(least, of_tokens[decodes + tokens] + of_rows[decodes] + attention(decodes, context, tokens, pairs) + more)

All arithmetic is on integers. Other cost models are called for every step with prompts.
*/

/* No slot, no count kept, and no end of a line. */
#define NONE (-1)
#define WITHOUT_END INT64_MAX
/* ``BLOCK_ROWS`` of base.py. */
#define BLOCK_ROWS 64

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
    /* ``PaperCost.terms``. */
    bool linear;
    int64_t step, per_decode, per_token, steeper, knee;
    /* ``StepParts``. */
    bool in_parts;
    PyObject *of_tokens, *of_rows, *mixed_decode, *prefill_node;
    struct memo tokens, rows;
    struct lines *attention; /* by batch size */
    struct node *nodes;      /* a hash table with open addressing; ticks are NONE where it is empty */
    int64_t num_nodes, node_room;
    struct pair_ticks *pairs;
    int64_t num_pairs, per_prefill_token, per_block, shared, more, least;
};

static int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

static int64_t most(int64_t one, int64_t other) { return one > other ? one : other; }

static int64_t ceil_div(int64_t amount, int64_t size) { return (amount + size - 1) / size; }

static bool too_long(void)
{
    PyErr_SetString(PyExc_OverflowError, "a time of the run exceeds 64 bits");
    return false;
}

/* *sum += factor * amount. Returns whether it fits; else an error is set. */
static bool add_product(int64_t *sum, int64_t factor, int64_t amount)
{
    int64_t product;
    if (!__builtin_mul_overflow(factor, amount, &product) && !__builtin_add_overflow(*sum, product, sum))
        return true;
    return too_long();
}

/* *items has room for one more after ``count``; else an error is set. */
static bool make_place(void **items, int64_t count, int64_t *room, size_t size)
{
    if (count < *room)
        return true;
    int64_t more = *room ? 2 * *room : 8;
    void *grown = realloc(*items, (size_t)more * size);
    if (grown == NULL) {
        PyErr_NoMemory();
        return false;
    }
    *items = grown;
    *room = more;
    return true;
}

/* The first line whose end lies past the context. */
static int64_t line_place(const struct lines *lines, int64_t context)
{
    int64_t low = 0, high = lines->count;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (lines->found[middle].until <= context)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The line at a context; ``ask`` gives it where it is not known. All contexts up to its end have the same. */
static bool line_at(struct lines *lines, PyObject *ask, int64_t decodes, int64_t context, struct line *line)
{
    int64_t place = line_place(lines, context);
    if (place < lines->count && lines->found[place].from <= context) {
        *line = lines->found[place];
        return true;
    }
    PyObject *until, *answer = PyObject_CallFunction(ask, "LL", (long long)decodes, (long long)context);
    long long base, slope, end = WITHOUT_END;
    if (answer == NULL || !PyArg_ParseTuple(answer, "LLO", &base, &slope, &until)) {
        Py_XDECREF(answer);
        return false;
    }
    if (until != Py_None)
        end = PyLong_AsLongLong(until);
    Py_DECREF(answer);
    if (PyErr_Occurred())
        return false;
    *line = (struct line){.from = context, .until = end, .base = base, .slope = slope};
    if (place < lines->count && lines->found[place].until == end) {
        lines->found[place].from = context;
        return true;
    }
    if (!make_place((void **)&lines->found, lines->count, &lines->room, sizeof *line))
        return false;
    memmove(&lines->found[place + 1], &lines->found[place], (size_t)(lines->count - place) * sizeof *line);
    lines->found[place] = *line;
    lines->count++;
    return true;
}

/* An integer that Python returns; false with an error set. */
static bool integer_of(PyObject *found, int64_t *ticks)
{
    *ticks = found == NULL ? NONE : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return !PyErr_Occurred();
}

/* Ticks of a count, which ``ask`` gives the first time. */
static bool ticks_of(struct memo *memo, PyObject *ask, int64_t count, int64_t *ticks)
{
    if (count >= memo->room) {
        int64_t room = most(2 * memo->room, count + 1), *grown = realloc(memo->ticks, (size_t)room * sizeof *grown);
        if (grown == NULL) {
            PyErr_NoMemory();
            return false;
        }
        for (int64_t place = memo->room; place < room; place++)
            grown[place] = NONE;
        memo->ticks = grown;
        memo->room = room;
    }
    if (memo->ticks[count] == NONE &&
        !integer_of(PyObject_CallFunction(ask, "L", (long long)count), &memo->ticks[count]))
        return false;
    *ticks = memo->ticks[count];
    return true;
}

/* The place of a node in the hash table, or of the gap where it belongs. */
static struct node *node_place(struct node *nodes, int64_t room, int64_t x, int64_t y)
{
    uint64_t hash = (uint64_t)x * 0x9E3779B97F4A7C15u ^ (uint64_t)y * 0xC2B2AE3D27D4EB4Fu;
    int64_t place = (int64_t)((hash ^ hash >> 29) & (uint64_t)(room - 1));
    while (nodes[place].ticks != NONE && (nodes[place].x != x || nodes[place].y != y))
        place = (place + 1) & (room - 1);
    return &nodes[place];
}

/* Double the hash table of nodes. */
static bool grow_nodes(struct cost *c)
{
    int64_t room = c->node_room ? 2 * c->node_room : 64;
    struct node *nodes = malloc((size_t)room * sizeof *nodes);
    if (nodes == NULL) {
        PyErr_NoMemory();
        return false;
    }
    for (int64_t place = 0; place < room; place++)
        nodes[place].ticks = NONE;
    for (int64_t place = 0; place < c->node_room; place++)
        if (c->nodes[place].ticks != NONE)
            *node_place(nodes, room, c->nodes[place].x, c->nodes[place].y) = c->nodes[place];
    free(c->nodes);
    c->nodes = nodes;
    c->node_room = room;
    return true;
}

/* ``Surface.node``. */
static bool node_at(struct cost *c, int64_t x, int64_t y, int64_t *ticks)
{
    if (2 * c->num_nodes >= c->node_room && !grow_nodes(c))
        return false;
    struct node *node = node_place(c->nodes, c->node_room, x, y);
    if (node->ticks == NONE) {
        if (!integer_of(PyObject_CallFunction(c->prefill_node, "LL", (long long)x, (long long)y), ticks))
            return false;
        *node = (struct node){.x = x, .y = y, .ticks = *ticks};
        c->num_nodes++;
    }
    *ticks = node->ticks;
    return true;
}

/* The width of the patch at a count: 1 << max(0, bit_length - 4). */
static int64_t patch(int64_t count)
{
    return count < 16 ? 1 : (int64_t)1 << (60 - __builtin_clzll((unsigned long long)count));
}

/* ``Surface.__call__``. */
static bool surface_at(struct cost *c, int64_t x, int64_t y, __int128 *ticks)
{
    int64_t width = patch(x), height = patch(y), left = x / width * width, low = y / height * height;
    int64_t along = x - left, up = y - low, node;
    if (!node_at(c, left, low, &node))
        return false;
    *ticks = (__int128)node * (width - along) * (height - up);
    if (along) {
        if (!node_at(c, left + width, low, &node))
            return false;
        *ticks += (__int128)node * along * (height - up);
    }
    if (up) {
        if (!node_at(c, left, low + height, &node))
            return false;
        *ticks += (__int128)node * (width - along) * up;
    }
    if (along && up) {
        if (!node_at(c, left + width, low + height, &node))
            return false;
        *ticks += (__int128)node * along * up;
    }
    *ticks /= (__int128)width * height;
    return true;
}

/* Attention of prompts: a surface, or a line in tokens and pairs (``AttentionCost.prefill_ticks``). */
static bool prefill_ticks(struct cost *c, int64_t tokens, int64_t pairs, __int128 *ticks)
{
    if (c->prefill_node != Py_None)
        return surface_at(c, tokens, pairs, ticks);
    *ticks = (__int128)c->per_prefill_token * tokens;
    for (int64_t place = 0; place < c->num_pairs; place++) {
        int64_t window = c->pairs[place].window;
        *ticks += (__int128)c->pairs[place].ticks * (window ? least(pairs, window * tokens) : pairs);
    }
    return true;
}

/* ``prompt_blocks`` of base.py. */
static int64_t prompt_blocks(int64_t tokens, int64_t pairs)
{
    return ceil_div(least(tokens, most(1, 2 * pairs / tokens)), BLOCK_ROWS);
}

/* ``StepParts``: a step with prompts. */
static bool sum_of_parts(struct cost *c, int64_t decodes, int64_t context, int64_t tokens, int64_t pairs, int64_t *ticks)
{
    __int128 decode = 0, prefill, attention;
    int64_t of_tokens, of_rows;
    struct line line;
    if (!ticks_of(&c->tokens, c->of_tokens, decodes + tokens, &of_tokens) ||
        !ticks_of(&c->rows, c->of_rows, decodes, &of_rows) || !prefill_ticks(c, tokens, pairs, &prefill))
        return false;
    attention = prefill;
    if (decodes) {
        if (!line_at(&c->attention[decodes], c->mixed_decode, decodes, context, &line))
            return false;
        decode = line.base + (__int128)line.slope * context;
        attention = decode + prefill + (__int128)c->per_block * decodes * prompt_blocks(tokens, pairs) - c->shared;
        attention = attention < decode ? decode : attention;
        attention = attention < prefill ? prefill : attention;
    }
    attention += (__int128)of_tokens + of_rows + c->more;
    if (attention > INT64_MAX)
        return too_long();
    *ticks = most(c->least, (int64_t)attention);
    return true;
}

/* ``StepCost.decode_line``; for one sequence or more. */
static bool decode_line(struct cost *c, int64_t decodes, int64_t context, struct line *line)
{
    return line_at(&c->steps[decodes], c->decode_line, decodes, context, line);
}

/* Ticks of a decode step. */
static bool decode_ticks(struct cost *c, int64_t decodes, int64_t context, int64_t *ticks)
{
    struct line line;
    if (!decode_line(c, decodes, context, &line))
        return false;
    *ticks = line.base;
    return add_product(ticks, line.slope, context);
}

/* ``StepCost.step_ticks`` of a step that computes a token at least; false with an error set. */
static bool step_ticks(struct cost *c, int64_t decodes, int64_t context, int64_t tokens, int64_t pairs, int64_t *ticks)
{
    if (!tokens)
        return decode_ticks(c, decodes, context, ticks);
    if (c->in_parts)
        return sum_of_parts(c, decodes, context, tokens, pairs, ticks);
    if (!c->linear)
        return integer_of(PyObject_CallFunction(c->step_ticks, "LLLL", (long long)decodes, (long long)context,
                                                (long long)tokens, (long long)pairs),
                          ticks);
    int64_t beyond = tokens - c->knee;
    *ticks = c->step;
    return add_product(ticks, c->per_decode, decodes) && add_product(ticks, c->per_token, tokens) &&
           (beyond <= 0 || add_product(ticks, c->steeper, beyond));
}

/* --- From Python, and back --- */

static bool parse_parts(struct cost *c, PyObject *parts)
{
    PyObject *pairs;
    long long numbers[5];
    if (!PyArg_ParseTuple(parts, "OOOOLO!LLLL", &c->of_tokens, &c->of_rows, &c->mixed_decode, &c->prefill_node,
                          &numbers[0], &PyTuple_Type, &pairs, &numbers[1], &numbers[2], &numbers[3], &numbers[4]))
        return false;
    Py_INCREF(c->of_tokens), Py_INCREF(c->of_rows), Py_INCREF(c->mixed_decode), Py_INCREF(c->prefill_node);
    c->in_parts = true;
    c->per_prefill_token = numbers[0], c->per_block = numbers[1], c->shared = numbers[2];
    c->more = numbers[3], c->least = numbers[4];
    c->num_pairs = PyTuple_Size(pairs);
    c->pairs = calloc((size_t)c->num_pairs + 1, sizeof *c->pairs);
    c->attention = calloc((size_t)c->max_num_seqs + 1, sizeof *c->attention);
    if (c->pairs == NULL || c->attention == NULL) {
        PyErr_NoMemory();
        return false;
    }
    for (int64_t place = 0; place < c->num_pairs; place++) {
        long long window, ticks;
        if (!PyArg_ParseTuple(PyTuple_GetItem(pairs, place), "LL", &window, &ticks))
            return false;
        c->pairs[place] = (struct pair_ticks){.window = window, .ticks = ticks};
    }
    return true;
}

/* Args: (step_ticks, decode_line, terms or None, parts or None). */
static bool parse_cost(struct cost *c, PyObject *given, int64_t max_num_seqs)
{
    PyObject *terms, *parts;
    long long numbers[5] = {0};
    c->max_num_seqs = max_num_seqs;
    if (!PyArg_ParseTuple(given, "OOOO", &c->step_ticks, &c->decode_line, &terms, &parts)) {
        c->step_ticks = c->decode_line = NULL;
        return false;
    }
    Py_INCREF(c->step_ticks), Py_INCREF(c->decode_line);
    c->steps = calloc((size_t)max_num_seqs + 1, sizeof *c->steps);
    if (c->steps == NULL) {
        PyErr_NoMemory();
        return false;
    }
    c->linear = terms != Py_None;
    if (c->linear &&
        !PyArg_ParseTuple(terms, "LLLLL", &numbers[0], &numbers[1], &numbers[2], &numbers[3], &numbers[4]))
        return false;
    c->step = numbers[0], c->per_decode = numbers[1], c->per_token = numbers[2];
    c->steeper = numbers[3], c->knee = numbers[4];
    return parts == Py_None || parse_parts(c, parts);
}

static void drop_lines(struct lines *lines, int64_t batches)
{
    for (int64_t place = 0; lines != NULL && place < batches; place++)
        free(lines[place].found);
    free(lines);
}

static void drop_cost(struct cost *c)
{
    Py_XDECREF(c->step_ticks);
    Py_XDECREF(c->decode_line);
    if (c->in_parts) {
        Py_DECREF(c->of_tokens), Py_DECREF(c->of_rows), Py_DECREF(c->mixed_decode), Py_DECREF(c->prefill_node);
    }
    drop_lines(c->steps, c->max_num_seqs + 1);
    drop_lines(c->attention, c->max_num_seqs + 1);
    free(c->tokens.ticks);
    free(c->rows.ticks);
    free(c->nodes);
    free(c->pairs);
}
