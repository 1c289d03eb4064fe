"""The instructions of a thread that only compute, by opcode with all modifiers. Operands are arrays over threads.

Semantics are those of the PTX ISA 9.0, "Instructions". Only opcodes and types that NVRTC made of the kernels are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np

from fragmeter.gpu.check import fp8

#: numpy's type of each type of PTX.
TYPES: dict[str, type[np.generic]] = {
    **{f"b{bits}": getattr(np, f"uint{bits}") for bits in (16, 32, 64)},
    **{f"u{bits}": getattr(np, f"uint{bits}") for bits in (16, 32, 64)},
    **{f"s{bits}": getattr(np, f"int{bits}") for bits in (16, 32, 64)},
    "f32": np.float32,
    "pred": np.bool_,
}
SIGNED, UNSIGNED, BITS = (tuple(f"{kind}{bits}" for bits in (16, 32, 64)) for kind in "sub")
INTEGERS = SIGNED + UNSIGNED


@dataclass(frozen=True, slots=True)
class Operation:
    """What an opcode computes.

    Attributes:
        function: Of arrays of ``operands`` types; the result is viewed as ``result``.
        result: Type of the result.
        operands: Types of the operands.
    """

    function: Callable[..., np.ndarray]
    result: str
    operands: tuple[str, ...]


def _table() -> dict[str, Operation]:
    table: dict[str, Operation] = {}

    def same(opcode: str, types: tuple[str, ...], count: int, function: Callable[..., np.ndarray]) -> None:
        """``opcode.type`` with ``count`` operands and a result of that type."""
        for name in types:
            table[f"{opcode}.{name}"] = Operation(function, name, (name,) * count)

    for opcode, function in (("add", np.add), ("sub", np.subtract)):
        same(opcode, (*INTEGERS, "f32"), 2, function)
    same("mul", ("f32",), 2, np.multiply)
    same("mul.lo", INTEGERS, 2, np.multiply)
    same("mad.lo", INTEGERS, 3, lambda a, b, c: a * b + c)
    same("neg", SIGNED, 1, np.negative)
    same("min", INTEGERS, 2, np.minimum)
    same("max", INTEGERS, 2, np.maximum)
    same("max", ("f32",), 2, np.fmax)  # of a NaN and a number it is the number
    same("div", INTEGERS, 2, _quotient)
    same("rem", UNSIGNED, 2, np.remainder)
    same("rem", SIGNED, 2, np.fmod)  # has the sign of the dividend
    for opcode, function in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        same(opcode, (*BITS, "pred"), 2, function)
    same("not", (*BITS, "pred"), 1, np.invert)
    same("mov", tuple(TYPES), 1, lambda a: a)
    same("bfi", ("b32",), 4, _bit_field_insert)
    table["prmt.b32"] = Operation(_permuted, "b32", ("b32",) * 3)
    for kind, (narrow, wide) in product("su", ((16, 32), (32, 64))):
        types = (f"{kind}{narrow}",) * 2
        table[f"mul.wide.{kind}{narrow}"] = Operation(_widened(TYPES[f"{kind}{wide}"]), f"{kind}{wide}", types)
        table[f"mul.hi.{kind}{narrow}"] = Operation(_upper_half(kind, narrow, wide), types[0], types)
    table["mul.hi.u64"] = Operation(_upper_half_64, "u64", ("u64", "u64"))
    for name in BITS:
        table[f"shl.{name}"] = Operation(_shifted(np.left_shift), name, (name, "u32"))
    for name in INTEGERS:
        table[f"shr.{name}"] = Operation(_shifted(np.right_shift), name, (name, "u32"))
    for name in TYPES:
        table[f"selp.{name}"] = Operation(lambda a, b, chosen: np.where(chosen, a, b), name, (name, name, "pred"))
    ordered = {"eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    for (compare, function), name in product(ordered.items(), TYPES):
        table[f"setp.{compare}.{name}"] = Operation(function, "pred", (name, name))
    for name in (*INTEGERS, *BITS):  # of floats `ne` is false if one of them is a NaN
        table[f"setp.ne.{name}"] = Operation(np.not_equal, "pred", (name, name))
    for to, given in (*product(INTEGERS, UNSIGNED), ("s64", "s32"), ("s32", "s16"), ("s64", "s16")):
        table[f"cvt.{to}.{given}"] = Operation(lambda a, to=to: a.astype(TYPES[to]), to, (given,))
    # Registers of 16 bits hold 8 bits with their sign.
    for to, given, held in (("s8", "s32", "s16"), ("s16", "s8", "s16"), ("s32", "s8", "s32")):
        operand = "s16" if (to, given) == ("s16", "s8") else "s32"
        table[f"cvt.{to}.{given}"] = Operation(
            lambda a, held=held: a.astype(np.int8).astype(TYPES[held]), held, (operand,)
        )
    bits_of = np.array([number.bit_count() for number in range(256)], np.uint32)
    table["popc.b32"] = Operation(
        lambda a: bits_of[np.ascontiguousarray(a).view(np.uint8).reshape(-1, 4)].sum(axis=1, dtype=np.uint32),
        "u32",
        ("b32",),
    )
    table |= _of_floats()
    return table


def _of_floats() -> dict[str, Operation]:
    def operation(result: str, count: int, function: Callable[..., np.ndarray]) -> Operation:
        return Operation(function, result, ("f32",) * count)

    return _of_fp8() | {
        # The product is exact in 64 bits; the sum rounds there and once more in 32 bits.
        "fma.rn.f32": operation("f32", 3, lambda a, b, c: (a.astype(float) * b + c).astype(np.float32)),
        "div.rn.f32": operation("f32", 2, np.divide),
        "rcp.rn.f32": operation("f32", 1, lambda a: np.float32(1) / a),
        # Approximations: here they are exact.
        "ex2.approx.ftz.f32": operation("f32", 1, lambda a: _flushed(np.exp2(_flushed(a)))),
        "lg2.approx.ftz.f32": operation("f32", 1, lambda a: _flushed(np.log2(_flushed(a)))),
        "cvt.f32.f16": Operation(lambda a: a.view(np.float16).astype(np.float32), "f32", ("b16",)),
        "cvt.f32.bf16": Operation(lambda a: a.astype(np.uint32) << np.uint32(16), "f32", ("b16",)),
        "cvt.rn.f16.f32": operation("b16", 1, to_half),
        "cvt.rn.bf16.f32": operation("b16", 1, to_bfloat),
        # "For .f16x2 and .bf16x2 the value converted from a is in the upper half of d, the one from b in the lower half."
        "cvt.rn.f16x2.f32": operation("b32", 2, lambda a, b: _halves(to_half(b), to_half(a))),
        "cvt.rn.bf16x2.f32": operation("b32", 2, lambda a, b: _halves(to_bfloat(b), to_bfloat(a))),
    }


def _of_fp8() -> dict[str, Operation]:
    """Conversions of e4m3, and the product of bf16 that stands in for one."""
    numbers = fp8.NUMBERS.astype(np.float16).view(np.uint16)

    def of_bfloats(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        # The product is exact in 64 bits; here the sum is, too.
        low, high = (
            np.float32(x) * y.astype(float) + z for x, y, z in zip(*map(_of_two_bfloats, (a, b, c)), strict=True)
        )
        return _halves(to_bfloat(low.astype(np.float32)), to_bfloat(high.astype(np.float32)))

    return {
        # "For .e4m3x2 the upper 8 bits are converted to the upper 16 bits of d", and likewise in the other direction.
        "cvt.rn.f16x2.e4m3x2": Operation(lambda a: _halves(numbers[a & 255], numbers[a >> 8]), "b32", ("b16",)),
        "cvt.rn.satfinite.e4m3x2.f32": Operation(
            lambda a, b: fp8.encoded(a).astype(np.uint16) << 8 | fp8.encoded(b), "b16", ("f32", "f32")
        ),
        "fma.rn.bf16x2": Operation(of_bfloats, "b32", ("b32",) * 3),
    }


def _of_two_bfloats(pair: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (pair << np.uint32(16)).view(np.float32), (pair & np.uint32(0xFFFF0000)).view(np.float32)


def to_half(values: np.ndarray) -> np.ndarray:
    """The bits of float16, rounded to the nearest even."""
    return values.astype(np.float16).view(np.uint16)


def to_bfloat(values: np.ndarray) -> np.ndarray:
    """The bits of bfloat16, rounded to the nearest even; a NaN becomes 0x7fff."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return np.where(np.isnan(values), 0x7FFF, rounded >> np.uint32(16)).astype(np.uint16)


