"""Results of benchmark clients: one run of the oracle, written as each client would write it, is measured alike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fragmeter.experiments.cli.app import DONE
from fragmeter.experiments.measured import replay as measured_replay
from fragmeter.experiments.measured.start import benchmark
from fragmeter.sim.types.errors import TraceError
from fragmeter.traces import measured, read
from paths import SAMPLES
from served_bench import CHOSEN, FLAGS, SENT, Server, validate, with_one_that_failed, written

EPOCH_NS = 1_763_847_600 * 10**9


def requests(document: dict[str, Any]) -> list[dict[str, Any]]:
    """One of vllm bench serve's requests after the other."""
    names = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "errors")
    return [dict(zip(names, row, strict=True)) for row in zip(*(document[name] for name in names), strict=True)]


def as_aiperf(document: dict[str, Any]) -> str:
    """In the order in which answers end, as AIPerf writes; with a request of the warm-up before."""
    lines = []
    for one in requests(document):
        start_ns = EPOCH_NS + round((one["start_times"] - document["start_times"][0]) * 1e9)
        latency_s = one["ttfts"] + sum(one["itls"])
        metadata = {"request_start_ns": start_ns, "benchmark_phase": "profiling", "was_cancelled": False}
        if one["errors"]:
            lines.append((start_ns, {"metadata": metadata, "metrics": {}, "error": {"code": 503, "message": "busy"}}))
            continue
        values = {
            "input_sequence_length": (one["input_lens"], "tokens"),
            "output_sequence_length": (one["output_lens"], "tokens"),
            "time_to_first_token": (one["ttfts"] * 1e3, "ms"),
            "request_latency": (latency_s * 1e3, "ms"),
            "inter_chunk_latency": ([gap * 1e3 for gap in one["itls"]] or None, "ms"),
        }
        metrics = {name: {"value": value, "unit": unit} for name, (value, unit) in values.items() if value is not None}
        lines.append((start_ns + latency_s * 1e9, {"metadata": metadata, "metrics": metrics}))
    first = lines[0][1]
    warmup = {**first, "metadata": {**first["metadata"], "benchmark_phase": "warmup"}}
    return "\n".join(json.dumps(record) for _, record in [(0, warmup), *sorted(lines, key=lambda line: line[0])])


def as_guidellm(document: dict[str, Any]) -> str:
    kinds: dict[str, list] = {"successful": [], "errored": [], "incomplete": []}
    for one in requests(document):
        start_s = EPOCH_NS / 1e9 + one["start_times"] - document["start_times"][0]
        kinds["errored" if one["errors"] else "successful"].append(
            {
                "request_start_time": start_s,
                "prompt_tokens": one["input_lens"],
                "output_tokens": None if one["errors"] else one["output_lens"],
                "time_to_first_token_ms": one["ttfts"] * 1e3,
                "request_latency": one["ttfts"] + sum(one["itls"]),
            }
        )
    config = {"strategy": {"type_": "poisson", "rate": 3.0}, "backend": {"model": document["model_id"]}}
    made = {"requests_made": {name: len(values) for name, values in kinds.items()}}
    kinds["successful"].reverse()
    return json.dumps({"benchmarks": [{"config": config, "scheduler_metrics": made, "requests": kinds}]}, indent=1)


def as_sglang(document: dict[str, Any]) -> str:
    kept = {name: document[name] for name in ("duration", "input_lens", "output_lens", "ttfts", "itls", "errors")}
    about = {"backend": "sglang-oai", "request_rate": 3.0, "max_concurrency": None, "sharegpt_output_len": None}
    server = {"server_info": {"model_path": document["model_id"]}, "total_output_tokens_retokenized": 7}
    return json.dumps({**about, **server, **kept}) + "\n"


def as_inference_perf(document: dict[str, Any], flat: bool = False) -> str:
    """``flat``: as releases before 0.3."""
    records = []
    for one in requests(document):
        start_s = one["start_times"]
        times = (start_s + one["ttfts"] + np.cumsum([0.0, *one["itls"]])).tolist()
        prompt, output = {"input_tokens": one["input_lens"]}, {"output_tokens": one["output_lens"] or 3}
        nested = {
            "request_metrics": {"text": prompt},
            "response_metrics": output | {"chunk_times": times, "output_token_times": times, "server_usage": None},
            "lora_adapter": None,
        }
        info = output | {"output_token_times": times} if flat else nested
        error = {"error_type": "ClientError", "error_msg": "503"} if one["errors"] else None
        body = json.dumps({"model": document["model_id"], "prompt": "a", "max_tokens": 5})
        records.append(
            {"start_time": start_s, "end_time": times[-1], "request": body, "response": "", "info": info | prompt}
            | {"error": error}
        )
    # In the order in which they end.
    return json.dumps(sorted(records, key=lambda record: record["end_time"]), indent=2)


