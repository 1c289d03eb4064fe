"""``ignore_eos``: stated by a trace, kept by a writer, and set where a benchmark's client sends it."""

from __future__ import annotations

import json

import pytest

from fragmeter.sim.types.errors import SettingError, TraceError
from fragmeter.traces import Trace, read, workload, write
from fragmeter.traces.synthesis.random_load import RandomLoad

STATED = Trace("stated", [3, 1], [4, 5], [0, 10**12], max_tokens=[4, 9], ignore_eos=[1, 0])


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".jsonl.gz", ".parquet"])
def test_a_writer_keeps_it(tmp_path, ending):
    write(STATED, tmp_path / f"stated{ending}")
    again = read(tmp_path / f"stated{ending}")
    assert again.ignore_eos.tolist() == [1, 0] and again.max_tokens.tolist() == [4, 9]
    assert workload(again).ignore_eos.tolist() == [1, 0] and again.first(1).ignore_eos.tolist() == [1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "prompt_tokens,output_tokens,ignore_eos\n3,4,1\n"),
        ("b.csv", "prompt_tokens,output_tokens,ignore_eos\n3,4,true\n"),
        ("a.jsonl", '{"prompt_tokens": 3, "output_tokens": 4, "ignore_eos": true}\n'),
    ],
)
def test_without_max_tokens_the_output_is_what_was_asked_for(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    found = read(tmp_path / name)
    assert (found.ignore_eos.tolist(), found.max_tokens.tolist()) == ([1], [4])


@pytest.mark.parametrize(
    ("columns", "row", "remedy"),
    [
        ("ignore_eos", "2", "must be 1 or 0 (true or false); correct the row"),
        ("ignore_eos", "0", "lets the request end before its max_tokens, which the file does not have"),
        ("ignore_eos,max_tokens", "1,5", "this one generates fewer; give 0"),
        ("ignore_eos,max_tokens", ",5", "is missing; give 1 or 0"),
    ],
)
def test_a_value_that_cannot_be_names_its_line(tmp_path, columns, row, remedy):
    path = tmp_path / "bad.csv"
    path.write_text(f"prompt_tokens,output_tokens,{columns}\n3,4,{row}\n")
    with pytest.raises(TraceError, match="line 2: ignore_eos") as caught:
        read(path)
    assert remedy in str(caught.value)


def test_it_needs_max_tokens():
    with pytest.raises(SettingError, match="ignore_eos"):
        Trace("bare", [3], [4], ignore_eos=[1])


def test_other_max_tokens_end_it():
    """A request that declares more than it generates ends by itself."""
    assert workload(STATED, 1.0, max_tokens="pow2").ignore_eos.tolist() == [1, 0]
    assert workload(STATED, 1.0, max_tokens=9).ignore_eos.tolist() == [0, 0]


def of_sglang(outputs: list[int], errors: tuple[str, ...] = ("", "", ""), **about: object) -> str:
    lists = {"input_lens": [5, 6, 7], "output_lens": outputs, "ttfts": [0.1] * 3, "errors": errors}
    return json.dumps({"request_rate": 4.0, "total_output_tokens_retokenized": 9, "duration": 2.0} | about | lists)


RANDOM = {"dataset_name": "random", "random_output_len": 8, "random_range_ratio": 0.5}


def test_bench_serving_sends_it(tmp_path):
    path = tmp_path / "sglang.jsonl"
    path.write_text(of_sglang([4, 8, 1]))
    found = read(path)
    assert (found.ignore_eos.tolist(), found.max_tokens.tolist()) == ([1, 1, 1], [4, 8, 1])
    path.write_text(of_sglang([4, 8, 0], ("", "", "503"), **RANDOM))
    assert read(path).ignore_eos.tolist() == [1, 1]


def test_an_answer_below_the_drawn_range_shows_disable_ignore_eos(tmp_path):
    path = tmp_path / "sglang.jsonl"
    path.write_text(of_sglang([4, 8, 3], **RANDOM))
    found = read(path)
    assert found.ignore_eos is None and found.max_tokens is None


def of_vllm(outputs: list[int], **about: object) -> str:
    lists = {"input_lens": [5, 6], "output_lens": outputs, "start_times": [0.0, 1.0], "ttfts": [0.1, 0.1]}
    return json.dumps({"backend": "vllm", "request_rate": 4.0, "duration": 2.0} | about | lists)


@pytest.mark.parametrize(
    ("outputs", "about", "sent"),
    [
        ([4, 8], {}, False),
        ([8, 8], {}, True),
        ([4, 8], {"dataset_name": "random"}, True),
        ([8, 8], {"dataset_name": "sharegpt"}, False),
        ([4, 8], {"ignore_eos": "true", "dataset_name": "sharegpt"}, True),
        ([8, 8], {"ignore_eos": "false", "dataset_name": "random"}, False),
    ],
)
def test_vllm_bench_serve_says_it_by_metadata_or_by_equal_answers(tmp_path, outputs, about, sent):
    path = tmp_path / "vllm.json"
    path.write_text(of_vllm(outputs, **about))
    found = read(path)
    assert (found.ignore_eos is not None) is sent
    if sent:
        assert (found.ignore_eos.tolist(), found.max_tokens.tolist()) == ([1, 1], outputs)


def test_random_lengths_are_sent_as_the_data_set_random_sends_them():
    found = RandomLoad(100, 20, (0.5, 0.5)).draw(50, 3, 2048)
    assert found.ignore_eos.tolist() == [1] * 50 and (found.max_tokens == found.output_tokens).all()
    assert workload(found, 1.0, max_tokens=2000).ignore_eos.tolist() == [0] * 50


@pytest.mark.parametrize(
    ("about", "sent"),
    [
        ({"conc": 4, "tput_per_gpu": 9.0, "tp": 1, "isl": 64, "osl": 32}, True),
        ({"total_output_tokens_retokenized": 9, "request_rate": 4.0, "request_throughput": 2.0}, True),
        ({"request_throughput": 2.0}, False),
        ({"request_throughput": 2.0, "dataset_name": "random"}, True),
    ],
)
def test_requests_rebuilt_from_a_summary_ask_as_the_client_did(tmp_path, about, sent):
    path = tmp_path / ("summary.jsonl" if "total_output_tokens_retokenized" in about else "summary.json")
    totals = {"completed": 3, "total_input_tokens": 30, "total_output_tokens": 12, "duration": 2.0, "mean_ttft_ms": 9.0}
    path.write_text(json.dumps(about if "conc" in about else totals | about))
    assert (read(path).ignore_eos is not None) is sent
