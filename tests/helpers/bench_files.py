"""A benchmark of a server that took so many times as long as a simulated run, as ``vllm bench serve`` writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from fragmeter.sim.metrics.result import served_times
from fragmeter.sim.types.ticks import PER_SECOND


def benchmark(path: Path, requests: pd.DataFrame, slower: float = 1.0, **more: object) -> Path:
    """Writes the requests of a run, all served, with each latency ``slower`` times the simulated one."""
    times = served_times(requests)
    assert len(times.index) == len(requests)
    ttft_s, e2el_s = (slower * values / 1e3 for values in (times.ttft_ms, times.e2el_ms))
    spans = zip((e2el_s - ttft_s).tolist(), (times.output_tokens - 1).tolist(), strict=True)
    data = {
        "model_id": "facebook/opt-13b",
        "duration": float(times.finish_ticks.max() / PER_SECOND),
        "request_rate": 4.0,
        "input_lens": requests["prompt_tokens"].tolist(),
        "output_lens": requests["output_tokens"].tolist(),
        "start_times": (times.arrival_ticks / PER_SECOND).tolist(),
        "ttfts": ttft_s.tolist(),
        "itls": [[span_s / max(1, count)] * count for span_s, count in spans],
    }
    path.write_text(json.dumps(data | more))
    return path
