"""The machine that runs PTX: its instructions beside numpy and the tables of the PTX ISA, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_cases
from fragmeter.gpu.ops import arrays
from ptx import fragments
from ptx.machine import Machine
from ptx.memory import Fault, Global
from ptx.operations import OPERATIONS, TYPES
from ptx.text import parsed

KERNEL = """.version 9.0
.target sm_80
.extern .shared .align 16 .b8 items[];

.visible .entry test(
	.param .u64 .ptr .align 1 test_param_0,
	.param .u64 test_param_1
)
{{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<99>;
	.reg .f32 	%f<99>;
	.reg .b64 	%rd<99>;

	ld.param.u64 	%rd1, [test_param_0];
	ld.param.u64 	%rd2, [test_param_1];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd3, %r1, 4;
	add.s64 	%rd4, %rd1, %rd3;
	add.s64 	%rd5, %rd2, %rd3;
	mov.u32 	%r2, items;
	shl.b32 	%r3, %r1, 4;
	add.s32 	%r4, %r2, %r3;
	mul.wide.u32 	%rd6, %r1, 16;
	add.s64 	%rd7, %rd2, %rd6;
{body}
	ret;

}}
"""


def run(body: str, given=None, *, threads: int = 32, shared_bytes: int = 0, apart: bool = False) -> np.ndarray:
    """Four words of each thread, of which ``%rd4`` is the address of the first; ``%rd5`` and ``%rd7`` are places in ``given``.

    ``%r1`` is the thread and ``%r4`` its 16 bytes of shared memory, at ``%r2``. Statements end with semicolons.
    """
    out = np.zeros(4 * threads, np.uint32)
    given = np.arange(4 * threads, dtype=np.uint32) if given is None else given
    views = [arrays.view(name, one) for name, one in (("out", out), ("given", given))]
    program = parsed(KERNEL.format(body=body), "test")
    addresses = [np.array(one.pointer, np.uint64) for one in views]
    Machine(program, addresses, Global(views), (1, 1, 1), (threads, 1, 1), shared_bytes, apart).run()
    return out


NAN, TWO_31 = float("nan"), 2**31
#: Opcode, operands and result by the PTX ISA.
RESULTS = [
    ("add.s32", (2**31 - 1, 1), -(2**31)),
    ("sub.s16", (-(2**15), 1), 2**15 - 1),
    ("mul.lo.s64", (2**62, 4), 0),
    ("mad.lo.s32", (-3, 5, 7), -8),
    ("mul.wide.s32", (-2, 2**30), -(2**31)),
    ("mul.wide.u16", (65535, 65535), 65535 * 65535),
    ("mul.hi.s32", (-(2**31), 2), -1),
    ("mul.hi.u32", (2**31, 6), 3),
    ("mul.hi.u64", (2**63, 6), 3),
    ("div.s32", (-7, 2), -3),
    ("div.s32", (7, -2), -3),
    ("div.s32", (-8, 2), -4),
    ("div.u64", (2**64 - 1, 2), 2**63 - 1),
    ("rem.u32", (2**32 - 1, 10), 5),
    ("rem.s32", (-7, 4), -3),
    ("popc.b32", (2**31 + 5,), 3),
    ("cvt.s8.s32", (511,), -1),
    ("cvt.s16.s8", (0x180,), -128),
    ("cvt.s32.s8", (0x17F,), 127),
    ("cvt.s32.s16", (-5,), -5),
    ("min.u32", (2**32 - 1, 1), 1),
    ("max.s32", (-1, 1), 1),
    ("neg.s32", (5,), -5),
    ("not.b16", (1,), 65534),
    ("not.pred", (True,), False),
    ("xor.pred", (True, True), False),
    ("shl.b32", (3, 31), TWO_31),
    ("shl.b32", (3, 32), 0),
    ("shr.u32", (TWO_31, 40), 0),
    ("shr.s32", (-8, 1), -4),
    ("shr.s32", (-8, 99), -1),
    ("shl.b64", (1, 63), 2**63),
    ("bfi.b32", (0xFF, 0, 4, 8), 0xFF0),
    ("bfi.b32", (0b101, 0xFFFFFFFF, 0, 3), 0xFFFFFFFD),
    ("bfi.b32", (7, 9, 3, 29), 0x39),
    ("bfi.b32", (7, 9, 32, 4), 9),
    ("selp.b32", (3, 4, False), 4),
    ("setp.lt.u32", (1, 2**32 - 1), True),
    ("setp.lt.s32", (1, -1), False),
    ("setp.eq.f32", (NAN, NAN), False),
    ("setp.ge.f32", (NAN, 1.0), False),
    ("setp.ne.s64", (2**40, 0), True),
    ("max.f32", (NAN, -2.0), -2.0),
    ("fma.rn.f32", (1 + 2.0**-12, 1 - 2.0**-12, -1.0), -(2.0**-24)),
    ("ex2.approx.ftz.f32", (-3.0,), 0.125),
    ("ex2.approx.ftz.f32", (-127.0,), 0.0),
    ("lg2.approx.ftz.f32", (8.0,), 3.0),
    ("rcp.rn.f32", (4.0,), 0.25),
    ("cvt.s64.s32", (-1,), -1),
    ("cvt.u64.u32", (2**32 - 1,), 2**32 - 1),
    ("cvt.u32.u64", (2**40 + 5,), 5),
    ("cvt.u16.u32", (2**16 + 5,), 5),
    ("cvt.f32.f16", (0x3C01,), 1 + 2.0**-10),
    ("cvt.f32.bf16", (0x3F81,), 1 + 2.0**-7),
    ("cvt.rn.f16.f32", (1 + 2.0**-11,), 0x3C00),
    ("cvt.rn.bf16.f32", (1 + 3 * 2.0**-8,), 0x3F82),
    ("cvt.rn.bf16.f32", (NAN,), 0x7FFF),
    ("cvt.rn.f16x2.f32", (2.0, 1.0), 0x40003C00),
    ("cvt.rn.bf16x2.f32", (2.0, 1.0), 0x40003F80),
]


@pytest.mark.parametrize(("opcode", "operands", "wanted"), RESULTS)
def test_an_operation_gives_the_result_of_the_isa(opcode, operands, wanted):
    operation = OPERATIONS[opcode]
    given = [np.array([value, value], TYPES[kind]) for value, kind in zip(operands, operation.operands, strict=True)]
    with np.errstate(all="ignore"):
        found = operation.function(*given)
    assert found.view(TYPES[operation.result]).tolist() == [wanted] * 2


@pytest.mark.parametrize("opcode", ["cvt.rn.bf16.f32", "cvt.rn.f16.f32"])
def test_conversions_round_as_numpy_does(opcode):
    given = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint32).view(np.float32)
    given = given[np.isfinite(given)]
    with np.errstate(over="ignore"):
        wanted = given.astype(gpu_cases.DTYPES["bfloat16" if "bf16" in opcode else "float16"])
        found = OPERATIONS[opcode].function(given)
    assert found.tobytes() == wanted.tobytes()


def strided(threads: tuple, values: tuple) -> np.ndarray:
    """``[32, values]``: place of each value of a thread, from the strides of thread % 4, thread // 4, and the bits of a value."""
    number = np.arange(2 ** len(values))
    of_value = sum(stride * (number >> bit & 1) for bit, stride in enumerate(values))
    lane = np.arange(32)[:, None]
    return lane % 4 * threads[0] + lane // 4 * threads[1] + of_value


