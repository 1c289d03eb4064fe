"""A benchmark with and without its lists: a summary has the same figures, and its requests are rebuilt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import client_summaries
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.diagnose.load import Sources, served_load
from fragmeter.experiments.measured import replay as measured_replay
from fragmeter.experiments.measured.knobs import ranked, vary_knobs
from fragmeter.experiments.measured.replay import benchmark_of
from fragmeter.experiments.measured.server_metrics import ServerMetrics
from fragmeter.experiments.measured.start import benchmark
from fragmeter.experiments.measured.statements import contradictions, of_benchmark, of_metrics
from fragmeter.sim.types.errors import TraceError
from fragmeter.traces import Pacing, Reading, measured, read
from oracle import Request
from served_bench import CHOSEN, FLAGS, SENT, Server, validate, with_one_that_failed, written

CLIENTS = {
    name: getattr(client_summaries, name)
    for name in ("vllm", "vllm_by_default", "sglang", "aiperf", "guidellm", "inference_perf")
}
#: Statistics that a client does not have in vLLM's sense.
WITHOUT = {"vllm_by_default": {"mean_e2el_ms"}, "aiperf": {"mean_itl_ms"}, "guidellm": {"mean_tpot_ms"}}
#: Requests that were not answered, by clients that do not count them.
FAILED = {"sglang": 0}
#: Requests/s at which ``SENT`` are sent.
RATE = (len(SENT) - 1) / (SENT[-1].arrival_ticks - SENT[0].arrival_ticks) * 1e12


def both(folder, client: str, server: Server = Server(), **more):
    """A benchmark with its lists, and by the summary that a client writes of it."""
    path, _ = written(folder, server, SENT, **{"request_rate": RATE} | more)
    document = with_one_that_failed(json.loads(path.read_text()))
    path.write_text(json.dumps(document))
    (folder / "summary.json").write_text(CLIENTS[client](document))
    return benchmark(path, None, CHOSEN), benchmark(folder / "summary.json", None, CHOSEN)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_summary_has_the_figures_of_its_lists(client, tmp_path):
    listed, summed = both(tmp_path, client)
    assert (len(summed.trace), summed.trace.left_out.failed) == (len(SENT), FAILED.get(client, 1))
    for name in ("prompt_tokens", "output_tokens"):
        assert getattr(summed.trace, name).mean() == pytest.approx(getattr(listed.trace, name).mean(), rel=0.01)
    sent, arrivals = listed.sent_rate, summed.trace.arrival_ticks
    assert summed.sent_rate == pytest.approx(sent, rel=0.01)
    assert (len(arrivals) - 1) / (arrivals[-1] - arrivals[0]) * 1e12 == pytest.approx(sent, rel=0.01)
    wanted, found = listed.values(), summed.values()
    names = {name for name in wanted if name.startswith("mean_") or name.endswith("throughput")}
    compared = names - WITHOUT.get(client, set())
    assert {name: found.get(name) for name in compared} == pytest.approx(
        {name: wanted[name] for name in compared}, rel=0.01
    )


#: Simulated figures of rebuilt requests, relative to those of the lists: percentiles of the lengths are known, a deviation that the latencies
#: imply, and means alone; at a rate, and with 6 in flight. The table is in docs/measured-server.md.
FIGURES = ("total_token_throughput", "mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "p99_e2el_ms")
REBUILT = {
    ("aiperf", None): (-0.002, -0.096, -0.008, -0.013, 0.019),
    ("aiperf", 6): (-0.026, 0.201, -0.012, 0.037, 0.193),
    ("vllm", None): (-0.002, -0.116, -0.008, -0.015, 0.004),
    ("vllm", 6): (0.015, -0.156, 0.078, -0.002, 0.041),
    ("vllm_by_default", None): (0.011, -0.080, -0.007, -0.011, -0.442),
    ("vllm_by_default", 6): (0.087, -0.326, -0.001, -0.037, -0.289),
}


@pytest.mark.parametrize(("client", "limit"), REBUILT)
def test_rebuilt_requests_are_served_like_those_of_the_lists(client, limit, tmp_path):
    rate = {} if limit is None else {"request_rate": "inf"}
    listed, summed = both(tmp_path, client, max_concurrency=limit, **rate)
    one, other = (measured_replay.replay(each, CHOSEN).values() for each in (listed, summed))
    found = [other[name] / one[name] - 1 for name in FIGURES]
    assert found == pytest.approx(REBUILT[client, limit], abs=0.001)


@pytest.mark.parametrize("client", ["aiperf", "guidellm", "inference_perf"])
def test_lengths_follow_the_percentiles_of_the_file(client, tmp_path):
    """Uniform lengths from 4 to 59 and 1 to 39 are rebuilt as such."""
    listed, summed = both(tmp_path, client)
    for name in ("prompt_tokens", "output_tokens"):
        one, other = (np.sort(getattr(each.trace, name)) for each in (listed, summed))
        assert abs(one - other).max() <= 3, name
    assert (99.9 in summed.measured.latencies["ttft"].percentiles) == (client != "aiperf")


@pytest.mark.parametrize("client", CLIENTS)
def test_slower_steps_are_named_first(client, tmp_path):
    _, summed = both(tmp_path, client, Server(scale=1.3))
    first = ranked(list(vary_knobs(summed, CHOSEN, measured_replay.replay(summed, CHOSEN))))[0]
    assert first.name == "step_scale" and first.value == pytest.approx(1.3 * 1.125, rel=0.01)


def test_the_command_says_what_it_assumed_first(tmp_path, capsys):
    both(tmp_path, "vllm")
    out = tmp_path / "out"
    assert (
        validate("--against", tmp_path / "summary.json", *FLAGS, "--out", out, "--json", tmp_path / "all.json") == DONE
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("summary.json: a summary of vllm bench serve without its requests. 80 are rebuilt:")
    data = json.loads((tmp_path / "all.json").read_text())
    assert data["of_summary"] and "scatter" not in data and data["failed"] == 1
    assert {row["metric"] for row in data["rows"]} >= {"mean_ttft_ms", "p99_e2el_ms", "output_throughput"}
    assert status(["report", str(out), "--out", str(tmp_path / "page.html")]) == DONE


@pytest.mark.parametrize("rate", [None, 9.0])
def test_a_closed_loop_is_simulated_as_one_unless_a_rate_is_given(rate, tmp_path, capsys):
    both(tmp_path, "vllm", max_concurrency=4)
    document = json.loads((tmp_path / "summary.json").read_text()) | {"request_rate": "inf"}
    (tmp_path / "summary.json").write_text(json.dumps(document))
    given = [] if rate is None else ["--request-rate", rate]
    flags = ["simulate", "--policy", "vllm-v1", "--trace", tmp_path / "summary.json", *given, *FLAGS]
    assert status([str(flag) for flag in [*flags, "--json", tmp_path / "run.json"]]) == DONE
    arrivals = read(tmp_path / "summary.json")
    assert arrivals.arrival_ticks is None and arrivals.max_concurrency == 4
    found = json.loads((tmp_path / "run.json").read_text())
    assert "closed loop of 4" in found["notes"][0]
    assert (found["mean_batch"] <= 4) == (rate is None)


class TestInferenceX:
    """Its results have neither mean lengths nor a number of requests."""

    @pytest.fixture
    def document(self):
        rng = np.random.default_rng(5)
        lengths = zip(rng.integers(48, 61, 80).tolist(), rng.integers(32, 41, 80).tolist(), strict=True)
        sent = [Request(place * 10**11, *pair) for place, pair in enumerate(lengths)]
        server = Server()
        return server.bench(sent, server.serve(sent), max_concurrency=8, request_rate="inf")

    def test_mean_lengths_follow_from_latencies_and_throughputs(self, document, tmp_path):
        path = tmp_path / "agg.json"
        path.write_text(client_summaries.inferencex(document))
        found, wanted = benchmark(path, None, CHOSEN), client_summaries.quantities(document)
        assert len(found.trace) == 80 and found.unlimited and found.measured.max_concurrency == 8
        for name, lengths in (("prompts", found.trace.prompt_tokens), ("outputs", found.trace.output_tokens)):
            assert lengths.mean() == pytest.approx(wanted[name].mean(), rel=0.01)
            assert lengths.max() == wanted[name].max()
        values, seconds = found.values(), document["duration"]
        assert found.duration_s == pytest.approx(seconds, rel=0.01)
        assert values["total_token_throughput"] == pytest.approx(
            (wanted["prompts"] + wanted["outputs"]).sum() / seconds
        )
        for name in ("ttft", "tpot", "itl", "e2el"):
            assert values[f"mean_{name}_ms"] == pytest.approx(wanted[name].mean() * 1e3)

    @pytest.mark.slow
    def test_another_parallelism_of_the_line_is_a_contradiction(self, document, tmp_path, capsys):
        path = tmp_path / "agg.json"
        path.write_text(client_summaries.inferencex(document))
        line = "vllm serve facebook/opt-13b"
        for size in (1, 2):
            flags = ("--gpu", "h100-80gb", "--serve", f"{line} --tensor-parallel-size {size}")
            assert validate("--against", path, *flags) == DONE
            printed = " ".join(capsys.readouterr().out.split())
            assert ("tensor_parallel_size is 1 by the line, 2 by agg.json" in printed) == (size == 1)

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            ({"is_multinode": True}, "is_multinode = True: is of several servers, and one is simulated"),
            ({"conc": None}, "conc = None: is missing"),
            ({"isl": 0}, "isl = 0: is missing"),
            ({"mean_ttft": "fast"}, "mean_ttft = 'fast': must be a number, 0 or more"),
        ],
    )
    def test_what_cannot_be_simulated_is_one_line(self, change, complaint, document, tmp_path):
        path = tmp_path / "agg.json"
        path.write_text(json.dumps(json.loads(client_summaries.inferencex(document)) | change))
        with pytest.raises(TraceError, match=complaint):
            read(path)
        path.write_text(f"[{path.read_text()}, {path.read_text()}]")
        with pytest.raises(TraceError, match="is a list of 2 results; keep one"):
            read(path)

    def test_a_list_of_one_result_is_that_result(self, document, tmp_path):
        text = client_summaries.inferencex(document)
        (tmp_path / "agg.json").write_text(text)
        (tmp_path / "list.json").write_text(f"[{text}]")
        alone, listed = (read(tmp_path / name) for name in ("agg.json", "list.json"))
        assert (listed.prompt_tokens == alone.prompt_tokens).all() and len(listed) == len(alone)


def changed(client: str, folder, change) -> Path:
    """A summary of which something is changed."""
    both(folder, client)
    document = json.loads((folder / "summary.json").read_text())
    change(document)
    (folder / "summary.json").write_text(json.dumps(document))
    return folder / "summary.json"


@pytest.mark.parametrize("flag", ["bench", "trace"])
@pytest.mark.parametrize("limit", [None, 4])
def test_diagnose_sends_the_load_of_a_summary(flag, limit, tmp_path):
    rate = {} if limit is None else {"request_rate": "inf"}
    both(tmp_path, "vllm", max_concurrency=limit, **rate)
    files = {"bench": None, "trace": None} | {flag: tmp_path / "summary.json"}
    sources = Sources(files["bench"], None, files["trace"], None, Pacing(), 50, Reading())
    load = served_load(sources, None, replace(CHOSEN, max_model_len=2048))
    assert load.max_concurrency == limit and (limit is not None or load.rate is None)
    if limit is None:
        assert load.mean_rate == pytest.approx(RATE, rel=0.01)


def test_model_and_concurrency_of_a_summary_are_cross_examined(tmp_path):
    path = changed("sglang", tmp_path, lambda document: document.update(max_concurrency=4, backend="vllm"))
    seen = benchmark(path, None, CHOSEN).measured
    for model, in_flight, number in (("facebook/opt-13b", 3.0, 0), ("meta-llama/Llama-3.1-8B", 9.0, 2)):
        metrics = ServerMetrics(num_scrapes=2, model_name=model, most_in_flight=in_flight)
        said = [*of_metrics("metrics.txt", metrics), *of_benchmark(path, seen, metrics)]
        assert len(contradictions(said)) == number


@pytest.mark.slow
@pytest.mark.parametrize("client", [*CLIENTS, "inferencex"])
def test_no_damage_is_a_traceback(client, tmp_path):
    """Each value in turn is a text, a list, an object, null, huge or negative: read, or refused in one line."""
    path, _ = written(tmp_path, Server(), SENT, max_concurrency=8)
    path.write_text(getattr(client_summaries, client)(json.loads(path.read_text())))
    document = json.loads(path.read_text())
    for place in list(places(document)):
        for value in ("x", [1], {"a": 1}, None, 10**40, -1):
            damaged = json.loads(json.dumps(document))
            inner = damaged
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
            path.write_text(json.dumps(damaged))
            try:
                trace = read(path)
                benchmark_of(trace, measured(path, trace)).values()
            except TraceError as error:
                assert "\n" not in str(error)


def places(value, place=()):
    """The keys of each value within a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*place, key)
        yield from places(each, (*place, key))


