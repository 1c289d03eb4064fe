"""An order of eviction that knows the future: the block whose contents are asked for last is taken first (Belady's MIN).

fragmeter simulate --policy farthest_next_use:FutureV1 --trace conversations.jsonl

Requests look their prompts up in the order of their arrivals, so the trace says which contents the coming ones ask for. Beside the
bounds of docs/cache-worth.md this is a run: it hits other blocks, is faster, and asks at other times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from ranked_order import RankedOrder

from fragmeter.sim.memory import Memory
from fragmeter.sim.memory.paged.cached import CachedMemory
from fragmeter.sim.memory.paged.transaction import PagedTransaction
from fragmeter.sim.memory.prefix import BlockPool, lookup_blocks
from fragmeter.sim.memory.prefix.chains import PLACE_BITS
from fragmeter.sim.policy.base import StepPlan
from fragmeter.sim.policy.server import Pool
from fragmeter.sim.policy.vllm_v1 import VllmV1
from fragmeter.sim.types.state import State

NEVER = 1 << 62


class FarthestNextUse(RankedOrder):
    """Blocks without a hash come first, then those that no request asks for, then those asked for last; of a prompt its end.

    Attributes:
        coming: The first request that has not looked up its blocks.
        pool: The pool of the queue.
        asking: By chain, the requests that ask for some of it, ascending, and the places at which they end.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.coming, self.pool = 0, BlockPool(0)
        self.asking: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        # Blocks by the request that asks for them next.
        self._due: dict[int, list[int]] = defaultdict(list)

    def pass_to(self, coming: int) -> None:
        """Requests before ``coming`` have looked up their blocks; what they have not hit is asked for later."""
        for request in range(self.coming, coming):
            self.coming = request + 1
            for block in self._due.pop(request, ()):
                if self._entries.get(block, (0,))[0] == -request:
                    self._enter(block)

    def next_use(self, block: int) -> int:
        """The next request that asks for the contents of a block, and finds this one of several with them."""
        name = self.pool.block_hash[block]
        if not name or self.pool.get_cached_blocks([name]) != [block]:
            return NEVER
        chain, place = divmod(name, 1 << PLACE_BITS)
        requests, stops = self.asking.get(chain, ((), ()))
        first = bisect_left(requests, self.coming)
        return next((requests[at] for at in range(first, len(requests)) if place < stops[at]), NEVER)

    def rank(self, block: int) -> int:
        request = self.next_use(block)
        if request < NEVER:
            self._due[request].append(block)
        return -request


class FutureV1(VllmV1):
    name, eviction_order = "vllm-v1-future", FarthestNextUse
    queue: FarthestNextUse | None = None

    def memory(self, pool: Pool) -> Memory:
        """That of vLLM; its queue hears what each request asks for."""
        memory = super().memory(pool)
        if not isinstance(memory, CachedMemory):
            return memory
        self.queue = queue = memory.pool.free_block_queue
        queue.pool = memory.pool
        for request, shares_none in enumerate(memory.unshared):
            if shares_none:
                continue
            most = lookup_blocks(sum(length for _, _, length in pool.token_runs.runs(request)), memory.block_size)
            for chain, stop in memory.chains.path(request):
                requests, stops = queue.asking[chain.number]
                requests.append(request)
                stops.append(min(stop, most))
        return memory

    def schedule(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """As vLLM, which looks up the requests of a plan while it makes it."""
        plan = super().schedule(state, transaction)
        if self.queue is not None:
            begun = (*plan.admitted, *(sequence for sequence, _ in plan.chunks))
            self.queue.pass_to(max((sequence.index + 1 for sequence in begun), default=0))
        return plan
