"""A scheduler and an allocator of your own on a trace of your own, with their waste bars.

    python examples/own_policy.py [FOLDER]


Cell by cell in a notebook, too: there ``fm.waste_bars(...)`` alone on the last line of a cell draws the bars in colour.
The classes are in ``examples/extending``; docs/extending.md explains them.
"""

# %% A trace: the path of yours in place of this one.
import sys
from pathlib import Path

import numpy as np
import pandas as pd

import fragmeter as fm

draws = np.random.default_rng(0)
trace = pd.DataFrame(
    {
        "arrival_s": draws.exponential(1 / 2, size=200).cumsum().round(3),
        "prompt_tokens": draws.integers(20, 1200, size=200),
        "output_tokens": draws.integers(20, 400, size=200),
        "max_tokens": 400,
    }
)

# %% The folder of your own classes, as for any module that is not installed.
sys.path.append(str(Path(__file__).resolve().parent / "extending" if "__file__" in globals() else "examples/extending"))

# %% The scheduler beside vLLM's, the allocator beside the one that Orca uses.
# The same pool and step times for all: by default vllm-v1 has those of today's server, and the others those of the paper.
replica = {
    "model": "opt-13b",
    "gpu": "a100-40gb",
    "num_gpu_blocks_override": 980,
    "enforce_eager": True,
    "trace": trace,
}
runs = {
    "vllm-v1": fm.simulate(policy="vllm-v1", **replica),
    "shortest prompt": fm.simulate(policy="shortest_prompt:ShortestPromptFirst", max_wait_steps=500, **replica),
    "orca-oracle, first fit": fm.simulate(policy="orca-oracle", arena="first-fit", **replica),
    "orca-oracle, worst fit": fm.simulate(
        policy="orca-oracle", arena="first-fit", allocator="worst_fit:WorstFit", **replica
    ),
}
bars = fm.waste_bars(*runs.values(), labels=list(runs))
print(bars)
folder = Path(sys.argv[1] if len(sys.argv) > 1 and "ipykernel" not in sys.modules else "out/own_policy")
folder.mkdir(parents=True, exist_ok=True)
page = f"<!doctype html><meta charset='utf-8'><section style='font-family:sans-serif'><h2>Waste bars</h2>{bars._repr_html_()}</section>"
(folder / "own_policy.html").write_text(page, "utf-8")

# %% What the scheduler changes for requests.
table = pd.DataFrame([run.summary[["mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms"]] for run in runs.values()])
print(table.set_axis(list(runs)).astype(float).round(1).to_string())
