"""The shape of a transformer, and the bytes that follow from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..types.errors import SettingError
from .attention import FULL, HeadAttention, KvGroup, Latent, LatentAttention, Span
from .experts import Experts
from .stages import stages
from .weights import num_params

DTYPE_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4}


def dtype_bits(dtype: str) -> int:
    """Width of one element in bits; raises SettingError for a dtype that is not known."""
    if dtype not in DTYPE_BITS:
        raise SettingError("dtype", dtype, f"one of {', '.join(DTYPE_BITS)}")
    return DTYPE_BITS[dtype]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer with K and V in all layers, or a latent vector in their stead.

    Attributes:
        num_kv_heads: Heads of K and V; as many as ``num_heads`` (MHA), fewer (GQA) or one (MQA).
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
        spans: Which tokens each layer keeps; empty where all keep all.
        latent: Multi-head latent attention, in place of heads of K and V.
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
    spans: tuple[Span, ...] = ()
    latent: Latent | None = None
    experts: Experts | None = None
    quantization: str | None = None

    @property
    def mlp_matrices(self) -> int:
        """Matrices of one MLP: 3 where it is gated, else 2."""
        return 3 if self.gated_mlp else 2

    def heads_per_rank(self, tensor_parallel: int = 1) -> int:
        """Query heads on each of ``tensor_parallel`` ranks."""
        if tensor_parallel < 1 or self.num_heads % tensor_parallel:
            remedy = f"must divide the {self.num_heads} heads of {self.name}"
            raise SettingError("tensor_parallel", tensor_parallel, remedy)
        return self.num_heads // tensor_parallel

    def kv_heads_per_rank(self, tensor_parallel: int = 1) -> int:
        """KV heads on each rank: never below one, so that ranks beyond the KV heads hold copies."""
        self.heads_per_rank(tensor_parallel)
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
        return HeadAttention(self.hidden_size, heads, self.kv_heads_per_rank(tensor_parallel), self.head_dim)

    def kv_groups(self, layers: Iterable[int] | None = None) -> tuple[KvGroup, ...]:
        """The KV groups of all layers, or of some (those of a pipeline stage), in the order of their first one."""
        groups: dict[Span, list[int]] = {}
        for layer in range(self.num_layers) if layers is None else layers:
            groups.setdefault(self.spans[layer] if self.spans else FULL, []).append(layer)
        return tuple(KvGroup(span, tuple(members)) for span, members in groups.items())

    def group_slot_bytes(self, group: KvGroup, dtype: str = "fp16", tensor_parallel: int = 1) -> int:
        """Bytes, on each rank, of one token that a KV group keeps: K and V, or the latent vector, a layer."""
        elements = group.num_layers * self.attention(tensor_parallel).slot_elements
        return elements * dtype_bits(dtype) // 8

    def slot_bytes(self, dtype: str = "fp16", tensor_parallel: int = 1, pipeline_parallel: int = 1) -> int:
        """Bytes, on each rank, of one token that all layers keep, on the pipeline stage with most layers.

        2 * layers * kv_heads * head_dim * dtype for heads, layers * (kv_rank + rope_dim) * dtype for
        latent vectors. int4 packs two values into a byte; scales are not counted (see ``Deployment``).
        """
        layers = max(len(stage) for stage in stages(self.num_layers, pipeline_parallel))
        return layers * self.attention(tensor_parallel).slot_elements * dtype_bits(dtype) // 8

    def kv_bytes(self, tokens: int, dtype: str = "fp16", tensor_parallel: int = 1, pipeline_parallel: int = 1) -> int:
        """Bytes, on each rank, that a sequence of ``tokens`` keeps, on the pipeline stage where that is most.

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
        width = self.intermediate_size
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