class TestWhatASummaryLacks:
    def test_without_a_rate_requests_arrive_as_they_were_answered(self, tmp_path, capsys):
        path = changed("inference_perf", tmp_path, lambda document: document["load_summary"].pop("requested_rate"))
        found = benchmark(path, None, CHOSEN)
        assert found.sent_rate == pytest.approx(found.values()["request_throughput"])
        assert status(["traces", "stats", str(path)]) == DONE
        assert "as the file has no rate and no concurrency" in " ".join(capsys.readouterr().out.split())

    def test_gaps_that_contradict_e2el_are_left_out(self, tmp_path):
        """As inference-perf writes them where it counts two tokens for one."""

        def halve(document) -> None:
            for name in ("time_per_output_token", "inter_token_latency"):
                of = document["successes"]["latency"][name]
                of.update({which: value / 2 for which, value in of.items()})

        values = benchmark(changed("inference_perf", tmp_path, halve), None, CHOSEN).values()
        assert not [name for name in values if "tpot" in name or "itl" in name] and values["mean_e2el_ms"] > 0

    def test_a_closed_loop_with_too_few_in_flight_contradicts_itself(self, tmp_path):
        """Of 60 users 1.7 have a request in flight, by the throughput and E2EL."""
        loop = {"load_summary": {"count": 81, "concurrency": 60}}
        found = benchmark(changed("inference_perf", tmp_path, lambda document: document.update(loop)), None, CHOSEN)
        assert [text for text in found.measured.caveats if "of 60 requests in flight 1.68 were" in text]
        loop["load_summary"]["concurrency"] = 2
        found = benchmark(changed("inference_perf", tmp_path, lambda document: document.update(loop)), None, CHOSEN)
        assert not found.measured.caveats

    def test_answers_that_were_not_streamed_have_no_ttft(self, tmp_path):
        def zero(document) -> None:
            document.update({name: 0.0 for name in document if name.endswith("ttft_ms")})

        values = benchmark(changed("vllm", tmp_path, zero), None, CHOSEN).values()
        assert {name.split("_")[1] for name in values if name.endswith("_ms")} == {"e2el"}

    @pytest.mark.parametrize(
        ("client", "change", "complaint"),
        [
            (
                "aiperf",
                lambda document: document.pop("input_sequence_length"),
                "input_sequence_length.avg = None: is missing",
            ),
            (
                "guidellm",
                lambda document: document["benchmarks"][0]["metrics"].pop("output_token_count"),
                "lengths of outputs",
            ),
            ("inference_perf", lambda document: document["successes"].pop("prompt_tokens"), "lengths of prompts"),
            ("inference_perf", lambda document: document["successes"].update(count=0), "are no answered requests"),
            (
                "aiperf",
                lambda document: document["request_latency"].update(unit="weeks"),
                "unit = 'weeks': must be one of ns",
            ),
        ],
    )
    def test_what_cannot_be_rebuilt_is_one_line(self, client, change, complaint, tmp_path):
        with pytest.raises(TraceError, match=complaint):
            changed(client, tmp_path, change)
            read(tmp_path / "summary.json")