def test_fragments_are_those_of_another_source():
    """CUTLASS (include/cute/atom/mma_traits_sm80.hpp, SM80_16x8x16) has the layouts as strides; columns come after one another."""
    assert (fragments.A_COLUMN * 16 + fragments.A_ROW == strided((32, 1), (16, 8, 128))).all()
    assert (fragments.B_ROW * 8 + fragments.B_COLUMN == strided((16, 1), (8, 64))).all()
    assert (fragments.C_COLUMN * 16 + fragments.C_ROW == strided((32, 1), (16, 8))).all()


def test_ldmatrix_mma_and_movmatrix_of_known_elements():
    """The ISA's pictures: thread 0 has the first two elements of row 0, thread 31 the last two of row 7."""
    rows = np.arange(256, dtype=np.uint16).reshape(1, 32, 8)
    words = fragments.ldmatrix(rows, transposed=False)[0]
    assert (words[0] == [0x00010000, 0x00410040, 0x00810080, 0x00C100C0]).all()
    assert words[31, 0] == 63 << 16 | 62
    assert fragments.ldmatrix(rows, transposed=True)[0, 1, 0] == 24 << 16 | 16
    matrix = fragments.matrix_of(words[None, :, 0])
    assert (matrix[0].reshape(-1) == np.arange(64)).all()


