"""What is read of a dump of ``/metrics``, and what is refused."""

from __future__ import annotations

import pytest

from fragmeter.experiments.measured.scrapes import _samples, read_scrapes, scrapes_of
from fragmeter.experiments.measured.server_metrics import ServerMetrics, read_metrics, served_load
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
        num_scrapes=4,
        kv_usage=(0.5, 0.75),
        running=3.0,
        waiting=0.0,
        preemptions=7.0,
        elapsed_s=2.0,
        model_name="m",
        most_in_flight=4.0,
    )


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_what_is_no_number_is_not_there(value, tmp_path):
    names = ("time_to_first_token_seconds_sum", "time_to_first_token_seconds_count")
    text = scrape(1, 0.5, 3, **dict.fromkeys(names, 7.0))
    metrics = found(tmp_path, text.replace(" 7.0", f" {value}").replace(" 3\n", f" {value}\n"))
    assert metrics == ServerMetrics(
        num_scrapes=1, kv_usage=(0.5, 0.5), running=1.0, waiting=0.0, model_name="m", most_in_flight=1.0
    )


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


def benchmark(*points: tuple[float, float, float, float]) -> str:
    """Scrapes with a time each: seconds, and requests that run, wait and have finished by then."""
    return "".join(
        f"{1_790_000_000 + at_s}\n"
        + scrape(running, running / 10, 0, e2e_request_latency_seconds_count=finished).replace(
            "waiting{" + LABELS + "} 0.0", "waiting{" + LABELS + f"}} {waiting}"
        )
        for at_s, running, waiting, finished in points
    )


class TestArrivals:
    """10 requests of before; 30 more arrive from 10 s to 20 s after the first scrape, and are finished after 40 s."""

    POINTS = (
        (0, 0, 0, 10),
        (10, 0, 0, 10),
        (15, 6, 2, 17),
        (20, 8, 2, 30),
        (30, 3, 0, 37),
        (40, 0, 0, 40),
        (50, 0, 0, 40),
    )

    def load(self, tmp_path, text: str) -> ServerMetrics:
        (tmp_path / "metrics.txt").write_text(text)
        return served_load(read_scrapes(tmp_path / "metrics.txt"))

    def test_neither_the_drain_nor_the_time_before_counts(self, tmp_path):
        text = benchmark(*self.POINTS)
        load, whole = self.load(tmp_path, text), found(tmp_path, text)
        assert (load.arrival_rate, load.running, load.waiting, load.kv_usage) == (3.0, 7.0, 2.0, (0.7, 0.8))
        assert (whole.arrival_rate, whole.running) == (None, pytest.approx(17 / 3))
        # What has finished is of the whole file: long requests finish last.
        assert load.finished == whole.finished == 30 and load.elapsed_s == 50

    def test_a_count_that_is_ahead_of_the_gauges_ends_nothing(self, tmp_path):
        """In the drain a request is counted as running and as finished for one scrape."""
        points = (*self.POINTS[:4], (30, 3, 0, 38), *self.POINTS[5:])
        assert self.load(tmp_path, benchmark(*points)).arrival_rate == 3.0

    def test_a_lull_is_a_part_of_the_load(self, tmp_path):
        later = tuple((at_s + 50, running, waiting, finished + 30) for at_s, running, waiting, finished in self.POINTS)
        assert self.load(tmp_path, benchmark(*self.POINTS, *later)).arrival_rate == pytest.approx(60 / 60)

    def test_without_times_there_are_means_and_no_rate(self, tmp_path):
        text = "".join(line for line in benchmark(*self.POINTS).splitlines(True) if not line.startswith("179"))
        load = self.load(tmp_path, text)
        assert (load.arrival_rate, load.running) == (None, 7.0)

    def test_the_time_of_a_scrape_is_not_that_of_the_next_one(self, tmp_path):
        """Of the scrapes while requests arrive one has a time; then the first and the last have, with 0 and 5 requests."""
        text = benchmark(*self.POINTS).replace("1790000010\n", "").replace("1790000020\n", "")
        assert self.load(tmp_path, text).arrival_rate is None
        text = benchmark((0, 0, 0, 0), (5, 2, 0, 0), (10, 2, 0, 3)).replace("1790000005\n", "")
        assert self.load(tmp_path, text).arrival_rate == 0.5

    @pytest.mark.parametrize("points", [((0, 4, 1, 5),), ((0, 2, 1, 5), (10, 0, 0, 8))])
    def test_without_arrivals_all_scrapes_count(self, points, tmp_path):
        load = self.load(tmp_path, benchmark(*points))
        assert (load.arrival_rate, load.waiting, load.running) == (None, 1.0, points[0][1])


