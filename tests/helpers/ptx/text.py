"""PTX as text: the parameters, registers, labels and instructions of one kernel.

NVRTC writes one statement a line. Inline assembly may put several in a line, or a block of its own: ``{ cvt.f32.f16 %f1, %rs1;}``.
A block may declare a register: ``{ .reg .b16 tmp; mov.b32 {tmp, %rs2}, %r1; }``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Several registers in braces, or one operand as it is written.
Operand = str | tuple[str, ...]

_REGISTERS = re.compile(r"\.reg\s+\.(?P<type>\w+)\s+(?P<prefix>%\w+?)<\d+>;")
_OF_BLOCK = re.compile(r"\.reg\s+\.(?P<type>\w+)\s+(?P<name>[a-z]+);")
_PARAMETER = re.compile(r"\.param\s+\.(?P<type>\w+)(?:\s+\.ptr)?(?:\s+\.\w+\s+\d+)?\s+(?P<name>[\w$]+)")
_DYNAMIC_SHARED = re.compile(r"^\.extern \.shared \.align \d+ \.b8 (?P<name>[\w$]+)\[\];", re.MULTILINE)
_STATEMENT = re.compile(r"(?:@(?P<sense>!?)(?P<guard>%\w+)\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^]]*\]|[^,\s][^,]*")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        line: Its line in the PTX, from 1.
        text: The statement.
        guard: Predicate register and the value for which the instruction is executed; None without a guard.
        opcode: With all modifiers: ``add.s32``.
        operands: In the order of the text.
    """

    line: int
    text: str
    guard: tuple[str, bool] | None
    opcode: str
    operands: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """One kernel.

    Attributes:
        parameter_types: Types of the parameters by name, in order.
        register_types: Type of the registers with a prefix: ``%rd`` has ``b64``.
        instructions: In order.
        labels: Number of the instruction that a label precedes.
        dynamic_shared: Name of the block's dynamic shared memory, if it has any.
    """

    parameter_types: dict[str, str]
    register_types: dict[str, str]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    dynamic_shared: str | None


def parsed(ptx: str, entry: str) -> Program:
    """The kernel with the mangled name ``entry``.

    Raises:
        ValueError: There is no such kernel, or a line is no statement.
    """
    head = re.search(rf"^\.(?:visible|weak) \.entry {re.escape(entry)}\(", ptx, re.MULTILINE)
    if not head:
        raise ValueError(f"no entry {entry}")
    begin, end = ptx.index("\n{", head.end()), ptx.index("\n}", head.end())
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    types: dict[str, str] = {}
    first = ptx.count("\n", 0, begin) + 2
    for number, line in enumerate(ptx[begin + 1 : end].split("\n"), start=first):
        text = line.partition("//")[0].strip()
        if found := _REGISTERS.fullmatch(text):
            types[found["prefix"]] = found["type"]
        elif text.endswith(":"):
            labels[text[:-1]] = len(instructions)
        elif not text.startswith("."):
            for found in _OF_BLOCK.finditer(text):
                types[found["name"]] = found["type"]
            text = _OF_BLOCK.sub("", text)
            instructions += _statements(text, number)
    shared = _DYNAMIC_SHARED.search(ptx)
    parameters = {found["name"]: found["type"] for found in _PARAMETER.finditer(ptx[head.end() : begin])}
    return Program(parameters, types, tuple(instructions), labels, shared and shared["name"])


def _statements(text: str, line: int) -> list[Instruction]:
    """The instructions of a line, which has none if it is a brace or empty."""
    block = re.fullmatch(r"\{(.*;)\s*\}", text)
    *statements, rest = (block[1] if block else text).split(";")
    if rest.strip() not in ("", "{", "}"):
        raise ValueError(f"line {line}: no statement: {text}")
    found = []
    for statement in filter(None, map(str.strip, statements)):
        match = _STATEMENT.fullmatch(statement)
        if not match:
            raise ValueError(f"line {line}: no statement: {text}")
        guard = (match["guard"], not match["sense"]) if match["guard"] else None
        operands = tuple(map(_operand, _OPERAND.findall(match["operands"])))
        found.append(Instruction(line, statement, guard, match["opcode"], operands))
    return found


def _operand(text: str) -> Operand:
    text = text.strip()
    return tuple(one.strip() for one in text[1:-1].split(",")) if text.startswith("{") else text
