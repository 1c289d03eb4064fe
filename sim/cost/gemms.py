"""The GEMMs of a layer. Matrices that vLLM multiplies with the same rows in one call are one GEMM."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..spec.deployment import ExpertRanks
from ..spec.matrix import Matrix, format_of, matrix_bytes
from ..spec.shape import Experts, ModelSpec
from ..spec.weights import layer_matrices, mixer_matrices
from . import op_work
from .op_work import ELEMENT_BYTES, Amount, Work


class Gemm(NamedTuple):
    """Matrices that are multiplied in one call; with ``experts`` those of all experts that a rank holds.

    Attributes:
        quantization: Number format of the weights; None is 16 bits.
        expert_ranks: Division of the experts.
    """

    n: int
    k: int
    weight_bytes: int
    quantization: str | None = None
    experts: Experts | None = None
    expert_ranks: ExpertRanks = ExpertRanks()

    def work(self, tokens: np.ndarray) -> Work:
        """For ``tokens`` rows, each of which goes to ``used`` of the experts, evenly and by itself.

        Every engine that shares the experts sends as many.
        """
        if self.experts is None:
            return op_work.gemm(tokens, self.n, self.k, self.weight_bytes)
        share, sent = self.experts.used / self.experts.count, tokens * self.expert_ranks.engines
        rows, reached = sent * self.experts.used / self.expert_ranks.holders, 1 - (1 - share) ** sent
        moved = self.weight_bytes * reached + rows * (self.n + self.k) * ELEMENT_BYTES
        at: dict[str, Amount] = {"m": np.maximum(sent * share, 1), "n": self.n, "k": self.k}
        return Work(2 * rows * self.n * self.k, moved, at=at)


def layer_gemms(
    model: ModelSpec,
    layer: int,
    tensor_parallel: int,
    quantization: str | None,
    expert_ranks: ExpertRanks | None = None,
    in_module: bool = False,
) -> list[Gemm]:
    """The GEMMs of one layer on a rank: Q, K and V together, output, gates and indexers, or the projections of a state, then MLP, or
    router and experts.

    Those of latent attention are left out: they belong to its own operation.

    Args:
        in_module: Whether the projections of attention belong to an operation of the calibration.
    """
    ranks = expert_ranks or ExpertRanks(slices=tensor_parallel)
    matrices = layer_matrices(model, layer, tensor_parallel, ranks)
    projections = len(mixer_matrices(model, layer, tensor_parallel))
    found, mlp = [], matrices[projections:]
    if model.span(layer).kind == "state":
        # The convolution belongs to the state's own operation.
        mixer = [matrix for matrix in matrices[:projections] if matrix.part != "convolution"]
        found = [_gemm((matrix,), quantization) for matrix in mixer]
    elif projections and not (in_module or model.has_vectors):
        mixer = list(matrices[:projections])
        # Query, key and value precede the output projection; gates and indexers follow it.
        output = max(place for place, matrix in enumerate(mixer) if matrix.outputs == model.hidden_size)
        alone = [(matrix,) for matrix in mixer[output:]]
        found = [_gemm(each, quantization) for each in (tuple(mixer[:output]), *alone)]
    for matrix in mlp:
        if matrix.part == "expert" and model.experts is not None:
            each = matrix.copies // -(-model.experts.count // ranks.holders)
            single = _gemm((matrix._replace(copies=each),), quantization)
            held = matrix_bytes(matrix, quantization)
            found.append(single._replace(weight_bytes=held, experts=model.experts, expert_ranks=ranks))
        else:
            found.append(_gemm((matrix,), quantization))
    return found


def _gemm(side_by_side: tuple[Matrix, ...], quantization: str | None) -> Gemm:
    """Matrices that the same rows are multiplied with."""
    outputs = sum(matrix.copies * matrix.outputs_on_rank for matrix in side_by_side)
    inputs = sum(matrix.params for matrix in side_by_side) // outputs
    weight_bytes = sum(matrix_bytes(matrix, quantization) for matrix in side_by_side)
    return Gemm(outputs, inputs, weight_bytes, format_of(side_by_side[0], quantization))
