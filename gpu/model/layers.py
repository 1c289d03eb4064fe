"""Weights of a skeleton: a model's real shapes with random values, and the computation of a layer.

Layers are those of OPT (LayerNorm, ReLU, learned positions) and of Llama (RMSNorm, SwiGLU, rotary positions), with the
stacked matrices of vLLM's models: queries, keys and values are one GEMM, gate and up another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...sim.spec import ModelSpec
from ...sim.types.errors import SettingError
from ...sim.types.optional import not_none

#: Base of the rotary angles, from Llama. Times do not depend on it.
ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-5
#: Numbers of rows that torch multiplies one by one on a CPU, which takes up to twice as long as four rows at once.
SLOW_ROWS = range(2, 4)


class Matrix(NamedTuple):
    """``weight`` is ``[outputs, inputs]``, ``bias`` ``[outputs]``."""

    weight: Tensor
    bias: Tensor | None


class Norm(NamedTuple):
    """A LayerNorm, or an RMSNorm if ``bias`` is None."""

    weight: Tensor
    bias: Tensor | None


Rotary = tuple[Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Multiply = Callable[[Tensor, Matrix], Tensor]


def multiply(inputs: Tensor, matrix: Matrix) -> Tensor:
    """``[tokens, inputs]`` to ``[tokens, outputs]``: one GEMM."""
    tokens = len(inputs)
    if tokens in SLOW_ROWS and inputs.device.type == "cpu":
        inputs = F.pad(inputs, (0, 0, 0, SLOW_ROWS.stop - tokens))
    return F.linear(inputs, matrix.weight, matrix.bias)[:tokens]


def normalise(hidden: Tensor, norm: Norm) -> Tensor:
    """Normalise over the last axis."""
    if norm.bias is None:
        return F.rms_norm(hidden, norm.weight.shape, norm.weight, NORM_EPSILON)
    return F.layer_norm(hidden, norm.weight.shape, norm.weight, norm.bias, NORM_EPSILON)


def rotate(heads: Tensor, rotary: Rotary) -> Tensor:
    """Apply rotary positions: a head's first half is paired with its second half, as in Llama's checkpoints."""
    cos, sin = rotary
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer; if the MLP is ``gated``, ``up`` contains gate and up, concatenated."""

    heads: tuple[int, int, int]
    gated: bool
    attention_norm: Norm
    qkv: Matrix
    output: Matrix
    mlp_norm: Norm
    up: Matrix
    down: Matrix

    def forward(self, hidden: Tensor, rotary: Rotary | None, attend: Attend, multiply: Multiply = multiply) -> Tensor:
        """``[tokens, hidden_size]`` to the same shape.

        Args:
            rotary: Cosines and sines of the tokens' positions; None for learned positions.
            attend: Maps query, key and value ``[tokens, heads, head_dim]`` to an output with the query's shape.
            multiply: The GEMM; replaced to time the rest of a layer.
        """
        stacked = multiply(normalise(hidden, self.attention_norm), self.qkv)
        query, key, value = stacked.unflatten(1, (sum(self.heads), -1)).split(self.heads, dim=1)
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        attended = attend(query.contiguous(), key.contiguous(), value.contiguous())
        hidden = hidden + multiply(attended.flatten(1), self.output)
        wide = multiply(normalise(hidden, self.mlp_norm), self.up)
        return hidden + multiply(self._activate(wide), self.down)

    def _activate(self, wide: Tensor) -> Tensor:
        if not self.gated:
            return F.relu(wide)
        gate, up = wide.chunk(2, dim=-1)
        return F.silu(gate) * up


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a whole model. The head is the embedding if the model ties the two, else a matrix of its own.

    Attributes:
        embedding: ``[vocab_size, hidden_size]``.
        positions: Learned positions ``[rows, hidden_size]``; token 0 uses row ``first_position``.
        rotary: Cosines and sines ``[max_model_len, 1, head_dim / 2]``.
    """

    embedding: Tensor
    positions: Tensor | None
    first_position: int
    rotary: Rotary | None
    layers: tuple[Layer, ...]
    norm: Norm
    head: Matrix

    def embed(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Rotary | None]:
        """The input of the first layer, and the rotary angles for every layer."""
        hidden = F.embedding(token_ids, self.embedding)
        if self.positions is not None:
            return hidden + F.embedding(positions + self.first_position, self.positions), None
        cos, sin = not_none(self.rotary)
        return hidden, (cos[positions], sin[positions])

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden_size]`` to ``[rows, vocab_size]``."""
        return multiply(normalise(hidden, self.norm), self.head)


