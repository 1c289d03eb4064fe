/* Passes over the logs of a run: what ``growth_moments`` of growth.py, ``ticks_of`` of moments.py and ``_Histogram`` of
prefix_cache.py compute in numpy, with the same integers.

Columns are int64 arrays of the caller. A pass over a long column goes on from call to call by its state, an int64 array that
is all zero at first, and ends with a call that does not fill its buffers.
*/

#include "_core.h"

enum { MOST_COLUMNS = 16, HINT_ROWS = 8 };

struct columns {
    Py_buffer views[MOST_COLUMNS];
    int number;
};

static void drop_columns(struct columns *c)
{
    while (c->number > 0)
        PyBuffer_Release(&c->views[--c->number]);
}

/* Takes the arrays of a tuple, which are int64. Each is as long as the one before it, but where ``begins`` has its bit. False with
   an error set. */
static bool take_columns(struct columns *c, PyObject *given, int number, unsigned begins)
{
    c->number = 0;
    bool valid = PyTuple_Check(given) && PyTuple_Size(given) == number;
    while (valid && c->number < number) {
        Py_buffer *view = &c->views[c->number];
        if (PyObject_GetBuffer(PyTuple_GetItem(given, c->number), view, PyBUF_SIMPLE) < 0)
            break;
        valid = view->len % 8 == 0 && (begins >> c->number & 1 || view->len == view[-1].len);
        c->number++;
    }
    if (valid && c->number == number)
        return true;
    drop_columns(c);
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "%d int64 columns are needed, those of one log of equal length", number);
    return false;
}

static int64_t *items(Py_buffer *view) { return view->buf; }
static const int64_t *column(const struct columns *c, int place) { return c->views[place].buf; }
static int64_t length(const Py_buffer *view) { return (int64_t)(view->len / 8); }
static int64_t rows_of(const struct columns *c, int place) { return length(&c->views[place]); }

/* Whether a state has so many fields, none of them negative, and ``more`` values. */
static bool is_state(const Py_buffer *view, int fields, int64_t more)
{
    const int64_t *state = view->buf;
    bool valid = length(view) == fields + more;
    for (int field = 0; valid && field < fields; field++)
        valid = state[field] >= 0;
    return valid;
}

/* --- Blocks taken in the rows of a run: ``growth_moments`` --- */

enum { MOMENT_STEP, MOMENT_FIRST, MOMENT_STOP, MOMENT_FIELDS };
enum { GROWTH_FIRST, GROWTH_STOP, ROW_STEPS, MOMENT_COLUMNS };
enum { POWERS = 3 };

/* Blocks taken after the first step of each of some rows, and their sums weighted with the number of the step in its row, and
   with its square. */
static void moments_of(const struct columns *c, int64_t size, int64_t *state, int64_t *found, int64_t rows)
{
    int64_t growths = rows_of(c, GROWTH_FIRST), *by_phase = state + MOMENT_FIELDS;
    const int64_t *first = column(c, GROWTH_FIRST), *stop = column(c, GROWTH_STOP), *steps = column(c, ROW_STEPS);
    int64_t step = state[MOMENT_STEP], started = state[MOMENT_FIRST], stopped = state[MOMENT_STOP], phase = step % size;
    for (int64_t row = 0; row < rows; row++) {
        int64_t sums[POWERS] = {0};
        for (int64_t number = 0; number < steps[row]; number++, step++) {
            int64_t taken = by_phase[phase];
            for (; started < growths && first[started] <= step; started++)
                taken++;
            for (; stopped < growths && stop[stopped] <= step; stopped++)
                taken--;
            by_phase[phase] = taken;
            phase = phase + 1 == size ? 0 : phase + 1;
            if (number) {
                sums[0] += taken;
                sums[1] += taken * number;
                sums[2] += taken * number * number;
            }
        }
        for (int power = 0; power < POWERS; power++)
            found[power * rows + row] = sums[power];
    }
    state[MOMENT_STEP] = step, state[MOMENT_FIRST] = started, state[MOMENT_STOP] = stopped;
}

PyObject *core_moments(PyObject *self, PyObject *args)
{
    PyObject *given, *result = NULL;
    long long size;
    Py_buffer state, found;
    struct columns c;
    if (!PyArg_ParseTuple(args, "OLw*w*", &given, &size, &state, &found))
        return NULL;
    if (take_columns(&c, given, MOMENT_COLUMNS, 1 << GROWTH_FIRST | 1 << ROW_STEPS)) {
        if (size < 1 || !is_state(&state, MOMENT_FIELDS, size) || length(&found) != POWERS * rows_of(&c, ROW_STEPS))
            PyErr_SetString(PyExc_ValueError, "a state of the block size, and a buffer for three sums a row are needed");
        else {
            moments_of(&c, size, items(&state), items(&found), rows_of(&c, ROW_STEPS));
            result = Py_NewRef(Py_None);
        }
        drop_columns(&c);
    }
    PyBuffer_Release(&state);
    PyBuffer_Release(&found);
    return result;
}

/* --- Times: ``ticks_of`` and ``iteration_of`` --- */

/* Of rows: start, duration, number of the first step; and durations of the first step and the second, and their growth, or
   empty columns where each step counts as one. */
enum { ROW_START, ROW_TICKS, ROW_STEP, ROW_FIRST, ROW_NEXT, ROW_SLOPE, TIME_COLUMNS };

/* The last row that begins with a step or before, from a guess; -1 before the first. Steps that are asked for in turn are near
   one another. */
