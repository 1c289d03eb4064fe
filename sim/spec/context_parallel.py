"""Decode context parallelism: tensor-parallel ranks that hold the same KV heads divide the tokens of every sequence.

Without it, ranks that cannot divide the KV heads any further hold copies: of latent vectors (MLA) all ranks, of grouped heads
``tensor_parallel / num_kv_heads``. With it, token i is on rank i mod n of a group of n:

    n = 1   rank 0 |0 1 2 3 4 5 6 7|        n = 2   rank 0 |0 2 4 6 8 ...|
            rank 1 |0 1 2 3 4 5 6 7|                rank 1 |1 3 5 7 9 ...|

A block has ``block_size`` tokens on each rank, n times as many in all, and as many bytes as before. So the pool has as many
blocks, each of ``n * block_size`` tokens, and the scheduler decides as with blocks of that size
(``tests/real_vllm/test_context_parallel.py``). A decode gathers the queries of the group's heads, attends to a part of the
context, and adds up the outputs. Source: vLLM 0.33, ``ParallelConfig._validate_parallel_config``,
``ModelConfig.verify_with_parallel_config``, ``resolve_dcp_kv_block_size``, ``MLADCPManager``, ``FlashAttentionImpl._forward_with_dcp``.
"""

from __future__ import annotations

from typing import NamedTuple

from ..types.errors import NotSimulated, SettingError
from .attention import FULL
from .shape import ModelSpec

_FIELD = "decode_context_parallel_size"


class Broken(NamedTuple):
    """A rule of vLLM that a configuration breaks: vLLM's text, and what the value must be."""

    text: str
    remedy: str


def broken_rule(model: ModelSpec, tensor_parallel: int, ranks: int) -> Broken | None:
    """The first rule of vLLM that ``ranks`` of ``tensor_parallel`` ranks break; None if they may divide the sequences.

    The ranks of a group are taken from those that hold the same KV heads, and divide the query heads of a KV head among them.
    """
    if tensor_parallel % ranks:
        text = f"tp_size={tensor_parallel} must be divisible by dcp_size={ranks}."
        return Broken(text, f"must divide tensor_parallel_size = {tensor_parallel}")
    if ranks == 1 or model.latent:
        return None
    heads, given = model.num_kv_heads, f"`--tensor-parallel-size` ({tensor_parallel})"
    if tensor_parallel <= heads:
        return Broken(
            f"Decode context parallelism for GQA/MQA requires {given} to be greater than the model's total number of KV heads"
            f" ({heads}). Increase `--tensor-parallel-size` or set `--decode-context-parallel-size 1`.",
            f"needs more ranks than the {heads} KV heads of {model.name}; raise tensor_parallel_size, or leave it out",
        )
    most, group = tensor_parallel // heads, model.num_heads // heads
    if ranks > most:
        return Broken(
            f"`--decode-context-parallel-size` ({ranks}) exceeds the maximum supported value ({most}) for {given} and {heads}"
            " model KV heads.",
            f"must be at most {most}: {tensor_parallel} ranks hold the {heads} KV heads of {model.name} so many times",
        )
    if group % ranks:
        return Broken(
            f"The model's number of query heads per KV head ({group}) must be divisible by `--decode-context-parallel-size`"
            f" ({ranks}) for GQA/MQA.",
            f"must divide the {group} query heads of a KV head of {model.name}",
        )
    return None


def require_context_parallel(model: ModelSpec, tensor_parallel: int, ranks: int, one_group: bool = False) -> None:
    """Raise SettingError where vLLM does not divide sequences among ``ranks`` ranks, NotSimulated where that is not simulated.

    Args:
        one_group: Whether all layers keep every token (``--disable-hybrid-kv-cache-manager``).
    """
    broken = broken_rule(model, tensor_parallel, ranks)
    if broken is not None:
        raise SettingError(_FIELD, ranks, broken.remedy)
    if ranks > 1 and has_windows(model) and not one_group:
        raise SettingError(_FIELD, ranks, f"vLLM divides no layers with windows, which {model.name} has; leave it out")
    if ranks > 1:
        _require_simulated(model, ranks)


def is_simulated(model: ModelSpec, tensor_parallel: int, ranks: int) -> bool:
    """Whether ``require_context_parallel`` accepts them."""
    try:
        require_context_parallel(model, tensor_parallel, ranks)
    except SettingError:
        return False
    return True


def has_windows(model: ModelSpec) -> bool:
    """Whether layers keep a window, which vLLM does not divide unless they keep every token, too."""
    return bool(model.compressed) or any(model.span(layer).kind == "sliding" for layer in range(model.num_layers))


def _require_simulated(model: ModelSpec, ranks: int) -> None:
    if any(model.span(layer) != FULL for layer in range(model.num_layers)):
        raise NotSimulated(
            _FIELD, ranks, f"is simulated for layers that all keep every token, and {model.name} has others"
        )
    if model.indexer:
        raise NotSimulated(_FIELD, ranks, f"is not simulated with the indexer of {model.name}")
