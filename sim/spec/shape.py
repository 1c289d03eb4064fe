"""The shape of a transformer, and the bytes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SettingError

DTYPE_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4}


def dtype_bits(dtype: str) -> int:
    """Width of one element in bits; raises SettingError for a dtype that is not known."""
    if dtype not in DTYPE_BITS:
        raise SettingError("dtype", dtype, f"one of {', '.join(DTYPE_BITS)}")
    return DTYPE_BITS[dtype]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer with multi-head or grouped-query attention.

    Attributes:
        num_kv_heads: Heads of K and V; as many as ``num_heads`` (MHA) or fewer (GQA, MQA).
        intermediate_size: Width of the MLP.
        max_model_len: The longest sequence, prompt and output together, in tokens.
        gated_mlp: The MLP has three matrices (gate, up, down) and not two.
        tied_embeddings: The output head is the word embedding.
        learned_positions: Rows of the learned position table; 0 where positions are rotary.
        qkv_bias, output_bias, mlp_bias: Which projections have biases.
        norm_vectors: Vectors of a normalisation: 2 in LayerNorm (weight, bias), 1 in RMSNorm.
        qk_norm: Queries and keys are normalised a head, with a weight of ``head_dim`` each.
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

    def slot_bytes(self, dtype: str = "fp16", tensor_parallel: int = 1) -> int:
        """Bytes, on each rank, of one token's K and V over all layers: 2 * layers * kv_heads * head_dim * dtype."""
        elements = 2 * self.num_layers * self.kv_heads_per_rank(tensor_parallel) * self.head_dim
        return elements * dtype_bits(dtype) // 8

    def layer_matrix_params(self, tensor_parallel: int = 1) -> int:
        """Elements of one layer's matrices on each rank: Q, K, V, output projection, MLP."""
        heads = self.heads_per_rank(tensor_parallel) + self.kv_heads_per_rank(tensor_parallel)
        attention = 2 * self.hidden_size * heads * self.head_dim
        return attention + self.mlp_matrices * self.hidden_size * self.intermediate_size // tensor_parallel

    @property
    def layer_vector_params(self) -> int:
        """Elements of one layer's biases and normalisations."""
        qkv = self.qkv_bias * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        mlp = self.mlp_bias * ((self.mlp_matrices - 1) * self.intermediate_size + self.hidden_size)
        norms = 2 * self.norm_vectors * self.hidden_size + self.qk_norm * 2 * self.head_dim
        return qkv + self.output_bias * self.hidden_size + mlp + norms

    def head_params(self, tensor_parallel: int = 1) -> int:
        """Elements of the word embedding on each rank, and so of the output head where there is one."""
        return self.vocab_size * self.hidden_size // tensor_parallel

    @property
    def num_params(self) -> int:
        """Parameters of the whole model, as its publisher counts them."""
        return self._params(tensor_parallel=1)

    def weight_bytes(self, dtype: str = "fp16", tensor_parallel: int = 1) -> int:
        """Bytes of the weights on each rank: matrices are divided, vectors and positions are held by every rank."""
        return self._params(tensor_parallel) * dtype_bits(dtype) // 8

    def _params(self, tensor_parallel: int) -> int:
        layers = self.num_layers * (self.layer_matrix_params(tensor_parallel) + self.layer_vector_params)
        heads = (1 if self.tied_embeddings else 2) * self.head_params(tensor_parallel)
        return layers + heads + (self.learned_positions + self.norm_vectors) * self.hidden_size
