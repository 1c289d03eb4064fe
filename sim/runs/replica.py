"""The policy, memory and cost model of one engine, and the settings that follow from those of the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from ..cost import StepCost
from ..memory import Memory
from ..memory.accounting.cache_log import CacheLog
from ..policy.base import PairedPolicy
from ..spec import HybridLayout
from .api_server import ApiServer


@dataclass(frozen=True)
class Replica:
    """The policy, memory and cost model of one engine.

    Attributes:
        policy, memory, cost: New objects for one run.
        num_blocks, block_size: Size of the pool, in blocks, and of a block, in tokens on all ranks that divide them; of several sizes of
            blocks the least common multiple.
        max_model_len: Longest prompt + output in tokens.
        layout: The KV groups that share the pool; None if all layers keep every token.
        page_bytes: Bytes of a block of one KV group on each rank; 0 without KV groups.
        caches_prefixes: Whether freed blocks keep their contents for prompts with the same prefix.
        enforce_eager: Whether it runs without CUDA graphs.
        outside_ticks: Time of a request outside of the engine.
        api_server: The event loops in front of it; None where they take no time.
        sources: Where each value of ``describe`` comes from.
    """

    policy: PairedPolicy
    memory: Memory
    cost: StepCost
    num_blocks: int
    block_size: int
    max_model_len: int
    layout: HybridLayout | None = None
    page_bytes: int = 0
    caches_prefixes: bool = False
    enforce_eager: bool = True
    outside_ticks: int = 0
    api_server: ApiServer | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def stated_block_size(self) -> int:
        """Tokens of a block as the setting and a server's metrics state them: where groups have several sizes, before pages are unified."""
        layout = self.layout
        return layout.config.block_size if layout and layout.config and layout.has_block_sizes else self.block_size

    @property
    def host_blocks(self) -> int:
        """Blocks of the swap space; 0 where the memory has none."""
        return self.memory.host_blocks

    @property
    def cache_log(self) -> CacheLog | None:
        """Log of the memory's prefix cache, if it has one."""
        return self.memory.cache_log

    def describe(self) -> dict[str, object]:
        """The resolved settings, defaults included, for ``run.json``."""
        return {
            "num_gpu_blocks": self.num_blocks,
            "block_size": self.stated_block_size,
            "enable_prefix_caching": self.caches_prefixes,
            "enforce_eager": self.enforce_eager,
            **asdict(self.policy.limits),
            "sources": dict(self.sources),
        }