def _halves(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


def _flushed(values: np.ndarray) -> np.ndarray:
    """Subnormal numbers as zeros of their sign."""
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), values), values)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Rounded toward zero; by zero it is unspecified, and here 0."""
    quotient = np.floor_divide(a, b)
    if a.dtype.kind == "u":
        return quotient
    return quotient + ((quotient < 0) & (quotient * b != a)).astype(a.dtype)


def _widened(wide: type[np.generic]) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    return lambda a, b: a.astype(wide) * b.astype(wide)


def _upper_half(kind: str, narrow: int, wide: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    product_of = _widened(TYPES[f"{kind}{wide}"])
    return lambda a, b: (product_of(a, b) >> narrow).astype(TYPES[f"{kind}{narrow}"])


def _upper_half_64(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    whole = [int(one) * int(other) >> 64 for one, other in zip(a, b, strict=True)]
    return np.array(whole, np.uint64)


def _shifted(shift: np.ufunc) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Shifts by any amount: one of the width or more leaves zeros, or copies of the sign."""

    def shifted(a: np.ndarray, amount: np.ndarray) -> np.ndarray:
        width = 8 * a.itemsize
        within = shift(a, np.minimum(amount, width - 1).astype(a.dtype))
        beyond = np.where(a < 0, -1, 0).astype(a.dtype) if a.dtype.kind == "i" else a.dtype.type(0)
        return np.where(amount < width, within, beyond)

    return shifted


def _bit_field_insert(field: np.ndarray, into: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
    first, count = (one.astype(np.uint64) & np.uint64(0xFF) for one in (position, length))
    first, count = np.minimum(first, np.uint64(32)), np.minimum(count, np.uint64(32))
    mask = (np.uint64(1) << count) - np.uint64(1) << first
    inserted = field.astype(np.uint64) << first & mask | into.astype(np.uint64) & ~mask
    return inserted.astype(np.uint32)


def _permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Each of the lower four nibbles of the selector takes a byte of a (0 to 3) or b (4 to 7), or copies of its sign."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(a)
    for byte in range(4):
        chosen = selector >> np.uint32(4 * byte) & np.uint32(15)
        taken = (both >> (chosen & np.uint32(7)).astype(np.uint64) * np.uint64(8)).astype(np.uint32) & np.uint32(255)
        signs = np.where(taken >> np.uint32(7), np.uint32(255), np.uint32(0))
        result |= np.where(chosen >> np.uint32(3), signs, taken) << np.uint32(8 * byte)
    return result


OPERATIONS = _table()
