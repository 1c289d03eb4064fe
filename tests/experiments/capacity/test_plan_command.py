"""``fragmeter plan --goodput`` as a user runs it: the documents, the page, resumed plans, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from fragmeter.experiments.capacity import contender, tasks
from fragmeter.experiments.capacity.prices import prices
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.sim.output.interrupts import INTERRUPTED

SMALL = ["--num-prompts", "120", "--seeds", "4", "--jobs", "1"]
LLAMA = ["--model", "llama-3.1-8b", "--goodput", "ttft:500", "tpot:50", *SMALL]
#: More than one A100 and less than one H200.
WANTED = ["--request-rate", "30"]


def planned(capsys: pytest.CaptureFixture, *tokens: str) -> dict:
    assert status(["plan", *tokens, "--json", "-"]) == DONE
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("plan") / "out"
    gpus = ["--gpu", "a100-80gb", "--gpu", "h200", *WANTED]
    assert status(["plan", *LLAMA, *gpus, "--out", str(out)]) == DONE
    return out


def files_of(out: Path) -> dict[str, object]:
    """The files of a plan."""
    return {path.name: path.read_bytes() for path in out.glob("plan.*")}


class TestCommand:
    @pytest.mark.slow
    def test_the_document(self, out):
        document = json.loads((out / "plan.json").read_text())
        first, second = document["candidates"]
        assert document["recommended"] == first["candidate"]
        assert first["bill"]["per_hour"] <= second["bill"]["per_hour"]
        listed = prices(None).per_gpu_hour
        for candidate in (first, second):
            cost, fleet = candidate["bill"], candidate["fleet"]
            assert cost["replicas"] == fleet["replicas"] >= fleet["fewest"] == cost["fewest_replicas"]
            assert cost["per_hour"] == pytest.approx(cost["gpus"] * listed[candidate["candidate"]["gpu"]])
            assert candidate["request_rate"] == 30 / fleet["replicas"]
            decisions = {each["replicas"]: each["decision"] for each in fleet["tried"]}
            assert decisions[fleet["replicas"]] == "enough" and decisions[fleet["fewest"]] != "too few"
            smaller = [size for size in decisions if size < fleet["fewest"]]
            assert all(decisions[size] == "too few" for size in smaller)
            assert len(fleet["rates"]) >= 4 and all(each is None or each > 0 for each in fleet["rates"])
            # 120 requests do not fill a replica: the rates that they bear are bursts.
            pairs = zip(candidate["known_rates"], fleet["rates"], strict=True)
            assert all(rate is None or known < rate for known, rate in pairs)
            # The detail is of the first seed, which may be one of the tenth that misses the goal.
            shares = next(each["shares"] for each in fleet["tried"] if each["replicas"] == fleet["replicas"])
            assert candidate["attained"] == shares[0] and sum(share < 0.9 for share in shares) <= 1
            assert sum(rate is not None and rate < 30 for rate in fleet["rates"]) <= fleet["misses"] <= 1
            assert (fleet["seeds"], fleet["sure_rate"] is None or fleet["sure_rate"] >= 30) == (48, True)
            assert sum(candidate["buckets_pct"].values()) == pytest.approx(100)
            assert candidate["settings"]["num_gpu_blocks_override"] * 16 == candidate["kv_cache_tokens"]
        assert [line.split(":")[0] for line in document["explained"]] == [second["candidate"]["gpu"]]

    def test_the_files(self, out):
        table = pd.read_parquet(out / "plan.parquet")
        assert table["gpu"].tolist() == [each["candidate"]["gpu"] for each in _candidates(out)]
        assert table["gpus_high"].tolist() == [each["bill"]["gpus"] for each in _candidates(out)]
        page = (out / "plan.html").read_text()
        for heading in (
            "Candidates",
            "The recommendation",
            "Price and speed",
            "Other candidates",
            "GPU memory",
            "Use of each slot",
            "Basis of the plan",
        ):
            assert heading in page

    @pytest.mark.slow
    def test_what_is_finished_is_not_done_again_and_leaves_the_same_bytes(self, out, monkeypatch, capsys):
        before = files_of(out)
        monkeypatch.setattr(tasks, "carry_out", lambda *_: pytest.fail("done a second time"))
        gpus = ["--gpu", "a100-80gb,h200", *WANTED]
        assert status(["plan", *LLAMA, *gpus, "--out", str(out), "--explain"]) == DONE
        summary, page = ((out / name).read_text() for name in ("plan.md", "plan.html"))
        assert all("Buy " in text and "confidence" not in text for text in (summary, page))
        assert files_of(out) == before
        printed = capsys.readouterr().out
        assert (
            "Buy " in printed
            and "USD/h against" in printed
            and "The runs are bursts, and say nothing sure of a load that lasts: give more requests"
            in " ".join(printed.split())
        )

    @pytest.mark.slow
    def test_interrupted_and_on_two_cores_it_comes_to_the_same(self, out, tmp_path, monkeypatch):
        tokens = ["plan", *LLAMA[:-2], "--gpu", "a100-80gb,h200", *WANTED]
        tokens += ["--out", str(tmp_path / "again")]
        left, real = [7], tasks.carry_out

        def interrupted(*arguments):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return real(*arguments)

        monkeypatch.setattr(tasks, "carry_out", interrupted)
        assert status([*tokens, "--jobs", "1"]) == INTERRUPTED
        assert len(list((tmp_path / "again" / "points").iterdir())) == 7
        assert not list((tmp_path / "again").glob("plan.*"))
        monkeypatch.setattr(tasks, "carry_out", real)
        assert status([*tokens, "--jobs", "2"]) == DONE
        assert files_of(tmp_path / "again") == files_of(out)

    def test_an_interrupted_search_prints_the_best_so_far_and_what_is_open(self, tmp_path, capsys, monkeypatch):
        """The whole test of the first candidate is interrupted: an L4 is so cheap that its bound is below."""
        listed = tmp_path / "prices.json"
        listed.write_text(json.dumps({"per_gpu_hour": {"a100-80gb": 2.0, "h200": 3.0, "l4": 0.5}}))

        def interrupted(member):
            raise KeyboardInterrupt

        monkeypatch.setattr(contender.Contender, "answer", interrupted)
        assert status(["plan", *LLAMA, *WANTED, "--prices", str(listed)]) == INTERRUPTED
        printed = capsys.readouterr()
        best = re.search(r"Best so far: (.*?), ([0-9.]+) USD/h \(by one seed, not confirmed\)", printed.out)
        assert best is not None and f"best so far, by one seed: {best[1]}, {best[2]} USD/h" in printed.err
        left = printed.out.split(" Open: ")[1]
        assert "l4" in left and best[1] not in left.split(", ")

    @pytest.mark.slow
    def test_a_pasted_line_is_where_candidates_begin(self, capsys):
        line = "vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 64"
        plan = planned(
            capsys,
            "--serve",
            line,
            "--gpu",
            "h200",
            "--max-num-seqs",
            "none,8",
            "--goodput",
            "ttft:500",
            "tpot:8",
            *SMALL,
        )
        by_max_num_seqs = {each["candidate"]["max_num_seqs"]: each for each in plan["candidates"]}
        assert by_max_num_seqs["8"]["settings"]["max_num_seqs"] == 8
        assert by_max_num_seqs["none"]["settings"]["max_num_seqs"] == 1024
        assert by_max_num_seqs["8"]["request_rate"] < by_max_num_seqs["none"]["request_rate"]
        assert by_max_num_seqs["8"]["limit"]["cause"] == "max_num_seqs"
        assert plan["wanted_request_rate"] is None and plan["recommended"]["max_num_seqs"] == "none"

    def test_objectives_that_nothing_meets(self, capsys):
        arguments = ["--model", "llama-3.1-8b", "--gpu", "h200", "--goodput", "ttft:500", "tpot:1", *SMALL]
        assert status(["plan", *arguments]) == DONE
        printed = " ".join(capsys.readouterr().out.split())
        assert "Buy none of these. The nearest, h200: no rate meets ttft:500 tpot:1: alone on the replica" in printed
        plan = planned(capsys, *arguments)
        assert plan["recommended"] is None and plan["candidates"][0]["attained_alone"] < 0.9

    #: With an hour to wait it does not matter how fast 200 requests come: nothing of it is said to fail.
    LENIENT = ["--goodput", "ttft:3600000", *SMALL, "--explain"]

    @pytest.mark.slow
    def test_objectives_that_every_rate_meets(self, capsys, tmp_path):
        arguments = ["--model", "llama-3.1-8b", "--gpu", "h200", *self.LENIENT]
        assert status(["plan", *arguments, "--out", str(tmp_path / "out")]) == DONE
        printed = " ".join(capsys.readouterr().out.split())
        assert "every rate meets the objectives: all requests at once do" in printed
        assert "no rate" not in printed.replace("no rate is asked for", "") and "none of these" not in printed
        document = json.loads((tmp_path / "out" / "plan.json").read_text())
        (candidate,) = document["candidates"]
        assert candidate["every_rate_meets"] and candidate["request_rate"] is None and candidate["error"] is None
        assert candidate["seed_rates"] == [None] * 4 and candidate["attained"] == 1
        assert "every rate meets the objectives: all requests at once do" in document["recommendation"]
        page = (tmp_path / "out" / "plan.html").read_text()
        assert "every rate meets the objectives: all requests at once do" in page
        assert document["recommended"] is None and "give more requests" in printed

    @pytest.mark.slow
    def test_a_rate_where_every_rate_meets_the_objectives(self, capsys):
        """Its fleet is simulated as any other: with each seed, divided or not. Equal fleets are listed once."""
        splits, routers = ["--prefill-replicas", "none,1,auto,2"], ["--router", "round-robin,kv-aware"]
        arguments = ["--model", "llama-3.1-8b", "--gpu", "h200", *self.LENIENT, "--request-rate", "5"]
        plan = planned(capsys, *arguments, *splits, *routers)
        assert plan["recommendation"].startswith(
            "Buy 1 x h200 for 5 requests/s: 4.59 USD/h (3,351 USD a month); headroom more than 11% (too few requests to fill a"
            " replica: raise --num-prompts); no objective limits it; 90% of seeds meet the goal with 95% confidence; step times from"
        )
        found = [(*list(each["candidate"].values())[1:], each["bill"]["replicas"]) for each in plan["candidates"]]
        assert sorted(found) == [
            ("kv-aware", "2", 3), ("round-robin", "1", 2), ("round-robin", "2", 3), ("round-robin", "none", 1),
        ]  # fmt: skip
        assert all(each["seed_rates"] == [None] for each in plan["candidates"])
        assert all(each["fleet"]["rates"] == [None] * 4 for each in plan["candidates"])
        name = "h200, router={}, prefill_replicas={}"
        assert [line for line in plan["explained"] if "the same fleet" in line] == [
            f"{name.format(*other)}: the same fleet as {name.format('round-robin', first)}"
            for other, first in (
                (("kv-aware", "none"), "none"),
                (("round-robin", "auto"), "1"), (("kv-aware", "1"), "1"), (("kv-aware", "auto"), "1"),
            )
        ]  # fmt: skip

    @pytest.mark.slow
    def test_of_one_seed_nothing_is_sure(self, capsys):
        arguments = ["--model", "llama-3.1-8b", "--gpu", "h200", "--goodput", "ttft:500", *SMALL[:2], "--seeds", "1"]
        assert status(["plan", *arguments]) == DONE
        printed = " ".join(capsys.readouterr().out.split())
        assert "measured with a single seed" in printed and "confidence" not in printed

    @pytest.mark.slow
    def test_ranks_are_tried_where_a_listed_card_does_not_start_with_one(self, capsys):
        load = ["--goodput", "ttft:2000", "tpot:100", "--request-rate", "0.5", "--num-prompts", "100", "--seeds", "1"]
        plan = planned(capsys, "--model", "llama-3.1-70b", "--gpu", "h200,a100-80gb", *load, "--jobs", "1")
        # Each listed card has an answer; no rank that starts is left out: 2, 4 and 8, as neither card holds the weights alone.
        assert {each["candidate"]["gpu"] for each in plan["candidates"]} == {"h200", "a100-80gb"}
        ranks = [each["candidate"]["tensor_parallel_size"] for each in plan["candidates"]]
        assert len(ranks) + len(plan.get("not_cheaper", [])) == 3 + 3
        assert plan["recommendation"].startswith("Buy ")

    def test_stages_are_tried_where_no_number_of_ranks_starts(self, capsys):
        load = [
            "--goodput",
            "ttft:9000",
            "tpot:300",
            "--request-rate",
            "0.1",
            "--num-prompts",
            "100",
            "--seeds",
            "1",
            "--input-len",
            "200",
        ]
        plan = planned(
            capsys, "--model", "llama-3.1-405b", "--gpu", "a100-80gb", *load, "--output-len", "20", "--jobs", "1"
        )
        # 810 GB of weights do not fit on eight cards of 80 GB.
        assert plan["candidates"][0]["candidate"] == {
            "gpu": "a100-80gb", "tensor_parallel_size": "8", "pipeline_parallel_size": "2",
        }  # fmt: skip

    @pytest.mark.slow
    def test_nothing_that_starts(self, capsys):
        one = ["--tensor-parallel-size", "1"]
        plan = planned(capsys, "--model", "llama-3.1-70b", "--gpu", "a100-80gb", "--goodput", "ttft:500", *SMALL, *one)
        assert plan["recommendation"] == "Buy none of these: no candidate has a rate; the reasons follow."
        assert "does not start: torch.OutOfMemoryError" in plan["explained"][0]
        arguments = ["--model", "llama-3.1-70b", "--gpu", "a100-80gb", "--goodput", "ttft:500", *SMALL, *one]
        assert status(["plan", *arguments]) == DONE
        table = capsys.readouterr().out.split("requests/s", 1)[1].split("a100-80gb:", 1)[0]
        assert "does not" in table and "start" in table

    @pytest.mark.slow
    def test_a_load_with_longer_requests_than_the_model_was_set_to(self, capsys, tmp_path):
        trace = tmp_path / "long.csv"
        trace.write_text("prompt_tokens,output_tokens\n" + "900,200\n" * 150)
        arguments = ["--gpu", "h200", "--max-model-len", "1000,2000", "--trace", str(trace), "--request-rate", "3"]
        plan = planned(capsys, *LLAMA, *arguments)
        assert plan["recommended"]["max_model_len"] == "2000"
        assert (
            "too short for the load: The load's longest request has 1,100 tokens, and max_model_len is 1000"
            in plan["explained"][0]
        )


def _candidates(out: Path) -> list[dict]:
    return json.loads((out / "plan.json").read_text())["candidates"]


LINE = ["--serve", "vllm serve llama-3.1-8b", "--gpu", "h200"]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([*LLAMA, "--gpu", "h300"], "gpu = 'h300': one of a100-40gb"),
        (["--gpu", "h200", "--goodput", "ttft:500"], "plan needs a model: --model a preset, org/name or config.json"),
        (["--model", "gpt-9", "--gpu", "h200", "--goodput", "ttft:500"], "model = 'gpt-9': one of opt-13b"),
        (
            ["--model", "llama-3.1-8b", "--gpu", "h200", "--goodput", "itl:5"],
            "goodput = 'itl:5': must be KEY:MILLISECONDS",
        ),
        ([*LLAMA, "--gpu", "h200", "--attainment", "1.5"], "attainment = '1.5'"),
        (
            [*LLAMA[:-4], "--gpu", "h200", "--seeds", "3"],
            "seeds = 3: are too few to begin the search with; give 4 or more, or 1 for a result without confidence",
        ),
        ([*LLAMA, "--gpu", "h200", "--policy", "best"], "policy = 'best': one of"),
        (
            [*LLAMA, "--gpu", "h200", "--tensor-parallel-size", "two"],
            "--tensor-parallel-size = 'two': must be a whole number",
        ),
        (
            [*LLAMA, "--gpu", "h200", "--max-concurrency", "4"],
            "max_concurrency = '4': makes arrivals wait for responses (a closed loop)",
        ),
        ([*LLAMA, "--gpu", "h200", "--request-rate", "0"], "request_rate = 0.0: must be above 0 and finite"),
        ([*LLAMA, "--gpu", "h200", "--request-rate", "-1"], "request_rate = -1.0: must be above 0 and finite"),
        ([*LLAMA, "--gpu", "h200", "--request-rate", "inf"], "request_rate = inf: must be above 0 and finite"),
        ([*LLAMA[:-6], "--gpu", "h200", "--num-prompts", "0"], "num_prompts = 0: must be 100 or more"),
        ([*LLAMA, "--gpu", "h200", "--prices", "none.json"], "prices = 'none.json': cannot be read"),
        (
            [*LLAMA, "--gpu", "h200,a100-80gb", "--startup-log", "# GPU blocks: 99"],
            "startup_log = 'given': applies to one server",
        ),
        ([*LINE, "--attainment", "0.99"], "flags of a plan have no effect without objectives"),
        ([*LINE, "--request-rate", "3"], "flags of a plan have no effect without objectives"),
        ([*LINE, "--mean-tokens", "9", "--goodput", "ttft:9"], "mean_tokens = 9: applies to one server; leave it out"),
        (["--model", "llama-3.1-8b", "--gpu", "h200"], "plan needs --serve, a vllm serve line; or for a plan"),
    ],
)
def test_what_cannot_be_planned(tokens, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert status(["plan", *tokens]) == MISTAKE
    complaint = capsys.readouterr().err
    assert message in complaint and complaint.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_fleets_of_engines_that_share_experts_are_bought_whole(capsys):
    """Mixtral on 4 engines a server, with experts divided or sliced;"""
    load = [
        "--goodput",
        "ttft:2000",
        "tpot:80",
        "--num-prompts",
        "120",
        "--seeds",
        "1",
        "--jobs",
        "1",
        "--request-rate",
        "8",
    ]
    axes = ["--data-parallel-size", "4", "--enable-expert-parallel", "true,false"]
    found = planned(capsys, "--model", "mixtral-8x7b", "--gpu", "h100-80gb", *axes, *load)
    assert len(found["candidates"]) == 2
    for each in found["candidates"]:
        assert each["bill"]["replicas"] % 4 == 0 and each["bill"]["gpus"] == each["bill"]["replicas"]
    alone = planned(capsys, "--model", "mixtral-8x7b", "--gpu", "h100-80gb", "--tensor-parallel-size", "1", *load)
    assert "CUDA out of memory" in alone["candidates"][0]["refused"]


@pytest.mark.slow
def test_without_a_wanted_rate_all_engines_that_share_experts_are_bought(capsys):
    load = ["--goodput", "ttft:200", "tpot:12", "--num-prompts", "100", "--seeds", "1", "--jobs", "1"]
    arguments = ["--model", "qwen3-30b-a3b", "--gpu", "h100-80gb", "--data-parallel-size", "2"]
    found = planned(capsys, *arguments, *load)
    assert found["recommendation"].startswith("Buy 2 x h100-80gb: 7.98 USD/h")
    engines = "1 deployment of 2 data-parallel engines, each on 1 GPU, that share the experts of qwen3-30b-a3b; "
    assert found["details"][0].startswith(engines)


def test_a_request_that_the_model_does_not_take_is_refused_before_any_start_is_computed(monkeypatch, capsys):
    def unexpected(*given, **more):
        raise AssertionError("starts are computed")

    monkeypatch.setattr("fragmeter.experiments.capacity.search.candidates", unexpected)
    load = ["--input-len", "200000", "--output-len", "100", "--num-prompts", "200"]
    command = ["plan", "--gpu", "h100-80gb,l40s", "--model", "llama-3.1-8b", "--goodput", "ttft:500", *load]
    assert status(command) == MISTAKE
    assert "requests have up to 200,100 tokens" in capsys.readouterr().err
