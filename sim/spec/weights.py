"""Weights of a model: parameters, bytes on a rank, and bytes that a step reads.

Tensor-parallel ranks divide the matrices; routed experts are divided as ``ExpertRanks`` says, by default like all
matrices. Every rank holds all vectors (biases, norms), routers,
down projections to a latent vector and the position table. ``states.py`` has the division of state mixers. A
pipeline stage holds its layers; the first stage also holds the embedding and a vision encoder, and the last the output head, which is a
copy of the embedding if the two are tied. Blocks that layers share (``shared_blocks.py``) are held once, and read by each layer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from ..types.errors import SettingError
from .attention import Span
from .deployment import ExpertRanks, stages
from .matrix import WEIGHT_BITS, Matrix, matrix_bytes

if TYPE_CHECKING:
    from .shape import ModelSpec


def weights_format(model: ModelSpec, given: str | None = None) -> str | None:
    """The number format of a model's weights: the given one, or the checkpoint's; None is 16 bits.

    Raises:
        SettingError: None is given, and the checkpoint's name has a format that its files do not have.
    """
    if given is None and model.named_format is not None:
        remedy = (
            f"{model.name} says {model.named_format} by its name, and has neither quantization_config in config.json nor"
            " hf_quant_config.json: give one of them, or --quantization (awq, gptq, int8, fp8, nvfp4); if its weights have 16 bits,"
            ' "quantization_config": null'
        )
        raise SettingError("quantization", None, remedy)
    return given or model.quantization


def layer_matrices(
    model: ModelSpec, layer: int, tensor_parallel: int = 1, expert_ranks: ExpertRanks | None = None
) -> tuple[Matrix, ...]:
    """The matrices of one layer: attention or state mixer, then its MLP, or its router and experts.

    Args:
        expert_ranks: Division of the routed experts; None divides them like all matrices.
    """
    found = _all_matrices(model, layer, tensor_parallel, expert_ranks)
    if not model.unquantized:
        return found
    return tuple(each._replace(part="plain") if (each.part, layer) in model.unquantized else each for each in found)


def _all_matrices(
    model: ModelSpec, layer: int, tensor_parallel: int, expert_ranks: ExpertRanks | None
) -> tuple[Matrix, ...]:
    mixer = mixer_matrices(model, layer, tensor_parallel) + model.call_matrices(layer, tensor_parallel)
    experts = model.experts
    if experts is None or layer not in experts.layers:
        return mixer + (_mlp(model, model.mlp_size(layer), tensor_parallel) if model.has_mlp(layer) else ())
    router = Matrix(model.hidden_size, experts.count + experts.shared_gate, part="router")
    divided = expert_ranks or ExpertRanks(slices=tensor_parallel)
    held = divided.held(experts.count)
    hidden = experts.latent_size or model.hidden_size
    used = min(experts.used, held)
    routed = _mlp(model, experts.intermediate_size, divided.slices, held, used, "expert", hidden)
    if experts.latent_size:
        # vLLM's checkpoints leave the projections to and from the latent vector in 16 bits.
        sizes = (model.hidden_size, experts.latent_size), (experts.latent_size, model.hidden_size)
        routed = (*(Matrix(inputs, outputs, part="router") for inputs, outputs in sizes), *routed)
    shared = _mlp(model, experts.shared_size, tensor_parallel, part="shared") if experts.shared_size else ()
    return (*mixer, router, *routed, *shared)


def _stored_matrices(
    model: ModelSpec, layer: int, tensor_parallel: int, expert_ranks: ExpertRanks | None = None
) -> tuple[Matrix, ...]:
    """As ``layer_matrices``, without those that an earlier layer holds."""
    if model.shares_weights(layer):
        return model.call_matrices(layer, tensor_parallel)
    return layer_matrices(model, layer, tensor_parallel, expert_ranks)


def mixer_matrices(model: ModelSpec, layer: int, ranks: int = 1) -> tuple[Matrix, ...]:
    """The matrices of a layer's attention or states."""
    span = model.span(layer)
    if span.keeps_tokens:
        found = model.attention(ranks, span).matrices
        if model.compressed:
            return found + model.compressed.matrices(layer, model.hidden_size)
        if model.indexer and layer in model.indexer.layers:
            found += model.indexer.matrices(model.hidden_size, model.latent.q_rank if model.latent else 0, ranks)
        return found
    mixer = model.state_mixer(ranks)
    return mixer.matrices(model.hidden_size, ranks) if mixer and span.kind == "state" else ()


def _mlp(
    model: ModelSpec,
    width: int,
    ranks: int,
    copies: int = 1,
    used: int = 1,
    part: str = "mlp",
    hidden_size: int | None = None,
) -> tuple[Matrix, ...]:
    wide, hidden = model.mlp_matrices - 1, hidden_size or model.hidden_size
    return (
        Matrix(hidden, width, ranks, copies=copies * wide, used=used * wide, part=part),
        Matrix(width, hidden, ranks, by_inputs=True, copies=copies, used=used, part=part),
    )


def layer_vector_params(model: ModelSpec, layer: int, used: bool = False, tensor_parallel: int = 1) -> int:
    """Elements of one layer's biases, normalisations, attention sinks and state decays on each rank.

    Args:
        used: Whether to leave out experts that do not compute a given token.
    """
    if model.shares_weights(layer):
        return 0
    return _mixer_vectors(model, layer, tensor_parallel) + _mlp_vectors(model, layer, used) + _norms(model, layer)


