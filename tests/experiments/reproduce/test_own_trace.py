"""``reproduce --trace`` with a trace that is not the paper's: its own arrivals and server, and nothing to compare with."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.paper.context_cost import ContextCost
from fragmeter.experiments.paper.fit import CONTEXT_STEP_SCALE
from fragmeter.experiments.paper.paper import SERIES
from fragmeter.experiments.reproduce import own_page
from fragmeter.experiments.reproduce import own_trace as own
from fragmeter.experiments.reproduce.reproduction import Traces
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.metrics.summary import waste
from fragmeter.sim.output.interrupts import INTERRUPTED
from fragmeter.traces import Trace, mean_rate, read, workload

HEAD = "arrival_s,prompt_tokens,output_tokens\n"
FIGURES = ("fig2", "fig12a", "fig13a", "waste")
#: The step time of the paper's figures, which these have on its own server.
PAPER_STEPS = ContextCost(CONTEXT_STEP_SCALE)


def rows_of(count: int, gap_s: float, longest_output: int = 400) -> list[str]:
    rng = np.random.default_rng(0)
    prompts, outputs = rng.integers(100, 700, count), rng.integers(5, longest_output, count)
    return [f"{at * gap_s:.3f},{p},{o}\n" for at, (p, o) in enumerate(zip(prompts, outputs, strict=True))]


def put(folder: Path, rows: list[str], name: str = "mine.csv") -> Path:
    (folder / name).write_text(HEAD + "".join(rows))
    return folder / name


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with all four figures of many short requests, in text, JSON and page."""
    folder = tmp_path_factory.mktemp("own")
    trace = put(folder, rows_of(600, 0.1, longest_output=60))
    tokens = ["reproduce", "all", "--trace", trace, "--out", folder / "out", "--json", folder / "all.json", "--jobs", 1]
    assert status([*map(str, tokens)]) == DONE
    return folder


def run(capsys, *tokens: object) -> dict:
    assert status([str(token) for token in ("reproduce", *tokens, "--json", "-")]) == DONE
    return json.loads(capsys.readouterr().out)


def refused(capsys, *tokens: object) -> str:
    assert status([str(token) for token in ("reproduce", *tokens)]) == MISTAKE
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err.removeprefix("fragmeter: ").rstrip("\n")


def value(document: dict, series: str, metric: str) -> float:
    [found] = [row["simulated"] for row in document["rows"] if (row["series"], row["metric"]) == (series, metric)]
    return found


def readable(page: str) -> str:
    """The text of a page, without scripts that the library brings and without style."""
    return re.sub(r"<style.*?</style>|<script>.*?</script>", "", page, flags=re.DOTALL)


