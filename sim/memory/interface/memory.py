"""The interface of a memory: all that an engine, a policy, a cluster, a recording or a metric may ask of it.

A memory says which sequence holds which slots of the pool on the device. It consists of

    a pool           blocks with reference counts, an arena of contiguous chunks, or single slots under a radix tree
    KV groups        ``groups``: layers that keep every token, and layers that keep a window; one block table a group
    a host pool      ``host_blocks`` blocks of swap space, or 0
    optional parts   typed attributes that are None where a memory has none:
                         tables         block ids                               read by recordings
                         placement      addresses of contiguous pieces          read by recordings
                         cache_log      look-ups in a prefix cache              read by metrics
                         cached_level   changes of the ledger's cached bucket   read by the ledger
                         contents_kept  contents of cached blocks, by name      read by metrics
                         transfers      copies beside the steps                 read by the engine
                         speculation    drafts, and which are accepted          read by the engine and by metrics

It is three protocols: ``Allocation`` (sequences get slots and give them up), ``Accounts`` (how many slots there are, and what they
are used for) and ``Inspection`` (which ones these are). A body below is the answer of a memory without the part in question.

One step of an engine calls it in this order:

    transaction                 the policy decides; what it grants is tentative
    evict, swap_in, stall       the executor: sequences leave the device, come back, stand still
    admit, prefill              the executor: sequences start to decode, prefills go on
    copied_slots                the executor: what the step copies before it writes
    advance                     the engine, when a leap is over: decoding sequences grow, by accepted drafts too
    release                     the engine: finished sequences leave
    free_deferred               the engine: blocks that the step in flight has written come free

Units: a *slot* holds the keys and values of one token, a *block* has ``block_size`` slots. ``decode_step`` is the number
of decode steps that are over.

A policy sees more than this of the kind of memory that it needs, by the transaction of that kind and its ``memory``:
``PagedTransaction`` and ``PagedMemory``, ``ContiguousTransaction`` and ``ContiguousMemory``, ``RadixTransaction`` and
``RadixMemory``. This module imports parts of memories, and none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np

from ...types.errors import SimulationFault
from ...types.sequence import Grant, Sequence
from ...types.state import State
from ..accounting.cache_log import CacheLog
from ..accounting.drafts import Speculation
from ..accounting.kv_groups import PageGroups
from ..accounting.ledger import Meter, SecondPool
from ..accounting.moves import Moves
from ..prefix.block_tables import BlockTables
from ..prefix.contents_log import ContentsKept
from ..prefix.host_copies import HostCopies


class Transaction(Protocol):
    """Blocks or slots that a policy grants while it decides one step. Nothing is allocated until the executor runs.

    A memory has one transaction, which ``Memory.transaction`` opens anew. Dropping it changes nothing. Exception:
    prefix caches allocate at once, so that the next look-up sees the blocks of the last grant.
    """

    @property
    def memory(self) -> Memory:
        """The memory of this transaction; subclasses narrow the type."""


class Placement(Protocol):
    """Optional part: where the contiguous pieces of reservations lie."""

    #: Where copies of pieces are noted, in slots; None without a recording.
    moves: Moves | None

    @property
    def has_addresses(self) -> bool:
        """Whether the memory places its pieces itself; False if it only counts slots."""

    def give_addresses(self, slots: int) -> None:
        """Give counted pieces addresses in a space of ``slots`` slots, for recordings; call it before the first
        admission."""

    def first_slot(self, grant: Grant) -> int:
        """First slot of the piece of a reservation.

        Raises:
            SimulationFault: Slots are only counted, without ``give_addresses``.
        """

    def kept_pieces(self) -> list[Grant]:
        """Pieces of finished requests that are kept for requests that continue them."""

    def stranded_pieces(self) -> list[tuple[int, int]]:
        """Free pieces ``(first block, blocks)`` that are too small for the request at the head of the queue."""


class Allocation(Protocol):
    """Allocation and release of slots: the calls of a policy and of the executor. All but ``transaction`` mutate.

    A method whose default raises ``SimulationFault`` is never called under the policies of a memory that lacks it.

    Attributes:
        pipelined: Whether pipeline stages have batches of their own in flight; the engine sets it before the first step.
        batch: What the last decision scheduled, for ``land``.
        deferred: Finished sequences whose blocks come free after a batch in flight.
    """

    pipelined: bool = False
    batch: Mapping[Sequence, object] = MappingProxyType({})
    deferred: Mapping[Sequence, object] = MappingProxyType({})

    def transaction(self, decode_step: int) -> Transaction:
        """Open the tentative grants of ``decode_step``; earlier grants become void."""

    # --- The executor, for the plan of ``decode_step`` ---

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        """Take the slots of victims before ``decode_step``.

        Args:
            preempted: Their KV is dropped and computed again later.
            swapped_out: Their KV moves to the host pool.
            decode_step: The step that is about to run.
        """
        raise _cannot(self, "preempt a sequence")

    def swap_in(self, sequence: Sequence, decode_step: int) -> None:
        """Move the KV of a sequence back from the host; it decodes in ``decode_step``."""
        raise _cannot(self, "swap a sequence in")

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """Allocate the slots of a sequence's ``start_tokens``, the last of which is computed in ``decode_step``.

        Args:
            padded_tokens: Length to which static batching pads the prompt; 0 without padding.
            past: Whether ``decode_step`` is already over: the prefill ran alone while the running sequences paused.
        """

    def prefill(self, sequence: Sequence, decode_step: int) -> None:
        """Allocate the slots of a chunked prefill up to ``computed_tokens``, the chunk of ``decode_step`` included."""
        raise _cannot(self, "prefill in chunks")

    def stall(self, sequence: Sequence, decode_step: int, finished: bool = False) -> None:
        """A running sequence stops decoding before ``decode_step`` and keeps its blocks.

        Args:
            finished: Whether it has generated its last token and only waits for ``release_finished``.
        """
        raise _cannot(self, "stall a sequence")

    def pass_windows(self, sequence: Sequence) -> None:
        """Free the blocks before the windows of a stalled sequence that computes nothing more on this replica."""
        raise _cannot(self, "keep a prompt that is sent elsewhere")

    def swapped_blocks(self, sequences: tuple[Sequence, ...]) -> int:
        """Blocks that a swap of these sequences, out or in, moves between device and host. Changes nothing."""
        raise _cannot(self, "swap")

    def copied_slots(self, decodes: bool) -> int:
        """Slots that the coming step copies on the device before it writes. The copies noted so far are made by this
        call.

        Args:
            decodes: Whether the running sequences decode in that step.
        """
        return 0

    # --- Sequences that leave ---

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """Free the slots of sequences that leave before ``decode_step``.

        These are sequences that generated their last token; on a prefill replica, also sequences that were stalled or
        prefilled in chunks.
        """

    def release_finished(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """As ``release`` under asynchronous scheduling: finished sequences leave after others allocated for
        ``decode_step``."""
        raise _cannot(self, "be scheduled ahead")

    def land(self, batch: Mapping[Sequence, object]) -> None:
        """With batches in flight: what ``batch`` had, as the decision was carried out, is over, and its tokens are known."""
        raise _cannot(self, "have batches in flight")

    def free_deferred(self, decode_step: int) -> None:
        """Under asynchronous scheduling, once ``decode_step`` is decided: the step before it is over, and the blocks of ``deferred`` come free."""
        raise _cannot(self, "defer blocks")

    def expect(self, children: np.ndarray) -> None:
        """State how many requests continue each request, int64 [requests]; called before anything else.

        A request's KV is kept until that many requests have continued it.
        """
        return


def _cannot(memory: object, what: str) -> SimulationFault:
    name = type(memory).__name__
    return SimulationFault(f"{name} cannot {what}; the policy calls a method that its memory does not have")


class Accounts(Protocol):
    """The size of the pool and the use of its slots: the calls of the engine, of clusters and of metrics.

    Attributes:
        num_blocks: Blocks of the device pool that sequences can hold.
        block_size: Slots per block.
        host_blocks: Blocks of the swap space; 0 without one.
        host_free: Free blocks of the swap space; negative if nothing may be swapped out.
        groups: KV groups that share the pool; one group that keeps every token unless layers have windows.
        meter: Names of the values that ``advance`` returns, from ``accounting.ledger.METER``.
        reserves: Whether an admission reserves everything that the sequence may ever need (``Sequence.grant``); False
            allocates block by block.
        leaves_together: Whether sequences hold their slots until the last sequence of their batch has finished.
        pinned_slots: Slots that are always live, such as a pinned prefix.
        cache_log: Prefix look-ups of admissions and their hits; None without a cache.
        cached_level: Changes over time of the slots that no sequence holds and whose contents, or mapping, are kept
            until reclaimed. The ``cache_log`` if there is one, else None without such slots.
        contents_kept: Intervals in which each content was cached, and the requests for it; None if not logged.
        second_pool: A pool of some layers beside that of the others; None where all share one.
        transfers: Copies between device and host that run beside steps; None if every copy is part of a step.
        speculation: Drafts that steps verify, and the accepted ones; None without speculative decoding.
        clock: The time in ticks, which the engine sets; for orders of eviction that a policy brings.
    """

    num_blocks: int
    block_size: int
    meter: tuple[str, ...]
    host_blocks: int = 0
    host_free: int = 0
    pinned_slots: int = 0
    groups: PageGroups = PageGroups()
    reserves: bool = False
    leaves_together: bool = False
    cache_log: CacheLog | None = None
    cached_level: CacheLog | None = None
    contents_kept: ContentsKept | None = None
    second_pool: SecondPool | None = None
    transfers: HostCopies | None = None
    speculation: Speculation | None = None
    clock: Callable[[], int] = staticmethod(lambda: 0)

    @property
    def capacity_slots(self) -> int:
        """Slots of the device pool."""
        return self.num_blocks * self.block_size

    @property
    def evicted_blocks(self) -> int:
        """Cached blocks that have been reclaimed so far, and lost their contents, because free blocks ran out."""
        return 0

    def log_no_contents(self) -> None:
        """Keep no ``contents_kept``; called before the first step."""
        return

    def advance(self, state: State, steps: int) -> Meter:
        """Grow the running sequences by ``steps`` tokens each, beginning with step ``state.decode_step``.

        Accepted drafts of a step that verified some are added (``State.accept``).

        Args:
            steps: Decode steps of a leap; 0 ends a step without decodes.

        Returns:
            The values named by ``meter`` in the first of these steps, in slots; ``growing`` is in sequences.

        Raises:
            SimulationFault: The pool has too few blocks, which the policy must prevent.
        """

    def room_after(self, state: State, steps: int) -> int:
        """Slots that are free or reclaimable after ``steps`` more decode steps. Changes nothing."""

    def repeated_slots(self, admitted: Iterable[Sequence] = ()) -> int:
        """Slots that the decodes of the coming step read more than once, because several block tables name their block.

        A block in k tables of decoding sequences counts k - 1 times. The value is the same in every step of a leap.
        Changes nothing. Tables of prefilling or stalled sequences do not count. Of several KV groups, one that keeps
        every token counts. Memories without block tables (llama.cpp's cells) return 0.

        Args:
            admitted: Sequences that end their prefill in that step; the executor has admitted them already.
        """
        return 0


class Inspection(Protocol):
    """Which slots a sequence holds: the calls of recordings.

    Attributes:
        tables: Block tables, read-only, brought up to date by ``settle``. None if blocks are only counted, or if each
            KV group has tables of its own.
    """

    tables: BlockTables | None = None

    @property
    def placement(self) -> Placement | None:
        """Addresses of contiguous pieces; None for a pool of blocks."""
        return None

    def settle(self, state: State, steps: int) -> None:
        """Bring ``tables`` to the state after ``steps`` steps of the leap that is about to run. Counts do not change.

        Args:
            steps: At most the steps of the leap; 0 for a step without decodes.
        """
        return

    def cached_block_ids(self) -> np.ndarray:
        """Ids of the blocks whose contents, or mapping, are kept for later requests, int64. Changes nothing.

        Ids may repeat, and may be in tables, too. Empty if blocks have no ids.
        """
        return np.zeros(0, dtype=np.int64)


class Memory(Allocation, Accounts, Inspection, Protocol):
    """The KV memory of one replica: allocation, accounting and inspection of its slots."""
