/* Step times of a cost model: ``sim/cost``.

A decode step is a line over the context; the lines that the model gave are kept for each batch size. A step with prompts is
the closed form of ``PaperCost``, or a sum of parts (``StepParts`` of base.py), each of which is over one or two counts and
kept from the first time that it is asked for:

    max(least, of_tokens[decodes + tokens] + of_rows[decodes] + attention(decodes, context, tokens, pairs) + more)

All arithmetic is on integers. Other cost models are called for every step with prompts.
*/

#include "_core.h"

bool too_long(void)
{
    PyErr_SetString(PyExc_OverflowError, "a time of the run exceeds 64 bits");
    return false;
}

/* Double the room of a list; false with an error set. */
bool grow_list(void **items, int64_t *room, size_t size)
{
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
    *ticks = (__int128)c->numbers.per_token * tokens;
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
        attention = decode + prefill + (__int128)c->numbers.per_block * decodes * prompt_blocks(tokens, pairs) - c->numbers.shared;
        attention = attention < decode ? decode : attention;
        attention = attention < prefill ? prefill : attention;
    }
    attention += (__int128)of_tokens + of_rows + c->numbers.more;
    if (attention > INT64_MAX)
        return too_long();
    *ticks = most(c->numbers.least, (int64_t)attention);
    return true;
}

/* ``StepCost.decode_line``; for one sequence or more. */
bool decode_line(struct cost *c, int64_t decodes, int64_t context, struct line *line)
{
    return line_at(&c->steps[decodes], c->decode_line, decodes, context, line);
}

/* Ticks of a decode step. */
bool decode_ticks(struct cost *c, int64_t decodes, int64_t context, int64_t *ticks)
{
    struct line line;
    if (!decode_line(c, decodes, context, &line))
        return false;
    *ticks = line.base;
    return add_product(ticks, line.slope, context);
}

/* ``StepCost.step_ticks`` of a step that computes a token at least; false with an error set. */
bool step_ticks(struct cost *c, int64_t decodes, int64_t context, int64_t tokens, int64_t pairs, int64_t *ticks)
{
    if (!tokens)
        return decode_ticks(c, decodes, context, ticks);
    if (c->in_parts)
        return sum_of_parts(c, decodes, context, tokens, pairs, ticks);
    if (!c->linear)
        return integer_of(PyObject_CallFunction(c->step_ticks, "LLLL", (long long)decodes, (long long)context,
                                                (long long)tokens, (long long)pairs),
                          ticks);
    const struct terms *terms = &c->terms;
    int64_t beyond = tokens - terms->knee;
    *ticks = terms->step;
    return add_product(ticks, terms->per_decode, decodes) && add_product(ticks, terms->per_token, tokens) &&
           (beyond <= 0 || add_product(ticks, terms->steeper, beyond));
}

/* --- From Python, and back --- */

/* Integers of a tuple of Python, as many as the fields of a struct; false with an error set. */
bool take_numbers(PyObject *given, void *fields, int count)
{
    if (!PyTuple_Check(given) || PyTuple_Size(given) != count) {
        PyErr_Format(PyExc_ValueError, "a tuple of %d integers is needed", count);
        return false;
    }
    for (int place = 0; place < count; place++)
        ((int64_t *)fields)[place] = PyLong_AsLongLong(PyTuple_GetItem(given, place));
    return !PyErr_Occurred();
}

/* Args: (of_tokens, of_rows, mixed_decode, prefill_node or None, pairs, ``PART_NUMBERS``). */
static bool parse_parts(struct cost *c, PyObject *parts)
{
    PyObject *pairs, *numbers;
    if (!PyArg_ParseTuple(parts, "OOOOO!O", &c->of_tokens, &c->of_rows, &c->mixed_decode, &c->prefill_node, &PyTuple_Type,
                          &pairs, &numbers))
        return false;
    Py_INCREF(c->of_tokens), Py_INCREF(c->of_rows), Py_INCREF(c->mixed_decode), Py_INCREF(c->prefill_node);
    c->in_parts = true;
    c->num_pairs = PyTuple_Size(pairs);
    c->pairs = calloc((size_t)c->num_pairs + 1, sizeof *c->pairs);
    c->attention = calloc((size_t)c->max_num_seqs + 1, sizeof *c->attention);
    if (c->pairs == NULL || c->attention == NULL) {
        PyErr_NoMemory();
        return false;
    }
    for (int64_t place = 0; place < c->num_pairs; place++)
        if (!take_numbers(PyTuple_GetItem(pairs, place), &c->pairs[place], 2))
            return false;
    return take_numbers(numbers, &c->numbers, PART_NUMBERS_FIELDS);
}

/* Args: (step_ticks, decode_line, terms or None, parts or None). */
bool parse_cost(struct cost *c, PyObject *given, int64_t max_num_seqs)
{
    PyObject *terms, *parts;
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
    return (!c->linear || take_numbers(terms, &c->terms, TERMS_FIELDS)) && (parts == Py_None || parse_parts(c, parts));
}

static void drop_lines(struct lines *lines, int64_t batches)
{
    for (int64_t place = 0; lines != NULL && place < batches; place++)
        free(lines[place].found);
    free(lines);
}

void drop_cost(struct cost *c)
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
