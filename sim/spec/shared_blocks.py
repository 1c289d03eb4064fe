"""Blocks of attention and MLP that several layers of a model share (Zamba2, arXiv 2411.15242).

A few blocks are called from many layers in turns, each beside a layer with a state. A call reads the hidden state and the embedding of
the token side by side, adds small matrices of its own (adapters) to the projections, and passes its output through a projection of
its own to the state. Each call has its own KV cache. Two blocks and four calls:

    calls      0      1      2      3       each: adapters, projection, K and V
    block      A      B      A      B       attention, MLP, norms: stored twice, read four times
"""

from __future__ import annotations

from dataclasses import dataclass

from .matrix import Matrix


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """The blocks, and what each call adds (``Zamba2HybridLayer`` and ``Zamba2LoRA`` of vLLM's ``zamba2.py``).

    Attributes:
        count: Number of blocks.
        adapter_rank: Width between the two matrices of an adapter.
        adapts_attention: Whether Q, K and V have adapters, as the MLP has.
    """

    count: int
    adapter_rank: int
    adapts_attention: bool = False

    def own_matrices(self, hidden_size: int, attention_size: int, mlp_size: int, ranks: int = 1) -> tuple[Matrix, ...]:
        """The matrices that one call does not share.

        Args:
            attention_size: Width of the input of Q, K and V, and of each of them.
            mlp_size: Width of the MLP.
            ranks: Tensor-parallel ranks; they divide adapters, and each holds the whole projection.
        """
        found = [Matrix(hidden_size, hidden_size)]
        if self.adapts_attention:
            found += self._adapter(attention_size, attention_size, ranks, copies=3)
        return (*found, *self._adapter(hidden_size, 2 * mlp_size, ranks))

    def _adapter(self, inputs: int, outputs: int, ranks: int, copies: int = 1) -> tuple[Matrix, Matrix]:
        rank = self.adapter_rank
        return Matrix(inputs, rank, ranks, copies=copies), Matrix(rank, outputs, ranks, copies=copies)