static int64_t row_of_step(const int64_t *row_step, int64_t rows, int64_t step, int64_t guess)
{
    int64_t low = -1, high = rows; /* row_step[low] <= step < row_step[high] */
    if (guess >= 0 && guess < rows) {
        if (row_step[guess] <= step) {
            low = guess;
            for (int near = 0; near < HINT_ROWS && low + 1 < rows; near++, low++)
                if (row_step[low + 1] > step)
                    return low;
        } else {
            high = guess;
            for (int near = 0; near < HINT_ROWS && high > 0; near++)
                if (row_step[--high] <= step)
                    return high;
        }
    }
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (row_step[middle] <= step)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* When a row has done all steps before ``step``: ``RunLog._into`` from its start. */
static int64_t ticks_in_row(const struct columns *c, int64_t row, int64_t step)
{
    int64_t steps = step - column(c, ROW_STEP)[row], start = column(c, ROW_START)[row];
    if (steps < 1)
        return start;
    if (rows_of(c, ROW_FIRST) == 0)
        return start + steps;
    int64_t later = steps - 1;
    return start + column(c, ROW_FIRST)[row] + column(c, ROW_NEXT)[row] * later +
           column(c, ROW_SLOPE)[row] * (later * (later - 1) / 2);
}

/* Ticks of moments; false if one is outside of the run. */
static bool date(const struct columns *c, int64_t end_ticks, const int64_t *moments, int64_t *ticks, int64_t number)
{
    int64_t rows = rows_of(c, ROW_START), row = 0;
    for (int64_t place = 0; place < number; place++) {
        int64_t count = moments[place] / MOMENT_KINDS;
        switch (moments[place] % MOMENT_KINDS) {
        case AT_ROW:
            if (count < 0 || count > rows)
                return false;
            ticks[place] = count < rows ? column(c, ROW_START)[count] : end_ticks;
            break;
        case AFTER_ROW:
            if (count < 0 || count >= rows)
                return false;
            ticks[place] = column(c, ROW_START)[count] + column(c, ROW_TICKS)[count];
            break;
        case IN_STEP:
            row = row_of_step(column(c, ROW_STEP), rows, count, row);
            if (row < 0)
                return false;
            ticks[place] = ticks_in_row(c, row, count);
            break;
        case AFTER_STEP:
            row = row_of_step(column(c, ROW_STEP), rows, count - 1, row);
            if (row < 0)
                return false;
            ticks[place] = ticks_in_row(c, row, count);
            break;
        default: /* negative */
            return false;
        }
    }
    return true;
}

PyObject *core_date(PyObject *self, PyObject *args)
{
    PyObject *given, *result = NULL;
    long long end_ticks;
    Py_buffer moments, ticks;
    struct columns c;
    if (!PyArg_ParseTuple(args, "OLy*w*", &given, &end_ticks, &moments, &ticks))
        return NULL;
    if (ticks.len != moments.len)
        PyErr_SetString(PyExc_ValueError, "a buffer for the ticks of each moment is needed");
    else if (take_columns(&c, given, TIME_COLUMNS, 1 << ROW_START | 1 << ROW_FIRST)) {
        if (rows_of(&c, ROW_FIRST) && rows_of(&c, ROW_FIRST) != rows_of(&c, ROW_START))
            PyErr_SetString(PyExc_ValueError, "durations of the steps of each row, or none, are needed");
        else if (date(&c, end_ticks, moments.buf, items(&ticks), length(&moments)))
            result = Py_NewRef(Py_None);
        else
            PyErr_SetString(PyExc_ValueError, "a moment is outside of the run");
        drop_columns(&c);
    }
    PyBuffer_Release(&moments);
    PyBuffer_Release(&ticks);
    return result;
}

/* --- Histograms: ``_Histogram.count`` --- */

/* Of the mantissa of a float64, for ranges of ``_width``; and the exponent of one. */
enum { MANTISSA_BITS = 52, WIDTH_BITS = 8, EXPONENT_OF_ONE = 1023 };

static int64_t width_of(int64_t value)
{
    double number = (double)value;
    int64_t bits;
    memcpy(&bits, &number, sizeof bits);
    bits >>= MANTISSA_BITS - WIDTH_BITS;
    return value < 1 ? 0 : bits - ((int64_t)EXPONENT_OF_ONE << WIDTH_BITS) + 1;
}

/* Counts blocks by the first bound at or above their value, and by width. Returns the sum of the values in two halves. */
PyObject *core_count(PyObject *self, PyObject *args)
{
    Py_buffer values, blocks, bounds, counts, widths;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*y*y*w*w*", &values, &blocks, &bounds, &counts, &widths))
        return NULL;
    const int64_t *value = values.buf, *number = blocks.buf, *bound = bounds.buf;
    int64_t most = length(&bounds);
    if (blocks.len != values.len || counts.len != bounds.len + 8)
        PyErr_SetString(PyExc_ValueError, "as many blocks as values, and a count more than bounds are needed");
    else {
        unsigned __int128 sum = 0;
        int64_t place = 0;
        for (; place < length(&values); place++) {
            int64_t bucket = 0, width = width_of(value[place]);
            if (value[place] < 0 || width >= length(&widths))
                break;
            for (int64_t at = 0; at < most; at++)
                bucket += bound[at] < value[place];
            items(&counts)[bucket] += number[place];
            items(&widths)[width] += number[place];
            sum += (unsigned __int128)value[place] * (uint64_t)number[place];
        }
        if (place < length(&values))
            PyErr_SetString(PyExc_ValueError, "a value is negative, or wider than all widths");
        else
            result = Py_BuildValue("KK", (unsigned long long)(sum >> 64), (unsigned long long)sum);
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&blocks);
    PyBuffer_Release(&bounds);
    PyBuffer_Release(&counts);
    PyBuffer_Release(&widths);
    return result;
}
