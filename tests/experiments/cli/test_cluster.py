"""``fragmeter simulate`` with several replicas: flags, results, and what is refused."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.sim.cluster import Cluster
from fragmeter.sim.memory import BUCKETS

SMALL = {"--policy": "vllm-v1", "--request-rate": "6", "--num-prompts": "60"}


def simulated(*tokens: object, out: Path) -> Path:
    flags = SMALL | dict(zip(map(str, tokens[::2]), map(str, tokens[1::2]), strict=True))
    assert status(["simulate", *chain(*flags.items()), "--out", str(out)]) == DONE
    return out


def documents(out: Path) -> tuple[dict, dict]:
    return tuple(json.loads((out / f"{name}.json").read_text("utf-8")) for name in ("summary", "run"))


@pytest.mark.slow
def test_the_results_say_which_replica_did_what(tmp_path):
    out = simulated("--num-replicas", 3, "--router", "least-outstanding-tokens", out=tmp_path / "out")
    summary, rerun = documents(out)
    requests = pd.read_parquet(out / "requests.parquet")
    assert summary["num_replicas"] == 3 and summary["completed"] == len(requests) == 60
    sent = requests.groupby("replica").agg({"prompt_tokens": ["size", "sum"], "output_tokens": "sum"}).to_numpy()
    counts = [[r["requests"], r["input_tokens"], r["output_tokens"]] for r in summary["replicas"]]
    assert counts == sent.tolist() and len(counts) == 3
    assert rerun["cluster"] == Cluster(num_replicas=3, router="least-outstanding-tokens").as_dict()
    ttft = (requests["first_token_ticks"] - requests["arrival_ticks"]).to_numpy(dtype=float) / 1e9
    assert summary["mean_ttft_ms"] == pytest.approx(ttft.mean())
    assert summary["duration"] == requests["finish_ticks"].max() / 1e12
    for name in ("steps", "memory", "residencies"):
        assert pd.read_parquet(out / f"{name}.parquet")["replica"].unique().tolist() == [0, 1, 2]
    residencies = pd.read_parquet(out / "residencies.parquet")
    assert residencies.sort_values("request")["replica"].tolist() == requests["replica"].tolist()
    last = residencies.groupby("request")["end_ticks"].max()
    assert last.tolist() == requests["finish_ticks"].tolist()


def test_every_slot_of_every_pool_is_counted(tmp_path):
    out = simulated("--num-replicas", 2, "--router", "kv-aware", out=tmp_path / "out")
    summary, _ = documents(out)
    for content in (summary, *summary["replicas"]):
        shares = content["waste"]["mean_over_time_pct"]["buckets"]
        assert sum(shares.values()) == pytest.approx(100)
        assert content["waste"]["window_s"] == [0, summary["duration"]]
    assert sum(summary["work"]["seconds"].values()) == pytest.approx(2 * summary["duration"])
    memory = pd.read_parquet(out / "memory.parquet")
    # vLLM's null block is in no bucket.
    assert (memory[list(BUCKETS)].sum(axis=1) == 911 * 16).all()


@pytest.mark.slow
def test_the_same_settings_are_the_same_bytes(tmp_path):
    flags = ("--num-replicas", 2, "--router", "prefix-affine")
    one, other = (simulated(*flags, out=tmp_path / name) for name in ("one", "other"))
    tables = ["gaps", "memory", "preemptions", "requests", "residencies", "steps"]
    tables = sorted([*(f"{table}.parquet" for table in tables), "run.json", "summary.json"])
    assert sorted(path.name for path in one.iterdir()) == tables
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in tables)


def test_requests_that_no_pool_holds_are_turned_away_and_named(tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,40,5\n0,900,5\n1,40,5\n2,40,5\n")
    flags = ["--trace", str(trace), "--num-replicas", "2", "--num-gpu-blocks-override", "10"]
    assert status(["simulate", *flags, "--out", str(tmp_path / "out")]) == DONE
    assert "line 3 of the trace: needs a pool of 57 blocks" in capsys.readouterr().out
    requests = pd.read_parquet(tmp_path / "out" / "requests.parquet")
    # Turned away before the router, which goes on with the next one.
    assert requests["replica"].fillna(-1).tolist() == [0, -1, 1, 0]
    assert requests["refused"].tolist() == [False, True, False, False]
    assert requests["finish_ticks"].isna().tolist() == requests["refused"].tolist()


MISTAKES = {
    "an unknown router": (["--router", "luck"], "router = 'luck': one of round-robin, least-outstanding-tokens"),
    "no replicas": (["--num-replicas", "0"], "num_replicas = '0'"),
    "half of two kinds": (["--prefill-replicas", "2"], "decode_replicas = None: goes with prefill_replicas = 2"),
    "a policy that cannot": (
        ["--prefill-replicas", "1", "--decode-replicas", "1", "--policy", "orca"],
        "prefill_replicas = 1: orca cannot go on from a prompt computed elsewhere; take vllm-v1 or sarathi",
    ),
    "samples that share blocks": (
        ["--num-replicas", "2", "--n", "2", "--policy", "vllm-v0"],
        "n = 2: samples share blocks under vllm-v0, which needs a single replica",
    ),
    "samples that move": (
        ["--prefill-replicas", "1", "--decode-replicas", "1", "--n", "2", "--policy", "vllm-v1"],
        "n = 2: cannot be combined with prefill_replicas",
    ),
    "a shared prefix": (
        ["--num-replicas", "2", "--policy", "vllm-v0", "--shared-prefix-tokens", "1"],
        "shared_prefix_tokens = 1: needs a single replica",
    ),
    "a recorded plan": (
        ["--num-replicas", "2", "--record-plan", "p.npz"],
        "record_plan = 'p.npz': needs a single replica",
    ),
}


@pytest.mark.parametrize(("flags", "message"), MISTAKES.values(), ids=MISTAKES)
def test_what_cannot_be_is_refused_in_one_line(flags, message, capsys):
    assert status(["simulate", "--num-prompts", "20", "--request-rate", "5", *flags]) == MISTAKE
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_turns_wait_for_answers_and_prefix_affine_sends_them_where_the_session_is(tmp_path):
    """Six sessions of two turns each, on two replicas: the second turn a second after the answer to the first."""
    trace, firsts = tmp_path / "turns.jsonl", [{"timestamp": 0, "input_length": 100}] * 6
    rows = [*firsts, *([{"delay": 1000, "input_length": 300}] * 6)]
    named = [row | {"session_id": name, "output_length": 30} for row, name in zip(rows, 2 * "abcdef")]
    trace.write_text("".join(json.dumps(row) + "\n" for row in named))
    flags = ["--num-replicas", "2", "--router", "prefix-affine", "--policy", "vllm-v1"]
    assert status(["simulate", *flags, "--trace", str(trace), "--out", str(tmp_path / "out")]) == DONE
    requests = pd.read_parquet(tmp_path / "out" / "requests.parquet")
    first, second = requests[:6].reset_index(), requests[6:].reset_index()
    assert (second["arrival_ticks"] == first["finish_ticks"] + 10**12).all()
    assert second["replica"].tolist() == first["replica"].tolist() and set(first["replica"]) == {0, 1}
    assert (second["cached_tokens"] > 100).all()


@pytest.mark.slow
def test_prefill_and_decode_apart(tmp_path, capsys):
    flags = ("--prefill-replicas", 1, "--decode-replicas", 2, "--kv-transfer-bandwidth", 25, "--kv-transfer-latency", 2)
    out = simulated(*flags, out=tmp_path / "out")
    summary, rerun = documents(out)
    requests = pd.read_parquet(out / "requests.parquet")
    assert rerun["cluster"]["kv_transfer_bandwidth"] == 25
    assert [replica["role"] for replica in summary["replicas"]] == ["prefill", "decode", "decode"]
    moved = requests[requests["output_tokens"] > 1]
    # OPT-13B: 40 layers, 5,120 elements of K and of V, two bytes each.
    assert summary["kv_transfer"]["bytes"] == moved["prompt_tokens"].sum() * 2 * 40 * 5120 * 2
    assert f"{summary['kv_transfer']['bytes'] / 1e9:,.2f}" in capsys.readouterr().out
    assert (moved["transfer_ticks"] >= moved["prompt_tokens"] * 819_200 * 40 + 2_000_000_000).all()
    assert (requests["prefill_replica"] == 0).all() and set(moved["replica"]) == {1, 2}
    assert summary["completed"] == 60


@pytest.mark.slow
def test_one_replica_behind_a_router_is_a_replica_alone(tmp_path, monkeypatch):
    """Whatever is said of both is the same, where a router without a choice is not refused."""
    for module in ("sim.cluster.run", "experiments.runs.serving"):
        monkeypatch.setattr(f"fragmeter.{module}.refuse_unread_in_cluster", lambda *arguments: None)
    alone, behind = (
        documents(simulated(*flags, out=tmp_path / str(place)))[0]
        for place, flags in enumerate([(), ("--router", "kv-aware")])
    )
    # A cluster pools the hits of its replicas.
    common = alone.keys() & behind.keys() - {"prefix_cache"}
    assert len(common) > 40 and {name: alone[name] for name in common} == {name: behind[name] for name in common}


def test_replicas_without_requests_are_idle(tmp_path):
    out = simulated("--num-prompts", 3, "--num-replicas", 5, out=tmp_path / "out")
    summary, _ = documents(out)
    last = summary["replicas"][-1]
    assert (last["requests"], last["num_steps"], last["kv_usage_pct"]) == (0, 0, 0)
    assert np.isclose(last["work"]["seconds"]["idle"], summary["duration"])


@pytest.mark.slow
def test_of_many_replicas_the_terminal_has_the_first(tmp_path, capsys):
    out = simulated("--num-replicas", 40, "--num-prompts", 80, out=tmp_path / "out")
    lines = capsys.readouterr().out.splitlines()
    assert [replica["replica"] for replica in documents(out)[0]["replicas"]] == [*range(40)]
    first = next(place for place, line in enumerate(lines) if line.startswith("replica"))
    assert [line.split()[0] for line in lines[first + 2 : first + 34]] == [f"{number}" for number in range(32)]
    assert lines[first + 34 : first + 36] == ["", "8 more replicas: summary.json of --out and --json have them all"]