class TestMeasured:
    @pytest.fixture
    def of_vllm(self, tmp_path):
        """The file of vllm bench serve, of which one request failed, and what is measured by it."""
        path, _ = written(tmp_path, Server(), SENT)
        path.write_text(json.dumps(with_one_that_failed(json.loads(path.read_text()))))
        return path, benchmark(path, None, CHOSEN)

    @pytest.mark.parametrize(
        ("name", "write"),
        [
            ("a.jsonl", as_aiperf),
            ("g.json", as_guidellm),
            ("s.jsonl", as_sglang),
            ("per_request_lifecycle_metrics.json", as_inference_perf),
            ("flat.json", partial(as_inference_perf, flat=True)),
        ],
    )
    def test_each_client_measures_the_same(self, of_vllm, tmp_path, name, write):
        path, wanted = of_vllm
        (tmp_path / name).write_text(write(json.loads(path.read_text())))
        found = benchmark(tmp_path / name, None, CHOSEN)
        assert found.trace.left_out.failed == 1
        for field in ("prompt_tokens", "output_tokens"):
            assert np.array_equal(getattr(found.trace, field), getattr(wanted.trace, field))
        for field in ("ttft_s", "e2el_s"):
            assert getattr(found.measured, field) == pytest.approx(getattr(wanted.measured, field), abs=1e-9)
        if write is as_guidellm:
            assert found.measured.gaps_s is None and not any("_itl_" in name for name in found.values())
        else:
            assert found.measured.gaps_s == pytest.approx(wanted.measured.gaps_s, abs=1e-9)
        assert found.measured.request_rate == (3.0 if write in (as_guidellm, as_sglang) else None)
        assert found.measured.model_id == (None if write is as_aiperf else "facebook/opt-13b")
        if write is as_sglang:
            assert found.trace.arrival_ticks is None and found.drawn
        else:
            late = found.trace.arrival_ticks - wanted.trace.arrival_ticks
            # A float holds seconds since 1970 to a quarter of a microsecond.
            assert np.abs(late).max() <= 500_000
            rows = measured_replay.compared(found, measured_replay.replay(found, CHOSEN))
            assert measured_replay.total_error(rows) == pytest.approx(0, abs=1e-6)

    @pytest.mark.parametrize(
        ("name", "write"),
        [("a.jsonl", as_aiperf), ("g.json", as_guidellm), ("s.jsonl", as_sglang), ("i.json", as_inference_perf)],
    )
    def test_the_command_takes_each(self, of_vllm, tmp_path, capsys, name, write):
        (tmp_path / name).write_text(write(json.loads(of_vllm[0].read_text())))
        assert validate("--against", tmp_path / name, *FLAGS) == DONE
        printed = capsys.readouterr().out
        assert "Left out: 1 requests" in printed
        assert ("no start_times" in printed) == (write is as_sglang)
        assert ("no times between tokens: ITL is left out" in printed) == (write is as_guidellm)


def exported(starts_s: Sequence[float], latencies_s: Sequence[float]) -> str:
    """An export of AIPerf with such requests."""
    units = {
        "input_sequence_length": (10, "tokens"),
        "output_sequence_length": (5, "tokens"),
        "time_to_first_token": (1.0, "ms"),
    }
    return "\n".join(
        json.dumps(
            {
                "metadata": {"request_start_ns": EPOCH_NS + round(start_s * 1e9), "benchmark_phase": "profiling"},
                "metrics": {name: {"value": value, "unit": unit} for name, (value, unit) in units.items()}
                | {"request_latency": {"value": latency_s * 1e3, "unit": "ms"}},
            }
        )
        for start_s, latency_s in zip(starts_s, latencies_s, strict=True)
    )


class TestClosedLoopsOfAiperf:
    """Its export does not say how requests were sent; a closed loop was replayed at the times of its requests."""

    @staticmethod
    def users(folder: Path, starts_s: Sequence[float], latencies_s: Sequence[float]) -> int | None:
        path = folder / "profile_export.jsonl"
        path.write_text(exported(starts_s, latencies_s))
        return measured(path, read(path)).max_concurrency

    @pytest.mark.parametrize("users", [1, 4, 32])
    def test_users_send_when_they_have_an_answer(self, users, tmp_path):
        rng = np.random.default_rng(users)
        latencies, free, starts = rng.exponential(2.0, 300), [0.0] * users, []
        for latency in latencies:
            free.sort()
            starts.append(free[0] + 0.002)
            free[0] += 0.002 + latency
        assert self.users(tmp_path, starts, latencies) == users

    @pytest.mark.parametrize("rate", [0.1, 2.0, 20.0])
    def test_requests_at_a_rate_are_of_no_users(self, rate, tmp_path):
        rng = np.random.default_rng(5)
        assert self.users(tmp_path, np.cumsum(rng.exponential(1 / rate, 300)), rng.exponential(2.0, 300)) is None

    def test_requests_at_a_constant_rate_are_of_no_users(self, tmp_path):
        latencies = np.random.default_rng(5).uniform(0.985, 0.995, 300)
        assert self.users(tmp_path, np.arange(300) / 50, latencies) is None

    def test_requests_at_once_or_few_say_nothing(self, tmp_path):
        assert self.users(tmp_path, [0.0] * 50, np.linspace(1, 2, 50)) is None
        assert self.users(tmp_path, [0.0, 1.0], [0.9, 0.9]) is None