def _mixer_vectors(model: ModelSpec, layer: int, ranks: int) -> int:
    span = model.span(layer)
    if model.compressed:
        return model.compressed.vector_params(layer, model.heads_per_rank(ranks))
    if span.keeps_tokens:
        vectors, indexer = _attention_vectors(model, span), model.indexer
        if indexer is None or layer not in indexer.layers:
            return vectors
        # A norm of the key with a bias, or one of queries and one of the key; for a key of several tokens a vector for each.
        return vectors + (2 + (indexer.pool_tokens if indexer.pool_tokens > 1 else 0)) * indexer.head_dim
    return model.mixer.vector_params(model.hidden_size, ranks) if model.mixer and span.kind == "state" else 0


def _attention_vectors(model: ModelSpec, span: Span) -> int:
    if model.latent:
        return model.latent.q_rank + model.latent.kv_rank
    heads = model.heads(span)
    queries = (1 + model.gated_attention) * heads.num_heads
    qkv = model.qkv_bias * (queries + 2 * heads.num_kv_heads) * heads.head_dim
    output = model.output_bias * model.hidden_size
    has_sinks = model.attention_sinks and (span.kind == "sliding" or not model.window_heads)
    return qkv + output + model.qk_norm * 2 * heads.head_dim + has_sinks * heads.num_heads


def _mlp_vectors(model: ModelSpec, layer: int, used: bool) -> int:
    experts = model.experts
    if experts is None or layer not in experts.layers:
        return model.has_mlp(layer) * model.mlp_bias * _bias(model, model.mlp_size(layer))
    routed = experts.bias * (experts.used if used else experts.count) * _bias(model, experts.intermediate_size)
    shared = model.mlp_bias * _bias(model, experts.shared_size) if experts.shared_size else 0
    return routed + shared + experts.router_bias * experts.count + experts.latent_norm * experts.latent_size


def _bias(model: ModelSpec, width: int) -> int:
    return (model.mlp_matrices - 1) * width + model.hidden_size


def _norms(model: ModelSpec, layer: int) -> int:
    norms = model.layer_norms
    if model.mlp_sizes:
        norms = (model.span(layer).kind != "none") + model.has_mlp(layer)
    if model.shared_blocks:
        # The norm of the hidden state and the embedding side by side counts twice.
        norms = 3 if model.span(layer).keeps_tokens else 1
    # Attention residuals: a norm and a projection to one weight, before both parts of a layer.
    residuals = 4 * model.hidden_size if model.residual_layers else 0
    return (
        norms * model.norm_vectors * model.hidden_size
        + residuals
        + 2 * _mixing_params(model.residual_streams, model.hidden_size)
    )


def _mixing_params(streams: int, hidden_size: int) -> int:
    """Elements that compute, from all hidden states, how a part of a layer reads, mixes and writes them; each counts as one."""
    if streams == 1:
        return 0
    mixed = (2 + streams) * streams
    return mixed * (streams * hidden_size + 1) + 3


def _last_vectors(model: ModelSpec) -> int:
    """Elements of the norm before the output head, and of the last attention residual."""
    return (model.norm_vectors + (2 if model.residual_layers else 0)) * model.hidden_size


def num_params(model: ModelSpec, tensor_parallel: int = 1, used: bool = False) -> int:
    """Parameters on each rank; ``used`` leaves out an encoder, and experts that do not compute a given token."""
    layers = sum(
        sum(matrix.used_params if used else matrix.params for matrix in _stored_matrices(model, layer, tensor_parallel))
        + layer_vector_params(model, layer, used, tensor_parallel)
        for layer in range(model.num_layers)
    )
    heads = (1 if model.tied_embeddings else 2) * model.head_params(tensor_parallel)
    if model.encoder and not used:
        layers += model.encoder.params(tensor_parallel)
    if model.values_are_keys:
        attention = model.head_attention(tensor_parallel)
        full = sum(model.span(layer).kind == "full" for layer in range(model.num_layers))
        layers -= full * attention.kv_heads * attention.v_dim * model.hidden_size
    return layers + heads + model.learned_positions * model.hidden_size + _last_vectors(model)


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
            matrix_bytes(matrix, quantization)
            for matrix in _stored_matrices(model, layer, tensor_parallel, expert_ranks)
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
    partition: tuple[int, ...] | None = None,
) -> list[int]:
    """Bytes of the weights on each rank, by pipeline stage; embedding and norms are always 16 bit.

    Args:
        expert_ranks: As for ``layer_matrices``.
        partition: As for ``stages``.

    Raises:
        SettingError: A stage would be empty, or layers of several stages would share weights.
    """
    if model.shared_blocks and pipeline_parallel > 1:
        remedy = (
            f"must be 1 for {model.name}, which shares weights among its layers; vLLM does not divide it into stages"
        )
        raise SettingError("pipeline_parallel", pipeline_parallel, remedy)
    found = []
    for number, layers in enumerate(stages(model.num_layers, pipeline_parallel, partition)):
        first, last = number == 0, number == pipeline_parallel - 1
        params = first * model.head_params(tensor_parallel) + last * _last_vectors(model)
        params += first * model.learned_positions * model.hidden_size
        if first and model.encoder:
            params += model.encoder.params(tensor_parallel)
        total = layers_bytes(model, layers, tensor_parallel, quantization, expert_ranks) + params * WEIGHT_BITS // 8
        if last and not (first and model.tied_embeddings):
            total += head_bytes(model, tensor_parallel, quantization)
        found.append(total)
    return found


def head_bytes(model: ModelSpec, tensor_parallel: int = 1, quantization: str | None = None) -> int:
    """Bytes of the output head on each rank; one that is the word embedding is 16 bit."""
    head = Matrix(model.hidden_size, model.vocab_size, tensor_parallel, part="head")
    return matrix_bytes(head, None if model.tied_embeddings else quantization)
