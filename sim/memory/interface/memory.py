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

Units: a *slot* holds the keys and values of one token, a *block* has ``block_size`` slots. ``decode_step`` is the number
of decode steps that are over.

A policy sees more than this of the kind of memory that it needs, by the transaction of that kind and its ``memory``:
``PagedTransaction`` and ``PagedMemory``, ``ContiguousTransaction`` and ``ContiguousMemory``, ``RadixTransaction`` and
``RadixMemory``. This module imports parts of memories, and none of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from ...types.errors import SimulationFault
from ...types.sequence import Grant, Sequence
from ...types.state import State
from ..accounting.cache_log import CacheLog
from ..accounting.drafts import Speculation
from ..accounting.kv_groups import PageGroups
from ..accounting.ledger import Meter
from ..accounting.moves import Moves
from ..prefix.block_tables import BlockTables
from ..prefix.contents_log import ContentsKept
from ..prefix.host_tier import HostTier


class Transaction(Protocol):
    """Tentative grants of one step, made by a policy while it decides.

    A memory has one transaction, opened anew by ``Memory.transaction``. Dropping it changes nothing, except where
    the kind says that a grant is made at once (in prefix caches the next look-up sees what the last grant took).
    """

    @property
    def memory(self) -> Memory:
        """The memory that the grants are of; a kind of transaction narrows the type."""


class Placement(Protocol):
    """Optional part: where the contiguous pieces of reservations lie."""

    #: Where copies of pieces are noted, in slots; None without a recording.
    moves: Moves | None

    @property
    def has_addresses(self) -> bool:
        """Whether the memory itself places its pieces; False where it counts slots, wherever they lie."""

    def give_addresses(self, slots: int) -> None:
        """Place pieces in an address space of so many slots where they are only counted; called before anything is admitted."""

    def first_slot(self, grant: Grant) -> int:
        """The slot in which the piece of a reservation begins.

        Raises:
            SimulationFault: Slots are only counted, without ``give_addresses``.
        """

    def kept_pieces(self) -> list[Grant]:
        """Pieces of requests that are over, kept for requests that go on from them."""

    def stranded_pieces(self) -> list[tuple[int, int]]:
        """Free pieces, (first block, blocks), too small for what the head of the queue was refused."""


