"""Files that are right: every format, every name of a column, every way to end a line."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fragmeter.sim.types import ticks
from fragmeter.sim.types.errors import SettingError, TraceError
from fragmeter.traces import check_fits, read, stats, workload

OURS = b"arrival_s,prompt_tokens,output_tokens,max_tokens\n0.0,7,2,4\n0.25,18,475,512\n1.5,3,1,1\n"
OURS_JSONL = (
    b'{"arrival_s": 0, "prompt_tokens": 7, "output_tokens": 2, "max_tokens": 4}\n'
    b'{"arrival_s": 0.25, "prompt_tokens": 18, "output_tokens": 475, "max_tokens": 512}\n'
    b'{"arrival_s": 1.5, "prompt_tokens": 3, "output_tokens": 1, "max_tokens": 1}\n'
)
LATEST_NS = 2**23 * 10**9
real_traces = pytest.mark.skipif("FRAGMETER_TRACES" not in os.environ, reason="FRAGMETER_TRACES names no folder")


def put(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def lengths(path: Path) -> list[tuple[int, int]]:
    trace = read(path)
    return list(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist()))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("day.csv", OURS),
        ("day.csv.gz", gzip.compress(OURS, mtime=0)),
        ("day.csv", gzip.compress(OURS, mtime=0)),  # by content, whatever the name says
        ("day.jsonl", OURS_JSONL),
        ("day.jsonl.gz", gzip.compress(OURS_JSONL, mtime=0)),
        ("day.txt", OURS_JSONL),
    ],
)
def test_text_formats_give_the_same_trace(tmp_path, name, data):
    trace = read(put(tmp_path, name, data))
    assert (trace.name, len(trace)) == ("day", 3)
    assert trace.prompt_tokens.tolist() == [7, 18, 3]
    assert trace.output_tokens.tolist() == [2, 475, 1]
    assert trace.max_tokens.tolist() == [4, 512, 1]
    assert trace.arrival_ticks.tolist() == [0, ticks.PER_SECOND // 4, 3 * ticks.PER_SECOND // 2]
    assert trace.prompt_tokens.dtype == trace.arrival_ticks.dtype == np.int64
    assert not trace.prompt_tokens.flags.writeable


@pytest.mark.parametrize("name", ["day.parquet", "day"])
def test_parquet_is_known_by_its_ending_or_its_content(tmp_path, name):
    columns = {"prompt_tokens": pa.array([7, 18], pa.uint16()), "output_tokens": [2.0, 475.0], "hash_ids": [[1], []]}
    path = tmp_path / name
    pyarrow.parquet.write_table(pa.table({"arrival_s": [0, 3], **columns}), path)
    assert lengths(path) == [(7, 2), (18, 475)]
    assert read(path).arrival_ticks.tolist() == [0, 3 * ticks.PER_SECOND]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("name", ["pairs.pkl", "pairs.pkl.gz"])
def test_the_artifacts_pickle_in_every_protocol(tmp_path, protocol, kind, name):
    pairs = [(7, 2), (300, 70_000), (1, 1)]
    data = pickle.dumps([kind(pair) for pair in pairs], protocol)
    path = put(tmp_path, name, gzip.compress(data) if name.endswith("gz") else data)
    assert lengths(path) == pairs
    assert read(path).arrival_ticks is None and read(path).max_tokens is None


def test_the_sosp23_pairs_names(tmp_path):
    path = put(tmp_path, "pairs.csv", b"input,output\n21,518\n8,66\n")
    assert lengths(path) == [(21, 518), (8, 66)]
    assert read(path).pairs.name == "pairs"
    assert read(path).pairs.output_tokens.tolist() == [518, 66]


def test_mooncakes_names_with_milliseconds(tmp_path):
    path = put(
        tmp_path,
        "mooncake.jsonl",
        b'{"timestamp":0,"input_length":6758,"output_length":500,"hash_ids":[0,1,2]}\n'
        b'{"timestamp":27482,"input_length":7322,"output_length":490,"hash_ids":[0,14]}\n'
        b'{"timestamp":27482.5,"input_length":1,"output_length":1,"hash_ids":[]}\n',
    )
    assert lengths(path) == [(6758, 500), (7322, 490), (1, 1)]
    assert read(path).arrival_ticks.tolist() == [0, 27_482 * ticks.PER_MS, 27_482_500 * ticks.PER_US]


def test_other_columns_are_not_read(tmp_path):
    text = b'hash_ids,m,output_tokens,session_id, prompt_tokens\n"[1, 2]",2,5,a,3\nnan,-1,6,,4\n'
    assert lengths(put(tmp_path, "wide.csv", text)) == [(3, 5), (4, 6)]


def test_n_is_how_many_sequences_each_request_asks_for(tmp_path):
    path = put(tmp_path, "n.csv", b"prompt_tokens,output_tokens,n\n3,5,2\n4,6,1\n")
    assert read(path).n.tolist() == [2, 1] and read(path).first(1).n.tolist() == [2]
    assert workload(read(path), request_rate=1).n.tolist() == [2, 1]
    assert workload(read(path), request_rate=1, n=3).n.tolist() == [3, 3]
    for n in (0, 1025):
        with pytest.raises(SettingError, match=f"n = {n}: must be from 1 to 1024"):
            workload(read(path), request_rate=1, n=n)
    with pytest.raises(TraceError, match="line 2: n = 0: must be 1 or more"):
        read(put(tmp_path, "none.csv", b"prompt_tokens,output_tokens,n\n3,5,0\n"))
    with pytest.raises(TraceError, match="line 2: n = 2000: must be at most 1024"):
        read(put(tmp_path, "many.csv", b"prompt_tokens,output_tokens,n\n3,5,2000\n"))


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_line_ends_blank_lines_and_a_byte_order_mark(tmp_path, end):
    text = b"\xef\xbb\xbf" + end.join([b"", b"input,output", b"1,2", b"   ", b"3,4", b"", b"5,6"])
    path = put(tmp_path, "odd.csv", text)
    assert lengths(path) == [(1, 2), (3, 4), (5, 6)]
    with pytest.raises(TraceError) as caught:
        check_fits(read(path), 10, path)
    assert caught.value.line == 7


def test_a_long_file_keeps_every_row_in_order(tmp_path):
    outputs = np.arange(1, 200_001)
    text = "input,output\n" + "\n".join(f"7,{tokens}" for tokens in outputs) + "\n"
    assert read(put(tmp_path, "long.csv", text.encode())).output_tokens.tolist() == outputs.tolist()


@pytest.mark.slow
def test_a_line_of_megabytes_is_one_request(tmp_path):
    short = {"input": 5, "output": 6}
    long = {**short, "hash_ids": list(range(400_000))}
    text = "\n".join(json.dumps(record) for record in (short, long, short))
    assert lengths(put(tmp_path, "long.jsonl", text.encode())) == [(5, 6)] * 3


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, LATEST_NS - 1), min_size=1, max_size=40).map(sorted))
def test_nine_decimals_become_ticks_exactly(tmp_path_factory, arrivals_ns):
    rows = [f"{ns // 10**9}.{ns % 10**9:09d},1,1" for ns in arrivals_ns]
    path = tmp_path_factory.getbasetemp() / "exact.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(rows))
    assert read(path).arrival_ticks.tolist() == [(ns - arrivals_ns[0]) * 1000 for ns in arrivals_ns]


def test_a_request_as_long_as_the_model_fits_and_one_longer_does_not(tmp_path):
    path = put(tmp_path, "pairs.csv", b"input,output\n1000,1048\n\n1000,1049\n")
    trace = read(path)
    check_fits(trace, 2049, path)
    with pytest.raises(TraceError) as caught:
        check_fits(trace, 2048, path)
    assert str(caught.value) == (
        f"{path}, line 4: prompt_tokens + output_tokens = 2049: longer than the model's 2048 tokens; "
        "shorten or drop the request, or take a longer model"
    )


def test_a_long_request_of_a_pickle_is_named_by_its_row(tmp_path):
    path = put(tmp_path, "pairs.pkl", pickle.dumps([(1, 2), (3, 4)]))
    with pytest.raises(TraceError, match=r"pairs\.pkl, row 2: prompt_tokens \+ output_tokens = 7: longer"):
        check_fits(read(path), 6, path)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_million_rows_in_bounded_memory(tmp_path, form):
    path = tmp_path / f"million.{form}.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        if form == "csv":
            file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        for row in range(1_000_000):
            stamp = f"2024-05-10 {row // 60_000:02d}:{row // 1000 % 60:02d}:{row % 1000 / 20:09.6f}+00:00"
            ids = list(range(row % 40))
            file.write(
                f"{stamp},{1 + row % 4000},7\n"
                if form == "csv"
                else f'{{"timestamp": {row}, "input_length": {512 * len(ids) or 1}, "output_length": 7, "hash_ids": {ids}}}\n'
            )
    # Of its own process, since a peak never falls: how much more than what the imports take.
    script = (
        "import resource, sys; import fragmeter.traces as traces;"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024; before = peak();"
        "trace = traces.read(sys.argv[1]); print(len(trace), peak() - before)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    ).stdout
    rows, more_mib = map(int, printed.split())
    assert rows == 1_000_000
    assert more_mib < 250, "the file has up to 150 MiB, and as text in Python it would take a gigabyte"


@real_traces
@pytest.mark.parametrize(
    ("name", "rows", "timed"),
    [
        ("sosp23_sharegpt_opt.csv.gz", 84_226, False),
        ("azure2023_code.csv.gz", 8_819, True),
        ("azure2023_conv.csv.gz", 19_366, True),
        ("mooncake_conversation.jsonl.gz", 12_031, True),
        ("ragpulse.jsonl.gz", 7_106, True),
        ("sharegpt_8k_llama2.csv.gz", 30_731, False),
        ("arxiv_summarization_llama2.csv.gz", 28_257, False),
    ],
)
def test_real_traces_are_read_whole(name, rows, timed):
    trace = read(Path(os.environ["FRAGMETER_TRACES"]) / name)
    assert len(trace) == rows
    assert (trace.arrival_ticks is not None) == timed


@real_traces
def test_real_traces_are_what_is_said_of_them():
    folder = Path(os.environ["FRAGMETER_TRACES"])
    pairs = read(folder / "sosp23_sharegpt_opt.csv.gz").pairs
    capped = pairs.capped(2048, strict=False)
    assert (len(capped), len(pairs.capped(2048, strict=True))) == (79_731, 79_725)
    assert (capped.prompt_tokens.mean().round(2), capped.output_tokens.mean().round(2)) == (161.31, 337.99)
    assert stats(read(folder / "azure2023_code.csv.gz"))["gap_cv"] == pytest.approx(13, abs=0.5)
