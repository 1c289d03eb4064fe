"""What is read of a dump of ``/metrics``, and what is refused."""

from __future__ import annotations

import pytest

from fragmeter.experiments.measured.server_metrics import (
    ServerMetrics,
    _samples,
    _scrapes,
    kv_usage_over_time,
    read_metrics,
)
from fragmeter.sim.types.errors import UserError
from served_bench import Server, requests

LABELS = 'engine="0",model_name="m"'


def scrape(running: float, usage: float, preemptions: float, **more: float) -> str:
    """One scrape as a server writes it, with what is not read in between."""
    lines = [
        "# HELP python_gc_objects_collected_total Objects collected during gc",
        'python_gc_objects_collected_total{generation="0"} 1.0e+04',
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{{{LABELS}}} {running}",
        f"vllm:num_requests_waiting{{{LABELS}}} 0.0",
        f"vllm:kv_cache_usage_perc{{{LABELS}}} {usage}",
        f"vllm:num_preemptions_total{{{LABELS}}} {preemptions}",
        *(f"vllm:{name}{{{LABELS}}} {value}" for name, value in more.items()),
    ]
    return "\n".join(lines) + "\n"


def found(tmp_path, text: str) -> ServerMetrics:
    (tmp_path / "metrics.txt").write_text(text)
    return read_metrics(tmp_path / "metrics.txt")


def test_gauges_are_those_of_scrapes_with_running_requests(tmp_path):
    text = scrape(0, 0.0, 5) + "1795334400\n" + scrape(4, 0.25, 5)
    text += "2026-11-22T08:00:02+00:00\n" + scrape(2, 0.75, 9) + scrape(0, 0.0, 12)
    assert found(tmp_path, text) == ServerMetrics(
        num_scrapes=4, kv_usage=(0.5, 0.75), running=3.0, waiting=0.0, preemptions=7.0, elapsed_s=2.0
    )


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_what_is_no_number_is_not_there(value, tmp_path):
    names = ("time_to_first_token_seconds_sum", "time_to_first_token_seconds_count")
    text = scrape(1, 0.5, 3, **dict.fromkeys(names, 7.0))
    metrics = found(tmp_path, text.replace(" 7.0", f" {value}").replace(" 3\n", f" {value}\n"))
    assert metrics == ServerMetrics(num_scrapes=1, kv_usage=(0.5, 0.5), running=1.0, waiting=0.0)


def test_counters_and_histograms_count_from_the_first_scrape(tmp_path):
    first, last = ({"prefix_cache_queries_total": 100 * n, "prefix_cache_hits_total": 40 * n * n,
                    "time_to_first_token_seconds_sum": 2.0 * n, "time_to_first_token_seconds_count": 10 * n,
                    "inter_token_latency_seconds_sum": 3.0 * n, "inter_token_latency_seconds_count": 100 * n}
                   for n in (1, 2))  # fmt: skip
    metrics = found(tmp_path, scrape(1, 0.5, 0, **first) + scrape(1, 0.5, 0, **last))
    assert (metrics.hit_rate, metrics.ttft_s, metrics.itl_s) == (1.2, 0.2, 0.03)
    assert metrics.first_tokens == 10
    alone = found(tmp_path, scrape(1, 0.5, 3, **last))
    assert (alone.hit_rate, alone.ttft_s, alone.preemptions) == (0.8, 0.2, 3)


FAMILIES = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 4 0.0
vllm:num_requests_running{engine="0"} 2 2.5
vllm:num_requests_running{engine="0"} 0 1e1
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} 1 0.0
vllm:num_preemptions_total{engine="0"} 3 2.5
vllm:num_preemptions_total{engine="0"} 4 1e1
# EOF
"""


def test_openmetrics_text_has_a_scrape_for_each_time(tmp_path):
    """Its families follow each other; series of one time are a scrape, wherever they stand."""
    assert found(tmp_path, FAMILIES) == ServerMetrics(num_scrapes=3, running=3.0, preemptions=3.0, elapsed_s=10.0)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("4 1e1", "4", "vllm:num_preemptions_total has no timestamp, and others have"),
        ("4 1e1", "4 2.5", "vllm:num_preemptions_total has two values at 2.5 s"),
    ],
)
def test_openmetrics_text_with_unclear_times_is_refused(old, new, complaint, tmp_path):
    with pytest.raises(UserError, match=complaint):
        found(tmp_path, FAMILIES.replace(old, new))


def test_timestamps_without_the_end_of_openmetrics_are_ignored(tmp_path):
    """A server's own text has them in ms, if at all, and the scrapes stand one after another."""
    text = "vllm:num_requests_running 4 1763790000000\nvllm:num_requests_running 2 1763790000000\n"
    assert found(tmp_path, text) == ServerMetrics(num_scrapes=2, running=3.0)