class TestTheFigures:
    def test_are_those_of_the_trace_at_its_own_arrivals(self, made):
        """Each share equals that of a run of the trace itself, measured over the last two thirds of its arrivals."""
        trace = read(made / "mine.csv")
        last_s = float(trace.arrival_ticks[-1]) / 1e12
        found = json.loads((made / "out" / "fig2.json").read_text())
        for name, policy in SERIES.items():
            chosen = settings(policy=policy, cost="paper", window=(last_s / 3, last_s))
            view = waste(simulate(chosen, workload(trace), PAPER_STEPS).window)["mean_over_iterations_pct"][
                "paper_view"
            ]
            for part in ("token_states", "reservation", "internal", "external_and_others"):
                assert value(found, name, f"{part}_pct") == pytest.approx(view[part], abs=6e-4)

    def test_another_pace_of_the_same_requests_has_another_batch(self, tmp_path, capsys):
        paces = [put(tmp_path, rows_of(30, gap_s), f"{gap_s}.csv") for gap_s in (0.2, 2.0)]
        dense, sparse = (run(capsys, "fig13a", "--trace", path) for path in paces)
        assert value(dense, "vLLM", "batched_requests") > 2 * value(sparse, "vLLM", "batched_requests")
        assert (dense["arrivals"], dense["seeds"], dense["requests"]) == ("the trace's", [0], 30)
        assert "30 requests, its own arrivals, 5.000 req/s over 5.8 s" in dense["workload"]

    def test_the_rate_is_that_of_traces_stats(self, tmp_path, capsys):
        """Gaps over the span between the first and the last arrival, in both commands and in the rate sweep."""
        path = put(tmp_path, [f"{at},100,5\n" for at in (90, 90.5, 94)])
        found = run(capsys, "fig2", "--trace", path)
        assert status(["traces", "stats", str(path), "--json", str(tmp_path / "stats.json")]) == DONE
        assert "0.500 requests/s over 4.0 s;" in capsys.readouterr().out
        assert json.loads((tmp_path / "stats.json").read_text())["request_rate"] == 0.5
        assert "3 requests, its own arrivals, 0.500 req/s over 4.0 s" in found["workload"]
        trace = own.own_trace("mine.csv", read(path), own.OwnServer(), None)
        search = own._search(trace, "vLLM", "vllm-sosp23", 0)
        assert mean_rate(search.load.at(0.25).arrival_ticks) == pytest.approx(0.25, rel=1e-12)

    def test_a_stated_rate_draws_the_arrivals_anew_for_each_seed(self, tmp_path, capsys):
        path = put(tmp_path, rows_of(30, 0.2))
        found = run(capsys, "fig13a", "--trace", path, "--request-rate", 1, "--seeds", 2)
        assert (found["arrivals"], found["request_rate"], found["seeds"]) == ("poisson", 1.0, [0, 1])
        trace, batches = read(path), []
        for seed in (0, 1):
            work = workload(trace, 1.0, seed)
            first_s, last_s = (float(work.arrival_ticks[at]) / 1e12 for at in (0, -1))
            window = (first_s + (last_s - first_s) / 6, last_s)
            served = simulate(settings(policy="orca-max", cost="paper", window=window), work, PAPER_STEPS)
            batches.append(served.window.mean_batch)
        assert value(found, "Orca (Max)", "batched_requests") == pytest.approx(sum(batches) / 2, abs=6e-4)

    def test_the_rate_of_a_system_is_where_its_latency_reaches_the_target(self, made):
        found = json.loads((made / "out" / "fig12a.json").read_text())
        trace = read(made / "mine.csv")
        own_rate = (len(trace) - 1) / (float(trace.arrival_ticks[-1] - trace.arrival_ticks[0]) / 1e12)
        at = value(found, "Orca (Max)", "crossing_req_per_s")
        for rate, above in ((0.97 * at, False), (1.03 * at, True)):
            scaled = Trace(
                "mine", trace.prompt_tokens, trace.output_tokens, np.rint(trace.arrival_ticks * (own_rate / rate))
            )
            served = simulate(settings(policy="orca-max", cost="paper"), workload(scaled), PAPER_STEPS)
            assert (request_times(served).normalized_latency_s.mean() > 0.5) == above
        assert value(found, "vLLM", "crossing_req_per_s") > at
        assert {row["series"] for row in found["curves"]} == {"FasterTransformer", *SERIES}

    def test_another_model_and_gpu_have_another_pool_and_their_own_step_time(self, tmp_path, capsys):
        path = put(tmp_path, rows_of(20, 0.2))
        found = run(capsys, "waste", "--trace", path, "--model", "llama-3.1-8b", "--gpu", "h100-80gb")
        assert (found["model"], found["gpu"], found["cost"], found["step_scale"]) == (
            "llama-3.1-8b", "h100-80gb", "fitted", 1.0,
        )  # fmt: skip
        assert f"Pool: {29710:,} blocks of 16 slots" in found["basis"][0]
        paper = run(capsys, "waste", "--trace", path)
        assert (paper["cost"], paper["step_scale"]) == ("paper", CONTEXT_STEP_SCALE)
        assert value(paper, "vLLM", "output_tokens_per_s") < value(found, "vLLM", "output_tokens_per_s")

    def test_requests_longer_than_the_model_are_left_out_and_counted(self, tmp_path, capsys):
        path = put(tmp_path, [*rows_of(20, 0.2), "9,2000,49\n", "9.5,2000,48\n"])
        found = run(capsys, "fig2", "--trace", path)
        assert (found["requests"], found["left_out"]) == (21, 1)
        assert found["remarks"] == ["Left out: 1 of 22 requests, longer than the 2,048 tokens of opt-13b."]

    @pytest.mark.parametrize("rows", [["0,100,50\n"], ["3,100,50\n", "3,200,60\n"]], ids=["one request", "all at once"])
    def test_requests_without_a_span_are_measured_over_the_whole_run(self, rows, tmp_path, capsys):
        found = run(capsys, "fig2", "--trace", put(tmp_path, rows))
        assert "Means are over the whole run, as all requests arrive at once." in found["basis"]
        assert sum(row["simulated"] for row in found["rows"] if row["series"] == "vLLM") == pytest.approx(100, abs=2e-3)

    def test_few_short_requests_have_no_rate_and_say_so(self, tmp_path, capsys):
        found = run(capsys, "fig12a", "--trace", put(tmp_path, ["0,100,300\n", "1,100,300\n"]))
        assert [row["simulated"] for row in found["rows"]] == [None] * 5
        assert found["finding"].startswith("No request rate gives FasterTransformer or Orca (Max)")

    def test_a_kept_figure_follows_from_the_content_of_a_model_file(self, tmp_path, capsys):
        config = tmp_path / "config.json"
        sizes = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
        sizes |= {"intermediate_size": 2816, "vocab_size": 32000, "max_position_embeddings": 2048}
        tokens = ["fig13a", "--trace", put(tmp_path, rows_of(5, 0.2)), "--model", config, "--out", tmp_path / "out"]
        config.write_text(json.dumps(sizes))
        first = run(capsys, *tokens)
        config.write_text(json.dumps(sizes | {"num_hidden_layers": 16}))
        assert run(capsys, *tokens)["basis"][0] != first["basis"][0]


