"""CUDA graphs: a captured step runs for a few batch sizes only, so a batch is filled up to the next.

Sizes 1, 2, 4 and the multiples of 8 up to 512 are captured, as vLLM 0.6 to 0.10 do
(``compilation_config.cudagraph_capture_sizes``). A larger batch runs without a graph, as it is.
"""

from __future__ import annotations

MAX_CAPTURED = 512
#: What capturing takes of each GPU: the low end of the "1~3 GiB" that vLLM's ``model_runner.py``
#: warns of. Logs of "Graph capturing finished ... took" found in public show 0.1 to 1.0 GiB.
CUDA_GRAPH_BYTES = 1 << 30


def padded_batch(width: int) -> int:
    """Rows that a batch of ``width`` tokens is computed with; 0 stays 0."""
    if width > MAX_CAPTURED or width < 3:
        return width
    return 4 if width <= 4 else -(-width // 8) * 8
