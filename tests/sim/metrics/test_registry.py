"""The registry against a summary: each metric is there under its path, and each latency is declared."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fragmeter.sim import Workload, settings, simulate, summary
from fragmeter.sim.metrics.registry import (
    COMPARED,
    LATENCIES,
    METRICS,
    OF_REQUESTS,
    PERCENTILES,
    STATISTICS,
    key,
    metric_text,
)
from fragmeter.sim.metrics.requests import request_times
from paths import ROOT

#: Metrics that only some runs have.
SOME = {"request_goodput"} | {path for path in METRICS if path.startswith(("speculative_decoding.", "kv_offloading."))}


def served():
    length = np.arange(2, 42, dtype=np.int64)
    workload = Workload("ramp", arrival_ticks=length * 10**6, prompt_tokens=length * 7, output_tokens=length)
    return simulate(settings(policy="vllm-v1"), workload)


def at(content, path):
    for part in path.split("."):
        content = content[part]
    return content


def test_a_summary_has_every_metric_under_its_path():
    content = summary(served())
    assert all(isinstance(at(content, path), int | float) for path in METRICS.keys() - SOME)


def test_a_summary_has_no_statistic_of_a_latency_that_is_not_declared():
    declared = {key(statistic, name) for statistic in (*STATISTICS, "std") for name in LATENCIES}
    shaped = re.compile(r"(mean|median|std|p[\d.]+)_\w+_ms")
    assert {name for name in summary(served()) if shaped.fullmatch(name)} == declared
    assert declared - {key("std", name) for name in LATENCIES} <= METRICS.keys()


def test_a_statistic_is_the_percentile_that_it_declares():
    run = served()
    content, times = summary(run), request_times(run)
    for name in OF_REQUESTS:
        values = getattr(times, f"{name}_ms")
        for statistic, rank in STATISTICS.items():
            expected = values.mean() if rank is None else np.percentile(values, rank)
            assert content[key(statistic, name)] == expected, (statistic, name)


def test_percentiles_are_generated_once():
    assert [rank for rank in STATISTICS.values() if rank not in (None, 50)] == list(PERCENTILES)
    assert COMPARED.items() <= STATISTICS.items()


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("p99_ttft_ms", 9999.94, "9,999.9"),
        ("p99_ttft_ms", 10_000.4, "10,000"),
        ("request_throughput", 0.126, "0.126"),
        ("request_goodput", 0.01964, "0.0196"),
        ("request_goodput", 0.0, "0.00"),
        ("request_goodput", 1.964, "1.96"),
        ("mean_normalized_latency_s", 0.02134, "0.0213"),
        ("refused", 3, "3"),
        ("refused", 0.4, "0.4"),
        ("refused", 12_345, "12,345"),
        ("waste.free", 12.3456, "12.35"),
    ],
)
def test_a_value_has_the_decimals_of_its_metric_and_none_from_ten_thousand(path, value, expected):
    assert metric_text(path, value) == expected
    if path in METRICS:
        assert f"{METRICS[path].rounded(value):,}" == expected.removesuffix(".00") + ".0" * expected.endswith(".00")


def test_no_other_module_formats_a_metric():
    """Its digits would be other ones than those of the next table. Texts in which a number is rounded are none of a table."""
    names = "|".join(path for path in METRICS if "." not in path)
    formatted = re.compile(rf"\{{[^{{}}]*\b({names})\b[^{{}}]*:[,.+]*\d*[fg]\}}")
    found = [
        (path.relative_to(ROOT).as_posix(), line.strip())
        for folder in ("sim", "traces", "gpu", "reports", "experiments")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if formatted.search(line)
    ]
    assert found == []