def test_a_closed_loop_of_inference_perf_is_one(tmp_path):
    starts = np.repeat(np.arange(0, 40, 2.0), 3) + np.tile([0, 0.01, 0.02], 20)
    records = [
        {
            "start_time": start_s,
            "end_time": start_s + 1.995,
            "request": "",
            "response": "",
            "info": {"input_tokens": 9, "output_tokens": 2, "output_token_times": [start_s + 0.5, start_s + 1]},
            "error": None,
        }
        for start_s in starts.tolist()
    ]
    path = tmp_path / "p.json"
    path.write_text(json.dumps(records))
    assert measured(path, read(path)).max_concurrency == 3
    records[4]["info"]["output_token_times"] = []
    path.write_text(json.dumps(records))
    with pytest.raises(TraceError, match="row 5: .* seconds, 0 or more"):
        measured(path, read(path))
    for record in records:
        record["info"]["output_token_times"] = []
    path.write_text(json.dumps(records))
    with pytest.raises(TraceError, match="is missing; run inference-perf with api.streaming: true"):
        measured(path, read(path))
    assert len(read(path)) == 60
    records[7]["end_time"] = "late"
    path.write_text(json.dumps(records))
    with pytest.raises(TraceError, match="row 8: end_time = 'late': must be a time in seconds"):
        read(path)
    path.write_text(json.dumps([*records[:2], {"start_time": 1}]))
    with pytest.raises(TraceError, match="row = .*: is not a request record of inference-perf"):
        read(path)


def test_a_closed_loop_of_guidellm_is_one(tmp_path):
    document = json.loads((SAMPLES / "guidellm.json").read_text())
    for strategy, limit in (({"type_": "synchronous"}, 1), ({"type_": "concurrent", "streams": 8}, 8)):
        document["benchmarks"][0]["config"]["strategy"] = strategy
        (tmp_path / "g.json").write_text(json.dumps(document))
        found = measured(tmp_path / "g.json", read(tmp_path / "g.json"))
        assert (found.request_rate, found.max_concurrency) == (np.inf, limit)


def test_the_samples_of_the_clients_own_code():
    """Numbers of the files, by eye; SGLang's stub server sends two tokens a chunk."""
    path = SAMPLES / "sglang_bench.jsonl"
    sglang = measured(path, read(path))
    assert sglang.ttft_s.tolist() == [0.0378641309998784, 0.03647048000129871]
    assert (len(sglang.gaps_s), sglang.request_rate, sglang.model_id) == (3, np.inf, "m")
    for name in ("aiperf.jsonl", "guidellm.json", "guidellm_0.3.json"):
        found = measured(SAMPLES / name, read(SAMPLES / name))
        assert found.ttft_s == pytest.approx([0.05, 0.04], abs=1e-6) and found.e2el_s == pytest.approx(
            [0.09, 0.07], abs=1e-6
        )


def changed(name: str, change) -> str:
    document = json.loads((SAMPLES / name).read_text().splitlines()[0])
    change(document)
    return json.dumps(document)


def several(document) -> None:
    document["benchmarks"] *= 3


def sampled(document) -> None:
    document["benchmarks"][0]["scheduler_metrics"] = {"requests_made": {"successful": 512}}


def without(*names: str):
    def change(document) -> None:
        for name in names:
            del document[name]

    return change


DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors")
VLLM_SUMMARY = {
    "date": "20260120-101010", "model_id": "m", "num_prompts": 5, "request_rate": 4.0, "duration": 9.5, "completed": 5,
    "total_input_tokens": 5, "total_output_tokens": 5, "request_throughput": 1.0,
}  # fmt: skip
LACKING = {
    "a summary of vllm without an answer": (
        json.dumps(VLLM_SUMMARY | {"completed": 0}, indent=2),
        "completed = 0: are no answered requests; give another result",
    ),
    "a summary of vllm without output lengths": (
        json.dumps({name: value for name, value in VLLM_SUMMARY.items() if name != "total_output_tokens"}),
        "total_output_tokens = None: tells no length; run the client with --save-detailed or --output-details",
    ),
    "sglang without details and totals": (
        changed("sglang_bench.jsonl", without(*DETAILS, "total_input_tokens")),
        "input_lens = None: is missing; run bench_serving with --output-details",
    ),
    "runs of sglang": (
        2 * (SAMPLES / "sglang_bench.jsonl").read_text(),
        "has 2 results; keep one, as by sed -n 2p for the second",
    ),
    "rates of guidellm": (
        changed("guidellm.json", several),
        "benchmarks = 3: must be one benchmark; keep one, as by jq '.benchmarks |= .[2:3]' for the third",
    ),
    "a sample by guidellm": (
        changed("guidellm.json", sampled),
        "requests.successful = 2: is a sample of 512 requests, and no trace; run guidellm with --sample-requests 512",
    ),
    "statistics of aiperf without a count": (
        '{"schema_version": "1.4", "aiperf_version": "0.13.0", "request_throughput": {"unit": "requests/sec"}}',
        "request_count.avg = None: is missing or 0; fetch the file again",
    ),
    "aiperf's raw export": (
        '{"metadata": {"request_start_ns": 1, "request_end_ns": 2}, "start_perf_ns": 3, "responses": []}',
        "row 1: metrics = None: is missing; give profile_export.jsonl, not its raw export",
    ),
    "an empty array before a record": (
        '[] {"metadata": {"request_start_ns": 1}}',
        "has no request that was answered; give another trace",
    ),
    "genai-perf": (
        '{"experiments": [{"requests": []}], "version": "", "service_kind": "openai"}',
        "is a file of genai-perf, not a trace of requests; it has no token counts: give AIPerf's profile_export.jsonl",
    ),
}


def test_long_values_hide_no_client(tmp_path):
    """The marks are of the first 64 KiB, in which what a server says of itself, or a prompt, may be all there is."""
    path = tmp_path / "result.jsonl"
    path.write_text(changed("sglang_bench.jsonl", lambda about: about.update(server_info={"log": "x" * 70_000})))
    wanted = read(SAMPLES / "sglang_bench.jsonl")
    assert read(path).prompt_tokens.tolist() == wanted.prompt_tokens.tolist()
    records = json.loads((SAMPLES / "inference_perf.json").read_text())
    records[0]["request"] = "x" * 70_000
    path = tmp_path / "report.json"
    path.write_text(json.dumps(records))
    assert len(read(path)) == len(read(SAMPLES / "inference_perf.json"))


@pytest.mark.parametrize("case", LACKING)
def test_what_a_file_lacks_is_one_line(tmp_path, case):
    text, complaint = LACKING[case]
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read(path)
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spread", [lambda records: "\n".join(json.dumps(one, indent=2) for one in records), json.dumps]
)
def test_pretty_printed_records_of_aiperf(tmp_path, spread):
    path, wanted = tmp_path / "a.json", read(SAMPLES / "aiperf.jsonl")
    path.write_text(spread([json.loads(line) for line in (SAMPLES / "aiperf.jsonl").read_text().splitlines()]))
    found = read(path)
    assert found.arrival_ticks.tolist() == wanted.arrival_ticks.tolist()
    assert measured(path, found).ttft_s.tolist() == measured(SAMPLES / "aiperf.jsonl", wanted).ttft_s.tolist()


@pytest.mark.parametrize(
    ("name", "taken", "complaint"),
    [
        ("aiperf.jsonl", ("metrics", "time_to_first_token"), "run AIPerf with --streaming"),
        ("guidellm.json", ("time_to_first_token_ms",), "run GuideLLM with streaming"),
        (
            "sglang_bench.jsonl",
            ("ttfts",),
            "run SGLang bench_serving with --output-details and without --disable-stream",
        ),
        ("bench_serve.json", ("ttfts",), "run vllm bench serve with --save-detailed, streaming"),
    ],
)
def test_an_answer_that_was_not_streamed_has_no_ttft(tmp_path, name, taken, complaint):
    def strip(value: Any) -> Any:
        """A document without the TTFT, wherever it stands."""
        if isinstance(value, dict):
            return {key: strip(one) for key, one in value.items() if key != taken[-1]}
        return [strip(one) for one in value] if isinstance(value, list) else value

    path = tmp_path / name
    lines = (SAMPLES / name).read_text().splitlines()
    path.write_text("\n".join(json.dumps(strip(json.loads(line))) for line in lines))
    with pytest.raises(TraceError, match=f"{taken[-1]} = None: is missing; {complaint}"):
        measured(path, read(path))


def test_a_trace_is_no_benchmark():
    with pytest.raises(TraceError, match="is a Mooncake or timed_trace file, not the result of a benchmark client"):
        measured(SAMPLES / "mooncake.jsonl", read(SAMPLES / "mooncake.jsonl"))
