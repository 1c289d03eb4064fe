"""Memory of expert-parallel load balancing (``--enable-eplb``): copies of experts, where experts are, and how they move.

    copies    with N redundant experts each rank holds (experts + N) / ranks of every layer (``ExpertRanks.redundant``)
    maps      of each layer: 8 bytes for each of 1,024 places of an expert, for its number of places, and for each copy
    load      4 bytes for each copy, layer and step of ``window_size``
    buffer    since 0.12 the experts of one layer of a rank, into which others are received
    profile   a dummy rearrangement after the forward: another such buffer, and the largest of its tensors from every rank, which torch
              gathers into one tensor. Not with NIXL, which moves experts since 0.22 where it is installed

A drafter with experts (MTP) has all of that for its own layer. Sources: ``EplbState.add_model`` (before 0.12 ``build``) and
``rearrange_expert_weights_inplace`` of ``distributed/eplb`` in the wheels of 0.10 to 0.33; ``ProcessGroupNCCL::allgather`` of torch. No log
of such a server was found.
"""

from __future__ import annotations

from ..matrix import Matrix, matrix_bytes, value_bytes
from ..shape import ModelSpec
from ..weights import layer_matrices
from .launch import Launch

#: ``MAX_EXPERT_REDUNDANCY`` and one.
_PLACES = 1024
#: The first release that keeps a buffer, and the first in which NIXL moves experts if it is installed.
_FIRST_BUFFER, _FIRST_NIXL = (0, 12), (0, 22)


def kept_bytes(launch: Launch, model: ModelSpec, layers: range) -> int:
    """Bytes of maps, load and buffer on each GPU, for these layers of the model or of its drafter."""
    eplb, experts, balanced = launch.eplb, model.experts, _balanced(model, layers)
    if eplb is None or not eplb.is_enabled or experts is None or not balanced:
        return 0
    copies = experts.count + eplb.num_redundant_experts
    a_layer = 8 * (experts.count * (_PLACES + 1) + copies) + 4 * copies * (1 + eplb.window_size)
    buffer = _rank_bytes(launch, model, balanced[0]) if launch.release.since >= _FIRST_BUFFER else 0
    return len(balanced) * a_layer + buffer


def profile_bytes(launch: Launch, layers: range, bound: int) -> int:
    """Bytes of the dummy rearrangement on each GPU; ``bound`` is that of ``activations.phases``."""
    eplb, model, balanced = launch.eplb, launch.model, _balanced(launch.model, layers)
    if eplb is None or not eplb.is_enabled or not balanced:
        return 0
    maybe_nixl = eplb.communicator is None and launch.release.since >= _FIRST_NIXL and bound == 0
    if maybe_nixl or eplb.communicator == "nixl":
        return 0
    quantization = launch.deployment.quantization
    largest = max(value_bytes(matrix, quantization) for matrix in _expert_matrices(launch, model, balanced[0]))
    return _rank_bytes(launch, model, balanced[0]) + launch.expert_ranks.holders * largest


def _balanced(model: ModelSpec, layers: range) -> list[int]:
    return sorted(set(layers) & set(model.experts.layers)) if model.experts else []


def _expert_matrices(launch: Launch, model: ModelSpec, layer: int) -> list[Matrix]:
    """Gate and up projections, and down projections, of a rank's experts in a layer."""
    matrices = layer_matrices(model, layer, launch.tensor_parallel, launch.expert_ranks)
    return [matrix for matrix in matrices if matrix.part == "expert"]


def _rank_bytes(launch: Launch, model: ModelSpec, layer: int) -> int:
    return sum(
        matrix_bytes(matrix, launch.deployment.quantization) for matrix in _expert_matrices(launch, model, layer)
    )
