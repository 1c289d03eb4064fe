"""Weight matrices, and their bytes in the number formats of quantised checkpoints.

A quantised matrix has values of 4 or 8 bits, and scales: one for each group of inputs and each output
(awq and gptq: groups of 128, and the same number of zero points of 4 bits; w4a16: groups of 128, w4a16-g32: of 32; mxfp4: groups
of 32 with an exponent of 8 bits, and so has mxfp8; nvfp4: groups of 16 with a scale of 8 bits), or one of 32 bits for each output (int8, fp8).
Sources: the parameters that vLLM's ``awq.py``, ``gptq.py``, ``fp8.py``, ``mxfp4.py``, ``modelopt.py`` and
``compressed_tensors`` create; OCP Microscaling Formats 1.0. Not counted: the
order of inputs that gptq keeps for ``desc_act``, and the scales of 128 x 128 tiles of DeepSeek's fp8. Each
is below a thousandth of the weights.

A checkpoint may quantise some parts of a model and not others, or each in a format of its own. Such a format has the parts in
its name:

    nvfp4                                       mixers, MLPs, shared and routed experts
    nvfp4[expert]                               routed experts only; the rest has 16 bits
    fp8[mixer]+nvfp4[mlp,shared,expert,head]    Qwen3.6 of NVIDIA
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from ..types.errors import SettingError

WEIGHT_BITS = 16
#: Parts of a model that a checkpoint may quantise: projections of attention and of states, MLPs, shared experts, routed experts
#: and the output head.
PARTS = ("mixer", "mlp", "shared", "expert", "head")
_LAYERS = PARTS[:-1]


class Matrix(NamedTuple):
    """``copies`` matrices of ``inputs`` x ``outputs``, divided among ``ranks``.

    Attributes:
        by_inputs: Whether ranks divide the inputs; each rank then holds all outputs and their scales.
        copies, used: Number of matrices, and number of them that a token is multiplied with; None is all.
        part: One of ``PARTS``, or "router", "convolution" or "indexer", which are never quantised, or "plain", which this layer's is not.
    """

    inputs: int
    outputs: int
    ranks: int = 1
    by_inputs: bool = False
    copies: int = 1
    used: int | None = None
    part: str = "mlp"

    @property
    def params(self) -> int:
        """Elements on each rank."""
        return self.copies * self._elements

    @property
    def used_params(self) -> int:
        """Elements on each rank that one token is multiplied with: of experts, those that it is routed to."""
        return (self.copies if self.used is None else self.used) * self._elements

    @property
    def _elements(self) -> int:
        return self.inputs * self.outputs // self.ranks

    @property
    def outputs_on_rank(self) -> int:
        return self.outputs if self.by_inputs else self.outputs // self.ranks


@dataclass(frozen=True, slots=True)
class Quantization:
    """A number format of weights.

    Attributes:
        bits: Bits per value.
        group: Inputs that share a scale; 0 if all inputs of an output share one.
        scale_bits, zero_bits: Bits of the scale and of the zero point of a group.
        parts: The parts that it quantises where a checkpoint names none.
    """

    bits: int
    group: int
    scale_bits: int
    zero_bits: int = 0
    parts: tuple[str, ...] = _LAYERS

    def matrix_bytes(self, matrix: Matrix) -> int:
        """Bytes on each rank of a quantised matrix."""
        if self.group:
            scales = -(-matrix.inputs // self.group) * matrix.outputs // matrix.ranks
        else:
            scales = matrix.outputs_on_rank
        beside = matrix.copies * scales * (self.scale_bits + self.zero_bits)
        return -(-(matrix.params * self.bits + beside) // 8)


QUANTIZATIONS = {
    "awq": Quantization(bits=4, group=128, scale_bits=16, zero_bits=4),
    "gptq": Quantization(bits=4, group=128, scale_bits=16, zero_bits=4),
    "w4a16": Quantization(bits=4, group=128, scale_bits=16),
    "w4a16-g32": Quantization(bits=4, group=32, scale_bits=16),
    "int8": Quantization(bits=8, group=0, scale_bits=32),
    "fp8": Quantization(bits=8, group=0, scale_bits=32),
    "mxfp4": Quantization(bits=4, group=32, scale_bits=8, parts=("expert",)),
    "mxfp8": Quantization(bits=8, group=32, scale_bits=8),
    "nvfp4": Quantization(bits=4, group=16, scale_bits=8),
}
_TERM = re.compile(r"([\w-]+)\[([\w,]+)\]")


@cache
def formats_by_part(name: str) -> Mapping[str, str]:
    """The format of each part that a checkpoint's format quantises.

    Args:
        name: One of ``QUANTIZATIONS``, or formats with their parts; the module docstring has examples.

    Raises:
        SettingError: The name is unknown.
    """
    if name in QUANTIZATIONS:
        return dict.fromkeys(QUANTIZATIONS[name].parts, name)
    found: dict[str, str] = {}
    for term in name.split("+"):
        match = _TERM.fullmatch(term)
        if match is None or match[1] not in QUANTIZATIONS or not set(match[2].split(",")) <= set(PARTS):
            raise SettingError("quantization", name, f"one of {', '.join(QUANTIZATIONS)}")
        found |= dict.fromkeys(match[2].split(","), match[1])
    return found


def quantization_name(formats: Mapping[str, str]) -> str | None:
    """The name of a checkpoint's format, from the format of each part that it quantises; None if it quantises none."""
    parts = {form: tuple(part for part in PARTS if formats.get(part) == form) for form in formats.values()}
    if len(parts) == 1 and (alone := next(iter(parts))) in QUANTIZATIONS and QUANTIZATIONS[alone].parts == parts[alone]:
        return alone
    return "+".join(f"{form}[{','.join(parts[form])}]" for form in sorted(parts)) or None


def format_of(matrix: Matrix, quantization: str | None) -> str | None:
    """The number format of a matrix in a checkpoint: one of ``QUANTIZATIONS``, or None for 16 bits."""
    return None if quantization is None else formats_by_part(quantization).get(matrix.part)


def value_bytes(matrix: Matrix, quantization: str | None = None) -> int:
    """Bytes of a matrix on each rank without its scales, which are a tensor of their own."""
    form = format_of(matrix, quantization)
    return matrix.params * (WEIGHT_BITS if form is None else QUANTIZATIONS[form].bits) // 8


def matrix_bytes(matrix: Matrix, quantization: str | None = None) -> int:
    """Bytes of a matrix on each rank: quantised if the format covers it, else in 16 bits."""
    form = format_of(matrix, quantization)
    return matrix.params * WEIGHT_BITS // 8 if form is None else QUANTIZATIONS[form].matrix_bytes(matrix)
