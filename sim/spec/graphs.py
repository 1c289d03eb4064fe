"""CUDA graphs: steps are captured for a few batch sizes, and a batch is padded to the next captured size.

Sizes 1, 2, 4 and the multiples of 8 up to 512 are captured, as vLLM 0.6 to 0.10 do
(``compilation_config.cudagraph_capture_sizes``). A larger batch runs without a graph and without padding.
"""

from __future__ import annotations

MAX_CAPTURED = 512
#: Memory of the captured graphs on each GPU: the low end of the "1~3 GiB" in a warning of vLLM's
#: ``model_runner.py``. Public logs of "Graph capturing finished ... took" show 0.1 to 1.0 GiB.
CUDA_GRAPH_BYTES = 1 << 30


def padded_batch(width: int) -> int:
    """Rows of a batch of ``width`` tokens with its padding; 0 for an empty batch."""
    if width > MAX_CAPTURED or width < 3:
        return width
    return 4 if width <= 4 else -(-width // 8) * 8
