"""Weights of a model: parameters, bytes on a rank, and bytes that a step reads.

Tensor-parallel ranks divide the matrices; routed experts are divided as ``ExpertRanks`` says, by default like all
matrices. Every rank holds all vectors (biases, norms), routers,
down projections to a latent vector and the position table. ``states.py`` has the division of state mixers. A
pipeline stage holds its layers; the first stage also holds the embedding, and the last the output head, which is a
copy of the embedding if the two are tied.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from .deployment import ExpertRanks, stages
from .matrix import WEIGHT_BITS, Matrix, matrix_bytes

if TYPE_CHECKING:
    from .shape import ModelSpec


def layer_matrices(
    model: ModelSpec, layer: int, tensor_parallel: int = 1, expert_ranks: ExpertRanks | None = None
) -> tuple[Matrix, ...]:
    """The matrices of one layer: attention or state mixer, then its MLP, or its router and experts.

    Args:
        expert_ranks: Division of the routed experts; None divides them like all matrices.
    """
    mixer = _mixer_matrices(model, layer, tensor_parallel)
    experts = model.experts
    if experts is None or layer not in experts.layers:
        return mixer + (_mlp(model, model.intermediate_size, tensor_parallel) if model.has_mlp(layer) else ())
    router = Matrix(model.hidden_size, experts.count + experts.shared_gate, part="router")
    divided = expert_ranks or ExpertRanks(slices=tensor_parallel)
    held = -(-experts.count // divided.holders)
    routed = _mlp(model, experts.intermediate_size, divided.slices, held, min(experts.used, held), "expert")
    shared = _mlp(model, experts.shared_size, tensor_parallel) if experts.shared_size else ()
    return (*mixer, router, *routed, *shared)


def _mixer_matrices(model: ModelSpec, layer: int, ranks: int) -> tuple[Matrix, ...]:
    span = model.span(layer)
    if span.keeps_tokens:
        return model.attention(ranks).matrices
    mixer = model.state_mixer(ranks)
    return mixer.matrices(model.hidden_size, ranks) if mixer and span.kind == "state" else ()


def _mlp(
    model: ModelSpec, width: int, ranks: int, copies: int = 1, used: int = 1, part: str = "dense"
) -> tuple[Matrix, ...]:
    wide = model.mlp_matrices - 1
    return (
        Matrix(model.hidden_size, width, ranks, copies=copies * wide, used=used * wide, part=part),
        Matrix(width, model.hidden_size, ranks, by_inputs=True, copies=copies, used=used, part=part),
    )


def layer_vector_params(model: ModelSpec, layer: int, used: bool = False, tensor_parallel: int = 1) -> int:
    """Elements of one layer's biases, normalisations, attention sinks and state decays on each rank.

    Args:
        used: Whether to leave out experts that do not compute a given token.
    """
    return _mixer_vectors(model, layer, tensor_parallel) + _mlp_vectors(model, layer, used) + _norms(model)


def _mixer_vectors(model: ModelSpec, layer: int, ranks: int) -> int:
    span = model.span(layer)
    if span.keeps_tokens:
        return _attention_vectors(model)
    return model.mixer.vector_params(model.hidden_size, ranks) if model.mixer and span.kind == "state" else 0


def _attention_vectors(model: ModelSpec) -> int:
    if model.latent:
        return model.latent.q_rank + model.latent.kv_rank
    queries = (1 + model.gated_attention) * model.num_heads
    qkv = model.qkv_bias * (queries + 2 * model.num_kv_heads) * model.head_dim
    output = model.output_bias * model.hidden_size
    return qkv + output + model.qk_norm * 2 * model.head_dim + model.attention_sinks * model.num_heads


def _mlp_vectors(model: ModelSpec, layer: int, used: bool) -> int:
    experts = model.experts
    if experts is None or layer not in experts.layers:
        return model.has_mlp(layer) * model.mlp_bias * _bias(model, model.intermediate_size)
    routed = experts.bias * (experts.used if used else experts.count) * _bias(model, experts.intermediate_size)
    shared = model.mlp_bias * _bias(model, experts.shared_size) if experts.shared_size else 0
    return routed + shared + experts.router_bias * experts.count


def _bias(model: ModelSpec, width: int) -> int:
    return (model.mlp_matrices - 1) * width + model.hidden_size


def _norms(model: ModelSpec) -> int:
    return model.layer_norms * model.norm_vectors * model.hidden_size


def num_params(model: ModelSpec, tensor_parallel: int = 1, used: bool = False) -> int:
    """Parameters on each rank; ``used`` leaves out experts that do not compute a given token."""
    layers = sum(
        sum(matrix.used_params if used else matrix.params for matrix in layer_matrices(model, layer, tensor_parallel))
        + layer_vector_params(model, layer, used, tensor_parallel)
        for layer in range(model.num_layers)
    )
    heads = (1 if model.tied_embeddings else 2) * model.head_params(tensor_parallel)
    return layers + heads + (model.learned_positions + model.norm_vectors) * model.hidden_size


# A search for the longest sequence that fits calls it a hundred times with the same layers.
@lru_cache
def layers_bytes(
    model: ModelSpec,
    layers: range,
    tensor_parallel: int = 1,
    quantization: str | None = None,
    expert_ranks: ExpertRanks | None = None,
) -> int:
    """Bytes of complete layers on each rank, with vectors in 16 bits."""
    return sum(
        sum(
            matrix_bytes(matrix, quantization) for matrix in layer_matrices(model, layer, tensor_parallel, expert_ranks)
        )
        + layer_vector_params(model, layer, tensor_parallel=tensor_parallel) * WEIGHT_BITS // 8
        for layer in layers
    )


def stage_bytes(
    model: ModelSpec,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    quantization: str | None = None,
    expert_ranks: ExpertRanks | None = None,
) -> list[int]:
    """Bytes of the weights on each rank, by pipeline stage; embedding, head and norms are always 16 bit.

    Args:
        expert_ranks: As for ``layer_matrices``.
    """
    found = []
    for number, layers in enumerate(stages(model.num_layers, pipeline_parallel)):
        first, last = number == 0, number == pipeline_parallel - 1
        tables = first + (last and not (first and model.tied_embeddings))
        params = tables * model.head_params(tensor_parallel) + last * model.norm_vectors * model.hidden_size
        params += first * model.learned_positions * model.hidden_size
        found.append(
            layers_bytes(model, layers, tensor_parallel, quantization, expert_ranks) + params * WEIGHT_BITS // 8
        )
    return found


def touched(total: int, used: int, count: int, tokens: int) -> int:
    """Part of ``total``, spread over ``count`` experts, that ``tokens`` tokens read if each goes to ``used`` experts.

    The mean over routings in which tokens draw their experts uniformly and independently:
    ``total * (1 - (1 - used / count) ** tokens)``. Computed in integers, so that all machines give the same value.
    """
    left = total
    for _ in range(tokens):
        if not left:
            break
        left = left * (count - used) // count
    return total - left


def streamed_bytes(model: ModelSpec, tokens: int = 1, tensor_parallel: int = 1, quantization: str | None = None) -> int:
    """Bytes of weights that a step over ``tokens`` tokens reads on each rank, over all pipeline stages.

    Every matrix and the output head are read once; of the experts, only those that compute a token.
    """
    matrices = [matrix for layer in range(model.num_layers) for matrix in layer_matrices(model, layer, tensor_parallel)]
    always = sum(matrix_bytes(matrix, quantization) for matrix in matrices if matrix.part != "expert")
    routed = sum(matrix_bytes(matrix, quantization) for matrix in matrices if matrix.part == "expert")
    if model.experts:
        routed = touched(routed, model.experts.used, model.experts.count, tokens)
    return always + routed + model.head_params(tensor_parallel) * WEIGHT_BITS // 8
