"""A trace of your own, and how many GPU blocks it needs: ``python examples/your_trace.py [FOLDER]``, or cell by cell.

The trace here is made up; put the path of yours in its place. Nothing beyond ``pip install -e .`` in the checkout is needed.
"""

# %% A trace: when each request arrives, and how many tokens its prompt and its answer have.
import sys
from pathlib import Path

import numpy as np
import pandas as pd

import fragmeter as fm

folder = Path(sys.argv[1] if len(sys.argv) > 1 and "ipykernel" not in sys.modules else "out/your_trace")
folder.mkdir(parents=True, exist_ok=True)
draws = np.random.default_rng(0)
requests = pd.DataFrame(
    {
        "arrival_s": draws.exponential(1 / 3, size=150).cumsum().round(3),
        "prompt_tokens": draws.integers(100, 1500, size=150),
        "output_tokens": draws.integers(50, 400, size=150),
    }
)
requests.to_csv(folder / "trace.csv", index=False)

# %% Serve it. A DataFrame does as well as a file: `trace=requests`.
replica = {"policy": "vllm-v1", "model": "llama-3.1-8b", "gpu": "a100-40gb"}
run = fm.simulate(trace=folder / "trace.csv", **replica)
print(run)

# %% How many blocks of the KV cache does a p99 TTFT under 1 s take?
LIMIT_MS = 1000.0


def p99_ttft_ms(blocks: int) -> float:
    """p99 TTFT with a pool of so many blocks; infinite where a request does not fit in at all."""
    summary = fm.simulate(trace=requests, num_gpu_blocks_override=blocks, **replica).summary
    return float("inf") if summary["refused"] else summary["p99_ttft_ms"]


too_few, enough = 0, int(run.summary["num_gpu_blocks"])
if p99_ttft_ms(enough) > LIMIT_MS:
    print(f"the {enough:,} blocks that the GPU has are not enough; take a larger GPU, or more of them")
else:
    # Halve the interval down to 16 blocks. More blocks seldom make TTFT worse, but they may: check beside the answer.
    while enough - too_few > 16:
        blocks = (too_few + enough) // 2
        if p99_ttft_ms(blocks) <= LIMIT_MS:
            enough = blocks
        else:
            too_few = blocks
    print(f"{enough:,} of {run.summary['num_gpu_blocks']:,} blocks are enough for p99 TTFT <= {LIMIT_MS:,.0f} ms")

# %% The trade-off around that point.
table = pd.DataFrame({"num_gpu_blocks": [enough // 2, 3 * enough // 4, enough, 2 * enough]})
table["p99_ttft_ms"] = table["num_gpu_blocks"].map(p99_ttft_ms)
print(table.round(1).to_string(index=False))
