"""Instructions as functions of threads and a mask. An opcode or operand that is not known is refused with its line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import fragments
from .memory import SHARED_BASE, SHARED_WINDOW, Fault
from .operations import OPERATIONS, TYPES
from .text import Instruction, Operand, Program

if TYPE_CHECKING:
    from .machine import Step, Threads

Source = Callable[["Threads"], np.ndarray]
_ADDRESS = re.compile(r"\[(?P<base>[%\w$]+)(?:\+(?P<offset>-?\d+))?\]")
_MEMORY = re.compile(
    r"(?P<kind>ld|st)(?P<space>\.global|\.shared|\.param|)(?:\.L1::no_allocate)?(?:\.v(?P<count>[24]))?\.(?P<type>\w+)"
)
_SPECIAL = re.compile(r"%(?P<name>tid|ntid|ctaid|nctaid)\.(?P<axis>[xyz])")
_COPY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Code:
    """A decoded kernel.

    Attributes:
        steps: One per instruction.
        ends: For each instruction the first one after it that a jump may reach, or that follows a jump.
        register_types: numpy's type of the bits of each register.
    """

    steps: tuple[Step, ...]
    ends: tuple[int, ...]
    register_types: tuple[type[np.generic], ...]


def decoded(program: Program, parameters: Mapping[str, np.ndarray], threads: int) -> Code:
    """The kernel with these arguments, for so many threads at once.

    Raises:
        Fault: An opcode or operand is not known.
    """
    decoder = _Decoder(program, parameters, threads)
    steps = []
    for number, instruction in enumerate(program.instructions):
        try:
            steps.append(decoder.step(instruction, number))
        except (KeyError, ValueError) as error:
            raise Fault(f"line {instruction.line}: the machine does not know {instruction.text}") from error
    starts = {*program.labels.values(), len(steps)}
    starts |= {number + 1 for number, one in enumerate(program.instructions) if one.opcode.startswith("bra")}
    ends, end = [], len(steps)
    for number in reversed(range(len(steps))):
        end = number + 1 if number + 1 in starts else end
        ends.append(end)
    return Code(tuple(steps), tuple(reversed(ends)), tuple(decoder.register_types))


class _Decoder:
    def __init__(self, program: Program, parameters: Mapping[str, np.ndarray], threads: int) -> None:
        self._program, self._parameters, self._threads = program, parameters, threads
        self._registers: dict[str, int] = {}
        self.register_types: list[type[np.generic]] = []

    def step(self, instruction: Instruction, number: int) -> Step:
        opcode, operands = instruction.opcode, instruction.operands
        if opcode in ("bra", "bra.uni"):
            return self._branch(instruction, number)
        if instruction.guard:
            raise ValueError("a guard")
        if opcode == "ret":
            return _end
        if opcode in ("mov.b32", "mov.b64") and any(isinstance(one, tuple) for one in operands):
            return self._move_parts(*operands)
        if opcode in OPERATIONS:
            return self._compute(opcode, *operands)
        if found := _MEMORY.fullmatch(opcode):
            return self._memory(found, *operands)
        prefix, _, rest = opcode.partition(".")
        return {
            "cvta": self._convert_address,
            "bar": self._barrier,
            "cp": self._copy,
            "shfl": self._shuffle,
            "atom": self._increment,
            "membar": self._fence,
            "ldmatrix": self._load_matrices,
            "movmatrix": self._transpose,
            "mma": self._multiply,
        }[prefix](rest, number, *operands)

    # Operands.

    def _register(self, name: Operand) -> int:
        """Number of a register."""
        if not isinstance(name, str):
            raise ValueError(name)
        if name not in self._registers:
            kind = self._program.register_types[name.rstrip("0123456789")]
            self.register_types.append(np.bool_ if kind == "pred" else TYPES["b" + kind[1:]])
            self._registers[name] = len(self._registers)
        return self._registers[name]

    def _source(self, operand: Operand, kind: str) -> Source:
        """Gives an operand of a type of PTX."""
        wanted = np.dtype(TYPES[kind])
        if not isinstance(operand, str):
            raise ValueError(operand)
        if found := _SPECIAL.fullmatch(operand):
            return _special(found["name"], "xyz".index(found["axis"]), wanted)
        if operand.startswith("%"):
            register = self._register(operand)
            if np.dtype(self.register_types[register]).itemsize != wanted.itemsize:
                raise ValueError(operand)
            if self.register_types[register] == wanted:
                return lambda threads: threads.registers[register]
            return lambda threads: threads.registers[register].view(wanted)
        constant = np.full(self._threads, self._constant(operand, wanted))
        return lambda threads: constant

    def _constant(self, text: str, wanted: np.dtype) -> np.generic:
        if text == self._program.dynamic_shared:
            return wanted.type(SHARED_BASE)
        bits = int(text[2:], 16) if text.startswith("0f") else int(text, 0) % (1 << 8 * wanted.itemsize)
        return np.array(bits, f"u{wanted.itemsize}").view(wanted)[()]

    def _address(self, operand: Operand, kind: str | None = None) -> Source:
        """The address of ``[register+offset]``; its register has the type ``kind``, or any."""
        found = _ADDRESS.fullmatch(operand) if isinstance(operand, str) else None
        if not found:
            raise ValueError(operand)
        base, offset = found["base"], int(found["offset"] or 0)
        if not base.startswith("%"):
            base_kind = "u32"
        else:
            base_kind = {4: "u32", 8: "u64"}[np.dtype(self.register_types[self._register(base)]).itemsize]
        if kind not in (None, base_kind):
            raise ValueError(operand)
        source, moved = self._source(base, base_kind), np.int64(offset)
        if not offset:
            return source
        return lambda threads: (source(threads).astype(np.int64) + moved).astype(np.uint64)

    # Instructions of single threads.

    def _compute(self, opcode: str, target: Operand, *operands: Operand) -> Step:
        operation = OPERATIONS[opcode]
        register, function = self._register(target), operation.function
        kinds = zip(operands, operation.operands, strict=True)
        sources = [self._source(operand, kind) for operand, kind in kinds]
        if np.dtype(self.register_types[register]).itemsize != np.dtype(TYPES[operation.result]).itemsize:
            raise ValueError(target)
        if len(sources) == 2:
            left, right = sources
            return lambda threads, mask: threads.write(register, function(left(threads), right(threads)), mask)
        return lambda threads, mask: threads.write(register, function(*(one(threads) for one in sources)), mask)

    def _move_parts(self, target: Operand, source: Operand) -> Step:
        """``mov.b32 d, {a, b}`` and ``mov.b32 {d, e}, a``: the first part is the low one."""
        if isinstance(target, tuple):
            parts, (low, high) = self._source(source, self._kind(source)), map(self._register, target)
            half = self.register_types[low]

            def split(threads: Threads, mask: np.ndarray | None) -> None:
                both = np.ascontiguousarray(parts(threads)).view(half)
                threads.write(low, both[0::2], mask)
                threads.write(high, both[1::2], mask)

            return split
        register, (first, second) = self._register(target), (self._source(one, self._half(target)) for one in source)
        whole = self.register_types[register]
        return lambda threads, mask: threads.write(
            register, np.stack([first(threads), second(threads)], axis=1).view(whole)[:, 0], mask
        )

    def _kind(self, register: Operand) -> str:
        return f"b{8 * np.dtype(self.register_types[self._register(register)]).itemsize}"

    def _half(self, register: Operand) -> str:
        return f"b{4 * np.dtype(self.register_types[self._register(register)]).itemsize}"

    def _memory(self, found: re.Match[str], *operands: Operand) -> Step:
        loads, space, count = found["kind"] == "ld", found["space"].removeprefix("."), int(found["count"] or 1)
        item = TYPES[found["type"]]
        address, values = operands if not loads else operands[::-1]
        names = values if isinstance(values, tuple) else (values,)
        if len(names) != count:
            raise ValueError(values)
        if space == "param":
            return self._parameter(address, values, item)
        place = self._address(address, "u64" if space != "shared" else None)
        if not loads:
            sources = [self._source(name, found["type"]) for name in names]

            def store(threads: Threads, mask: np.ndarray | None) -> None:
                given = np.stack([source(threads) for source in sources], axis=1)
                addresses, memory = _reached(threads, space, _active(place(threads), mask))
                memory.store(addresses, _active(given, mask), _active(threads.numbers, mask))

            return store
        registers = [self._register(name) for name in names]
        # A wider register has a number of its own width, extended by the sign or by zeros.
        wide = np.dtype(f"{np.dtype(item).kind}{np.dtype(self.register_types[registers[0]]).itemsize}")
        if wide.itemsize < np.dtype(item).itemsize:
            raise ValueError(names)

        def load(threads: Threads, mask: np.ndarray | None) -> None:
            addresses, memory = _reached(threads, space, _active(place(threads), mask))
            loaded = memory.load(addresses, count, item, _active(threads.numbers, mask))
            loaded = threads.expand(loaded, mask).astype(wide, copy=False)
            for column, register in enumerate(registers):
                threads.write(register, np.ascontiguousarray(loaded[:, column]), mask)

        return load

    def _increment(self, rest: str, number: int, target: Operand, place: Operand, highest: Operand) -> Step:
        """Threads of a block one after the other."""
        if rest != "global.inc.u32":
            raise ValueError(rest)
        register, address, limit = self._register(target), self._address(place, "u64"), self._source(highest, "u32")

        def increment(threads: Threads, mask: np.ndarray | None) -> None:
            addresses, limits = (_active(one(threads), mask) for one in (address, limit))
            before = threads.machine.memory.increment(addresses, limits, _active(threads.numbers, mask))
            threads.write(register, threads.expand(before, mask), mask)

        return increment

    def _fence(self, rest: str, number: int) -> Step:
        if rest != "gl":
            raise ValueError(rest)
        return lambda threads, mask: threads.machine.memory.fence(_active(threads.numbers, mask))

    def _parameter(self, address: Operand, target: Operand, item: type[np.generic]) -> Step:
        value = self._parameters[str(address)[1:-1]]
        if value.itemsize != np.dtype(item).itemsize:
            raise ValueError(address)
        register, whole = self._register(target), np.full(self._threads, value)
        return lambda threads, mask: threads.write(register, whole, mask)

    def _convert_address(self, rest: str, number: int, target: Operand, source: Operand) -> Step:
        """Between generic addresses and those of a window. Global addresses are their own generic ones."""
        step = np.uint64({"to.global.u64": 0, "shared.u64": SHARED_WINDOW}[rest])
        register, given = self._register(target), self._source(source, "u64")
        return lambda threads, mask: threads.write(register, given(threads) + step, mask)

    def _branch(self, instruction: Instruction, number: int) -> Step:
        (label,) = instruction.operands
        target = self._program.labels[str(label)]
        if not instruction.guard:

            def jump(threads: Threads, mask: np.ndarray | None) -> bool:
                threads.counters[slice(None) if mask is None else mask] = target
                return True

            return jump
        name, sense = instruction.guard
        source, after = self._source(name, "pred"), number + 1

        def branch(threads: Threads, mask: np.ndarray | None) -> bool:
            counters = np.where(source(threads) == sense, target, after)
            threads.counters = counters if mask is None else np.where(mask, counters, threads.counters)
            return True

        return branch

    # Copies.

    def _copy(self, rest: str, number: int, *operands: Operand) -> Step:
        if rest == "async.commit_group":

            def commit(threads: Threads, mask: np.ndarray | None) -> None:
                threads.groups = threads.groups + (1 if mask is None else mask)

            return commit
        if rest == "async.wait_group":
            pending = int(str(operands[0]))
            return lambda threads, mask: threads.await_groups(pending, mask)
        if rest != "async.cg.shared.global":
            raise ValueError(rest)
        return self._copy_async(*operands)

    def _copy_async(self, to: Operand, source: Operand, size: Operand, given: Operand = "16") -> Step:
        """``given`` bytes are read, and zeros fill the rest."""
        target, origin, count = self._address(to), self._address(source, "u64"), self._source(given, "u32")
        if size != "16":
            raise ValueError(size)

        def copy(threads: Threads, mask: np.ndarray | None) -> None:
            chunks = threads.shared.issue(_active(target(threads), mask))
            addresses, counts = _active(origin(threads), mask), _active(count(threads), mask)
            if (counts > _COPY_BYTES).any():
                raise Fault(f"cp.async reads {counts.max()} bytes of {_COPY_BYTES}", int(np.argmax(counts)))
            data = np.zeros((len(counts), 4), np.uint32)
            read = counts > 0
            data[read] = threads.machine.memory.load(addresses[read], 4, np.uint32)
            data.view(np.uint8)[np.arange(_COPY_BYTES) >= counts[:, None]] = 0
            threads.issue(chunks, data, mask)

        return copy

    # Instructions of whole warps.

    def _barrier(self, rest: str, number: int, operand: Operand) -> Step:
        if (rest, operand) == ("warp.sync", "-1"):
            return lambda threads, mask: threads.meet(rest, number, mask)
        if (rest, operand) != ("sync", "0"):
            raise ValueError(operand)

        def arrive(threads: Threads, mask: np.ndarray | None) -> None:
            threads.at_barrier[slice(None) if mask is None else mask] = True

        def wait(threads: Threads, mask: np.ndarray | None) -> bool:
            if not threads.meet(number, number, mask, take=arrive):
                threads.counters[slice(None) if mask is None else mask] = number + 1
            return True

        return wait

    def _warp_step(self, number: int, compute: Callable[[Threads, np.ndarray | None], None]) -> Step:
        """An instruction that is ``.aligned``: all threads of a warp execute the same one."""
        return lambda threads, mask: threads.meet(number, number, mask, take=compute)

    def _shuffle(self, rest: str, number: int, targets: Operand, *operands: Operand) -> Step:
        """The pseudocode of the ISA: ``c`` has the clamp in bits 0-4 and the mask of a segment in bits 8-12."""
        kind = {"sync.bfly.b32": "bfly", "sync.idx.b32": "idx"}[rest]
        value, other, bounds, members = (self._source(operand, "u32") for operand in operands)
        target, _, found = str(targets).partition("|")
        register, valid = self._register(target), self._register(found) if found else None

        def give(threads: Threads, mask: np.ndarray | None) -> None:
            if (_active(members(threads), mask) != 0xFFFFFFFF).any():
                raise Fault("a shuffle of a part of a warp")
            here = slice(None) if mask is None else mask
            for name, source in (("value", value), ("b", other), ("c", bounds)):
                threads.given[name][here] = _active(source(threads), mask)

        def take(threads: Threads, mask: np.ndarray | None) -> None:
            given, b, c = (threads.given[name].reshape(-1, 32) for name in ("value", "b", "c"))
            lane, b, clamp, segment = np.arange(32), b & 0x1F, c & 0x1F, c >> np.uint32(8) & 0x1F
            last = (lane & segment) | (clamp & ~segment & 0x1F)
            source = lane ^ b if kind == "bfly" else (lane & segment) | (b & ~segment & 0x1F)
            within = source <= last
            moved = np.take_along_axis(given, np.where(within, source, lane).astype(np.int64), axis=1)
            threads.write(register, moved.reshape(-1), mask)
            if valid is not None:
                threads.write(valid, within.reshape(-1), mask)

        return lambda threads, mask: threads.meet(rest, number, mask, give, take)

    def _lanes(self, names: Operand, kind: str) -> Source:
        """``[warps, 32, registers]`` of a vector of registers."""
        if not isinstance(names, tuple):
            raise ValueError(names)
        sources = [self._source(name, kind) for name in names]
        return lambda threads: np.stack([source(threads) for source in sources], axis=1).reshape(-1, 32, len(sources))

    def _writer(self, names: Operand) -> Callable[[Threads, np.ndarray, np.ndarray | None], None]:
        registers = [self._register(name) for name in names]

        def write(threads: Threads, values: np.ndarray, mask: np.ndarray | None) -> None:
            flat = values.reshape(-1, len(registers))
            for column, register in enumerate(registers):
                threads.write(register, np.ascontiguousarray(flat[:, column]), mask)

        return write

    def _load_matrices(self, rest: str, number: int, targets: Operand, address: Operand) -> Step:
        shape = "sync.aligned.m8n8.x4.shared.b16", "sync.aligned.m8n8.x4.trans.shared.b16"
        transposed = bool(shape.index(rest))
        write, place = self._writer(targets), self._address(address)
        if len(targets) != 4:
            raise ValueError(targets)

        def load(threads: Threads, mask: np.ndarray | None) -> None:
            words = threads.shared.load(_active(place(threads), mask), 4, np.uint32)
            rows = fragments.scalars(threads.expand(words, mask).reshape(-1, 32, 4))
            write(threads, fragments.ldmatrix(rows, transposed), mask)

        return self._warp_step(number, load)

    def _transpose(self, rest: str, number: int, target: Operand, source: Operand) -> Step:
        if rest != "sync.aligned.m8n8.trans.b16":
            raise ValueError(rest)
        register, given = self._register(target), self._source(source, "b32")

        def transpose(threads: Threads, mask: np.ndarray | None) -> None:
            matrices = fragments.matrix_of(given(threads).reshape(-1, 32))
            threads.write(register, fragments.m8n8(matrices.swapaxes(1, 2)).reshape(-1), mask)

        return self._warp_step(number, transpose)

    def _multiply(self, rest: str, number: int, d: Operand, a: Operand, b: Operand, c: Operand) -> Step:
        found = re.fullmatch(r"sync\.aligned\.m16n8k16\.row\.col\.f32\.(f16|bf16)\.\1\.f32", rest)
        if not found or [len(one) for one in (d, a, b, c)] != [4, 4, 2, 4]:
            raise ValueError(rest)
        write, scalar = self._writer(d), found[1]
        left, right, sums = self._lanes(a, "b32"), self._lanes(b, "b32"), self._lanes(c, "f32")

        def multiply(threads: Threads, mask: np.ndarray | None) -> None:
            product = fragments.mma_m16n8k16(left(threads), right(threads), sums(threads), scalar)
            write(threads, product.view(np.uint32), mask)

        return self._warp_step(number, multiply)


def _end(threads: Threads, mask: np.ndarray | None) -> bool:
    threads.alive[slice(None) if mask is None else mask] = False
    return True


def _active(values: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    return values if mask is None else values[mask]


def _reached(threads: Threads, space: str, addresses: np.ndarray):
    """The addresses within their space, and its memory. A generic address is one of shared memory within its window."""
    if space == "shared":
        return addresses, threads.shared
    window = np.uint64(SHARED_WINDOW)
    if not space and len(addresses) and (addresses >= window).all() and (addresses < window + np.uint64(1 << 24)).all():
        return addresses - window, threads.shared
    return addresses, threads.machine.memory


def _special(name: str, axis: int, wanted: np.dtype) -> Source:
    """``%tid`` and others of a thread."""

    def source(threads: Threads) -> np.ndarray:
        machine, count = threads.machine, len(threads.numbers)
        if name == "tid":
            extents = machine.block
            before = int(np.prod(extents[:axis]))
            return (threads.numbers // before % extents[axis]).astype(wanted)
        value = {"ntid": machine.block, "nctaid": machine.grid, "ctaid": threads.place}[name][axis]
        return np.full(count, value, wanted)

    return source
