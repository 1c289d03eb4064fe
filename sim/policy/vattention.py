"""vAttention: contiguous virtual memory, with physical pages mapped on demand."""

from __future__ import annotations

from typing import NamedTuple

from ..memory.paged.deferred import DeferredMemory
from ..memory.paged.paged import PagedMemory
from ..spec import ModelSpec, dtype_bits, stages
from ..types.errors import SettingError
from ..types.state import State
from .base import Source
from .options import Options, VAttentionOptions
from .server import Pool, Server
from .vllm_v0 import VllmV0

_KIB = 1 << 10


class PageGroup(NamedTuple):
    """The unit of allocation: a page for K and one for V (or one for the latent vectors) in every layer.

    Attributes:
        tokens: Tokens that it holds, which are a block of the ledger.
        rank_bytes: Bytes of its pages on each rank.
    """

    tokens: int
    rank_bytes: int


def page_group(
    model: ModelSpec, page_size: int, tensor_parallel: int = 1, dtype: str = "fp16", pipeline_parallel: int = 1
) -> PageGroup:
    """The page group of pages of ``page_size`` KiB; pipeline stages count the one with most layers.

    ``page // (kv_heads_per_rank * head_dim * dtype)`` tokens, as ``init_kv_block_size`` in vAttention's
    ``vattention.cu`` has it: where a page is no whole number of tokens, what is left at its end is not used
    (OPT-13B: 204.8 tokens of 10 KiB in 2 MiB, of which 204 count).

    Raises SettingError where a page does not hold one token of a layer, or where layers keep different bytes of a token.
    """
    if model.has_page_sizes or model.indexer:
        raise SettingError(
            "model", model.name, "has layers that keep different bytes of a token, which share no page group"
        )
    attention, bits = model.attention(tensor_parallel), dtype_bits(dtype)
    tensors = attention.kv_tensors
    tokens = page_size * _KIB * 8 * tensors // (attention.slot_elements * bits)
    if not tokens:
        raise SettingError("page_size", page_size, f"holds less than a token of {model.name}; take larger pages")
    layers = max(len(stage) for stage in stages(model.num_layers, pipeline_parallel))
    return PageGroup(tokens, tensors * layers * page_size * _KIB)


class VAttention(VllmV0):
    """vAttention (ASPLOS'25): the scheduler of vLLM 0.x over pages that stay mapped after a request finishes.

    The scheduler is ``VllmV0`` without a swap space, as in vAttention's evaluation. Mapped and unmapped page groups both
    count as available, so its decisions are those of vllm-v0 with blocks of the same size. Only the location of the
    slots differs: see ``memory.deferred``.

    A request wastes at worst all but a token of its last page group: with ``2 * layers`` pages a group and
    rank, ``2 * layers * page * TP`` bytes less one token's (a token costs 2 * layers * kv_heads * head_dim *
    dtype). Of Llama-3.1-8B with pages of 2 MiB that is 128 MiB on one GPU, and 256 MiB on two.

    While some mapped pages are unused, a leap ends where one changes hands, so that there are about
    twice as many leaps as under vllm-v0.
    """

    name = "vattention"
    source = Source("ASPLOS'25, vattention.cu", "paper, source")
    system = "vAttention, ASPLOS'25"
    options_type = VAttentionOptions
    serves_kv_groups = False

    @classmethod
    def pool_size(
        cls, server: Server, options: Options, num_blocks: int | None, block_size: int | None
    ) -> tuple[int, int]:
        """See ``Policy``: the page groups that fit, unless a block size is given."""
        if block_size:
            return super().pool_size(server, options, num_blocks, block_size)
        assert isinstance(options, VAttentionOptions)
        ranks, dtype, stages = server.tensor_parallel, server.deployment.kv_dtype, server.deployment.pipeline_parallel
        group = page_group(server.model, options.page_size, ranks, dtype, stages)
        if num_blocks:
            return num_blocks, group.tokens
        slots = server.num_blocks(1)
        # In bytes, as the pages of a group may be no whole number of tokens.
        num_groups = slots * server.model.slot_bytes(dtype, ranks, stages) // group.rank_bytes
        if not num_groups:
            remedy = (
                f"{server.model.name} leaves room for {slots} tokens on {ranks} x {server.gpu.name}; take smaller pages"
            )
            raise SettingError("page_size", options.page_size, remedy)
        return num_groups, group.tokens

    def memory(self, pool: Pool) -> DeferredMemory:
        return DeferredMemory(pool.num_blocks, pool.block_size, pool.ids)

    def _swaps(self, blocks: int, host_free: int, num_blocks: int) -> bool:
        return False

    def horizon(self, state: State, memory: PagedMemory, limit: int) -> int:
        """As for vllm-v0, and at most until mapped pages pass to another sequence."""
        steps = super().horizon(state, memory, limit)
        if memory.cached_blocks:
            return memory.steps_settled(state.decode_step, min(steps, limit))
        # A sequence that finishes meanwhile leaves mapped pages; but none arrives, and growth uses unmapped ones.
        return steps
