"""KV groups that share one pool of pages: how many there are, and which blocks each kind keeps.

full       every block
sliding    the blocks that the window of the next token needs
state      a page for the fixed-size state of its layers (Mamba, linear attention), however long the sequence. Where
           prefixes are cached, states at ends of blocks are kept for look-ups (``mamba_cache_mode`` align of vLLM):
           a sequence takes a page with every block, and gives back the one before in the next step. Where kernels export
           states from within a prefill, its last chunk takes two: one for the end of the last block before its end
ring       a page for the buffer of an indexer (``CircularBufferSpec`` of vLLM), from the first chunk to the end of the
           sequence; no look-up finds it

Groups may have blocks of several sizes, of 16 tokens and of 32 where a block of either has the same bytes. Look-ups then find prefixes
of a multiple of all sizes, and a slot is the share of a block that a token has in the group with the longest common multiple of them:

    sizes        16  16  32        a block has 32 slots; a token of the first two groups has two of them
    tokens 40    3   3   2         blocks, of 96 + 96 + 64 slots
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

FULL, SLIDING, STATE, RING = "full", "sliding", "state", "ring"
#: Tokens that the state of a sequence stands for in the next step, with the step before: as of a window of two.
STATE_WINDOW = 2


class GroupSize(NamedTuple):
    """Size of the blocks of one KV group, where the groups of a model have blocks of several sizes.

    Attributes:
        block_size: Tokens of a block.
        window_tokens, most_prompt_blocks: See ``PageGroups``; 0 in a group that keeps every token.
    """

    block_size: int
    window_tokens: int = 0
    most_prompt_blocks: int = 0


class GroupClass(NamedTuple):
    """KV groups that allocate and free blocks at the same tokens.

    Attributes:
        kind: Kind of the groups.
        block_size: Tokens per block.
        window_tokens: Window in tokens, the current token included; 0 if blocks are freed only when the sequence ends.
        most_prompt_blocks: Most blocks that an admission asks for in one group; None without a bound.
        places: Indices of the groups.
    """

    kind: str
    block_size: int
    window_tokens: int
    most_prompt_blocks: int | None
    places: tuple[int, ...]

    @property
    def number(self) -> int:
        """How many groups."""
        return len(self.places)

    def wanted_blocks(self, tokens: int) -> int:
        """Blocks that the admission of ``tokens`` asks for in one group."""
        blocks, most = -(-tokens // self.block_size), self.most_prompt_blocks
        return blocks if most is None else min(blocks, most)


class PageGroups(NamedTuple):
    """KV cache groups, as in vLLM: sets of layers with their own block tables over one shared pool.

    Attributes:
        kinds: Kind of each group (``FULL``, ``SLIDING``, ``STATE``, ``RING``), in the order of the model's first
            layers.
        window_tokens: Window of sliding groups in tokens, the current token included; the longest one if ``sizes``
            differ.
        most_prompt_blocks: Most blocks that an admission asks for in a sliding group, however long the prompt.
        states_by_block: Whether states at block boundaries are kept for prefix look-ups.
        ahead: Whether a step is decided while the step before it runs; blocks are then released one step later.
        exports_states: Whether the last chunk of a prefill also keeps the state at its last block boundary
            (``num_prefill_checkpoint_blocks`` of vLLM's ``MambaSpec``).
        sizes: Block size and window of each group, if they differ; else empty. A pool block then has as many slots as
            the least common multiple of the block sizes.
        drafts: Draft tokens per sequence and step. State groups hold one more block for each
            (``num_speculative_blocks``).
        drafter: Index of the group with the drafter's layer, if there is one.
        drops_block: Whether look-ups drop the last block found in the drafter's group (``use_eagle_block_drop`` of
            vLLM): its KV depends on the token after the block, which the hash covers only without a KV connector.
        connects: Whether there is a KV connector. A finished sequence then frees the blocks before its windows first
            (``_connector_finished`` of vLLM's scheduler).
        defers: Whether blocks that a batch in flight may write come free after it (``defer_block_free``; see ``paged.fences``).
        retention_tokens: Tokens from one checkpoint of windows and states that stays cached within a prompt to the next; 0 for none
            (``prefix_cache_retention_interval``).
    """

    kinds: tuple[str, ...] = (FULL,)
    window_tokens: int = 0
    most_prompt_blocks: int = 0
    states_by_block: bool = False
    ahead: bool = False
    exports_states: bool = False
    sizes: tuple[GroupSize, ...] = ()
    drafts: int = 0
    drafter: int = 0
    drops_block: bool = False
    connects: bool = False
    defers: bool = False
    retention_tokens: int = 0

    @classmethod
    def of(cls, full: int = 1, sliding: int = 0, window_tokens: int = 0, most_prompt_blocks: int = 0) -> PageGroups:
        """``full`` groups that keep every token, followed by ``sliding`` groups with a window."""
        return cls((FULL,) * full + (SLIDING,) * sliding, window_tokens, most_prompt_blocks)

    @property
    def number(self) -> int:
        return len(self.kinds)

    @property
    def full(self) -> int:
        """Number of groups that keep every token."""
        return self.kinds.count(FULL)

    @property
    def sliding(self) -> int:
        """Number of groups with a sliding window."""
        return self.kinds.count(SLIDING)

    @property
    def states(self) -> int:
        """Number of groups with a fixed-size state (Mamba, linear attention)."""
        return self.kinds.count(STATE)

    @property
    def rings(self) -> int:
        """Number of groups with the ring buffer of an indexer."""
        return self.kinds.count(RING)

    def windows(self) -> dict[str, int]:
        """Window in tokens of each kind of group that frees blocks while a sequence runs."""
        kinds = {SLIDING: self.window_tokens, STATE: STATE_WINDOW if self.states_by_block else 0}
        return {kind: tokens for kind, tokens in kinds.items() if tokens and kind in self.kinds}

    def classes(self, block_size: int) -> tuple[GroupClass, ...]:
        """Groups with equal blocks and windows, merged into classes, in the order of each class's first group.

        Args:
            block_size: Tokens per block, if ``sizes`` is empty.
        """
        found: dict[tuple[str, int, int, int | None], list[int]] = {}
        for place, kind in enumerate(self.kinds):
            size, window, most = block_size, self.window_tokens, self.most_prompt_blocks
            if self.sizes:
                size, window, most = self.sizes[place]
            of_kind = {
                FULL: (0, None),
                SLIDING: (window, most),
                STATE: (STATE_WINDOW if self.states_by_block else 0, 1 + self.exports_states),
                RING: (0, 1),
            }
            found.setdefault((kind, size, *of_kind[kind]), []).append(place)
        return tuple(GroupClass(*each, tuple(places)) for each, places in found.items())

    def block_sizes(self, block_size: int) -> tuple[int, ...]:
        """Tokens per block of each group."""
        return tuple(size.block_size for size in self.sizes) or (block_size,) * self.number

    def hash_block_size(self, block_size: int) -> int:
        """Tokens per block hash: a divisor of the block sizes of all groups."""
        return gcd(*self.block_sizes(block_size))

    def exports(self, computed: int, tokens: int, prefill_end: int, block_size: int) -> bool:
        """Whether a chunk from token ``computed`` to ``tokens`` takes two blocks in a state group.

        The first block is for the state at the last block boundary before ``tokens``, which the kernel exports from
        within the chunk. The second is for the state at ``tokens``. Source: ``is_mamba_prefill_checkpoint_valid`` and
        ``MambaManager._needs_internal_checkpoint`` of vLLM 0.33, with hashes of whole blocks.

        Args:
            prefill_end: See ``Sequence``; no chunk that ends before it exports, unless states within a prompt are retained.
        """
        if not self.exports_states or (tokens < prefill_end and not self.retention_tokens) or computed % block_size:
            return False
        return self.last_end(tokens, block_size) > computed // block_size

    def last_end(self, tokens: int, block_size: int) -> int:
        """Blocks of the longest prefix of ``tokens`` that a look-up may find together with its state.

        At least one token stays to be computed, and dropped blocks are left out
        (``get_mamba_prefill_checkpoint_position`` of vLLM).
        """
        return max(0, tokens // block_size - 1) if self.drops_block else (tokens - 1) // block_size


def skipped_blocks(tokens: int, window_tokens: int, block_size: int) -> int:
    """Blocks that a group with a window needs no more once ``tokens`` are computed: the token to come attends to
    itself and the ``window_tokens - 1`` before it."""
    return max(0, tokens - window_tokens + 1) // block_size


def most_prompt_blocks(window_tokens: int, in_flight_tokens: int, max_model_len: int, block_size: int) -> int:
    """Most blocks that a sequence ever holds in a sliding group: the window before a chunk, and the chunk.

    ``ceil(min(window - 1 + in_flight, max_model_len) / block_size) + 1``. The extra block is for a window that begins
    within a block. Source: ``SlidingWindowSpec.max_admission_blocks_per_request`` of vLLM 0.33.

    Args:
        in_flight_tokens: Most tokens of a sequence that one step computes.
    """
    return -(-min(window_tokens - 1 + in_flight_tokens, max_model_len) // block_size) + 1