def test_older_names_are_known(tmp_path):
    text = scrape(1, 0.0, 0, gpu_prefix_cache_queries_total=50, gpu_prefix_cache_hits_total=10)
    text = text.replace("kv_cache_usage_perc", "gpu_cache_usage_perc")
    old = "vllm:time_per_output_token_seconds"
    text += f"{old}_sum{{{LABELS}}} 4\n{old}_count{{{LABELS}}} 80\n"
    metrics = found(tmp_path, text.replace("usage_perc{" + LABELS + "} 0.0", "usage_perc{" + LABELS + "} 0.5"))
    assert (metrics.kv_usage, metrics.hit_rate, metrics.itl_s) == ((0.5, 0.5), 0.2, 0.05)


@pytest.mark.parametrize(("blocks", "read"), [("27904", 27904), ("None", None), ("0", None)])
def test_the_pool_is_in_labels(blocks, read, tmp_path):
    """A text in a label may hold anything, braces too."""
    labels = rf'block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="{blocks}",note="a \"b\" }} c"'
    metrics = found(tmp_path, f"vllm:cache_config_info{{{labels}}} 1.0\n")
    assert (metrics.num_gpu_blocks, metrics.block_size) == (read, 16)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no metrics of vLLM; give the server's response from /metrics"),
        ("up 1\n", "has no metrics of vLLM"),
        ("vllm:num_requests_running 1\n<html>404</html>\n", "line 2: '<html>404</html>': is not a metric"),
        ("vllm:num_requests_running one\n", "line 1: 'vllm:num_requests_running one': is not a metric"),
        (scrape(1, 0.5, 7) + scrape(1, 0.5, 3), "num_preemptions_total falls from 7 to 3; the server was restarted"),
        (
            scrape(1, 0.5, 7) + 'vllm:num_requests_running{engine="1",model_name="m"} 2\n',
            "has metrics of 2 engines; one is simulated",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(text, complaint, tmp_path):
    with pytest.raises(UserError) as error:
        found(tmp_path, text)
    assert complaint in str(error.value) and "\n" not in str(error.value)


def test_files_that_are_none(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, complaint in (("missing", "cannot be read"), ("binary", "is not text")):
        with pytest.raises(UserError, match=complaint):
            read_metrics(tmp_path / name)


def test_samples_are_those_of_prometheus_own_parser():
    """Of a whole dump, and of lines with all that the format allows."""
    parser = pytest.importorskip("prometheus_client.parser")
    sent = requests(10)
    server = Server()
    strange = 'vllm:a{x="1, y=\\"2\\"",z="\\\\"} 1e-3 1763790000000\nvllm:b +Inf\nvllm:c{} 2\n'
    for text in (server.metrics(sent, server.serve(sent), every_s=100.0).split("\n", 1)[1], strange):
        text = text.split("1763790001\n")[0].replace("1763790001", "")
        families = parser.text_string_to_metric_families(text)
        theirs = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
            if sample.name.startswith("vllm:")
        }
        (ours,) = _scrapes(_samples("dump", text))
        unescaped = {
            (name, frozenset((key, value.replace('\\"', '"').replace("\\\\", "\\")) for key, value in labels)): value
            for (name, labels), value in ours.items()
        }
        assert unescaped == theirs


def test_the_use_of_the_pool_over_time_has_the_scrapes_with_a_time(tmp_path):
    (tmp_path / "metrics.txt").write_text(scrape(0, 0.1, 0) + "1763790001.5\n" + scrape(4, 0.25, 0) + scrape(4, 0.5, 0))
    assert kv_usage_over_time(tmp_path / "metrics.txt") == [(1763790001.5, 0.25)]
