"""A plain transformer over a whole sequence, in float64: what a skeleton must say, without a cache or a table."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fragmeter.gpu.check import fp8
from fragmeter.gpu.model.skeleton import Skeleton


def dense_logits(skeleton: Skeleton, token_ids: list[int]) -> Tensor:
    """The logits ``[tokens, vocab_size]`` of a sequence, by the weights of ``skeleton``; keys and values are rounded where its
    caches are of fp8."""
    model, weights = skeleton.model, skeleton.weights
    tokens = torch.tensor(token_ids) % model.vocab_size
    hidden = weights.embedding.double()[tokens]
    if model.learned_positions:
        # OPT's positions begin in row 2, GPT-2's in row 0.
        offset = model.learned_positions - model.max_model_len
        hidden = hidden + weights.positions.double()[offset : offset + len(tokens)]
    for layer, scales in zip(weights.layers, skeleton.pool.scales, strict=True):
        attended = _attention(model, layer, _norm(hidden, layer.attention_norm), scales)
        hidden = hidden + _linear(attended, layer.output)
        hidden = hidden + _mlp(model, layer, _norm(hidden, layer.mlp_norm))
    return _linear(_norm(hidden, weights.norm), weights.head)


def _linear(inputs: Tensor, matrix) -> Tensor:
    found = inputs @ matrix.weight.double().T
    return found if matrix.bias is None else found + matrix.bias.double()


def _norm(hidden: Tensor, norm) -> Tensor:
    if norm.bias is None:
        return hidden / (hidden.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    centred = hidden - hidden.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * norm.weight.double() + norm.bias.double()


def _attention(model, layer, hidden: Tensor, scales: tuple[Tensor, ...]) -> Tensor:
    """Head by head, each with its own causal softmax."""
    stacked, head_dim = _linear(hidden, layer.qkv), model.head_dim
    heads = [stacked[:, start : start + head_dim] for start in range(0, stacked.shape[1], head_dim)]
    queries, keys = heads[: model.num_heads], heads[model.num_heads : model.num_heads + model.num_kv_heads]
    values = heads[model.num_heads + model.num_kv_heads :]
    if not model.learned_positions:
        queries, keys = [_turned(head) for head in queries], [_turned(head) for head in keys]
    if scales:
        keys, values = (
            [_rounded(head, scale) for head, scale in zip(held, of_heads.tolist(), strict=True)]
            for held, of_heads in zip((keys, values), scales, strict=True)
        )
    hides = torch.ones(len(hidden), len(hidden), dtype=torch.bool).triu(1)
    found = []
    for number, query in enumerate(queries):
        held = number * model.num_kv_heads // model.num_heads
        scores = (query @ keys[held].T / math.sqrt(head_dim)).masked_fill(hides, -math.inf)
        found.append(scores.softmax(-1) @ values[held])
    return torch.cat(found, -1)


def _rounded(head: Tensor, scale: float) -> Tensor:
    """The numbers of fp8 that are the nearest, by their table."""
    return torch.from_numpy(fp8.NUMBERS[fp8.encoded((head / scale).numpy())]) * scale


def _turned(head: Tensor) -> Tensor:
    """Rotary positions as complex numbers: entry i and entry i + half are one."""
    half = head.shape[1] // 2
    turns = torch.arange(len(head))[:, None] * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(head[:, :half], head[:, half:]) * torch.polar(torch.ones_like(turns), turns)
    return torch.cat((turned.real, turned.imag), -1)


def _mlp(model, layer, hidden: Tensor) -> Tensor:
    wide = _linear(hidden, layer.up)
    if model.gated_mlp:
        gate, up = wide[:, : model.intermediate_size], wide[:, model.intermediate_size :]
        return _linear(gate * gate.sigmoid() * up, layer.down)
    return _linear(wide.clamp(min=0), layer.down)