class TestNothingIsComparedWithThePaper:
    def test_in_text(self, made, capsys):
        tokens = ["reproduce", "all", "--trace", made / "mine.csv", "--out", made / "out", "--jobs", 1]
        assert status([*map(str, tokens)]) == DONE
        text = capsys.readouterr().out
        assert text.startswith("Your trace, the paper's systems: mine.csv\n")
        assert not re.search(r"publish|\bfail|\bpass\b|error", text, re.IGNORECASE)
        words = " ".join(text.split())
        assert words.count("No number is fitted on this trace.") == words.count("Step time:") == 4

    def test_in_data(self, made):
        text = (made / "all.json").read_text()
        assert not re.search(r"publish|fail|passes|error|findings", text, re.IGNORECASE)
        assert [one["figure"] for one in json.loads(text)["figures"]] == [*FIGURES]

    def test_on_the_page(self, made):
        page = readable((made / "out" / "your-trace.html").read_text("utf-8"))
        assert "<h1>Your trace, the paper&#39;s systems: mine.csv</h1>" in page
        assert not re.search(r'publish|\bfail|class="badge|class="scores', page, re.IGNORECASE)
        assert re.findall(r'<h2 id="(\w+)"', page) == [*FIGURES]

    def test_the_page_is_written_at_once_and_filled(self, tmp_path, monkeypatch, capsys):
        trace, page, seen = put(tmp_path, rows_of(2, 0.1)), tmp_path / "out" / "your-trace.html", []

        def watched(name, make):
            def made(own):
                seen.append(re.findall(">(Not [^<]*)<", page.read_text("utf-8")))
                if name == "fig13a":
                    raise KeyboardInterrupt
                return make(own)

            return made

        monkeypatch.setattr(own_page, "FIGURES", {name: watched(name, make) for name, make in own.FIGURES.items()})
        tokens = ["reproduce", "all", "--trace", trace, "--out", tmp_path / "out", "--jobs", 1]
        assert status([*map(str, tokens)]) == INTERRUPTED
        assert [len(unfinished) for unfinished in seen] == [4, 3, 2]
        left = page.read_text("utf-8")
        assert '<h2 id="fig13a">Mean batch</h2>' in left and left.count(">Not run.<") == 2
        assert "Stopped at 2 of 4 figures" in left and "location.reload" not in left
        assert capsys.readouterr().err.endswith("fragmeter: interrupted; finished results are kept\n")

    def test_an_interrupt_without_files_promises_none(self, tmp_path, monkeypatch, capsys):
        def interrupt(_):
            raise KeyboardInterrupt

        monkeypatch.setattr(own_page, "FIGURES", {"fig2": interrupt})
        assert status(["reproduce", "fig2", "--trace", str(put(tmp_path, rows_of(2, 0.1)))]) == INTERRUPTED
        assert capsys.readouterr().err == "fragmeter: interrupted\n"

    def test_a_page_made_again_is_the_same_bytes(self, made, tmp_path):
        tokens = ["reproduce", "all", "--trace", made / "mine.csv", "--out", tmp_path / "again", "--jobs", 1]
        assert status([*map(str, tokens)]) == DONE
        for path in sorted((made / "out").iterdir()):
            assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


