"""A slow, literal reference simulator: the oracle that tests hold the real one against.

It shares no code with ``fragmeter``: it was written from the rules alone, walks step by step, sequence by sequence and
slot by slot, and leaps over nothing. Meant for a few hundred requests of some sixty tokens over small pools.

    model     what goes in and what comes out
    slots     the class of one slot, and the census of a pool
    decode_step  the loop that moves time; what every policy does alike
    paged     vllm-sosp23
    buddy     the arena of orca-max, orca-pow2 and orca-oracle
    orca      those three, and orca as its own paper has it
    batches   static and fastertransformer
    iteration what those below share: counts of tokens computed, chunks of prompts, real block tables
    vllm_v0, vllm_v1, sarathi, tgi, trtllm, lightllm, fastgen, llama_cpp, sglang (with trie)
    vllm_v1_caching  vllm-v1 with prefix caching
    hybrid    KV groups over one pool of pages, under vllm-v1, vllm-v0 and vllm-sosp23
    families  requests of several sequences, or with parents: what goes in and comes out, and a clock of their own
    families_blocks, families_paged, families_orca  groups: blocks with their holders, vllm-sosp23 and vllm-v0, pieces
    trees_paged, trees_orca  dialogue trees over the same
    story     for the tests: costs, a log of one line a step, random cases
"""

from __future__ import annotations

from collections.abc import Callable

from .batches import FasterTransformer, StaticBatches
from .decode_step import System, run
from .fastgen import FastGen
from .lightllm import LightLlm
from .llama_cpp import LlamaCpp, UnifiedLlamaCpp
from .model import Limits, Outcome, Pool, Request, Step, check
from .orca import BuddyOrca, CountedOrca, estimate_max, estimate_oracle, estimate_pow2
from .paged import Paged
from .sarathi import Sarathi
from .sglang import SgLang
from .slots import BUCKETS, classify_slot
from .tgi import Tgi
from .trtllm import MaxUtilization, NoEvict
from .vllm_v0 import VllmV0
from .vllm_v1 import VllmV1

__all__ = [
    "BUCKETS", "POLICIES", "SCHEDULERS", "Limits", "Outcome", "Pool", "Request", "Step", "classify_slot", "simulate",
]  # fmt: skip

POLICIES: dict[str, Callable[[Pool, Limits], System]] = {
    "vllm-sosp23": Paged,
    "orca-max": lambda pool, limits: BuddyOrca(pool, limits, estimate_max),
    "orca-pow2": lambda pool, limits: BuddyOrca(pool, limits, estimate_pow2),
    "orca-oracle": lambda pool, limits: BuddyOrca(pool, limits, estimate_oracle),
    "orca": CountedOrca,
    "static": StaticBatches,
    "fastertransformer": FasterTransformer,
}

#: Those that decide by counts of tokens computed. vllm-v1 needs max_num_batched_tokens >= max_num_seqs, and lightllm
#: and sglang a pool in blocks of one; else ValueError.
SCHEDULERS: dict[str, Callable[[Pool, Limits], System]] = {
    "vllm-v0": VllmV0,
    "vllm-v1": VllmV1,
    "sarathi": Sarathi,
    "tgi": Tgi,
    "trtllm-no-evict": NoEvict,
    "trtllm-max-util": MaxUtilization,
    "lightllm": LightLlm,
    "fastgen": FastGen,
    "sglang": SgLang,
    "llama-cpp": LlamaCpp,
    "llama-cpp-unified": UnifiedLlamaCpp,
}


def no_ticks(blocks: int) -> int:
    """A swap that takes no time."""
    return 0


def simulate(
    policy: str,
    requests: list[Request],
    pool: Pool,
    limits: Limits,
    cost: Callable[[int, int, int, int], int],
    swap_out: Callable[[int], int] = no_ticks,
    swap_in: Callable[[int], int] = no_ticks,
) -> Outcome:
    """Serve ``requests`` to the last one under ``policy``, of ``POLICIES`` or ``SCHEDULERS``, step by step.

    ``cost(decodes, decode_context, prefill_tokens, prefill_pairs)`` gives the ticks of a step without its swaps;
    ``swap_out(blocks)`` and ``swap_in(blocks)`` the ticks of moving all blocks that one step moves that way.
    ValueError for a request that cannot be true; one that the pool can never hold is refused in the outcome.
    """
    check(requests, limits)
    system = (POLICIES | SCHEDULERS)[policy]
    return run(system(pool, limits), requests, cost, swap_out, swap_in)
