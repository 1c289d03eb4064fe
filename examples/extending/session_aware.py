"""An order of eviction that knows sessions and the time: contents of a session that goes on are kept until its tool has answered.

fragmeter simulate --policy session_aware:SessionV1 --trace conversations.jsonl

As the best-effort retention of vLLM's RFC 52113: a client that calls a tool says that it comes back, not when. Its blocks are kept
for ``EXPECTED`` from when they are free; blocks of which this is over, and those of sessions that have ended, are taken first. Here
the trace knows whether a later request asks for a block. A block that is kept is taken once all other free blocks are.
"""

from __future__ import annotations

from farthest_next_use import NEVER, FarthestNextUse, FutureV1

from fragmeter.sim.memory import Memory
from fragmeter.sim.policy.server import Pool
from fragmeter.sim.types.ticks import PER_SECOND

#: How long a tool takes, and who reads its answer.
EXPECTED = 300 * PER_SECOND


class SessionAware(FarthestNextUse):
    """Blocks without a hash come first, then those whose time is over for longest.

    Attributes:
        memory: The memory of the queue, which has the time.
    """

    memory: Memory

    def rank(self, block: int) -> int:
        return self.memory.clock() + (EXPECTED if self.next_use(block) < NEVER else 0)


class SessionV1(FutureV1):
    name, eviction_order = "vllm-v1-sessions", SessionAware

    def memory(self, pool: Pool) -> Memory:
        """That of vLLM; its queue sees the time."""
        memory = super().memory(pool)
        if self.queue is not None:
            self.queue.memory = memory
        return memory
