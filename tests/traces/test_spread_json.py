"""JSON objects that take more lines than one, as in pretty-printed files: read as one object a line is."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fragmeter.sim.types.errors import TraceError
from fragmeter.traces import Reading, read, read_with_content

REQUESTS = [
    {"arrival_s": i / 2, "prompt_tokens": 10 + i, "output_tokens": 5, "hash_ids": [i], "block_tokens": [10 + i]}
    for i in range(5000)  # More than are parsed together.
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("array.json", json.dumps(REQUESTS)),
        ("indented.json", json.dumps(REQUESTS, indent=2)),
        ("jq.jsonl", "\n".join(json.dumps(request, indent=2) for request in REQUESTS)),
        ("colon.jsonl", "\n".join(json.dumps(request).replace('": ', '":\n ') for request in REQUESTS)),
        ("before colon.jsonl", "\n".join(json.dumps(request).replace('":', '"\n :') for request in REQUESTS)),
        ("wrapped.json", "\n\n" + json.dumps(REQUESTS, indent=1).replace("\n", "\r\n")),
    ],
)
def test_is_read_as_one_object_a_line_is(tmp_path, name, text):
    plain, spread = tmp_path / "plain.jsonl", tmp_path / name
    plain.write_text("\n".join(map(json.dumps, REQUESTS)))
    spread.write_text(text)
    wanted, found = read_with_content(plain), read_with_content(spread)
    for field in ("arrival_ticks", "prompt_tokens", "output_tokens"):
        assert np.array_equal(getattr(found, field), getattr(wanted, field))
    for field in ("offsets", "ids", "tokens"):
        assert np.array_equal(getattr(found.content, field), getattr(wanted.content, field))


def test_a_form_of_others_is_known(tmp_path):
    path = tmp_path / "mooncake.json"
    rows = [{"timestamp": 500 * i, "input_length": 600, "output_length": 5, "hash_ids": [i, 7]} for i in range(3)]
    path.write_text(json.dumps(rows, indent=4))
    assert read(path).arrival_ticks.tolist() == [0, 500_000_000_000, 1_000_000_000_000]


def test_a_value_that_is_called_as_a_key_of_a_benchmark_is_a_value(tmp_path):
    path = tmp_path / "tagged.json"
    path.write_text(json.dumps([{"tag": "benchmarks", "mark": "experiments", **REQUESTS[0]}], indent=1))
    assert len(read(path)) == 1


@pytest.mark.slow
def test_bad_rows_are_named_by_their_line_and_can_be_skipped(tmp_path):
    path, rows = tmp_path / "bad.json", [dict(request) for request in REQUESTS]
    rows[2]["output_tokens"] = 0
    rows[4] = [3]
    path.write_text(json.dumps(rows, indent=1))
    with pytest.raises(TraceError, match=r"bad.json, line 46: row = \[3\]: is not a JSON object"):
        read(path)
    trace = read(path, Reading(skip_bad=True))
    assert (len(trace), trace.left_out.bad) == (4998, 2)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{\n "input": 1,\n "output": 2,\n "input": 3\n}', "line 1: has the key input twice; keep one"),
        ('{\n "input": 1,\n "output": 2\n}\n{\n "input"', "line 5: ends within an element; fetch the file again"),
        ('{\n "input": 1,\n "output": 2\n}\n7', "line 5: row = 7: is not a JSON object; give one a request"),
        ('[\n {"input": 1}\n]', "line 2: columns = 'input': no column output_tokens"),
        ('[\n {"x": 1}\n]', "line 2: columns = 'x': no column prompt_tokens"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, text, complaint):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read(path)
    assert complaint in str(caught.value) and "\n" not in str(caught.value)