class TestThePapersPairs:
    def papers(self, monkeypatch, path: Path) -> None:
        """The pairs of a file become the paper's."""
        monkeypatch.setattr(own_page, "SHAREGPT_SHA256", hash_of(read(path)))

    def test_are_the_papers_figures_as_ever_whatever_the_file_is_called(self, tmp_path, monkeypatch):
        (tmp_path / "pairs.csv").write_text("input,output\n7,5\n9,3\n2000,500\n")
        (tmp_path / "other.jsonl").write_text('{"input": 7, "output": 5}\n{"input": 9, "output": 3}\n')
        self.papers(monkeypatch, tmp_path / "pairs.csv")
        for name in ("pairs.csv", "other.jsonl"):
            # The longer pair is one that no experiment of the paper serves.
            assert own_page.own_of("fig2", Traces(tmp_path / name), own.OwnServer(), None) is None

    @pytest.mark.parametrize(
        "text",
        ["input,output\n7,5\n9,4\n", "input,output\n9,3\n7,5\n", "input,output\n7,5\n"],
        ids=["a length", "the order", "a pair less"],
    )
    def test_are_no_others(self, text, tmp_path, monkeypatch):
        (tmp_path / "pairs.csv").write_text("input,output\n7,5\n9,3\n")
        (tmp_path / "mine.csv").write_text(text)
        self.papers(monkeypatch, tmp_path / "pairs.csv")
        found = own_page.own_of("fig2", Traces(tmp_path / "mine.csv"), own.OwnServer(request_rate=1), None)
        assert found is not None and found.file == "mine.csv"

    def test_with_arrivals_or_another_server_are_a_trace_of_the_users(self, tmp_path, monkeypatch):
        (tmp_path / "pairs.csv").write_text("input,output\n7,5\n9,3\n")
        self.papers(monkeypatch, tmp_path / "pairs.csv")
        timed = put(tmp_path, ["0,7,5\n", "1,9,3\n"])
        assert own_page.own_of("fig2", Traces(timed), own.OwnServer(), None) is not None
        on_h100 = own.OwnServer(gpu="h100-80gb", request_rate=2)
        assert own_page.own_of("fig2", Traces(tmp_path / "pairs.csv"), on_h100, None) is not None

    @pytest.mark.skipif("FRAGMETER_TRACES" not in os.environ, reason="FRAGMETER_TRACES names no folder")
    def test_are_recognised(self):
        folder = Path(os.environ["FRAGMETER_TRACES"])
        sharegpt, alpaca = (folder / f"sosp23_{name}_opt.csv.gz" for name in ("sharegpt", "alpaca"))
        assert own_page.own_of("all", Traces(sharegpt, alpaca), own.OwnServer(), None) is None
        assert not own.is_papers(read(alpaca), own.SHAREGPT_SHA256)


def hash_of(trace: Trace) -> str:
    """The hash that recognises a trace, found by asking for it."""
    asked: list[str] = []

    class Known(str):
        def __eq__(self, other: object) -> bool:
            asked.append(str(other))
            return True

        __hash__ = str.__hash__

    own.is_papers(trace, Known())
    return asked[0]


REFUSED = {
    "a figure of the paper's": (
        ["fig15", "--trace", "mine.csv"],
        "trace = 'mine.csv': fig15 compares with the paper, and this is not its set-up; use fig2, fig12a, fig13a, waste or all",
    ),
    "a figure that serves no trace": (["fig1", "--trace", "mine.csv"], "trace = 'mine.csv': fig1 does not serve it; leave it out"),
    "no arrivals": (
        ["fig2", "--trace", "pairs.csv"], "request_rate: pairs.csv has no arrivals; give a request rate",
    ),
    "seeds of nothing drawn": (
        ["fig2", "--trace", "mine.csv", "--seeds", "2"],
        "seeds = 2: mine.csv has its own arrivals and nothing is drawn; leave it out",
    ),
    "a server without a trace": (
        ["fig2", "--model", "opt-66b"],
        "model = 'opt-66b': applies only to a trace of your own; give one with --trace",
    ),
    "a server of servers": (["servers", "--gpu", "h200"], "gpu = 'h200': has no effect on servers; leave it out"),
    "pairs that are not Alpaca's": (
        ["fig13b", "--alpaca-trace", "pairs.csv"],
        "alpaca_trace = 'pairs.csv': not the paper's pairs of Alpaca; give a trace of your own with --trace",
    ),
    "nothing fits": (
        ["fig2", "--trace", "long.csv"],
        "model = 'opt-13b': holds 2048 tokens, and every request of long.csv is longer; take a longer model",
    ),
    "no gaps to scale": (
        ["fig12a", "--trace", "mine.csv", "--request-rate", "inf"],
        "request_rate = inf: fig12a scales gaps, and all requests arrive at once; give a finite rate",
    ),
    "a rate": (
        ["fig2", "--trace", "mine.csv", "--request-rate", "-1"],
        "request_rate = -1.0: must be positive; inf lets all requests arrive at 0",
    ),
    "a server": (
        ["fig2", "--trace", "mine.csv", "--tensor-parallel-size", "0"], "tensor_parallel_size = 0: must be at least 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("tokens", "line"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_drawn_is_refused_before_anything_is_run(tokens, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    put(tmp_path, rows_of(3, 1.0))
    (tmp_path / "pairs.csv").write_text("input,output\n7,5\n")
    put(tmp_path, ["0,2000,49\n"], "long.csv")
    assert refused(capsys, *tokens, "--out", "out") == line
    assert not (tmp_path / "out").exists()


def test_the_folder_of_the_paper_is_not_written_into(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "fig1.json").write_text("{}")
    line = refused(capsys, "fig2", "--trace", put(tmp_path, rows_of(3, 1.0)), "--out", tmp_path / "out")
    assert "holds fig1.json, which is not a file of a reproduction of a trace" in line
