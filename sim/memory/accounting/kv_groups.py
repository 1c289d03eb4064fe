"""KV groups that share one pool of pages: how many there are, and what the windowed ones need."""

from __future__ import annotations

from typing import NamedTuple


class PageGroups(NamedTuple):
    """Groups of layers, each with block tables of its own, over one pool.

    Attributes:
        full: Groups that keep every token.
        sliding: Groups that keep what a window needs.
        window_tokens: Tokens that a token attends to there, itself included.
        most_prompt_blocks: Blocks that an admission asks for in a sliding group at the most, however long the prompt.
        sliding_first: Whether the sliding groups come before the full ones: the model's first layer has a window.
    """

    full: int = 1
    sliding: int = 0
    window_tokens: int = 0
    most_prompt_blocks: int = 0
    sliding_first: bool = False

    @property
    def number(self) -> int:
        return self.full + self.sliding

    @property
    def windowed(self) -> slice:
        """The sliding groups' places."""
        return slice(0, self.sliding) if self.sliding_first else slice(self.full, None)

    @property
    def unwindowed(self) -> slice:
        """The full groups' places."""
        return slice(self.sliding, None) if self.sliding_first else slice(0, self.full)

    def is_windowed(self, place: int) -> bool:
        """Whether the group at ``place`` has a window."""
        return place < self.sliding if self.sliding_first else place >= self.full

    def skipped_blocks(self, tokens: int, block_size: int) -> int:
        """Blocks that a sliding group needs no more once ``tokens`` are computed: the token to come attends to
        itself and the ``window_tokens - 1`` before it."""
        return max(0, tokens - self.window_tokens + 1) // block_size

    def wanted_blocks(self, blocks: int) -> int:
        """Blocks that an admission asks for in all groups, where it asks for ``blocks`` in a full one."""
        return self.full * blocks + self.sliding * min(blocks, self.most_prompt_blocks)


def most_prompt_blocks(window_tokens: int, in_flight_tokens: int, max_model_len: int, block_size: int) -> int:
    """Most blocks that a sequence ever holds in a sliding group: the window before a chunk, and the chunk.

    ``ceil(min(window - 1 + in_flight, max_model_len) / block_size) + 1``, the one more because a window may begin
    within a block: ``SlidingWindowSpec.max_admission_blocks_per_request`` of vLLM 0.33.

    Args:
        in_flight_tokens: Most tokens of a sequence that a step computes.
    """
    return -(-min(window_tokens - 1 + in_flight_tokens, max_model_len) // block_size) + 1
