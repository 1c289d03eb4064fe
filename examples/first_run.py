"""A first run, and the waste bars of three policies: ``python examples/first_run.py [FOLDER]``, or cell by cell in a notebook.

Editors with Jupyter open the ``# %%`` cells of this file as a notebook; there ``run`` and ``fm.waste_bars(...)`` alone on
the last line of a cell draw the bars in colour. Nothing beyond ``pip install -e .`` in the checkout is needed.
"""

# %% One run: 200 requests with ShareGPT's lengths, Poisson arrivals at 2 requests/s, OPT-13B on an A100.
import sys
from pathlib import Path

import fragmeter as fm

run = fm.simulate(policy="vllm-sosp23", request_rate=2, num_prompts=200)
print(run)

# %% The same numbers as a pandas Series; the keys are those of `vllm bench serve`.
print(run.summary[["request_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms"]])

# %% A row a request, in seconds and milliseconds.
print(run.requests[["arrival_s", "prompt_tokens", "output_tokens", "ttft_ms", "tpot_ms", "e2el_ms"]].describe())

# %% Three policies on the same requests: what the slots of the KV pool are used for.
policies = ("static", "orca-max", "vllm-sosp23")
runs = [fm.simulate(policy=policy, request_rate=2, num_prompts=200) for policy in policies]
print(fm.waste_bars(*runs))

# %% A page of its own with the bars, and a result folder that `fragmeter report` and `fragmeter compare` read.
folder = Path(sys.argv[1] if len(sys.argv) > 1 and "ipykernel" not in sys.modules else "out/first_run")
folder.mkdir(parents=True, exist_ok=True)
(folder / "waste.html").write_text(
    f"<!doctype html><meta charset='utf-8'>{fm.waste_bars(*runs)._repr_html_()}", "utf-8"
)
print(f"see {folder / 'waste.html'} and {run.save(folder / 'vllm-sosp23')}")
