"""Weight matrices, and their bytes in the number formats of quantised checkpoints.

A quantised matrix has values of 4 or 8 bits, and scales: one for each group of inputs and each output
(awq and gptq: groups of 128, and the same number of zero points of 4 bits; mxfp4: groups of 32 with an
exponent of 8 bits; nvfp4: groups of 16 with a scale of 8 bits), or one of 32 bits for each output (int8, fp8). Sources: the parameters that vLLM's
``awq.py``, ``gptq.py``, ``fp8.py``, ``mxfp4.py`` and ``modelopt.py`` create; OCP Microscaling Formats 1.0. Not counted: the
order of inputs that gptq keeps for ``desc_act``, and the scales of 128 x 128 tiles of DeepSeek's fp8. Each
is below a thousandth of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..types.errors import SettingError

WEIGHT_BITS = 16


class Matrix(NamedTuple):
    """``copies`` matrices of ``inputs`` x ``outputs``, divided among ``ranks``.

    Attributes:
        by_inputs: Whether ranks divide the inputs; each rank then holds all outputs and their scales.
        copies, used: Number of matrices, and number of them that a token is multiplied with; None is all.
        part: "dense", "expert", "router" or "convolution".
    """

    inputs: int
    outputs: int
    ranks: int = 1
    by_inputs: bool = False
    copies: int = 1
    used: int | None = None
    part: str = "dense"

    @property
    def params(self) -> int:
        """Elements on each rank."""
        return self.copies * self._elements

    @property
    def used_params(self) -> int:
        """Elements on each rank that a token is multiplied with."""
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
        experts_only: Whether only the experts are quantised.
    """

    bits: int
    group: int
    scale_bits: int
    zero_bits: int = 0
    experts_only: bool = False

    def covers(self, matrix: Matrix) -> bool:
        """Whether ``matrix`` is quantised; routers and convolutions never are."""
        return matrix.part == "expert" or (matrix.part == "dense" and not self.experts_only)

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
    "int8": Quantization(bits=8, group=0, scale_bits=32),
    "fp8": Quantization(bits=8, group=0, scale_bits=32),
    "mxfp4": Quantization(bits=4, group=32, scale_bits=8, experts_only=True),
    "nvfp4": Quantization(bits=4, group=16, scale_bits=8),
}


def quantization_of(name: str) -> Quantization:
    """The format of that name.

    Raises:
        SettingError: The name is unknown.
    """
    if name not in QUANTIZATIONS:
        raise SettingError("quantization", name, f"one of {', '.join(QUANTIZATIONS)}")
    return QUANTIZATIONS[name]


def matrix_bytes(matrix: Matrix, quantization: str | None = None) -> int:
    """Bytes of a matrix on each rank: quantised if the format covers it, else in 16 bits."""
    if quantization is not None and (form := quantization_of(quantization)).covers(matrix):
        return form.matrix_bytes(matrix)
    return matrix.params * WEIGHT_BITS // 8
