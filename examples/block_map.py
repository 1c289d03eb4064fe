"""Figures of two policies on one load, as in a notebook: ``python examples/block_map.py [FOLDER]``.

Each figure is a plotly figure over tables of a run: ``figure.show()`` draws it in a notebook, ``write_html`` keeps it, and
``data_of`` is what it draws, as a table. A run's tables, once written, are also a timeline for ui.perfetto.dev, where
the package perfetto is installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fragmeter.reports.data.distribution import of_values
from fragmeter.reports.data.over_time import over_time
from fragmeter.reports.data.results import read_result
from fragmeter.reports.figures.figures import (
    block_map,
    data_of,
    largest_free_run,
    latency_cdf,
    request_timeline,
    throughput_over_time,
)
from fragmeter.sim import settings
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.metrics.residencies import residencies_table
from fragmeter.sim.metrics.result import requests_table, steps_table, write
from fragmeter.sim.recording.blocks import record
from fragmeter.traces import synthetic_pairs, workload

try:
    from fragmeter.reports.perfetto.timeline import write_timeline
except ImportError:
    write_timeline = None
    print("no timelines: the package perfetto is not installed; pip install -e '.[perfetto]' in the checkout")

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "out/figures")
folder.mkdir(parents=True, exist_ok=True)
load = workload(synthetic_pairs("vllm_sosp23_sharegpt_opt", 80, seed=0, max_model_len=2048), request_rate=3)
for policy in ("orca-max", "vllm-sosp23"):
    run, blocks = record(settings(policy=policy, num_gpu_blocks_override=400), load)
    requests, residencies = requests_table(run), residencies_table(run)
    figures = {
        "blocks": block_map(blocks, f"{policy}: every block over time"),
        "free": largest_free_run(blocks, f"{policy}: free blocks, and the longest run of them"),
        "requests": request_timeline(requests, residencies, f"{policy}: requests over time"),
        "latency": latency_cdf("e2el", {policy: of_values(request_times(run).e2el_ms)}, limit_ms=20_000),
        "throughput": throughput_over_time({policy: over_time(requests, residencies, steps_table(run))}),
    }
    for name, figure in figures.items():
        figure.write_html(folder / f"{policy}-{name}.html", include_plotlyjs="directory")
        data_of(figure).to_csv(folder / f"{policy}-{name}.csv", index=False)
    result = write(run, folder / policy, request={})
    if write_timeline is not None:
        write_timeline(folder / f"{policy}.pftrace", [read_result(result)])
    live = blocks.census_slots[:, 0].sum() / blocks.census_slots.sum()
    print(f"{policy}: {live:.1%} of the pool held tokens, {len(blocks.preempted_ticks)} preemptions; see {folder}")