def test_threads_leave_a_loop_one_after_another_and_meet_again():
    """Each adds the numbers below its own, and then takes the sum of the next lane."""
    body = """
	mov.u32 	%r10, 0;
	mov.u32 	%r11, 0;
	setp.eq.s32 	%p1, %r1, 0;
	@%p1 bra 	$L_end;
$L_loop:
	add.s32 	%r10, %r10, %r11;
	add.s32 	%r11, %r11, 1;
	setp.lt.u32 	%p1, %r11, %r1;
	@%p1 bra 	$L_loop;
$L_end:
	add.s32 	%r12, %r1, 1;
	shfl.sync.idx.b32 	%r13|%p2, %r10, %r12, 31, -1;
	st.global.u32 	[%rd4], %r13;
"""
    lane = (np.arange(32) + 1) % 32
    assert run(body)[:32].tolist() == (lane * (lane - 1) // 2).tolist()


SHUFFLES = {
    "bfly": ("shfl.sync.bfly.b32 	%r13|%p2, %r1, 5, 31, -1;", [lane ^ 5 for lane in range(32)]),
    # Segments of eight lanes: mask 0x18 in bits 8-12; lane 5 of the own segment.
    "idx": ("shfl.sync.idx.b32 	%r13|%p2, %r1, 5, 6175, -1;", [lane // 8 * 8 + 5 for lane in range(32)]),
    # Lanes that would read past the clamp keep their own value.
    "clamp": ("shfl.sync.bfly.b32 	%r13|%p2, %r1, 16, 15, -1;", [lane % 16 for lane in range(32)]),
}


@pytest.mark.parametrize("kind", SHUFFLES)
def test_a_shuffle_reads_the_lane_that_the_isa_says(kind):
    statement, wanted = SHUFFLES[kind]
    assert run(statement + "\n	st.global.u32 	[%rd4], %r13;")[:32].tolist() == wanted


#: The compiler puts a shuffle into both branches that a warp takes: ``shfl.sync`` waits for the same instruction anywhere.
BOTH_BRANCHES = """
	setp.lt.u32 	%p1, %r1, 12;
	@%p1 bra 	$L_low;
	shfl.sync.bfly.b32 	%r13|%p2, %r1, 16, 31, -1;
	add.s32 	%r13, %r13, 100;
	bra.uni 	$L_end;
$L_low:
	{low}
$L_end:
	st.global.u32 	[%rd4], %r13;
"""


def test_a_shuffle_meets_the_same_one_of_another_branch():
    found = run(BOTH_BRANCHES.format(low="shfl.sync.bfly.b32 	%r13|%p2, %r1, 16, 31, -1;"))
    assert found[:32].tolist() == [(lane ^ 16) + 100 * (lane >= 12) for lane in range(32)]


DEADLOCKS = {
    "a shuffle of another kind": BOTH_BRANCHES.format(low="shfl.sync.idx.b32 	%r13|%p2, %r1, 16, 31, -1;"),
    "threads that end": BOTH_BRANCHES.format(low="ret;"),
    "a matrix instruction in a branch": BOTH_BRANCHES.format(
        low="movmatrix.sync.aligned.m8n8.trans.b16 %r13, %r1;"
    ).replace("shfl.sync.bfly.b32 	%r13|%p2, %r1, 16, 31, -1;", "movmatrix.sync.aligned.m8n8.trans.b16 %r13, %r1;"),
    "a barrier in a branch": BOTH_BRANCHES.format(low="bar.sync 	0;"),
}


@pytest.mark.parametrize("mistake", DEADLOCKS)
def test_threads_that_miss_each_other_are_reported(mistake):
    with pytest.raises(Fault, match="deadlock: of 32 threads"):
        run(DEADLOCKS[mistake])


#: The thread of the other end of the block wrote these bytes.
REVERSED = """
	st.shared.u32 	[%r4], %r1;
	{barrier}
	sub.s32 	%r11, 63, %r1;
	shl.b32 	%r12, %r11, 4;
	add.s32 	%r13, %r2, %r12;
	ld.shared.u32 	%r14, [%r13];
	st.global.u32 	[%rd4], %r14;
"""


def test_a_missing_barrier_shows_where_warps_run_one_after_another():
    given = dict(threads=64, shared_bytes=1024, apart=True)
    wanted = list(range(63, -1, -1))
    assert run(REVERSED.format(barrier="bar.sync 	0;"), **given)[:64].tolist() == wanted
    assert run(REVERSED.format(barrier=""), **given)[:64].tolist() == [2**32 - 1] * 32 + wanted[32:]


def test_vectors_parts_and_extended_numbers():
    body = """
	ld.global.v4.u32 	{%r10, %r11, %r12, %r13}, [%rd7];
	st.shared.v4.u32 	[%r4], {%r13, %r12, %r11, %r10};
	ld.shared.v2.u32 	{%r14, %r15}, [%r4+8];
	mov.b64 	%rd10, {%r14, %r15};
	shr.u64 	%rd11, %rd10, 32;
	cvt.u32.u64 	%r16, %rd11;
	mov.b32 	{%rs1, %rs2}, %r16;
	mov.b32 	%r17, {%rs2, %rs1};
	st.global.u32 	[%rd4], %r17;
	ld.global.s32 	%rd12, [%rd5];
	setp.lt.s64 	%p1, %rd12, 0;
	selp.b32 	%r18, 1, 0, %p1;
	st.global.u32 	[%rd4+128], %r18;
	mov.u64 	%rd13, items;
	add.s64 	%rd13, %rd13, %rd6;
	cvta.shared.u64 	%rd14, %rd13;
	st.u32 	[%rd14], %r1;
	ld.shared.u32 	%r19, [%r4];
	st.u32 	[%rd4+256], %r19;
"""
    given = np.random.default_rng(0).integers(0, 2**32, 128, np.uint32)
    found, first = run(body, given, shared_bytes=512), given[::4]
    assert (found[:32] == (first << np.uint32(16) | first >> np.uint32(16))).all()
    assert (found[32:64] == (given[:32] >> np.uint32(31))).all()
    assert (found[64:96] == np.arange(32)).all()


FAULTS = {
    "outside every array": (
        "ld.global.u32 	%r10, [%rd4+512];",
        "thread 0: an access of 4 bytes outside every array",
    ),
    "a part outside": ("ld.global.u32 	%r10, [%rd4+388];", "thread 31: an access of 4 bytes outside every array"),
    "before the array": ("st.global.u32 	[%rd4+-8], %r1;", "thread 0: an access of 4 bytes outside every array"),
    "a wide access at a wrong address": ("ld.global.v2.u32 	{%r10, %r11}, [%rd4];", "thread 1: .* no multiple of 8"),
    "outside shared memory": (
        "ld.shared.u32 	%r10, [%r4+16];",
        "thread 31: an access outside the block's shared memory",
    ),
    "a null pointer to shared memory": (
        "ld.shared.u32 	%r10, [%r3];",
        "thread 0: an access outside the block's shared",
    ),
    "an unknown instruction": ("brev.b32 	%r10, %r1;", r"line 27: the machine does not know brev.b32 	%r10, %r1"),
    "an unknown modifier": ("add.sat.s32 	%r10, %r1, 1;", "does not know add.sat.s32"),
    "a register of another width": ("add.s32 	%r10, %r1, %rd1;", "does not know add.s32"),
    "a guard": ("@%p1 add.s32 	%r10, %r1, 1;", "does not know @%p1 add.s32"),
    "a part of a warp": ("shfl.sync.idx.b32 	%r10|%p1, %r1, 0, 31, 1;", "a shuffle of a part of a warp"),
    "too many bytes": (
        "cp.async.cg.shared.global [%r4], [%rd7], 16, %r1;",
        "thread 17: cp.async reads 17|31 bytes of 16",
    ),
}


@pytest.mark.parametrize("mistake", FAULTS)
def test_what_a_gpu_does_not_allow_is_a_fault(mistake):
    statement, message = FAULTS[mistake]
    with pytest.raises(Fault, match=message):
        run(statement, shared_bytes=512)


#: Three groups of a copy each: the bytes of ``given``, 16, 8 and 0 of them.
COPIES = """
	cp.async.cg.shared.global [%r4], [%rd7], 16;
	cp.async.commit_group;
	cp.async.cg.shared.global [%r4+512], [%rd7], 16, 8;
	cp.async.commit_group;
	cp.async.cg.shared.global [%r4+1024], [%rd9], 16, 0;
	cp.async.commit_group;
	cp.async.wait_group {pending};
	ld.shared.u32 	%r10, [%r4+{place}];
	st.global.u32 	[%rd4], %r10;
"""


@pytest.mark.parametrize(("pending", "last"), [(2, 0), (1, 1), (0, 2)])
def test_copies_arrive_when_their_group_is_awaited(pending, last):
    """The second one has zeros from its third word on, and the third, with no valid source, everywhere."""
    for group, wanted in enumerate([np.arange(3, 128, 4), 0, 0]):
        body = COPIES.format(pending=pending, place=512 * group + 12)
        if group <= last:
            assert (run(body, shared_bytes=1536)[:32] == wanted).all()
        else:
            with pytest.raises(Fault, match="thread 0: an access to bytes that cp.async has in flight, in line 35"):
                run(body, shared_bytes=1536)


def test_a_copy_into_bytes_in_flight_is_a_fault():
    statement = "cp.async.cg.shared.global [%r4], [%rd7], 16;"
    with pytest.raises(Fault, match="in flight"):
        run(statement + "\n" + statement, shared_bytes=512)


def test_text_that_is_no_kernel_is_refused():
    with pytest.raises(ValueError, match="no entry other"):
        parsed(KERNEL.format(body=""), "other")
    with pytest.raises(ValueError, match="line 27: no statement: add.s32 %r1"):
        parsed(KERNEL.format(body="add.s32 %r1"), "test")
