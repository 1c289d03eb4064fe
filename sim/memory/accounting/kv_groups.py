"""KV groups that share one pool of pages: how many there are, and which blocks each kind keeps.

full       every block
sliding    the blocks that the window of the next token needs
state      a page for the fixed-size state of its layers (Mamba, linear attention), however long the sequence. Where
           prefixes are cached, states at ends of blocks are kept for look-ups (``mamba_cache_mode`` align of vLLM):
           a sequence takes a page with every block, and gives back the one before in the next step. Where kernels export
           states from within a prefill, its last chunk takes two: one for the end of the last block before its end
ring       a page for the buffer of an indexer (``CircularBufferSpec`` of vLLM), from the first chunk to the end of the
           sequence; no look-up finds it
"""

from __future__ import annotations

from typing import NamedTuple

FULL, SLIDING, STATE, RING = "full", "sliding", "state", "ring"
#: Tokens that the state of a sequence stands for in the next step, with the step before: as of a window of two.
STATE_WINDOW = 2


class PageGroups(NamedTuple):
    """Groups of layers, each with block tables of its own, over one pool.

    Attributes:
        kinds: Of each group, in the order of the model's first layers.
        window_tokens: Tokens that a token attends to in sliding groups, itself included.
        most_prompt_blocks: Blocks that an admission asks for in a sliding group at the most, however long the prompt.
        states_by_block: Whether states at ends of blocks are kept for look-ups.
        ahead: Whether a step is decided while the step before it runs; blocks are then released a step later.
        exports_states: Whether a prefill's last chunk also keeps the state at the last end of a block before its end
            (``num_prefill_checkpoint_blocks`` of vLLM's ``MambaSpec``).
    """

    kinds: tuple[str, ...] = (FULL,)
    window_tokens: int = 0
    most_prompt_blocks: int = 0
    states_by_block: bool = False
    ahead: bool = False
    exports_states: bool = False

    @classmethod
    def of(cls, full: int = 1, sliding: int = 0, window_tokens: int = 0, most_prompt_blocks: int = 0) -> PageGroups:
        """So many full groups, then so many sliding ones."""
        return cls((FULL,) * full + (SLIDING,) * sliding, window_tokens, most_prompt_blocks)

    @property
    def number(self) -> int:
        return len(self.kinds)

    @property
    def full(self) -> int:
        """Groups that keep every token."""
        return self.kinds.count(FULL)

    @property
    def sliding(self) -> int:
        """Groups that keep what a window needs."""
        return self.kinds.count(SLIDING)

    @property
    def states(self) -> int:
        """Groups with a fixed-size state."""
        return self.kinds.count(STATE)

    @property
    def rings(self) -> int:
        """Groups with the buffer of an indexer."""
        return self.kinds.count(RING)

    def windows(self) -> dict[str, int]:
        """Window of each kind of group that gives blocks back while its sequences run."""
        kinds = {SLIDING: self.window_tokens, STATE: STATE_WINDOW if self.states_by_block else 0}
        return {kind: tokens for kind, tokens in kinds.items() if tokens and kind in self.kinds}

    def wanted_blocks(self, blocks: int) -> int:
        """Blocks that an admission asks for in all groups, where it asks for ``blocks`` in a full one."""
        states = self.states * min(blocks, 1 + self.exports_states) + self.rings * min(blocks, 1)
        return self.full * blocks + self.sliding * min(blocks, self.most_prompt_blocks) + states

    def exports(self, computed: int, tokens: int, prefill_end: int, block_size: int) -> bool:
        """Whether a chunk from ``computed`` up to ``tokens`` tokens takes two blocks in a group of states.

        The first one is for the state at the last end of a block before ``tokens``, which the kernel exports from within the
        chunk; the second one for the state at its end. Source: ``is_mamba_prefill_checkpoint_valid`` of vLLM 0.33, with hashes
        of whole blocks, and ``MambaManager._needs_internal_checkpoint``.

        Args:
            prefill_end: See ``Sequence``; no chunk before it exports.
        """
        if not self.exports_states or tokens < prefill_end or computed % block_size:
            return False
        return -(-tokens // block_size) - computed // block_size > 1


def skipped_blocks(tokens: int, window_tokens: int, block_size: int) -> int:
    """Blocks that a group with a window needs no more once ``tokens`` are computed: the token to come attends to
    itself and the ``window_tokens - 1`` before it."""
    return max(0, tokens - window_tokens + 1) // block_size


def most_prompt_blocks(window_tokens: int, in_flight_tokens: int, max_model_len: int, block_size: int) -> int:
    """Most blocks that a sequence ever holds in a sliding group: the window before a chunk, and the chunk.

    ``ceil(min(window - 1 + in_flight, max_model_len) / block_size) + 1``, the one more because a window may begin
    within a block: ``SlidingWindowSpec.max_admission_blocks_per_request`` of vLLM 0.33.

    Args:
        in_flight_tokens: Most tokens of a sequence that a step computes.
    """
    return -(-min(window_tokens - 1 + in_flight_tokens, max_model_len) // block_size) + 1
