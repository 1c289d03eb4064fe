"""The shape of a transformer, and the bytes that follow from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..types.errors import SettingError
from .attention import FULL, HeadAttention, KvGroup, Latent, LatentAttention, Span
from .dtypes import dtype_bits
from .experts import Experts
from .stages import stages
from .states import StateMixer
from .weights import num_params


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model: layers keep K and V or a latent vector of tokens, or a state of fixed size.

    A layer is attention or a state mixer, then an MLP or experts; a layer of Nemotron-H is only one of these.

    Attributes:
        num_kv_heads: Heads of K and V; as many as ``num_heads`` (MHA), fewer (GQA) or one (MQA). All numbers of
            heads are 0 where no layer has attention.
        intermediate_size: Width of the MLP, in layers that have one.
        max_model_len: The longest sequence, prompt and output together, in tokens.
        gated_mlp: The MLP has three matrices (gate, up, down) and not two.
        tied_embeddings: The output head is the word embedding.
        learned_positions: Rows of the learned position table; 0 where positions are rotary.
        qkv_bias, output_bias, mlp_bias: Which projections have biases.
        norm_vectors: Vectors of a normalisation: 2 in LayerNorm (weight, bias), 1 in RMSNorm.
        qk_norm: Queries and keys are normalised a head, with a weight of ``head_dim`` each.
        layer_norms: Normalisations of a layer, those of queries and keys aside.
        attention_sinks: Each head has a sink, one element.
        gated_attention: Queries come with a gate of the output, as wide as they are.
        spans: What each layer keeps; empty where all keep all tokens.
        latent: Multi-head latent attention, in place of heads of K and V.
        mixer: What the layers with span "state" have in place of attention.
        mlp_layers: Layers with an MLP; None is all that have no experts.
        experts: Mixture of experts, in place of the MLP of some layers.
        quantization: Number format in which the checkpoint holds the matrices; None is 16 bit.
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
    spans: tuple[Span, ...] = ()
    latent: Latent | None = None
    mixer: StateMixer | None = None
    mlp_layers: tuple[int, ...] | None = None
    experts: Experts | None = None
    quantization: str | None = None

    @property
    def mlp_matrices(self) -> int:
        """Matrices of one MLP: 3 where it is gated, else 2."""
        return 3 if self.gated_mlp else 2

    def span(self, layer: int) -> Span:
        """What a layer keeps of a sequence."""
        return self.spans[layer] if self.spans else FULL

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers that keep tokens: those with attention."""
        return tuple(layer for layer in range(self.num_layers) if self.span(layer).keeps_tokens)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Layers that keep a state of fixed size."""
        return tuple(layer for layer in range(self.num_layers) if self.span(layer).kind == "state")

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in place of an MLP."""
        return self.experts is not None and layer in self.experts.layers

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP, or experts in its place."""
        return self.has_experts(layer) or self.mlp_layers is None or layer in self.mlp_layers

    @property
    def num_mixers(self) -> int:
        """Layers with attention or a state mixer."""
        return sum(self.span(layer).kind != "none" for layer in range(self.num_layers))

    @property
    def num_mlps(self) -> int:
        """Layers with an MLP or experts."""
        return sum(self.has_mlp(layer) for layer in range(self.num_layers))

    def heads_per_rank(self, tensor_parallel: int = 1) -> int:
        """Query heads on each of ``tensor_parallel`` ranks."""
        if tensor_parallel < 1 or self.num_heads % tensor_parallel:
            remedy = f"must divide the {self.num_heads} heads of {self.name}"
            raise SettingError("tensor_parallel", tensor_parallel, remedy)
        return self.num_heads // tensor_parallel

    def kv_heads_per_rank(self, tensor_parallel: int = 1) -> int:
        """KV heads on each rank: never below one, so that ranks beyond the KV heads hold copies."""
        self.heads_per_rank(tensor_parallel)
        if not self.num_kv_heads:
            return 0
        fewer, more = sorted((self.num_kv_heads, tensor_parallel))
        if more % fewer:
            remedy = f"must divide the {self.num_kv_heads} KV heads of {self.name}, or be a multiple of them"
            raise SettingError("tensor_parallel", tensor_parallel, remedy)
        return max(1, self.num_kv_heads // tensor_parallel)

    def attention(self, tensor_parallel: int = 1) -> HeadAttention | LatentAttention:
        """The attention of one layer as each of ``tensor_parallel`` ranks computes it."""
        if self.latent:
            return LatentAttention(self.hidden_size, self.heads_per_rank(tensor_parallel), self.latent)
        return self.head_attention(tensor_parallel)

    def head_attention(self, tensor_parallel: int = 1) -> HeadAttention:
        """As ``attention``, of a model that keeps K and V."""
        heads = self.heads_per_rank(tensor_parallel)
        kv_heads = self.kv_heads_per_rank(tensor_parallel)
        return HeadAttention(self.hidden_size, heads, kv_heads, self.head_dim, self.gated_attention)

    def state_mixer(self, tensor_parallel: int = 1) -> StateMixer | None:
        """The mixer of the state layers, if ``tensor_parallel`` ranks can divide it; None where there are none."""
        divisors = self.mixer.divisors if self.mixer else {}
        for what, number in divisors.items():
            if tensor_parallel < 1 or number % tensor_parallel:
                remedy = f"must divide the {number} {what} of the state of {self.name}"
                raise SettingError("tensor_parallel", tensor_parallel, remedy)
        return self.mixer

    def kv_groups(self, layers: Iterable[int] | None = None) -> tuple[KvGroup, ...]:
        """The KV groups of all layers, or of some (those of a pipeline stage), in the order of their first one.

        Layers with a state are one of them. Layers that keep nothing are in none.
        """
        groups: dict[Span, list[int]] = {}
        for layer in range(self.num_layers) if layers is None else layers:
            if self.span(layer).kind != "none":
                groups.setdefault(self.span(layer), []).append(layer)
        return tuple(KvGroup(span, tuple(members)) for span, members in groups.items())

    def group_slot_bytes(self, group: KvGroup, dtype: str = "fp16", tensor_parallel: int = 1) -> int:
        """Bytes, on each rank, of one token that a KV group keeps: K and V, or the latent vector, a layer.

        0 of layers with a state, which no token makes larger.
        """
        if not group.span.keeps_tokens:
            return 0
        elements = group.num_layers * self.attention(tensor_parallel).slot_elements
        return elements * dtype_bits(dtype) // 8

    def slot_bytes(self, dtype: str = "fp16", tensor_parallel: int = 1, pipeline_parallel: int = 1) -> int:
        """Bytes, on each rank, of one token that all attention layers keep, on the stage with most of these.

        2 * layers * kv_heads * head_dim * dtype for heads, layers * (kv_rank + rope_dim) * dtype for
        latent vectors. int4 packs two values into a byte; scales are not counted (see ``Deployment``).
        """
        return (
            self.most_attention_layers(pipeline_parallel)
            * self.attention(tensor_parallel).slot_elements
            * dtype_bits(dtype)
            // 8
        )

    def most_attention_layers(self, pipeline_parallel: int = 1) -> int:
        """Attention layers of the pipeline stage that has most of them."""
        return self._most_layers(self.attention_layers, pipeline_parallel)

    def _most_layers(self, layers: Iterable[int], pipeline_parallel: int) -> int:
        chosen = set(layers)
        return max(len(chosen.intersection(stage)) for stage in stages(self.num_layers, pipeline_parallel))

    def state_bytes(self, dtype: str = "fp16", tensor_parallel: int = 1, pipeline_parallel: int = 1) -> int:
        """Bytes, on each rank, of the state that a sequence has in all state layers, on the stage with most of these.

        Args:
            dtype: Of the model, as in vLLM: the KV cache may have another.

        Raises:
            SettingError: The ranks cannot divide the heads, groups or channels of the state.
        """
        mixer = self.state_mixer(tensor_parallel)
        if mixer is None:
            return 0
        return self._most_layers(self.state_layers, pipeline_parallel) * mixer.state_bytes(tensor_parallel, dtype)

    def kv_bytes(self, tokens: int, dtype: str = "fp16", tensor_parallel: int = 1, pipeline_parallel: int = 1) -> int:
        """Bytes, on each rank, that attention keeps of ``tokens``, on the pipeline stage where that is most.

        Layers with a window stop growing when it is full. Whole blocks are not counted here.
        """
        return max(
            sum(
                group.span.held_tokens(tokens) * self.group_slot_bytes(group, dtype, tensor_parallel)
                for group in self.kv_groups(stage)
            )
            for stage in stages(self.num_layers, pipeline_parallel)
        )

    def mlp_width(self, layer: int, tensor_parallel: int = 1) -> int:
        """Elements that the MLP of a layer, or the experts of one token, make on each rank."""
        width = self.intermediate_size if self.has_mlp(layer) else 0
        if self.experts and layer in self.experts.layers:
            width = self.experts.used * self.experts.intermediate_size + self.experts.shared_size
        return self.mlp_matrices * width // tensor_parallel

    def head_params(self, tensor_parallel: int = 1) -> int:
        """Elements of the word embedding on each rank, and so of the output head where there is one."""
        return self.vocab_size * self.hidden_size // tensor_parallel

    @property
    def num_params(self) -> int:
        """Parameters of the whole model, as its publisher counts them."""
        return num_params(self)

    @property
    def active_params(self) -> int:
        """Parameters that take part in one token: all but the experts that it is not sent to."""
        return num_params(self, used=True)

    def weight_bytes(self, dtype: str = "fp16", tensor_parallel: int = 1) -> int:
        """Bytes of the weights on each rank: matrices are divided, vectors and positions are held by every rank."""
        return num_params(self, tensor_parallel) * dtype_bits(dtype) // 8


def refuse_states(model: ModelSpec, why: str) -> None:
    """Raise SettingError for a model with state layers, where ``why`` says what does not know of them."""
    if model.mixer:
        raise SettingError("model", model.name, f"has layers with a fixed-size state; {why}")
