"""Division of decode attention's work among the blocks of a grid, and the merge of the sequences that blocks share."""

from __future__ import annotations

import shutil
from collections import defaultdict

import numpy as np
import pytest

import gpu_cases
from fragmeter.gpu.ops import arrays, paged_attention
from fragmeter.gpu.ops.cpu_kernels import CpuKernels
from fragmeter.gpu.ops.source import KERNELS, Kernel, inlined
from fragmeter.sim.types.errors import KernelFault

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

#: ``kGranule`` and ``kLeastGranules`` of the kernel.
GRANULE_TOKENS, LEAST_GRANULES = 64, 4

#: Writes down what each block takes: column, sequence, first granule, granules, and of pieces the first block and the number.
PROGRAM = """
__global__ void shares(int *taken, const int *context_lens, int sequences, int columns, int most) {
    struct Memory { unsigned granules[kWarps]; Work work; };
    auto &memory = *ptx::dynamic_shared_memory<Memory>();
    Work &work = memory.work;
    find_work(work, memory.granules, context_lens, sequences, columns);
    if (threadIdx.x > 0 || work.left == ~0u) return;  // not written
    int *row = taken + blockIdx.x * most * 6;
    for (int rows = 0; rows < most && work.left > 0; ++rows, row += 6) {
        row[0] = work.column.number, row[1] = work.column.sequence, row[2] = work.granule, row[3] = work.taken();
        if (!work.whole()) row[4] = work.pieces().first, row[5] = work.pieces().count;
        work.next(context_lens, sequences);
    }
}
"""


def shares(context_lens, columns: int, blocks: int, bug=None) -> list[list[tuple[int, ...]]]:
    """The rows of each block."""
    kernel = Kernel(inlined(KERNELS / "balance.cuh") + PROGRAM, "shares")
    kernel = gpu_cases.planted(kernel, *bug) if bug else kernel
    lengths, most = np.asarray(context_lens, np.int32), len(context_lens) * columns + 1
    taken = np.full((blocks, most, 6), -1, np.int32)
    given = arrays.view("taken", taken), arrays.view("context_lens", lengths)
    sizes = map(np.int32, (len(lengths), columns, most))
    launch = CpuKernels().prepared(kernel, (blocks, 1, 1), (128, 1, 1), (*given, *sizes), shared_bytes=128)
    launch()
    return [[tuple(row) for row in rows if row[0] >= 0] for rows in taken.tolist()]


RAGGED = [70, 0, 1, 4000, 64, 65, 128, 300]
#: Context lengths, columns, blocks.
GRIDS = [
    (RAGGED, 1, 7),
    (RAGGED, 3, 40),
    (RAGGED, 2, 1),
    ([3] * 5, 2, 64),  # more blocks than work
    ([0, 0, 0], 1, 2),
    ([32768], 1, 216),
    (np.random.default_rng(0).integers(0, 700, 300), 2, 108),  # several sequences for each thread
]