def check_shape(model: ModelSpec) -> None:
    """Refuse architectures that a skeleton does not support.

    Raises:
        SettingError: The model has a mixture of experts, latent attention, windows, or layers unlike OPT's and Llama's.
    """
    unknown = {
        "a mixture of experts": model.experts,
        "multi-head latent attention": model.has_vectors,
        "layers with a fixed-size state": model.mixer,
        "windows or chunks": model.spans,
        "attention sinks": model.attention_sinks,
        "norms of queries and keys": model.qk_norm,
        f"{model.layer_norms} norms a layer": model.layer_norms != 2,
        f"{model.quantization} weights": model.quantization,
    }
    for feature, has in unknown.items():
        if has:
            raise SettingError("model", model.name, f"has {feature}; take one like OPT or Llama, which can be run")


def draw_weights(model: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int) -> Weights:
    """Random weights, all different and nonzero, scaled so that the hidden states stay within fp16."""
    draw = _Draw(model, device, dtype, torch.Generator(device).manual_seed(seed))
    embedding = draw.normal(model.vocab_size, model.hidden_size)
    learned = model.learned_positions
    return Weights(
        embedding,
        draw.normal(learned, model.hidden_size) if learned else None,
        learned - model.max_model_len if learned else 0,
        None if learned else _rotary(model, device, dtype),
        tuple(draw.layer() for _ in range(model.num_layers)),
        draw.norm(),
        Matrix(embedding, None) if model.tied_embeddings else draw.matrix(model.hidden_size, model.vocab_size, False),
    )


@dataclass(frozen=True, slots=True)
class _Draw:
    model: ModelSpec
    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def layer(self) -> Layer:
        """One layer; each matrix is scaled so that its outputs have about the magnitude of its inputs."""
        model = self.model
        query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        wide = model.intermediate_size
        return Layer(
            (model.num_heads, model.num_kv_heads, model.num_kv_heads),
            model.gated_mlp,
            self.norm(),
            self.matrix(model.hidden_size, query + 2 * kv, model.qkv_bias),
            self.matrix(query, model.hidden_size, model.output_bias),
            self.norm(),
            self.matrix(model.hidden_size, (model.mlp_matrices - 1) * wide, model.mlp_bias),
            self.matrix(wide, model.hidden_size, model.mlp_bias),
        )

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def matrix(self, inputs: int, outputs: int, biased: bool) -> Matrix:
        weight = self.normal(outputs, inputs).div_(math.sqrt(inputs))
        return Matrix(weight, self.normal(outputs).mul_(0.1) if biased else None)

    def norm(self) -> Norm:
        weight = self.normal(self.model.hidden_size).mul_(0.1).add_(1)
        return Norm(weight, self.normal(self.model.hidden_size).mul_(0.1) if self.model.norm_vectors == 2 else None)


def _rotary(model: ModelSpec, device: torch.device, dtype: torch.dtype) -> Rotary:
    exponents = torch.arange(0, model.head_dim, 2, device=device, dtype=torch.float32) / model.head_dim
    positions = torch.arange(model.max_model_len, device=device, dtype=torch.float32)
    angles = torch.outer(positions, ROTARY_BASE**-exponents)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)
