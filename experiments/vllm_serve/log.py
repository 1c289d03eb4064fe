"""The KV cache size from a pasted vLLM start-up log, which replaces the computed size."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from ...sim.spec.launch import Launch, capacity
from ...sim.types.errors import SettingError
from ...sim.types.optional import not_none
from .line import pasted

Found = TypeVar("Found")
GIB = 1 << 30
#: Numbers in a log; one with more digits than any cache size has is ignored.
_COUNT, _DECIMAL = r"(\d[\d,]{0,20})(?![\d,])", r"(-?\d{1,12}(?:\.\d*)?)"
_BLOCKS = re.compile(rf"# (?:GPU|CUDA) blocks: {_COUNT}|num_gpu_blocks is: {_COUNT}", re.ASCII)
_TOKENS = re.compile(rf"GPU KV cache size: {_COUNT} tokens", re.ASCII)
_CONCURRENCY = re.compile(rf"Maximum concurrency for {_COUNT} tokens per request: {_DECIMAL}x", re.ASCII)
_MEMORY = re.compile(rf"Available KV cache memory: {_DECIMAL} GiB|reserved for KV Cache is {_DECIMAL}\s?GiB", re.ASCII)


@dataclass(frozen=True)
class StartupLog:
    """The lines found in a log; None for each absent line.

    Attributes:
        num_blocks: ``# GPU blocks: 1234``.
        num_tokens: ``GPU KV cache size: 123,456 tokens``.
        concurrency: ``Maximum concurrency for 8,192 tokens per request: 15.07x``, as length and sequences.
        memory_bytes: ``Available KV cache memory: 12.34 GiB``, of one GPU.
    """

    num_blocks: int | None
    num_tokens: int | None
    concurrency: tuple[int, float] | None
    memory_bytes: int | None

    def kv_cache_bytes(self, launch: Launch) -> int:
        """The smallest KV cache of any GPU, from the most exact line."""
        block_bytes = capacity(launch).stage.block_bytes
        if self.num_blocks is not None:
            return self.num_blocks * block_bytes
        if self.num_tokens is not None:
            return _blocks(launch, launch.max_model_len, self.num_tokens / launch.max_model_len) * block_bytes
        if self.memory_bytes is not None:
            return self.memory_bytes
        return _blocks(launch, *not_none(self.concurrency)) * block_bytes


def _blocks(launch: Launch, tokens: int, sequences: float) -> int:
    return round(sequences * launch.sequence_blocks(tokens))


def read_log(text: str) -> StartupLog:
    """The lines of a start-up log with the size of the KV cache: the last of each kind, but the smallest memory.

    Args:
        text: The log, or the name of its file.

    Raises:
        SettingError: The log has no line of this kind.
    """
    given, text = text, pasted(text, "startup_log")
    concurrency = [(_whole(tokens), float(sequences)) for tokens, sequences in _CONCURRENCY.findall(text)]
    memory = [int(float(one or other) * GIB) for one, other in _MEMORY.findall(text)]
    log = StartupLog(
        num_blocks=_last(_whole(one or other) for one, other in _BLOCKS.findall(text)),
        num_tokens=_last(_whole(tokens) for tokens in _TOKENS.findall(text)),
        concurrency=_last(concurrency),
        memory_bytes=min(memory, default=None),
    )
    if log == StartupLog(None, None, None, None):
        lines = "GPU KV cache size, Available KV cache memory, Maximum concurrency or # GPU blocks"
        remedy = f"has none of the lines {lines}; give vLLM's output from its start"
        raise SettingError("startup_log", " ".join(given.split())[:60], remedy)
    return log


def _whole(text: str) -> int:
    return int(text.replace(",", ""))


def _last(found: Iterable[Found]) -> Found | None:
    return next(reversed(list(found)), None)
