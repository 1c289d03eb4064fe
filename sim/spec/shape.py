"""The shape of a transformer, and its bytes per token, per state and of weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..types.errors import SettingError
from .attention import FULL, HeadAttention, Heads, Indexer, KvGroup, Latent, LatentAttention, Span
from .compressed import ROPE_DIM, Compressed, CompressedAttention
from .deployment import dtype_bits, stages
from .encoders import Encoder
from .matrix import Matrix
from .shared_blocks import SharedBlocks
from .states import StateMixer
from .weights import num_params


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a model.

    Attributes:
        count: Routed experts of a layer.
        used: Routed experts that compute a token.
        intermediate_size: Width of one routed expert.
        layers: Layers with experts instead of an MLP.
        shared_size: Total width of the shared experts, which compute every token.
        latent_size: Width of the vector that routed experts compute, to which every rank projects the hidden state; 0 if it is the
            hidden state.
        latent_norm: Whether the output of routed experts is normalised before it is projected back.
        shared_gate: Whether a gate scales the output of the shared experts; it adds one output to the router.
        router_bias: Whether the router has a bias, or a score correction, for each expert.
        bias: Whether the experts' projections have biases.
    """

    count: int
    used: int
    intermediate_size: int
    layers: tuple[int, ...]
    shared_size: int = 0
    latent_size: int = 0
    latent_norm: bool = False
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False


AnyAttention = HeadAttention | LatentAttention | CompressedAttention