class Allocation(Protocol):
    """Which sequence gets slots, and gives them up: what a policy and the executor ask. Everything but ``transaction`` mutates.

    What cannot happen under the policies of a kind raises SimulationFault.
    """

    def transaction(self, decode_step: int) -> Transaction:
        """Open the tentative grants of ``decode_step``; the last ones are void."""

    # --- The executor, for the plan of ``decode_step`` ---

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        """Victims give up what they hold before ``decode_step``: computed again later, or moved to the host pool."""
        raise _cannot(self, "preempt a sequence")

    def swap_in(self, sequence: Sequence, decode_step: int) -> None:
        """A sequence comes back from the host pool and decodes in ``decode_step``."""
        raise _cannot(self, "swap a sequence in")

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """A sequence takes what it needs for its ``start_tokens``, the last of which ``decode_step`` computes.

        Args:
            padded_tokens: Length to which static batching pads the prompt; 0 where nothing is padded.
            past: Whether ``decode_step`` is over already: the prefill goes alone while the running sequences pause.
        """

    def prefill(self, sequence: Sequence, decode_step: int) -> None:
        """A prefill that goes on takes what it needs for its ``computed_tokens``, those of ``decode_step`` included."""
        raise _cannot(self, "prefill in chunks")

    def stall(self, sequence: Sequence, decode_step: int, finished: bool = False) -> None:
        """A running sequence stops to grow before ``decode_step`` and keeps its blocks.

        Args:
            finished: Whether it generated its last token, so that it only waits for ``release_finished``.
        """
        raise _cannot(self, "stall a sequence")

    def pass_windows(self, sequence: Sequence) -> None:
        """A stalled sequence that computes nothing more on this replica gives back what its windows have passed."""
        raise _cannot(self, "keep a prompt that is sent elsewhere")

    def swapped_blocks(self, sequences: tuple[Sequence, ...]) -> int:
        """Blocks that move between device and host when these go out, or come back. Changes nothing."""
        raise _cannot(self, "swap")

    def copied_slots(self, decodes: bool) -> int:
        """Slots that the coming step copies on the device before it writes; the copies noted so far are then made.

        Args:
            decodes: Whether the running sequences compute in that step.
        """
        return 0

    # --- Sequences that leave ---

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """Sequences give up what they hold before ``decode_step``: those that generated their last token, and on a replica that
        only prefills those that were stalled, or prefilled in chunks."""

    def release_finished(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """As ``release``, of sequences that generated their last token, after other sequences took what they need for ``decode_step``."""
        raise _cannot(self, "be scheduled ahead")

    def expect(self, children: np.ndarray) -> None:
        """How many requests go on from each, int64 [requests]: it is kept for so many. Called before anything else."""
        return


def _cannot(memory: object, what: str) -> SimulationFault:
    name = type(memory).__name__
    return SimulationFault(f"{name} cannot {what}; the policy calls a method that its memory does not have")


class Accounts(Protocol):
    """How many slots there are, what they are used for, and for how long: what the engine, clusters and metrics ask.

    Attributes:
        num_blocks: Blocks of the device pool that sequences can have.
        block_size: Slots of a block.
        host_blocks: Blocks of the swap space; 0 where there is none.
        host_free: Free blocks of the swap space; below 0 where nothing may be swapped out.
        groups: KV groups that share the pool; one group that keeps every token unless layers have windows.
        meter: Names of what ``advance`` returns, of ``accounting.ledger.METER``.
        reserves: Whether an admission takes all that the sequence may ever need (``Sequence.grant``), and not block by block.
        leaves_together: Whether sequences hold their slots until the last one of their batch is done.
        pinned_slots: Slots that are live whether anything runs or not.
        cache_log: What admissions looked up and found; None where nothing is kept for others.
        cached_level: When slots that no sequence holds became reclaimable with their contents, or their mapping, kept; the
            ``cache_log`` where there is one, None where there are no such slots.
        contents_kept: Which contents were cached from when to when, and who asked for them; None where that is not logged.
        transfers: Copies between device and host that go on beside steps; None where every copy is part of a step.
        speculation: Drafts that steps verify, and which are accepted; None without speculative decoding.
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
    transfers: HostTier | None = None
    speculation: Speculation | None = None

    @property
    def capacity_slots(self) -> int:
        """Slots of the device pool."""
        return self.num_blocks * self.block_size

    @property
    def evicted_blocks(self) -> int:
        """Blocks so far that lost contents kept for others, because blocks ran out."""
        return 0

    def advance(self, state: State, steps: int) -> Meter:
        """Let the running sequences grow by ``steps`` tokens each, from step ``state.decode_step`` on. A step that verified drafts
        gives them those that are accepted, too (``State.accept``).

        Args:
            steps: Decode steps of a leap; 0 ends a step that only prefills, or in which nothing runs.

        Returns:
            ``meter``: levels in the first of those steps, in slots (and ``growing`` in sequences).

        Raises:
            SimulationFault: The pool has too few blocks; the policy must have seen to that.
        """

    def room_after(self, state: State, steps: int) -> int:
        """Slots that are free, or can be reclaimed, after so many decode steps more. Changes nothing."""

    def repeated_slots(self, admitted: Iterable[Sequence] = ()) -> int:
        """Slots that the decodes of the coming step read again: those of blocks that the tables of several decoding sequences
        name, once for each table beyond the first. Changes nothing; the same in every step of a leap.

        Tables of sequences that prefill, or are stalled, do not count: nothing is said of what a prompt reads of its prefix. Of KV
        groups one that keeps every token counts. 0 in memories that share without tables of blocks (llama.cpp's cells).

        Args:
            admitted: Sequences that end their prefill in that step; asked after the executor admitted them.
        """
        return 0


class Inspection(Protocol):
    """Which slots a sequence holds: what recordings ask.

    Attributes:
        tables: Block tables: read only, and brought up to date by ``settle``; None where blocks are only counted, and where each KV group has tables of its own.
    """

    tables: BlockTables | None = None

    @property
    def placement(self) -> Placement | None:
        """Where pieces lie; None where the pool is handed out in blocks."""
        return None

    def settle(self, state: State, steps: int) -> None:
        """Bring ``tables`` to the end of so many steps of the leap that is about to run; counts do not change.

        Args:
            steps: No more than the leap has; 0 for a step that only prefills.
        """
        return

    def cached_block_ids(self) -> np.ndarray:
        """Blocks that keep contents (or their mapping) for others, int64, some perhaps several times and some in
        tables too. Changes nothing; empty where no ids are handed out."""
        return np.zeros(0, dtype=np.int64)


class Memory(Allocation, Accounts, Inspection, Protocol):
    """Which sequence holds which slots of a pool."""
