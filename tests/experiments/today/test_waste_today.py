"""The document, the page and the documentation of ``fragmeter reproduce waste-today``."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from fragmeter.experiments.paper.bench import Bench
from fragmeter.experiments.paper.paper import Source
from fragmeter.experiments.runs.kept import key
from fragmeter.experiments.runs.output import Report
from fragmeter.experiments.today import cached, tables, waste_today
from fragmeter.experiments.today.loads import LOADS
from fragmeter.experiments.today.replay import BUCKETS
from fragmeter.experiments.today.servers import SERVERS, Server, hbm_gib
from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.reports.page.page import write_page
from fragmeter.reports.style.palette import MEMORY
from fragmeter.sim import simulate
from fragmeter.sim.spec.gpu import GIB
from fragmeter.sim.spec.startup.capacity import capacity, stage_memories
from fragmeter.traces import read_with_content
from paths import ROOT
from published_waste import glm_launch

PAGE = ROOT / "docs" / "results" / "waste-today.md"
FEW = tuple(replace(load, requests=16) for load in LOADS)
TWO = (Server("Llama 8B", "llama-3.1-8b", "h100-80gb"), Server("Gemma 3 12B", "gemma-3-12b", "h100-80gb"))


@pytest.fixture(scope="module")
def document():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waste_today, "SERVERS", TWO)
        patch.setattr(waste_today, "LOADS", FEW)
        yield waste_today.waste_today(Bench(Source((0,))))


@pytest.mark.slow
def test_every_server_has_every_allocator_and_load(document):
    rows = document["kv_bytes"]
    assert {(row["server"], row["load"], row["allocator"]) for row in rows} == {
        (server.name, load.name, allocator)
        for server in TWO
        for load in FEW
        for allocator in ("vllm", "jenga", "separate")
    }
    assert len(document["hbm"]) == len(document["slots"]) == 6
    for row in document["hbm"]:
        assert sum(row[name] for name in MEMORY) == pytest.approx(row["memory_gib"], abs=0.01)


def test_the_parts_of_a_gpu_are_those_of_a_vllm_serve_line(document):
    """The memory beside the KV cache part by part, and the buckets of the KV cache together."""
    for server in TWO:
        stage = capacity(started(parse_serve(f"vllm serve {server.model}"), server.gpu).launch).stage
        beside = {
            "weights": stage.weights.likely,
            "activations": stage.activations.likely,
            "cuda_graphs": stage.cuda_graphs.likely,
            "outside_torch": stage.non_torch.likely,
            "never_used": stage.total_bytes - stage.requested_bytes,
        }
        rows = [row for row in document["hbm"] if row["server"] == server.name]
        assert len(rows) == len(FEW) and all(beside.values())
        for row in rows:
            assert {name: row[name] for name in beside} == {
                name: pytest.approx(size / GIB, abs=0.001) for name, size in beside.items()
            }
            kept = sum(row[name] for name in MEMORY if name not in beside)
            assert kept == pytest.approx(stage.kv_cache_bytes / GIB, abs=0.01)


def test_the_memory_of_a_gpu_adds_up():
    """To the byte, whatever the KV cache holds; what is left of it beside whole blocks is free."""
    memory = stage_memories(glm_launch(max_num_seqs=256))[0]
    buckets = dict.fromkeys(BUCKETS, 0) | {"live": 3 << 30, "free": memory.block_bytes}
    parts = hbm_gib(memory, buckets)
    assert parts.keys() == MEMORY.keys() and parts["live"] == 3
    assert round(GIB * sum(parts.values())) == memory.total_bytes
    assert round(GIB * (parts["live"] + parts["free"])) == memory.kv_cache_bytes
    assert round(GIB * parts["cuda_graphs"]) == memory.cuda_graphs.likely > 0
    assert round(GIB * parts["outside_torch"]) == memory.non_torch.likely > 0


@pytest.mark.slow
def test_several_seeds_give_means(monkeypatch):
    monkeypatch.setattr(waste_today, "SERVERS", TWO[1:])
    monkeypatch.setattr(waste_today, "LOADS", FEW[:1])
    one, other, both = (waste_today.waste_today(Bench(Source(seeds)))["kv_bytes"] for seeds in ((0,), (1,), (0, 1)))
    for first, second, mean in zip(one, other, both, strict=True):
        assert mean["live"] == pytest.approx((first["live"] + second["live"]) / 2, abs=0.002)
    assert [row["live"] for row in one] != [row["live"] for row in other]


def test_a_model_in_which_all_layers_keep_the_same_has_one_row(document):
    shown = tables.of_load(document["kv_bytes"], "short chat")
    assert [(row["server"].split(",")[0], row["allocator"]) for row in shown] == [
        ("Llama 8B", "vllm"),
        *(("Gemma 3 12B", allocator) for allocator in ("vllm", "jenga", "separate")),
    ]


@pytest.mark.slow
def test_it_is_printed_and_shown(document, capsys, tmp_path):
    waste_today.print_waste_today(document, Report(None))
    printed = capsys.readouterr().out
    assert all(load.name in printed for load in LOADS)
    sections = waste_today.show_waste_today(document, Bench(Source((0,))))
    [first, memory, slots, _] = sections
    assert len(first.figures) == 3 and len(memory.figures) == 1 and len(slots.rows) == 6
    short = [[row["short"] for row in tables.of_load(document["kv_bytes"], load.name)] for load in LOADS]
    for figure, beyond in zip((*first.figures, *memory.figures), (*short, [0, 0]), strict=True):
        numbers = figure.layout.meta["numbers"]["rows"]
        for place, row in enumerate(numbers):
            drawn = [trace.x[place] for trace in figure.data]
            assert drawn == row[2:] and sum(drawn) == pytest.approx(100 + beyond[place], abs=0.1)
    text = write_page(tmp_path / "page.html", "Waste", "", sections).read_text("utf-8")
    assert "page padding" in text and "never used" in text


@pytest.mark.parametrize("label", ["Qwen3-Next 80B", "Nemotron 3 Nano"])
def test_a_row_of_the_documentation_is_what_comes_out_today(label):
    server = next(server for server in SERVERS if server.label == label)
    found = waste_today.measure(server, LOADS[1], 0)["kv_bytes"]
    made = tables.kv_table(LOADS[1].name, found).markdown()
    assert "\n".join(made[2:]) in PAGE.read_text("utf-8")


def test_the_worth_of_cached_blocks_is_that_of_the_documentation():
    """The agents of one server, whose prompts share contents, and those of no other load."""
    server = next(server for server in SERVERS if server.label == "DeepSeek V3.2")
    [agents] = cached.cached_rows(server, "agents", simulate(server.settings(), LOADS[2].workload(0)))
    assert cached.cached_table([agents]).markdown()[2] in PAGE.read_text("utf-8")
    assert 0 < agents["hit"] < agents["best order"] < agents["infinite"] < 100
    assert cached.cached_rows(server, "chat", simulate(server.settings(), FEW[0].workload(0))) == []


@pytest.mark.skipif("FRAGMETER_TRACES" not in os.environ, reason="FRAGMETER_TRACES names no folder")
def test_the_worth_of_cached_blocks_of_mooncakes_conversations_is_that_of_the_documentation():
    record = read_with_content(Path(os.environ["FRAGMETER_TRACES"]) / "mooncake_conversation.jsonl.gz")
    for server in (cached.RECORD_SERVERS[0], cached.RECORD_SERVERS[-1]):
        rows = cached.measure_record(server, record)
        assert cached.cached_table(rows).markdown()[2] in PAGE.read_text("utf-8")


def test_a_record_has_rows_and_parts_of_its_own(document, monkeypatch, tmp_path):
    """Written by the command's path: the rows of the record change nothing else, and another record is another document."""
    monkeypatch.setattr(waste_today, "SERVERS", ())
    monkeypatch.setattr(waste_today, "RECORD_SERVERS", TWO[:1])
    monkeypatch.setattr(tables, "SERVERS", TWO)
    lines = [
        {"timestamp": 100 * n, "input_length": 1024, "output_length": 8, "hash_ids": [n % 3, n]} for n in range(12)
    ]
    (tmp_path / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = read_with_content(tmp_path / "record.jsonl")
    made = waste_today.waste_today(Bench(Source((0,), record=record)))
    [row] = made["cached_of_record"]
    assert row["server"] == TWO[0].name and row["load"] == "record" and row["hit"] > 0
    assert not made["cached"]
    parts = tables.markdown_parts(document | {"cached_of_record": made["cached_of_record"]})
    assert "record" in parts["cached of a record"] and "cached of a record" not in tables.markdown_parts(document)
    other = [line | {"hash_ids": [n // 4, n]} for n, line in enumerate(lines)]
    (tmp_path / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in other))
    changed = read_with_content(tmp_path / "record.jsonl")
    keys = {key("waste-today", (None, None), (0,), each) for each in (None, record, changed)}
    assert len(keys) == 3


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.label)
def test_the_page_has_the_memory_that_is_reckoned_now(server: Server):
    """What the engine takes beside the KV cache depends on no load: a short run shows a page that was not written again."""
    found = waste_today.measure(server, replace(LOADS[0], requests=2), seed=0)["hbm"][0]
    table = PAGE.read_text("utf-8").split("## Every byte of a GPU")[1]
    line = next(line for line in table.splitlines() if line.startswith(f"| {server.name} |"))
    parts = ("weights", "activations", "cuda_graphs", "outside_torch")
    assert line.split(" | ")[1:5] == [f"{found[part]:.2f}" for part in parts]
