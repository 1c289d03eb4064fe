"""``fragmeter.simulate``: the command line's run, in data frames."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fragmeter as fm
from cli_runs import run_here
from fragmeter.experiments.api.simulation import arguments
from fragmeter.experiments.cli.app import app
from fragmeter.experiments.runs.inputs import Inputs
from fragmeter.reports.data.results import read_result
from fragmeter.reports.figures.waste_bars import WasteBars
from fragmeter.sim.cluster import Cluster
from fragmeter.sim.memory import BUCKETS
from fragmeter.sim.metrics.views import PAPER_VIEW, UNUSED, WASTE
from fragmeter.traces import synthetic_pairs, workload
from paths import ROOT

ROWS = "arrival_s,prompt_tokens,output_tokens,max_tokens\n0,7,5,10\n0.5,9,1,10\n2.25,30,4,10\n"
LOAD = {"request_rate": 4, "num_prompts": 30}


@pytest.fixture
def trace(tmp_path) -> Path:
    path = tmp_path / "three.csv"
    path.write_text(ROWS)
    return path


@pytest.fixture(scope="module")
def run() -> fm.Simulation:
    return fm.simulate(policy="vllm-v1", **LOAD)


def by_command(tmp_path: Path, *flags: object) -> tuple[dict, Path]:
    """summary.json of the command line, and its result folder."""
    out = tmp_path / "by-command"
    done = run_here("simulate", *flags, "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads((out / "summary.json").read_text()), out


class TestSameAsTheCommandLine:
    @pytest.mark.parametrize(
        ("flags", "keywords"),
        [
            (["--num-prompts", 20], {"num_prompts": 20}),
            (
                ["--policy", "orca", "--request-rate", 3, "--num-prompts", 20, "--max-tokens", 2048, "--seed", 7],
                {"policy": "orca", "request_rate": 3, "num_prompts": np.int64(20), "max_tokens": 2048, "seed": 7},
            ),
            (
                ["--dataset", "alpaca", "--num-prompts", 20, "--request-rate", 9, "--burstiness", 0.5, "--n", 2],
                {"dataset": "alpaca", "num_prompts": 20, "request_rate": np.float64(9), "burstiness": 0.5, "n": 2},
            ),
            (
                ["--num-prompts", 20, "--num-replicas", 2, "--no-enforce-eager", "--window", 1, 5],
                {"num_prompts": 20, "num_replicas": 2, "enforce_eager": False, "window": (1, 5)},
            ),
        ],
    )
    def test_the_summary_and_every_file(self, flags, keywords, tmp_path):
        summary, out = by_command(tmp_path, *flags)
        simulated = fm.simulate(**keywords)
        assert simulated.as_dict() == summary
        saved = simulated.save(tmp_path / "saved")
        names = sorted(path.name for path in out.iterdir())
        assert names == sorted(path.name for path in saved.iterdir()) and len(names) == 8
        for name in names:
            assert (saved / name).read_bytes() == (out / name).read_bytes(), name

    def test_a_trace_as_a_path_a_text_and_a_frame(self, trace, tmp_path):
        summary, _ = by_command(tmp_path, "--trace", trace)
        for given in (trace, str(trace), pd.read_csv(trace), fm.traces.read(trace)):
            assert fm.simulate(trace=given).as_dict() == summary

    def test_the_keywords_are_the_flags(self):
        flags = {
            name.removeprefix("--").replace("-", "_")
            for argument in app["simulate"].assemble_argument_collection()
            # The others are further spellings.
            for name in argument.names[:1]
            if name.startswith("--") and not name.startswith(("--no-", "--help", "--version"))
        }
        only_there = {
            "out",
            "json",
            "record_plan",
            "record_steps",
            "shuffle_ids",
            "openmetrics",
            "openmetrics_interval",
            "view",
        }
        assert only_there < flags
        keywords = inspect.signature(fm.simulate).parameters
        assert set(keywords) == flags - only_there
        assert all(keyword.kind is keyword.KEYWORD_ONLY for keyword in keywords.values())

    def test_defaults_are_the_command_lines(self):
        assert arguments({}) == (Inputs(), Cluster(), None)
        for name, keyword in inspect.signature(fm.simulate).parameters.items():
            if name != "record_blocks":
                assert arguments({name: keyword.default}) == arguments({}), name

    def test_a_model_may_be_a_path(self, tmp_path):
        """As text, as the flag takes it."""
        found, _, _ = arguments({"model": tmp_path / "config.json"})
        assert found.settings.model == str(tmp_path / "config.json")

    @pytest.mark.slow
    def test_recorded_blocks_are_saved(self, tmp_path):
        flags = ["--num-prompts", 5, "--record-blocks"]
        _, out = by_command(tmp_path, *flags)
        saved = fm.simulate(num_prompts=5, record_blocks=True).save(tmp_path / "saved")
        assert read_result(saved).blocks is not None
        assert (saved / "blocks.npz").read_bytes() == (out / "blocks.npz").read_bytes()


class TestMistakes:
    @pytest.mark.parametrize(
        ("keywords", "text"),
        [
            ({"request_rte": 2}, "request_rte = 2: is not a keyword of simulate; did you mean request_rate?"),
            ({"record_block": True}, "did you mean record_blocks"),
            ({"qqqq": 2}, "help(fragmeter.simulate) has them all"),
            ({"out": "x"}, "call save(folder)"),
            ({"json": "-"}, "as_dict()"),
            ({"record_plan": True}, "use fragmeter simulate --record-plan"),
            ({"policy": "vllm"}, "policy = 'vllm': one of static, "),
            ({"policy": None}, "policy = None: must be text"),
            ({"policy": "orca", "swap_space": 8}, "swap_space = 8.0: orca does not read it"),
            ({"tensor_parallel_size": True}, "tensor_parallel_size = True: is not a switch"),
            ({"tensor_parallel_size": 1.5}, "tensor_parallel_size = 1.5: "),
            ({"request_rate": np.arange(3)}, "request_rate = 'ndarray': must be a number, a text, True or False"),
            ({"record_blocks": 1}, "record_blocks = 1: must be True or False"),
            ({"record_blocks": True, "num_replicas": 2}, "record_blocks = True: needs a single replica"),
            ({"num_prompts": 0}, "num_prompts = 0: must be 1 or more"),
            ({"trace": [1, 2]}, "trace = 'list': must be a path, a pandas DataFrame, a Trace or a Workload"),
            ({"trace": "missing.csv"}, "missing.csv: no such file"),
        ],
    )
    def test_one_line_says_what_to_do(self, keywords, text):
        with pytest.raises(fm.UserError) as refusal:
            fm.simulate(**keywords)
        assert text in str(refusal.value) and "\n" not in str(refusal.value)

    @pytest.mark.parametrize(
        ("change", "keywords", "text"),
        [
            ({"prompt_tokens": [7, -1, 3]}, {}, "DataFrame, iloc 1: prompt_tokens = -1: must be 1 or more"),
            ({"prompt_tokens": [7, np.nan, 3]}, {}, "DataFrame, iloc 1: prompt_tokens = None"),
            ({"output_tokens": ["a", 1, 2]}, {}, "column = 'output_tokens': holds values of several types"),
            ({"prompt_tokens": [7, 9000, 3]}, {}, "DataFrame, iloc 1: prompt_tokens + output_tokens = 9001"),
            ({"output_tokens": None}, {}, "no column output_tokens"),
            ({"arrival_s": None}, {}, "request_rate: DataFrame has no arrivals; give a request rate"),
            ({}, {"num_prompts": 4}, "num_prompts = 4: the trace has no more than 3; ask for fewer"),
            ({}, {"num_prompts": -1}, "num_prompts = -1: must be 1 or more"),
            (
                {},
                {"skip_bad": True},
                "skip_bad = True: applies only to a trace file, and trace is a DataFrame; leave it out",
            ),
            ({}, {"dataset": "alpaca"}, "dataset = 'alpaca': excludes trace"),
        ],
    )
    def test_of_a_data_frame(self, change, keywords, text, trace):
        frame = pd.read_csv(trace).assign(**change).dropna(axis="columns", how="all")
        with pytest.raises(fm.UserError) as refusal:
            fm.simulate(trace=frame, **keywords)
        assert text in str(refusal.value) and "\n" not in str(refusal.value)

    def test_a_frame_without_rows_or_with_a_column_twice(self, trace):
        frame = pd.read_csv(trace)
        with pytest.raises(fm.UserError, match="has columns and no rows"):
            fm.simulate(trace=frame[:0])
        with pytest.raises(fm.UserError, match="output_tokens appears twice; keep one"):
            fm.simulate(trace=pd.concat([frame, frame["output_tokens"]], axis="columns"))

    @pytest.mark.parametrize("keywords", [{"request_rate": 2}, {"n": 2}, {"skip_bad": True}, {"num_prompts": 1}])
    def test_a_workload_is_as_it_is(self, keywords):
        work = workload(synthetic_pairs("vllm_sosp23_sharegpt_opt", 3, seed=0, max_model_len=2048), request_rate=4)
        with pytest.raises(fm.UserError, match="trace is a Workload; leave it out"):
            fm.simulate(trace=work, **keywords)


def test_a_workload_is_served():
    pairs = synthetic_pairs("vllm_sosp23_sharegpt_opt", LOAD["num_prompts"], seed=0, max_model_len=2048)
    work = workload(pairs, request_rate=LOAD["request_rate"])
    assert fm.simulate(trace=work).as_dict() == fm.simulate(**LOAD).as_dict()


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_window_behind_the_run_is_refused(num_replicas):
    with pytest.raises(
        fm.UserError, match=r"^window = \(900.0, 990.0\): begins after the run, which ends at \d+.\d s; "
    ):
        fm.simulate(num_prompts=3, window=(900, 990), num_replicas=num_replicas)


def test_a_frame_may_say_what_prompts_are_made_of():
    frame = pd.DataFrame({"arrival_s": [0.0, 9.0], "prompt_tokens": [64, 128], "output_tokens": 5, "session_id": "a"})
    found = fm.simulate(trace=frame, policy="vllm-v1")
    # The second turn begins with 64 + 5 tokens of the first, of which four blocks are full.
    assert found.requests["cached_tokens"].tolist() == [0, 64]


class TestFrames:
    def test_the_summary_is_flat_and_has_the_keys_of_vllm(self, run):
        assert run.summary["mean_ttft_ms"] == run.as_dict()["mean_ttft_ms"]
        assert run.summary["preemptions.recompute"] == 0
        assert len(run.summary) < 110 and not any("_seconds.buckets." in path for path in run.summary.index)
        for name, frame in run.histograms.items():
            buckets = run.as_dict()["prefix_cache"][name]["buckets"]
            assert frame["blocks"].tolist() == [*buckets.values()] and np.isinf(frame["upto_s"].iloc[-1])
            assert frame["blocks"].iloc[-1] == run.summary[f"prefix_cache.{name}.count"]
        assert "vllm:kv_block_lifetime_seconds" in run.histograms
        assert pd.DataFrame([run.summary, run.summary]).index.tolist() == ["vllm-v1", "vllm-v1"]

    @pytest.mark.parametrize("name", ["ttft", "tpot", "e2el"])
    def test_latencies_of_requests_are_those_of_the_summary(self, name, run):
        values = run.requests[f"{name}_ms"]
        assert np.percentile(values.dropna(), 99) == run.summary[f"p99_{name}_ms"]
        assert values.mean() == pytest.approx(run.summary[f"mean_{name}_ms"])

    def test_times_of_a_request(self, trace):
        requests = fm.simulate(trace=trace).requests
        assert requests["arrival_s"].tolist() == [0, 0.5, 2.25]
        first_s = requests["arrival_s"] + requests["ttft_ms"] / 1e3
        assert np.allclose(requests["first_token_s"], first_s, rtol=1e-12)
        assert np.allclose(requests["finish_s"], requests["arrival_s"] + requests["e2el_ms"] / 1e3, rtol=1e-12)
        # One output token has no time per output token after the first.
        assert requests["tpot_ms"].isna().tolist() == [False, True, False]
        assert not [name for name in requests if "ticks" in name]

    def test_what_was_refused_has_no_times(self):
        frame = pd.DataFrame({"arrival_s": [0, 1], "prompt_tokens": [16, 900], "output_tokens": [8, 8]})
        found = fm.simulate(trace=frame, num_gpu_blocks_override=20)
        assert found.requests["refused"].tolist() == [False, True]
        for name in ("queue_time_ms", "ttft_ms", "tpot_ms", "e2el_ms", "first_token_s", "finish_s"):
            assert found.requests[name].isna().tolist() == [False, True], name
        assert "2 requests, 1 refused" in repr(found)

    def test_memory_is_the_pool_at_every_moment(self, run):
        # Of vLLM's pool one block is never handed out.
        capacity = (run.summary["num_gpu_blocks"] - 1) * run.summary["block_size"]
        assert (run.memory[list(BUCKETS)].sum(axis=1) == capacity).all()
        assert run.memory["start_s"].is_monotonic_increasing


class TestWhatItSays:
    def test_two_lines(self, run):
        first, second = repr(run).splitlines()
        assert first == "vllm-v1: opt-13b on 1 x a100-40gb, 30 requests"
        throughput = f"{run.summary['request_throughput']:.3g} requests/s"
        p99 = f"TTFT p50 {run.summary['median_ttft_ms']:,.1f} ms, p99 {run.summary['p99_ttft_ms']:,.1f} ms"
        assert second.startswith(throughput) and p99 in second
        buckets = run.as_dict()["waste"]["mean_over_iterations_pct"]["buckets"]
        used = sum(buckets[bucket] for bucket in ("live", "free", "cached"))
        assert second.endswith(f"waste {100 - used:.1f} %") and buckets["free"] > 0

    def test_the_shares_are_the_papers(self, run):
        assert run.waste == pytest.approx(run.as_dict()["waste"]["mean_over_iterations_pct"]["paper_view"])
        assert sum(run.waste.values()) == pytest.approx(100)

    def test_the_html_is_whole_and_asks_for_nothing(self, run):
        page = Elements()
        page.feed(run._repr_html_())
        assert page.open == [] and page.tags["rect"] >= 2 and page.tags["svg"] == 1
        assert not {"script", "link", "img", "iframe", "style"} & page.tags.keys()
        # The namespace of SVG is a name.
        assert run._repr_html_().replace('"http://www.w3.org/2000/svg"', "").count("//") == 0

    def test_labels_are_escaped(self, run):
        label = "<b>&\"x'"
        page = fm.waste_bars(run, labels=[label])._repr_html_()
        assert "<b>" not in page and "&lt;b&gt;&amp;&quot;x&#x27;" in page
        assert str(fm.waste_bars(run, labels=[label])).startswith(label)

    def test_a_label_for_each_run(self, run):
        with pytest.raises(fm.UserError, match="must be one for each of 1 runs"):
            fm.waste_bars(run, labels=["a", "b"])

    def test_a_bar_of_text_is_as_long_as_its_shares(self):
        shares = dict.fromkeys(BUCKETS, 0.0) | {"live": 50, "reserved": 10, "over_estimate": 14, "block_tail": 6}
        shares |= {"stranded": 4, "cached": 6, "free": 10}
        line, signs, *legend = str(WasteBars(["a"], [shares])).splitlines()
        assert line == f"a {'█' * 25}{'▓' * 5}{'▒' * 10}{'░' * 2}{'·' * 8}  50.0 % token states, 34.0 % waste"
        names = "█ token states  ▓ reservation  ▒ internal  ░· external & others  · of it free"
        assert signs.strip() == f"{names}: the paper's view, mean over iterations"
        named = [*PAPER_VIEW.categories.values(), UNUSED, WASTE]
        assert [text.strip() for text in legend] == [category.defined for category in named]

    def test_a_number_in_a_bar_is_that_of_a_category(self):
        """External & others has two pieces: what is lost, without a number of its own, and what is free."""
        shares = dict.fromkeys(BUCKETS, 0.0) | {"live": 60, "stranded": 15, "free": 25}
        page = WasteBars(["a"], [shares])._repr_html_()
        numbers = re.findall(r"<text[^>]*>([^<]*)</text>", page)
        assert numbers == ["60.0", "25.0"] and "external &amp; others 40.0 %, of it free 25.0 %" in page


class Elements(HTMLParser):
    """The elements of a page: how often each occurs, and which are not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


class TestTheFront:
    def test_its_names_are_documented_and_no_others(self):
        page = (ROOT / "docs" / "python.md").read_text()
        rows = [line.split("|")[1] for line in page.split("| name | meaning |")[1].split("\n\n")[0].splitlines()[2:]]
        named = [part.split("(")[0] for row in rows for part in row.split("`")[1::2]]
        assert sorted(named) == sorted(fm.__all__) and set(fm.__all__) <= set(dir(fm))

    def test_an_unknown_name_is_an_attribute_error(self):
        with pytest.raises(AttributeError, match="no attribute 'simulat'"):
            fm.simulat  # noqa: B018

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("code", "unloaded"),
        [
            ("import fragmeter", ["numpy", "pandas", "pyarrow", "pydantic", "cyclopts", "fragmeter.sim"]),
            ("import fragmeter; fragmeter.simulate(num_prompts=3)", ["torch", "cupy", "pandas", "plotly", "scipy"]),
        ],
    )
    def test_it_loads_what_it_needs(self, code, unloaded):
        code = f"{code}; import sys; print([name for name in {unloaded} if name in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        assert done.stdout == "[]\n"
