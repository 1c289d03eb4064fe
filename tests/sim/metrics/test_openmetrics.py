"""A run as vLLM's metrics: what a parser reads back are the run's own counts, and gauges by hand."""

from __future__ import annotations

import json
import re
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.measured.scrapes import read_scrapes
from fragmeter.experiments.measured.server_metrics import read_metrics, served_load
from fragmeter.experiments.runs.pool_use import use_while_arriving
from fragmeter.sim import Workload, settings, simulate
from fragmeter.sim.cluster import cluster, simulate_cluster
from fragmeter.sim.metrics.openmetrics import openmetrics
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.users import Users
from fragmeter.traces import synthetic_pairs, workload
from paths import ROOT

PAIRS = synthetic_pairs("vllm_sosp23_sharegpt_opt", 200, seed=0, max_model_len=2048)


@pytest.fixture(scope="module")
def run():
    """Requests that preempt each other, a few of which end before their limit."""
    work = workload(PAIRS, request_rate=6)
    limits = work.output_tokens + (np.arange(len(work)) % 5 == 0)
    tight = settings(policy="vllm-v1", num_gpu_blocks_override=300, cost="roofline")
    return simulate(tight, Workload("limited", work.arrival_ticks, work.prompt_tokens, work.output_tokens, limits))


def samples_of(text: str) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(time, value) of every series, read by Prometheus' own parser, scrape by scrape.

    Of several scrapes at once it drops samples of histograms (prometheus_client 0.26): it takes those of a later time for
    duplicates of the ones before.
    """
    lines = text.splitlines()
    headers = [line for line in lines if line.startswith("# ") and line != "# EOF"]
    data = [line for line in lines if not line.startswith("#")]
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _, scrape in groupby(sorted(data, key=time_of), key=time_of):
        for family in text_string_to_metric_families(_with_headers(headers, list(scrape))):
            for sample in family.samples:
                found.setdefault(_series(sample), []).append((float(sample.timestamp), sample.value))
    return found


def time_of(line: str) -> float:
    return float(line.rpartition(" ")[2])


def _with_headers(headers: list[str], data: list[str]) -> str:
    parts = []
    for help_line, type_line in zip(headers[::2], headers[1::2], strict=True):
        name = type_line.split()[2]
        parts += [
            help_line,
            type_line,
            *(line for line in data if re.match(rf"{name}(_total|_bucket|_count|_sum)?{{", line)),
        ]
    return "\n".join([*parts, "# EOF", ""])


def _series(sample: Sample) -> tuple[str, str]:
    labels = {name: value for name, value in sample.labels.items() if name not in ("job", "model_name")}
    return sample.name.removeprefix("vllm:"), ",".join(f"{name}={value}" for name, value in sorted(labels.items()))


@pytest.mark.slow
def test_at_the_end_they_are_the_run_s_own_counts(run):
    found, times, total = samples_of("".join(openmetrics([run], "opt-13b", 7.0))), request_times(run), summary(run)
    last = {name: series[-1][1] for name, series in found.items()}
    assert last["generation_tokens_total", "engine=0"] == run.workload.output_tokens.sum()
    assert last["prompt_tokens_total", "engine=0"] == run.workload.prompt_tokens.sum()
    assert last["num_preemptions_total", "engine=0"] == total["preemptions"]["recompute"] > 10
    reasons = [last["request_success_total", f"engine=0,finished_reason={reason}"] for reason in ("stop", "length")]
    assert reasons == [40, 160]
    for name, values in (
        ("time_to_first_token_seconds", times.ttft_ms / 1e3),
        ("e2e_request_latency_seconds", times.e2el_ms / 1e3),
        ("request_time_per_output_token_seconds", times.tpot_ms / 1e3),
    ):
        assert last[f"{name}_count", "engine=0"] == last[f"{name}_bucket", "engine=0,le=+Inf"] == len(values)
        assert last[f"{name}_sum", "engine=0"] == pytest.approx(values.sum())
        assert last[f"{name}_bucket", "engine=0,le=2.5"] == (values <= 2.5).sum()
    assert all(last[gauge, "engine=0"] == 0 for gauge in ("num_requests_running", "num_requests_waiting"))


def test_the_pool_is_in_labels_as_vllm_has_them(run, tmp_path):
    """Without the name of the model (``log_metrics_info`` in vllm/v1/metrics/loggers.py)."""
    text = "".join(openmetrics([run], "opt-13b", 7.0))
    lines = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    labels = 'job="fragmeter",engine="0",block_size="16",cache_dtype="auto",enable_prefix_caching="True",num_gpu_blocks="300"'
    assert {line.rpartition(" ")[0] for line in lines} == {f"vllm:cache_config_info{{{labels}}} 1"}
    (tmp_path / "metrics.txt").write_text(text)
    found = read_metrics(tmp_path / "metrics.txt")
    assert (found.num_gpu_blocks, found.block_size) == (300, 16)
    whole = simulate(settings(policy="orca-max", cost="roofline"), workload(PAIRS, request_rate=6))
    assert "cache_config_info" not in "".join(openmetrics([whole], "m", 60.0))


@pytest.mark.slow
def test_scrapes_rise_in_time_and_counters_never_fall(run):
    text = "".join(openmetrics([run], "opt-13b", 7.0))
    found = samples_of(text)
    end_s = -(-run.log.end_ticks // 10**9) / 1000
    for (name, _), series in found.items():
        seconds = [second for second, _ in series]
        assert seconds == [*np.arange(0, end_s, 7.0), end_s]
        if re.search("_(total|bucket|count|sum)$", name):
            assert all(one <= other for (_, one), (_, other) in zip(series, series[1:]))
    usage = [value for _, value in found["kv_cache_usage_perc", "engine=0"]]
    assert 0.9 < max(usage) <= 1 and min(usage) == 0
    assert text.endswith("# EOF\n") and text.count("# TYPE") == 16


@pytest.mark.slow
def test_a_family_stands_together_and_its_times_rise():
    """Prometheus' parser refuses a file in which they do not; it reads histograms of a single time (see ``samples_of``)."""
    fleet = simulate_cluster(settings(policy="vllm-v1"), workload(PAIRS, request_rate=6), cluster(num_replicas=2))
    text = "".join(openmetrics(fleet.runs, "m", 5.0))
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(set(names)) == len(names)
    kinds = {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE")}
    blocks = re.split("(?=# HELP )", text.removesuffix("# EOF\n"))[1:]
    whole = "".join(block for block, name in zip(blocks, names, strict=True) if kinds[name] != "histogram")
    read = {family.name: family.samples for family in text_string_to_metric_families(whole + "# EOF\n")}
    for name, samples in read.items():
        assert len(samples) == sum(line.startswith(f"{name}") for line in whole.splitlines())
    for block, name in zip(blocks, names, strict=True):
        data = [line for line in block.splitlines() if not line.startswith("#")]
        assert data and all(line.startswith(name) for line in data)
        if kinds[name] == "histogram":
            for _, point in groupby(data, key=lambda line: (line.partition('engine="')[2][0], time_of(line))):
                (family,) = text_string_to_metric_families("\n".join([*block.splitlines()[:2], *point, "# EOF", ""]))
                assert family.samples[-1].name == f"{name}_sum"


@pytest.mark.slow
def test_lengths_have_the_buckets_of_the_longest_sequence(run):
    found = samples_of("".join(openmetrics([run], "opt-13b", 7.0)))
    times = request_times(run)
    for name, values in (("prompt", run.workload.prompt_tokens[times.index]), ("generation", times.output_tokens)):
        series = f"request_{name}_tokens"
        assert found[f"{series}_count", "engine=0"][-1][1] == len(values)
        assert found[f"{series}_sum", "engine=0"][-1][1] == values.sum()
        bounds = [key[1].partition("le=")[2] for key in found if key[0] == f"{series}_bucket"]
        assert bounds == [
            "1.0",
            "2.0",
            "5.0",
            "10.0",
            "20.0",
            "50.0",
            "100.0",
            "200.0",
            "500.0",
            "1000.0",
            "2000.0",
            "+Inf",
        ]
        for bound in bounds[:-1]:
            assert found[f"{series}_bucket", f"engine=0,le={bound}"][-1][1] == (values <= float(bound)).sum()


@pytest.mark.slow
def test_a_prefix_cache_has_its_counters(run):
    """Every prompt of 64 tokens begins with the same 48: all but the first find three blocks of 16, when they are admitted."""
    count = 20
    content = PromptContent(np.arange(count + 1), np.zeros(count, dtype=np.int64), np.full(count, 48))
    work = Workload("shared", np.arange(count) * 10**12, np.full(count, 64), np.full(count, 4), content=content)
    cached = simulate(settings(policy="vllm-v1", enable_prefix_caching=True, cost="roofline", outside_ms=0), work)
    whole = summary(cached)["prefix_cache"]
    found = samples_of("".join(openmetrics([cached], "m", 1.0)))
    queries, hits = (found[f"prefix_cache_{name}_total", "engine=0"] for name in ("queries", "hits"))
    assert (
        (queries[-1][1], hits[-1][1])
        == (whole["queried_tokens"], whole["hit_tokens"])
        == (count * 64, (count - 1) * 48)
    )
    # One request a second: at second n, n + 1 of them were admitted.
    assert [value for at, value in queries if at == int(at)] == [64 * (place + 1) for place in range(count)]
    # Look-ups of preempted requests are not counted again.
    preempting = samples_of("".join(openmetrics([run], "opt-13b", 60.0)))
    assert preempting["prefix_cache_queries_total", "engine=0"][-1][1] == run.workload.prompt_tokens.sum()
    off = simulate(settings(policy="vllm-v1", enable_prefix_caching=False, cost="roofline"), work)
    assert "prefix_cache" not in "".join(openmetrics([off], "m", 60.0))


def test_what_is_written_is_read_as_the_run_s_own_metrics(run, tmp_path):
    """Scrape by scrape: rate, lengths, preemptions and use of the pool are those of the run."""
    (tmp_path / "metrics.txt").write_text("".join(openmetrics([run], "opt-13b", 2.5)))
    found, times = read_metrics(tmp_path / "metrics.txt"), request_times(run)
    end_s = -(-run.log.end_ticks // 10**9) / 1000
    assert found.elapsed_s == end_s and found.num_scrapes == len({*np.arange(0, end_s, 2.5), end_s})
    assert (found.finished, found.first_tokens) == (len(times.index),) * 2
    assert found.preemptions == summary(run)["preemptions"]["recompute"]
    assert found.prompts.mean == run.workload.prompt_tokens.mean()
    assert found.outputs.mean == run.workload.output_tokens.mean()
    assert found.e2el_s == pytest.approx(times.e2el_ms.mean() / 1e3)
    assert 0.5 < found.kv_usage[0] < found.kv_usage[1] <= 1


@pytest.mark.slow
@settings_of_hypothesis(max_examples=8, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.floats(1, 12),
    st.sampled_from([200, 400, 2000]),
    st.sampled_from([4, 16, 256]),
    st.booleans(),
)
def test_what_is_read_back_are_the_means_while_requests_arrive(
    tmp_path_factory, seed, rate, blocks, max_num_seqs, users
):
    """Of random loads, with and without preemptions and queues, and of 20 users in a closed loop: means to 8 %, and 0.3 requests or
    0.01 of the pool, because 150 scrapes sample them. Times of arrivals are known to a scrape, and to a leap of steps, in which
    the requests that wait do not change: so is the rate."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 400, 300), rng.integers(1, 300, 300)
    arrivals = (np.cumsum(rng.exponential(1 / rate, 300)) * 1e12).astype(np.int64)
    work = Workload("random", arrivals, *lengths)
    if users:
        zeros = np.zeros(300, dtype=np.int64)
        work = Workload("random", zeros, *lengths, users=Users(20, zeros))
    run = simulate(
        settings(
            policy="vllm-v1",
            num_gpu_blocks_override=blocks,
            max_num_seqs=max_num_seqs,
            cost="roofline",
            outside_ms=0,
        ),
        work,
    )
    every_s = max(0.001, float(run.workload.arrival_ticks.max()) / 1e12 / 250)
    path = tmp_path_factory.mktemp("metrics") / "metrics.txt"
    path.write_text("".join(openmetrics([run], "opt-13b", every_s)))
    found, simulated = served_load(read_scrapes(path)), use_while_arriving(run)
    assert found.running == pytest.approx(simulated.mean_running, rel=0.08, abs=0.3)
    assert found.waiting == pytest.approx(simulated.mean_waiting, rel=0.08, abs=0.3)
    assert found.kv_usage[0] == pytest.approx(simulated.mean_usage, rel=0.08, abs=0.01)
    sent_s = np.sort(run.workload.arrival_ticks) / 1e12
    passed_s, known_to_s = sent_s[-1] - sent_s[0], 2 * every_s + run.log.rows["ticks"].max() / 1e12
    expected = (sent_s > sent_s[0]).sum() / passed_s
    assert found.arrival_rate == pytest.approx(expected, rel=0.01 + known_to_s / passed_s)


def test_gauges_by_hand():
    """Two requests of 16 tokens and 40 outputs at 0, on one place: the first runs and the second waits, then it runs alone."""
    one = settings(policy="vllm-v1", max_num_seqs=1, num_gpu_blocks_override=101, cost="roofline", outside_ms=0)
    run = simulate(one, Workload("two", np.zeros(2), np.full(2, 16), np.full(2, 40)))
    half = round(float(request_times(run).finish_ticks[0]) / 2e12, 3)
    found = samples_of("".join(openmetrics([run], "m", half)))
    gauges = {name: dict(series) for (name, _), series in found.items() if name.startswith(("num_requests", "kv"))}
    later = round(3 * half, 3)
    assert (gauges["num_requests_running"][half], gauges["num_requests_waiting"][half]) == (1, 1)
    assert (gauges["num_requests_running"][later], gauges["num_requests_waiting"][later]) == (1, 0)
    # Half way it has its prompt and some 20 tokens: 3 of 101 blocks, one of which no sequence ever has.
    assert 2 <= gauges["kv_cache_usage_perc"][half] * 101 <= 4
    tokens = dict(found["generation_tokens_total", "engine=0"])
    assert 18 <= tokens[half] <= 22


def test_each_replica_is_an_engine():
    fleet = simulate_cluster(settings(policy="vllm-v1"), workload(PAIRS, request_rate=6), cluster(num_replicas=2))
    found = samples_of("".join(openmetrics(fleet.runs, 'a "b"', 20.0)))
    finished = [found["e2e_request_latency_seconds_count", f"engine={engine}"][-1][1] for engine in (0, 1)]
    assert finished == [100, 100]


def test_a_run_without_requests_that_fit_is_all_zeros():
    run = simulate(settings(num_gpu_blocks_override=2), Workload("big", np.zeros(1), np.array([500]), np.array([5])))
    found = samples_of("".join(openmetrics([run], "m")))
    values = {name: {value for _, value in series} for (name, _), series in found.items()}
    assert values.pop("cache_config_info") == {1} and set().union(*values.values()) == {0}


@pytest.mark.slow
def test_the_command_writes_a_file(tmp_path, capsys):
    file = tmp_path / "metrics.txt"
    command = ["simulate", "--num-prompts", "20", "--num-replicas", "2", "--openmetrics", str(file)]
    assert status([*command, "--openmetrics-interval", "2.5"]) == DONE
    assert "Metrics: " in capsys.readouterr().out
    assert ("num_requests_running", "engine=1") in samples_of(file.read_text())
    before = file.read_bytes()
    for tokens, text in (
        (["--openmetrics-interval", "0"], "openmetrics_interval = 0.0: must be from 0.001 to 86400 seconds"),
        (["--request-rate", "-1"], "request_rate"),
    ):
        assert status([*command, *tokens]) == MISTAKE
        assert text in capsys.readouterr().err
    assert status(["simulate", "--openmetrics-interval", "2"]) == MISTAKE
    assert "applies only to --openmetrics" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_the_dashboard_asks_for_metrics_that_are_written(run):
    dashboard = json.loads((ROOT / "docs" / "dashboard.json").read_text())
    written = {name for name, _ in samples_of("".join(openmetrics([run], "m", 60.0)))}
    asked = {
        name for panel in dashboard["panels"] for target in panel["targets"] for name in _METRIC.findall(target["expr"])
    }
    assert asked <= written and len(asked) == 14
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    # Every curve is of one job, so that a simulated server stands beside a served one.
    for target in (target for panel in dashboard["panels"] for target in panel["targets"]):
        assert target["expr"].count("sum by (job) (") + target["expr"].count("sum by (le, job) (") == target[
            "expr"
        ].count("sum ")
        assert "{{job}}" in target["legendFormat"]


_METRIC = re.compile(r"vllm:(\w+)")
