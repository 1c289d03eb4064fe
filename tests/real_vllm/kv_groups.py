"""The KV groups that the installed vLLM forms, asked in JSON, so that any process can ask.

    python -m real_vllm.kv_groups < questions.json > answers.json

A question is an object with the fields of ``Question``, an answer one with those of ``groups_of``; both files hold a
list. Everything that decides is vLLM's: the engine core is started with layers that say what they keep, and asked.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from .server import Setup, start
from .shapes import Layer


@dataclass(frozen=True)
class Question:
    """A model and where it is served.

    Attributes:
        layers: In order.
        block_size: As given to the server.
        available_bytes: Memory for the KV cache on a rank.
        max_model_len, max_num_batched_tokens: As in vLLM.
        prefix_caching, asynchronous, disable_hybrid: Switches of the server.
    """

    layers: tuple[Layer, ...]
    block_size: int = 16
    available_bytes: int = 1 << 34
    max_model_len: int = 8192
    max_num_batched_tokens: int = 8192
    prefix_caching: bool = True
    asynchronous: bool = True
    disable_hybrid: bool = False

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Question:
        layers = tuple(_layer_from_json(layer) for layer in value["layers"])
        return cls(**value | {"layers": layers})


def _layer_from_json(value: dict[str, Any]) -> Layer:
    shapes, dtypes = (value.get(name, ()) for name in ("state_shapes", "state_dtypes"))
    return Layer(**value | {"state_shapes": tuple(map(tuple, shapes)), "state_dtypes": tuple(dtypes)})


def groups_of(question: Question) -> dict[str, Any]:
    """What vLLM makes of it.

    Returns:
        ``num_blocks`` (the null block included), ``block_bytes``, ``scheduler_block_size``, ``hash_block_size``,
        ``mamba_cache_mode``, and ``groups``: of each its ``layers`` (numbers), ``kind`` (class of its spec),
        ``block_size`` and ``page_bytes`` of a layer; ``{"error": text}`` where vLLM does not start.
    """
    setup = Setup(
        layers=question.layers,
        block_size=question.block_size,
        max_model_len=question.max_model_len,
        max_num_seqs=1,
        max_num_batched_tokens=question.max_num_batched_tokens,
        prefix_caching=question.prefix_caching,
        asynchronous=question.asynchronous,
        disable_hybrid=question.disable_hybrid,
        available_bytes=question.available_bytes,
    )
    try:
        engine = start(setup)
    except ValueError as error:
        return {"error": str(error)}
    scheduler = engine.scheduler
    config = scheduler.kv_cache_config
    return {
        "num_blocks": config.num_blocks,
        "block_bytes": config.kv_cache_tensors[0].size // config.num_blocks,
        "scheduler_block_size": scheduler.block_size,
        "hash_block_size": scheduler.hash_block_size,
        "mamba_cache_mode": engine.vllm_config.cache_config.mamba_cache_mode,
        "groups": [
            {
                "layers": [int(name) for name in group.layer_names],
                "kind": type(group.kv_cache_spec).__name__,
                "block_size": group.kv_cache_spec.block_size,
                "page_bytes": group.kv_cache_spec.page_size_bytes,
            }
            for group in config.kv_cache_groups
        ],
    }


if __name__ == "__main__":
    json.dump([groups_of(Question.from_json(value)) for value in json.load(sys.stdin)], sys.stdout)
