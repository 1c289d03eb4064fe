"""Small traces in the forms in which they are found, counted by hand (tests/data/traces/README.md)."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from fragmeter.sim.types import ticks
from fragmeter.sim.types.errors import MissingExtra, SettingError, TraceError
from fragmeter.traces import Reading, read, read_with_content, write
from paths import SAMPLES

MICROSECOND = ticks.PER_US


def by_hand() -> list[tuple]:
    """The table of the README: file, rows, failed, sums, first and last time in whole nanoseconds or None."""
    rows = []
    for line in (SAMPLES / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != 7 or not re.match(r"[a-z]+\w*[./]", cells[0]):
            continue
        name, _, count, failed, prompts, outputs, times = cells
        sums = [int(cell.partition("= ")[2]) for cell in (prompts, outputs)]
        found = [round(float(second.replace(",", "")) * 1e9) for second in re.findall(r"[\d.,]*\d", times)]
        found = [second - found[0] for second in found]
        rows.append((name, int(count), int(failed), *sums, found or None))
    return rows


def test_every_sample_is_in_the_table():
    assert {name.partition("/")[0] for name, *_ in by_hand()} | {"README.md"} == set(os.listdir(SAMPLES))


@pytest.mark.parametrize(("name", "rows", "failed", "prompts", "outputs", "times_ns"), by_hand())
def test_counts_and_sums_by_hand(name, rows, failed, prompts, outputs, times_ns):
    trace = read_with_content(SAMPLES / name)
    assert (len(trace), trace.left_out.failed, trace.left_out.bad) == (rows, failed, 0)
    assert (trace.prompt_tokens.sum(), trace.output_tokens.sum()) == (prompts, outputs)
    if times_ns is None:
        assert trace.arrival_ticks is None
    else:
        assert [trace.arrival_ticks[0] / 1000, trace.arrival_ticks[-1] / 1000] == times_ns


@pytest.mark.parametrize("name", [name for name, *_ in by_hand()])
@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_they_are_the_same(tmp_path, name, ending):
    data = (SAMPLES / name).read_bytes()
    squeezed = gzip.compress(data) if ending == ".gz" else pa.compress(data, codec="zstd", asbytes=True)
    path = tmp_path / (Path(name).name + ending)
    path.write_bytes(squeezed)
    again, plain = read(path), read(SAMPLES / name)
    assert again.name == plain.name
    assert again.prompt_tokens.tolist() == plain.prompt_tokens.tolist()
    assert again.rows.lines.tolist() == plain.rows.lines.tolist()


def seconds(trace) -> list[float]:
    return (trace.arrival_ticks / ticks.PER_SECOND).tolist()


def test_azures_seven_decimals_are_exact():
    assert (read(SAMPLES / "azure2023.csv").arrival_ticks // 1000).tolist() == [
        0, 4_314_579_000, 4_541_877_000, 20_653_319_409_900, 20_653_319_410_100
    ]  # fmt: skip


def test_rows_keep_the_lines_on_which_they_stand():
    assert read(SAMPLES / "burstgpt.csv").rows.lines.tolist() == [2, 3, 5]
    assert read(SAMPLES / "sharegpt.json").rows.lines.tolist() == [2, 8]
    assert read(SAMPLES / "bench_serve.json").rows.lines.tolist() == [1, 2, 5]


def test_turns_are_one_session():
    assert read_with_content(SAMPLES / "burstgpt_sessions.csv").content.session_id.tolist() == [1, 1, 2]
    assert read_with_content(SAMPLES / "bailian.jsonl").content.session_id.tolist() == [1, 2, 1, 1, 3]
    assert read_with_content(SAMPLES / "mooncake.jsonl").content.session_id.tolist() == [1, 2, 1, -1]


def test_blocks_have_the_size_that_their_number_tells():
    assert read_with_content(SAMPLES / "mooncake.jsonl").content.tokens.tolist() == [
        512, 512, 76, 512, 512, 512, 512, 64, 88
    ]  # fmt: skip
    assert read_with_content(SAMPLES / "timed_trace.jsonl").content.tokens.tolist() == [16, 16, 8, 16, 16, 16, 12]
    assert read_with_content(SAMPLES / "bailian.jsonl").content.tokens.tolist()[:4] == [16, 16, 8, 16]


def test_vllms_flags_say_what_a_timed_trace_does_not(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 3000, "input_length": 70, "output_length": 8, "hash_ids": [1, 2, 3]}\n')
    with pytest.raises(TraceError, match="hash_ids = .*: 3 ids where 70 tokens of prompt are 1 blocks of 512"):
        read_with_content(path)
    made = read_with_content(path, Reading(timed_trace_chunk_hash_size=32, timed_trace_sec_multiplier=0.001))
    assert made.content.tokens.tolist() == [32, 32, 6]
    assert seconds(made) == [0] and (made.start.written, made.start.unit) == ("3000", "ms")


def test_ragpulses_chunks_have_the_sizes_that_lie_beside_it(tmp_path):
    content = read_with_content(SAMPLES / "ragpulse" / "0_trace.jsonl").content
    # The second prompt ends within its last chunk; of the third the chunk 1 has no size.
    assert content.ids.tolist() == [8302, 9453, 6035, 7059, 22097, 8302, 9453, 7059, 15200, 22096, 8302]
    assert content.tokens.tolist() == [512, 30, 80, 70, 8, 512, 30, 70, 11, 27, 512]
    assert content.session_id.tolist() == [1, 1, 2]
    alone = tmp_path / "0_trace.jsonl"
    alone.write_bytes((SAMPLES / "ragpulse" / "0_trace.jsonl").read_bytes())
    assert read_with_content(alone).content is None
    (tmp_path / "1_sys_prompt.jsonl").write_text('{"hash_id": 8302}\n')
    with pytest.raises(TraceError, match="1_sys_prompt.jsonl, line 1: row = .*: must be an object of a chunk and its"):
        read_with_content(alone)


class TestShareGpt:
    def test_a_tokenizer_of_the_users_own(self, tmp_path):
        tokenizers = pytest.importorskip("tokenizers")
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"Twelve": 0, "?": 1}, unk_token="?"))
        words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        words.save(str(tmp_path / "tokenizer.json"))
        trace = read(SAMPLES / "sharegpt.json", Reading(tokenizer=tmp_path / "tokenizer.json"))
        assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([2, 1], [2, 2])
        (tmp_path / "no.json").write_text("{}")
        with pytest.raises(SettingError, match="tokenizer = .*no.json': is not a tokenizer.json"):
            read(SAMPLES / "sharegpt.json", Reading(tokenizer=tmp_path / "no.json"))

    def test_without_the_package_that_counts(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(MissingExtra, match=r"needs the package tokenizers: pip install -e '\.\[traces\]'"):
            read(SAMPLES / "sharegpt.json", Reading(tokenizer=Path("tokenizer.json")))

    def test_conversations_that_end_anywhere_in_a_piece(self, monkeypatch):
        whole = read(SAMPLES / "sharegpt.json")
        for size in (1, 2, 7, 64, 100):
            monkeypatch.setattr("fragmeter.traces.parsing.files.PIECE_BYTES", size)
            cut = read(SAMPLES / "sharegpt.json")
            assert cut.prompt_tokens.tolist() == whole.prompt_tokens.tolist()
            assert cut.rows.lines.tolist() == whole.rows.lines.tolist()


@pytest.mark.slow
def test_lines_that_end_anywhere_in_a_piece(monkeypatch, tmp_path):
    text = (SAMPLES / "burstgpt.csv").read_bytes()
    for end in (b"\n", b"\r\n", b"\r"):
        path = tmp_path / "burst.csv"
        path.write_bytes(text.replace(b"\n", end) + end)
        for size in (1, 3, 10, 69, 70, 71, 1000):
            monkeypatch.setattr("fragmeter.traces.parsing.files.PIECE_BYTES", size)
            trace = read(path)
            assert (trace.prompt_tokens.tolist(), trace.rows.lines.tolist()) == ([470, 1080, 40], [2, 3, 5])


def test_a_result_without_times_or_without_details(tmp_path):
    result = json.loads((SAMPLES / "bench_serve.json").read_text())
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({name: value for name, value in result.items() if name != "start_times"}, indent=1))
    assert read(path).arrival_ticks is None
    path.write_text(json.dumps({"date": "today", "input_lens": [1]}))
    with pytest.raises(
        TraceError, match="output_lens = None: is missing; run vllm bench serve with --save-result --save-detailed"
    ):
        read(path)


@pytest.mark.parametrize("name", ["mooncake.jsonl", "bailian.jsonl", "ragpulse/0_trace.jsonl", "ours.jsonl"])
@pytest.mark.parametrize("ending", [".parquet", ".jsonl.gz", ".jsonl.zst", ".csv"])
def test_converting_keeps_what_the_target_can_hold(tmp_path, name, ending):
    before = read_with_content(SAMPLES / name)
    write(before, tmp_path / f"new{ending}")
    after = read_with_content(tmp_path / f"new{ending}")
    assert after.arrival_ticks.tolist() == before.arrival_ticks.tolist()
    assert after.content.session_id.tolist() == before.content.session_id.tolist()
    if ending != ".csv":
        for field in ("offsets", "ids", "tokens"):
            assert getattr(after.content, field).tolist() == getattr(before.content, field).tolist()