def check_shares(context_lens, columns: int, blocks: int, bug=None) -> None:
    """Every granule is taken once, by blocks in order, and no block has more than one more than another."""
    found = shares(context_lens, columns, blocks, bug)
    granules = np.maximum(1, -(-np.asarray(context_lens) // GRANULE_TOKENS))
    row = [
        (column, sequence, granule)
        for column in range(columns)
        for sequence, count in enumerate(granules)
        for granule in range(count)
    ]
    taken = [
        (column, sequence, first + granule)
        for rows in found
        for column, sequence, first, count, *_ in rows
        for granule in range(count)
    ]
    assert taken == row
    loads = [sum(count for _, _, _, count, *_ in rows) for rows in found]
    used = min(blocks, max(columns * len(granules), -(-len(row) // LEAST_GRANULES)))
    assert sum(load > 0 for load in loads) == used and max(loads) - min(loads[:used]) <= 1

    blocks_of, slots = defaultdict(list), set()
    for block, rows in enumerate(found):
        for column, sequence, first, count, *_ in rows:
            if count < granules[sequence]:
                blocks_of[column, sequence].append(block)
                slots.add(2 * block + (first == 0))
    for block, rows in enumerate(found):
        for column, sequence, _, count, first_block, pieces in rows:
            held = blocks_of[column, sequence] if count < granules[sequence] else []
            assert (first_block, pieces) == ((held[0], len(held)) if held else (-1, -1)), (block, sequence)
    assert len(slots) == sum(map(len, blocks_of.values())), "two pieces have one slot"


@pytest.mark.parametrize(("context_lens", "columns", "blocks"), GRIDS)
def test_blocks_have_as_much_work_as_others_but_for_a_granule(context_lens, columns, blocks):
    check_shares(context_lens, columns, blocks)


@pytest.mark.slow
def test_a_long_sequence_among_short_ones_leaves_no_block_of_an_h200_idle():
    """The figures of the documentation: 132 multiprocessors, three blocks each."""

    def loads(*grid) -> list[int]:
        return [sum(count for _, _, _, count, *_ in rows) for rows in shares(*grid)]

    assert set(loads([128_000, *[1_000] * 63], 8, 396)) == {60, 61}
    assert sorted(loads([32_768], 1, 396)) == [0] * 268 + [4] * 128


DIVISION_BUGS = {
    "longer ranges are not counted": ("block * each + min(block, longer)", "block * each"),
    "a granule at the edge is the next block's": ("granule < longer * (each + 1)", "granule < longer * each"),
    "ranges behind the longer ones begin early": ("(granule - longer) / each", "granule / each"),
    "an empty sequence has no granule": ("ceil_div(tokens, kGranule) : 1", "ceil_div(tokens, kGranule) : 0"),
    "a warp leaves out the warps before it": ("other < warp ?", "other < 0 ?"),
    "a lane leaves out the lane before it": ("int distance = 1; distance < 32", "int distance = 2; distance < 32"),
    "a range begins a granule late": ("granule = within - before;", "granule = within - before + 1;"),
    "the next column begins with the second sequence": ("{column.number + 1, 0}", "{column.number + 1, 1}"),
    "the last piece is forgotten": ("block_of(begin + granules - 1)", "block_of(begin + granules - 2)"),
    "the first piece is this block's": ("granule == 0 ? blockIdx.x :", "true ? blockIdx.x :"),
}  # fmt: skip


@pytest.mark.parametrize("bug", DIVISION_BUGS)
def test_a_planted_bug_of_the_division_is_caught(bug):
    with pytest.raises((AssertionError, KernelFault, IndexError)):
        for grid in GRIDS:
            check_shares(*grid, DIVISION_BUGS[bug])


#: Pieces of one granule, to have many of them in short sequences: 67, which are merged in three levels, beside 2 and 9.
CONTEXTS = [67 * 64 - 3, 100, 0, 9 * 64, 1]
BLOCKS = 79


def of_short_pieces(monkeypatch, bug=None) -> None:
    right, wrong = "kLeastGranules = 4;", "kLeastGranules = 1;"
    gpu_cases.plant_attention(monkeypatch, right, wrong)
    if bug:
        gpu_cases.plant_attention(monkeypatch, *bug)


def long_case(dtype: str = "float32", heads: tuple[int, int] = (2, 1)) -> gpu_cases.Case:
    return gpu_cases.case(dtype, heads, 64, 16, CONTEXTS)


def check_merge(given: gpu_cases.Case) -> None:
    """Results are those of float64, and the same bits whichever block is the last one."""
    found = [gpu_cases.run(given, BLOCKS, seed) for seed in range(3)]
    dtype = given.query.dtype.name
    assert gpu_cases.error(found[0], gpu_cases.expected(given)) <= gpu_cases.TOLERANCE[dtype]
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "heads"),
    [("float32", (2, 1)), pytest.param("float16", (10, 1), marks=pytest.mark.slow), ("bfloat16", (8, 1))],
)
def test_a_tree_of_pieces_is_merged_alike_in_any_order_of_blocks(dtype, heads, monkeypatch):
    of_short_pieces(monkeypatch)
    check_merge(long_case(dtype, heads))


MERGE_BUGS = {
    "a piece has the next granule, too": (", start + (int)work.taken() * kGranule)", ", start + ((int)work.taken() + 1) * kGranule)"),
    "a piece begins with its sequence": ("const int start = work.granule * kGranule;", "const int start = 0;"),
    "a piece lacks its last token": ("(int)work.taken() * kGranule)", "(int)work.taken() * kGranule - 1)"),
    "the first piece is written to the slot of the other": ("slot = 2 * blockIdx.x + (work.granule == 0)", "slot = 2 * blockIdx.x"),
    "pieces are merged from the last one's on": (
        "const float *values = partials.value(pieces.slot(leader + member * stride)) + place;\n"
        "                batch[member] = member < members",
        "const unsigned from = (member + pieces.own) % members;\n"
        "                const float *values = partials.value(pieces.slot(leader + from * stride)) + place;\n"
        "                batch[member] = member < members",
    ),
    "the first piece has no slot of its own": ("2 * (first + piece) + (piece == 0)", "2 * (first + piece)"),
    "a group has one piece too few": ("(pieces.count - leader + stride - 1) / stride", "(pieces.count - leader) / stride"),
    "levels share counters": ("stride *= kFanIn, counters += 2 * gridDim.x)", "stride *= kFanIn)"),
    "the first level is the last": ("stride * kFanIn >= pieces.count", "true"),
    "a group keeps the state of its first piece": ("partials.state(target)[threadIdx.x] = merging.states", "if (false) partials.state(target)[0] = merging.states"),
    "pieces are added at their own scale": ("ptx::exp2(state.x - maximum);\n        float sum", "1;\n        float sum"),
    "the sum is of half the pieces": (
        "distance /= 2)\n            sum += __shfl",
        "distance /= 4)\n            sum += __shfl",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bug", MERGE_BUGS)
def test_a_planted_bug_of_the_merge_is_caught(bug, monkeypatch):
    of_short_pieces(monkeypatch, MERGE_BUGS[bug])
    with pytest.raises((AssertionError, KernelFault)):
        check_merge(long_case())


def replayed() -> None:
    """A launch with the lengths of the day, three times, as a captured graph runs it."""
    given = gpu_cases.case("float32", (2, 1), 64, 16, [700, 300, 40])
    out, lengths = np.full_like(given.query, np.nan), [[700, 300, 40], [130, 300, 0], [1, 300, 40]]
    named = vars(given) | {"out": out}
    sizes = {name: named.pop(name) for name in ("block_size", "max_context_len")}
    views = {name: arrays.view(name, array) for name, array in named.items()}
    call = paged_attention.checked(**views, **sizes).prepared(CpuKernels(), blocks=5)
    for now in lengths:
        given.context_lens[:] = now
        call.launch()
        assert gpu_cases.error(out, gpu_cases.expected(given)) <= 1e-5
        out[:] = np.nan


def test_a_launch_divides_the_lengths_of_its_time():
    replayed()


def test_counters_that_are_not_reset_are_noticed(monkeypatch):
    """In the second launch."""
    gpu_cases.plant_attention(
        monkeypatch, "atomicInc(counters + target, members - 1)", "atomicInc(counters + target, 1 << 30)"
    )
    with pytest.raises(AssertionError):
        replayed()


def test_the_constants_are_those_of_the_kernel():
    text = (KERNELS / "balance.cuh").read_text()
    assert f"kGranule = {GRANULE_TOKENS};" in text
    assert f"kLeastGranules = {LEAST_GRANULES};" in text
    assert f"kFanIn = {paged_attention.FAN_IN};" in text