class FileWeights(NamedTuple):
    """Bytes of all tensors in a checkpoint's files, and whether some are a drafter's."""

    total_bytes: int
    has_drafter: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model. Its layers keep K and V or a latent vector per token, or a state of fixed size.

    A layer is attention or a state mixer, followed by an MLP or experts. A layer of Nemotron-H is only one of these.

    Attributes:
        num_kv_heads: Heads of K and V: ``num_heads`` (MHA), fewer (GQA) or one (MQA). ``num_heads`` and
            ``num_kv_heads`` are 0 for a model without attention.
        intermediate_size: Width of the MLP; of the widest, if layers differ.
        max_model_len: The longest sequence, prompt and output together, in tokens.
        gated_mlp: Whether the MLP has three matrices (gate, up, down) instead of two.
        tied_embeddings: Whether the output head is the word embedding.
        learned_positions: Rows of the learned position table; 0 without one.
        qkv_bias, output_bias, mlp_bias: Which projections have biases.
        norm_vectors: Vectors per normalisation: 2 for LayerNorm (weight, bias), 1 for RMSNorm.
        qk_norm: Whether queries and keys are normalised per head, with a weight of ``head_dim`` each.
        layer_norms: Normalisations per layer, without those of queries and keys.
        attention_sinks: Whether each head has a sink, one element.
        gated_attention: Whether the query projection also computes a gate of the output, as wide as the queries.
        head_gates: Whether a projection computes a gate for the output of each head.
        spans: Span of each layer; empty if all layers keep all tokens.
        v_head_dim: Width of a head of V; 0 if it is ``head_dim``.
        window_heads: Heads of layers with a window, if other layers have others.
        values_are_keys: Whether K of layers that keep all tokens is also their V: the checkpoint has one matrix, and vLLM loads it
            as both.
        latent: Multi-head latent attention, instead of heads of K and V.
        compressed: Vectors that stand for several tokens beside those of a window (DeepSeek V4), instead of heads of K and V.
        indexer: Choice of the tokens that attention attends to; None is all.
        mixer: State mixer of the layers with span "state", instead of attention.
        residual_layers: Layers of a block of attention residuals (Kimi K3): each part of a layer reads a weighted sum of the outputs of all
            blocks before it, with a norm and a projection to the weights; 0 without.
        residual_streams: Hidden states of a token between layers, which each part of a layer reads and writes mixed (hyper-connections of
            GLM-5.3-Flash); 1 without.
        shared_blocks: Blocks of attention and MLP that the layers with attention share. Other layers have one norm. The layers are in
            vLLM's order, those with attention first.
        mlp_layers: Layers with an MLP; None is all layers without experts.
        mlp_sizes: Width of the MLP of each layer, 0 without one, if layers differ. A layer then has a norm for each of its parts.
        experts: Mixture of experts, instead of the MLP of some layers.
        quantization: Number format of the checkpoint's matrices; None is 16 bit.
        fp8_block: Inputs, and outputs, that share a scale of the checkpoint's fp8; None where it has no blocks.
        unquantized: Parts of layers (``matrix.PARTS`` and the layer) that the checkpoint leaves in 16 bits, where it quantises the part in
            others.
        named_format: Number format of weights that the checkpoint's name has and its files lack; the real one is not known then.
        kv_dtype: Number format of the KV cache that the checkpoint asks for; None is 16 bit.
        encoder: Vision encoder that is loaded beside the text model, if any.
        model_type: ``model_type`` of the configuration; None is unknown. It chooses vLLM's model runner, no bytes.
        file_weights: Size of the checkpoint's files, if they are known.
        assumed: What was taken for granted of a family that is not known, for its reader; None if nothing was.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    gated_mlp: bool
    tied_embeddings: bool = False
    learned_positions: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_vectors: int = 1
    qk_norm: bool = False
    layer_norms: int = 2
    attention_sinks: bool = False
    gated_attention: bool = False
    head_gates: bool = False
    spans: tuple[Span, ...] = ()
    v_head_dim: int = 0
    window_heads: Heads | None = None
    values_are_keys: bool = False
    latent: Latent | None = None
    compressed: Compressed | None = None
    indexer: Indexer | None = None
    mixer: StateMixer | None = None
    residual_layers: int = 0
    residual_streams: int = 1
    shared_blocks: SharedBlocks | None = None
    mlp_layers: tuple[int, ...] | None = None
    mlp_sizes: tuple[int, ...] | None = None
    experts: Experts | None = None
    quantization: str | None = None
    fp8_block: int | None = None
    unquantized: frozenset[tuple[str, int]] = frozenset()
    named_format: str | None = None
    kv_dtype: str | None = None
    encoder: Encoder | None = None
    model_type: str | None = None
    file_weights: FileWeights | None = None
    assumed: str | None = None

    def has_layers_of(self, other: ModelSpec) -> bool:
        """Whether the layers are those of another model; number formats, the longest sequence and an encoder may be others."""
        apart: dict[str, Any] = {
            "name": "", "max_model_len": 0, "quantization": None, "fp8_block": None, "unquantized": frozenset(), "named_format": None,
            "kv_dtype": None, "encoder": None, "model_type": None, "file_weights": None, "assumed": None,
        }  # fmt: skip
        return replace(self, **apart) == replace(other, **apart)

    @property
    def mlp_matrices(self) -> int:
        """Matrices of one MLP: 3 if it is gated, else 2."""
        return 3 if self.gated_mlp else 2

    def span(self, layer: int) -> Span:
        """Span of a layer."""
        return self.spans[layer] if self.spans else FULL

    @property
    def has_vectors(self) -> bool:
        """Whether layers keep one vector for all heads, which every rank holds, instead of heads of K and V."""
        return bool(self.latent or self.compressed)

    @property
    def rotary_dim(self) -> int:
        """Elements of a head with a rotary position."""
        if self.compressed:
            return ROPE_DIM
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def has_page_sizes(self) -> bool:
        """Whether pages of its KV cache have several sizes: with states, other heads in layers with a window, or compressed attention."""
        return bool(self.mixer or self.window_heads or self.compressed)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with attention, which keep tokens."""
        return tuple(layer for layer in range(self.num_layers) if self.span(layer).keeps_tokens)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Layers that keep a state of fixed size."""
        return tuple(layer for layer in range(self.num_layers) if self.span(layer).kind == "state")

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts instead of an MLP."""
        return self.experts is not None and layer in self.experts.layers

    def mlp_size(self, layer: int) -> int:
        """Width of the MLP of a layer; 0 if it has none, or experts."""
        if self.has_experts(layer) or not self.has_mlp(layer):
            return 0
        return self.mlp_sizes[layer] if self.mlp_sizes else self.intermediate_size

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP or experts."""
        if self.mlp_sizes:
            return self.mlp_sizes[layer] > 0
        return self.has_experts(layer) or self.mlp_layers is None or layer in self.mlp_layers

    @property
    def num_mixers(self) -> int:
        """Number of layers with attention or a state mixer."""
        return sum(self.span(layer).kind != "none" for layer in range(self.num_layers))

    @property
    def num_mlps(self) -> int:
        """Number of layers with an MLP or experts."""
        return sum(self.has_mlp(layer) for layer in range(self.num_layers))

    def shares_weights(self, layer: int) -> bool:
        """Whether an earlier layer holds the weights of this layer's block."""
        return self.shared_blocks is not None and layer in self.attention_layers[self.shared_blocks.count :]

    def call_matrices(self, layer: int, tensor_parallel: int = 1) -> tuple[Matrix, ...]:
        """The matrices that a call of a shared block has of its own; none for other layers."""
        if self.shared_blocks is None or not self.span(layer).keeps_tokens:
            return ()
        width = self.num_heads * self.head_dim
        return self.shared_blocks.own_matrices(self.hidden_size, width, self.intermediate_size, tensor_parallel)

    def residual_blocks(self, layer: int) -> int:
        """Blocks of attention residuals that a layer reads; 0 without."""
        return -(-layer // self.residual_layers) if self.residual_layers else 0

    def heads_per_rank(self, tensor_parallel: int = 1) -> int:
        """Query heads on each of ``tensor_parallel`` ranks."""
        if tensor_parallel < 1 or self.num_heads % tensor_parallel:
            remedy = f"must divide the {self.num_heads} heads of {self.name}"
            raise SettingError("tensor_parallel", tensor_parallel, remedy)
        return self.num_heads // tensor_parallel

    def kv_heads_per_rank(self, tensor_parallel: int = 1, span: Span = FULL) -> int:
        """KV heads on each rank in layers of that span. At least one: with more ranks than KV heads, heads are replicated."""
        self.heads_per_rank(tensor_parallel)
        heads = self.heads(span).num_kv_heads
        if not heads:
            return 0
        fewer, more = sorted((heads, tensor_parallel))
        if more % fewer:
            remedy = f"must divide the {heads} KV heads of {self.name}, or be a multiple of them"
            raise SettingError("tensor_parallel", tensor_parallel, remedy)
        return max(1, heads // tensor_parallel)

    def heads(self, span: Span = FULL) -> Heads:
        """The heads of layers with a span."""
        if self.window_heads and span.kind == "sliding":
            return self.window_heads
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim, self.v_head_dim)

    def attention(self, tensor_parallel: int = 1, span: Span = FULL) -> AnyAttention:
        """The attention of one layer with a span as each of ``tensor_parallel`` ranks computes it."""
        if self.compressed:
            heads = self.heads_per_rank(tensor_parallel)
            return CompressedAttention(self.hidden_size, heads, tensor_parallel, self.compressed)
        if self.latent:
            return LatentAttention(self.hidden_size, self.heads_per_rank(tensor_parallel), self.latent)
        return self.head_attention(tensor_parallel, span)

    def head_attention(self, tensor_parallel: int = 1, span: Span = FULL) -> HeadAttention:
        """As ``attention``, for a model that keeps K and V."""
        self.heads_per_rank(tensor_parallel)
        heads = self.heads(span)
        return HeadAttention(
            self.hidden_size,
            heads.num_heads // tensor_parallel,
            self.kv_heads_per_rank(tensor_parallel, span),
            heads.head_dim,
            self.gated_attention,
            heads.v_dim or heads.head_dim,
            2 * self.hidden_size if self.shared_blocks else 0,
            self.head_gates,
        )

    def state_mixer(self, tensor_parallel: int = 1) -> StateMixer | None:
        """The mixer of the layers with a state (Mamba, gated delta net, ...); None for a model without such layers.

        Raises:
            SettingError: ``tensor_parallel`` ranks cannot divide it.
        """
        divisors = self.mixer.divisors if self.mixer else {}
        for what, number in divisors.items():
            if tensor_parallel < 1 or number % tensor_parallel:
                remedy = f"must divide the {number} {what} of the state of {self.name}"
                raise SettingError("tensor_parallel", tensor_parallel, remedy)
        return self.mixer

    def kv_groups(self, layers: Iterable[int] | None = None) -> tuple[KvGroup, ...]:
        """The KV groups of all layers, or of the layers of a pipeline stage, in the order of their first layers.

        Layers with a state form one group. Layers without a cache are in no group.
        """
        groups: dict[Span, list[int]] = {}
        for layer in range(self.num_layers) if layers is None else layers:
            if self.span(layer).kind != "none":
                groups.setdefault(self.span(layer), []).append(layer)
        return tuple(KvGroup(span, tuple(members)) for span, members in groups.items())

    def group_slot_bytes(self, group: KvGroup, dtype: str = "fp16", tensor_parallel: int = 1) -> int:
        """Bytes per token of a KV group on each rank: K and V, or the latent vector and an indexer's key, of all its layers.

        0 for layers with a state: their size does not depend on tokens.
        """
        if not group.span.keeps_tokens:
            return 0
        if self.compressed:
            return self.compressed.slot_bytes(group.layers)
        kept = self.attention(tensor_parallel, group.span).slot_bytes(group.num_layers, dtype)
        if self.indexer:
            kept += len(set(self.indexer.layers).intersection(group.layers)) * self.indexer.slot_bytes
        return kept

    def slot_bytes(self, dtype: str = "fp16", tensor_parallel: int = 1, pipeline_parallel: int = 1) -> int:
        """Bytes per token of all attention layers on each rank, on the stage with most of these layers.

        2 * layers * kv_heads * head_dim * dtype for heads, layers * (kv_rank + rope_dim) * dtype for
        latent vectors, and the keys of indexers. int4 packs two values into a byte; scales are not counted (see ``Deployment``).
        """
        return max(
            sum(self.group_slot_bytes(group, dtype, tensor_parallel) for group in self.kv_groups(stage))
            for stage in stages(self.num_layers, pipeline_parallel)
        )

    def most_attention_layers(self, pipeline_parallel: int = 1) -> int:
        """Number of attention layers of the pipeline stage with most of them."""
        return self._most_layers(self.attention_layers, pipeline_parallel)

    def _most_layers(self, layers: Iterable[int], pipeline_parallel: int) -> int:
        chosen = set(layers)
        return max(len(chosen.intersection(stage)) for stage in stages(self.num_layers, pipeline_parallel))

    def state_bytes(self, dtype: str = "fp16", tensor_parallel: int = 1, pipeline_parallel: int = 1) -> int:
        """Bytes of the state of one sequence in all state layers on each rank, on the stage with most of these layers.

        Args:
            dtype: Number format of the model, as in vLLM; the KV cache may have another.

        Raises:
            SettingError: The ranks cannot divide the heads, groups or channels of the state.
        """
        mixer = self.state_mixer(tensor_parallel)
        if mixer is None:
            return 0
        return self._most_layers(self.state_layers, pipeline_parallel) * mixer.state_bytes(tensor_parallel, dtype)

    def kv_bytes(self, tokens: int, dtype: str = "fp16", tensor_parallel: int = 1, pipeline_parallel: int = 1) -> int:
        """Bytes of the KV cache of ``tokens`` on each rank, on the pipeline stage with the most bytes.

        Layers with a window do not grow beyond it. Bytes are not rounded up to whole blocks; of compressed attention its windows are left out.
        """
        return max(
            sum(
                group.span.held_tokens(tokens) * self.group_slot_bytes(group, dtype, tensor_parallel)
                for group in self.kv_groups(stage)
            )
            for stage in stages(self.num_layers, pipeline_parallel)
        )

    def mlp_width(self, layer: int, tensor_parallel: int = 1) -> int:
        """Elements that the MLP of a layer, or the experts of one token, compute on each rank."""
        width = self.mlp_size(layer)
        if self.experts and layer in self.experts.layers:
            width = self.experts.used * self.experts.intermediate_size + self.experts.shared_size
        return self.mlp_matrices * width // tensor_parallel

    def head_params(self, tensor_parallel: int = 1) -> int:
        """Elements of the word embedding on each rank; an untied output head has the same number."""
        return self.vocab_size * self.hidden_size // tensor_parallel

    @property
    def num_params(self) -> int:
        """Parameters of the whole model, counted as its publisher does."""
        return num_params(self)

    def weight_bytes(self, dtype: str = "fp16", tensor_parallel: int = 1) -> int:
        """Bytes of the weights on each rank. Ranks divide matrices; every rank holds all vectors and positions."""
        return num_params(self, tensor_parallel) * dtype_bits(dtype) // 8


def refuse_states(model: ModelSpec, why: str) -> None:
    """Raise SettingError for a model with state layers; ``why`` names the missing support."""
    if model.mixer:
        raise SettingError("model", model.name, f"has layers with a fixed-size state; {why}")