class TestEngines:
    """Two data-parallel engines; the second has more in flight in the mean, though not at the end."""

    def text(self) -> str:
        config = '{{block_size="16",engine="{}",num_gpu_blocks="{}"}} 1.0\n'
        parts = []
        for at_s, first, second, done in ((0, 0, 0, 0), (10, 2, 6, 5), (20, 3, 2, 10)):
            own = [
                scrape(running, running / 10, running, e2e_request_latency_seconds_count=done).replace(
                    'engine="0"', f'engine="{engine}"'
                )
                for engine, running in enumerate((first, second))
            ]
            pools = "".join(f"vllm:cache_config_info{config.format(engine, 900 + engine)}" for engine in (0, 1))
            parts.append(f"{1_790_000_000 + at_s}\n" + "".join(own) + pools)
        return "".join(parts)

    def test_all_is_of_the_busiest(self, tmp_path):
        (tmp_path / "metrics.txt").write_text(self.text())
        load = served_load(read_scrapes(tmp_path / "metrics.txt"))
        assert (load.engine, load.num_engines, load.num_scrapes) == ("1", 2, 3)
        assert (load.running, load.kv_usage, load.preemptions) == (4.0, (0.4, 0.6), 2.0)
        assert (load.num_gpu_blocks, load.finished, load.arrival_rate) == (901, 10, 0.6)

    def test_of_openmetrics_text_too(self, tmp_path):
        families = FAMILIES.splitlines(True)
        other = [line.replace('engine="0"', 'engine="10"').replace("} 2 2.5", "} 9 2.5") for line in families]
        text = families[0] + "".join(families[1:4] + other[1:4] + families[4:-1] + other[5:-1]) + families[-1]
        (tmp_path / "metrics.txt").write_text(text)
        load = served_load(read_scrapes(tmp_path / "metrics.txt"))
        assert (load.engine, load.num_engines, load.running, load.preemptions) == ("10", 2, 6.5, 3)

    def test_beside_the_requests_of_all_they_are_refused(self, tmp_path):
        (tmp_path / "metrics.txt").write_text(self.text())
        with pytest.raises(UserError, match="has metrics of 2 engines; the requests of a file went to all of them"):
            served_load(read_scrapes(tmp_path / "metrics.txt"), one_engine=True)


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
    assert found(tmp_path, FAMILIES) == ServerMetrics(
        num_scrapes=3, running=3.0, preemptions=3.0, elapsed_s=10.0, most_in_flight=4.0
    )


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
    assert found(tmp_path, text) == ServerMetrics(num_scrapes=2, running=3.0, most_in_flight=4.0)


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
        ("", "has no metrics of vLLM, SGLang, llama.cpp; give the server's response from /metrics"),
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
    for name, complaint in (("missing", "cannot be read"), ("binary", "is not UTF-8 text")):
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
        ((_, ours),) = scrapes_of(_samples("dump", text))
        unescaped = {
            (name, frozenset((key, value.replace('\\"', '"').replace("\\\\", "\\")) for key, value in labels)): value
            for (name, labels), value in ours.items()
        }
        assert unescaped == theirs
