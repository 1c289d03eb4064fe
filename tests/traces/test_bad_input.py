"""Files that cannot be true: each is refused in one line that says where, what and what to do."""

from __future__ import annotations

import datetime
import gzip
import io
import json
import os
import pickle
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from fragmeter.sim.types.errors import TraceError, UserError
from fragmeter.traces import Reading, read, read_with_content
from paths import SAMPLES

HEAD = b"arrival_s,prompt_tokens,output_tokens\n"
PICKLE_REMEDY = "a pickled trace is a list of (prompt, output) in plain ints; save it as CSV instead"


def refusal(folder, name: str, data: bytes) -> str:
    path = folder / name
    path.write_bytes(data)
    with pytest.raises(TraceError) as caught:
        read(path)
    text = str(caught.value)
    assert "\n" not in text
    return text.removeprefix(str(path))


def parquet(**columns) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


WHOLE = "must be a whole number of tokens; correct the row"
NUMBER = "must be a whole number of tokens, 1 or more; correct the row"
POSITIVE = "must be 1 or more; correct or drop the row"
MISSING = "is missing; give a whole number of tokens, 1 or more"

CSV = {
    "fraction": (HEAD + b"0,1,2\n0,1.5,2\n", f", line 3: prompt_tokens = 1.5: {WHOLE}"),
    "negative": (HEAD + b"0,1,2\n0,-3,2\n", f", line 3: prompt_tokens = -3: {POSITIVE}"),
    "zero": (HEAD + b"0,1,2\n0,1,0\n", f", line 3: output_tokens = 0: {POSITIVE}"),
    "nan": (HEAD + b"0,1,2\n0,nan,2\n", f", line 3: prompt_tokens = nan: {WHOLE}"),
    "infinite": (HEAD + b"0,1,2\n0,1,inf\n", f", line 3: output_tokens = inf: {WHOLE}"),
    "missing": (HEAD + b"0,1,2\n0,,2\n", f", line 3: prompt_tokens = None: {MISSING}"),
    "all missing": (b"input,output\n,2\n,2\n", f", line 2: input = None: {MISSING}"),
    "text": (HEAD + b"0,1,2\n0,1,abc\n", f", line 3: output_tokens = 'abc': {NUMBER}"),
    "bool": (b"input,output\n1,true\n", f", line 2: output = 'true': {NUMBER}"),
    "other digits": ("input,output\n1,2\n1,２\n".encode(), f", line 3: output = '２': {NUMBER}"),
    "below a blank line": (HEAD + b"0,1,2\n\n  \r\n0,1,-1\n", f", line 5: output_tokens = -1: {POSITIVE}"),
    "below a blank head": (b"\n\n" + HEAD + b"0,1,x\n", f", line 4: output_tokens = 'x': {NUMBER}"),
    "huge": (b"input,output\n1,2147483648\n", ", line 2: output = 2147483648: no model is that long; correct the row"),
    "far before": (
        HEAD + b"9e6,1,2\n9e6,1,2\n4.5,1,2\n",
        ", line 4: arrival_s = 4.5: is more than 97 days before the first; cut the trace, correct the row,"
        " or give --time-unit",
    ),
    "early": (HEAD + b"-0.5,1,2\n", ", line 2: arrival_s = -0.5: must be 0 or more; count from the start of the run"),
    "timeless": (HEAD + b"0,1,2\n,1,2\n", ", line 3: arrival_s = None: is missing; give a time, 0 or more"),
    "never": (HEAD + b"0,1,2\ninf,1,2\n", ", line 3: arrival_s = inf: must be a finite time; correct or drop the row"),
    "unix time": (
        HEAD + b"0.5,1,2\n1700000000.5,1,2\n",
        ", line 3: arrival_s = 1700000000.5: is more than 97 days after the first; cut the trace, correct the row,"
        " or give --time-unit",
    ),
    "date": (
        HEAD + b"0,1,2\n2024-01-01 10:00:00,1,2\n",
        ", line 3: arrival_s = '2024-01-01 10:00:00': must be a time, 0 or more; correct the row",
    ),
    "date before": (
        HEAD + b"2024-01-01T10:00:00Z,1,2\n2023-01-01T09:00:00Z,1,2\n",
        ", line 3: arrival_s = '2023-01-01T09:00:00Z': is more than 97 days before the first; cut the trace,"
        " correct the row, or give --time-unit",
    ),
    "number after a date": (
        HEAD + b"2024-01-01T10:00:00Z,1,2\n5,1,2\n",
        ", line 3: arrival_s = '5': must be a date and time such as 2026-03-29T10:00:00,"
        " with an offset (Z, +01:00) in all rows or in none",
    ),
    "date of no standard": (
        b"timestamp,input,output\n03/04/2026 10:00:00,1,2\n03/04/2026 10:00:05,1,2\n",
        ", line 2: timestamp = '03/04/2026 10:00:00': must be a number, or a date and time such as 2026-03-29T10:00:00; write it so",
    ),
    "named zone": (
        b"timestamp,input,output\n2026-03-29 10:00:00 CET,1,2\n",
        ", line 2: timestamp = '2026-03-29 10:00:00 CET': must be a date and time such as 2026-03-29T10:00:00,"
        " with an offset (Z, +01:00) in all rows or in none",
    ),
    "semicolons": (
        b"arrival_s;input;output\n0,5;1;2\n",
        ", line 1: columns = 'arrival_s;input;output': are separated by semicolons; write the file with commas",
    ),
    "short row": (
        HEAD + b"0,1,2\n\n0,1\n",
        ", line 4: row = '0,1': 2 fields where the header has 3; correct the row",
    ),
    "long row": (
        HEAD + b"0,1,2\n0,1,2,3\n",
        ", line 3: row = '0,1,2,3': 4 fields where the header has 3; correct the row",
    ),
    "open quote": (
        HEAD + b'0,1,2\n0,"1,2\n0,1,2\n',
        ", line 3: row = '0,\"1,2': a quote is left open; close it on its line",
    ),
    "hidden open quote": (
        b'a,b,input,output\nx"y,"z,1,2\n3,4,5,6\n"\n',
        ", line 4: row = '\"': a quote is left open; close it on its line",
    ),
    "spanning field": (
        b'a,b,c,input,output,d\n1,x"y,"z\n",5,6,q"\n',
        ": has fields that span lines; write each request on one line",
    ),
    "max_tokens below the output": (
        b"input,output,max_tokens\n1,5,5\n1,5,4\n",
        ", line 3: max_tokens = 4: must be at least output, the output that comes; raise it or leave the column out",
    ),
    "wrong column": (
        b"prompt,output\n1,2\n",
        ", line 1: columns = 'prompt,output': no column prompt_tokens; name it prompt_tokens or input or input_length, or say by --columns which it is",
    ),
    "no header": (
        b"\n21,518\n8,66\n",
        ", line 2: columns = '21,518': no column prompt_tokens; name it prompt_tokens or input or input_length, or say by --columns which it is",
    ),
    "one column": (
        b"input\n1\n",
        ", line 1: columns = 'input': no column output_tokens; name it output_tokens or output or output_length, or say by --columns which it is",
    ),
    "column twice": (
        b"input,input,output\n1,2,3\n",
        ", line 1: columns = 'input,input,output': input appears twice; keep one",
    ),
    "no rows": (HEAD, ": has a header and no rows; give one request a line"),
    "empty": (b"", ": is empty; give a header and one request a line"),
    "blank": (b"\xef\xbb\xbf \n\n", ": is empty; give a header and one request a line"),
    "latin-1": (b"input,output\n1,\xff\n", ", line 2: is not UTF-8 text; save the file as UTF-8"),
    "damaged gzip": (gzip.compress(HEAD * 100)[:40], ": is a damaged gzip file; fetch it again"),
}

JSONL = {
    "zero": (b'{"input":1,"output":2}\n\n{"input":1,"output":0}\n', f", line 3: output = 0: {POSITIVE}"),
    "fraction": (b'{"input":12.5,"output":2}\n', f", line 1: input = 12.5: {WHOLE}"),
    "nan": (b'{"input":1,"output":NaN}\n', f", line 1: output = nan: {WHOLE}"),
    "missing": (b'{"input":1,"output":2}\n{"input":1}\n', f", line 2: output = None: {MISSING}"),
    "null": (b'{"input":null,"output":2}\n', f", line 1: input = None: {MISSING}"),
    "text": (
        b'{"input":1,"output":2}\n\n{"input":1,"output":"x"}\n',
        ", line 3: output = 'x': must be a finite number; correct the row",
    ),
    "bool": (b'{"input":1,"output":true}\n', ", line 1: output = True: must be a finite number; correct the row"),
    "too big": (b'{"input":1,"output":1e999}\n', ", line 1: output = inf: must be a finite number; correct the row"),
    "unsorted": (
        b'{"timestamp":5,"input":1,"output":2}\n{"timestamp":4,"input":1,"output":2,"parent":0,"fork_at":1}\n',
        ", line 2: timestamp = 4: is before the row above; sort the rows by arrival",
    ),
    "cut": (
        b'{"input":1,"output":2}\n{"input":1,\n',
        ", line 2: row = '{\"input\":1,': is not a JSON object; give one object a line",
    ),
    "cut on its second line": (
        b'{"input":1,\n"output":2\n',
        ", line 1: ends within an element; fetch the file again",
    ),
    "two on a line": (
        b'{"input":1,"output":2} {}\n',
        ", line 1: input = None: is missing; give a whole number of tokens, 1 or more",
    ),
    "list": (b"[1,2]\n", ", line 1: row = '[1,2]': is not a JSON object; give one object a line"),
    "wrong key": (
        b'{"prompt":1,"output":2}\n',
        ", line 1: columns = 'prompt,output': no column prompt_tokens; name it prompt_tokens or input or input_length, or say by --columns which it is",
    ),
}

PARQUET = {
    "negative": (parquet(input=[1, 2], output=[1, -7]), f", row 2: output = -7: {POSITIVE}"),
    "missing": (parquet(input=[1, 2], output=[1, None]), f", row 2: output = None: {MISSING}"),
    "text": (parquet(input=[1, 2], output=["1", "2"]), f", row 1: output = '1': {NUMBER}"),
    "list": (parquet(input=[[1, 2]], output=[1]), f", row 1: input = [1, 2]: {NUMBER}"),
    "wrong column": (
        parquet(input=[1], x=[1]),
        ": columns = 'input,x': no column output_tokens; name it output_tokens or output or output_length, or say by --columns which it is",
    ),
    "no rows": (
        parquet(input=pa.array([], pa.int64()), output=pa.array([], pa.int64())),
        ": has columns and no rows; give one request a row",
    ),
}

PICKLE = {
    "zero": (pickle.dumps([(1, 2), (1, 0)]), f", row 2: output_tokens = 0: {POSITIVE}"),
    "triple": (
        pickle.dumps([(1, 2), (1, 2, 3)]),
        f", row 2: pair = (1, 2, 3): must be two whole numbers: {PICKLE_REMEDY}",
    ),
    "fraction": (pickle.dumps([(1, 2.5)]), f", row 1: pair = (1, 2.5): must be two whole numbers: {PICKLE_REMEDY}"),
    "huge": (
        pickle.dumps([(1, 2**70_000)]),
        f", row 1: pair = (1, a number of 70001 bits): must be two whole numbers: {PICKLE_REMEDY}",
    ),
    "no list": (pickle.dumps(5), f": pickle = 5: {PICKLE_REMEDY}"),
    "no pairs": (pickle.dumps([]), f": pickle = []: {PICKLE_REMEDY}"),
    "cut": (pickle.dumps([(1, 2)])[:-4], f": is not a readable pickle (EOFError): {PICKLE_REMEDY}"),
}


@pytest.mark.parametrize("case", CSV)
def test_csv(tmp_path, case):
    data, refused = CSV[case]
    assert refusal(tmp_path, "bad.csv", data) == refused


@pytest.mark.parametrize("case", JSONL)
def test_jsonl(tmp_path, case):
    data, refused = JSONL[case]
    assert refusal(tmp_path, "bad.jsonl", data) == refused


@pytest.mark.parametrize("case", PARQUET)
def test_parquet(tmp_path, case):
    data, refused = PARQUET[case]
    assert refusal(tmp_path, "bad.parquet", data) == refused


@pytest.mark.parametrize("case", PICKLE)
def test_pickle(tmp_path, case):
    data, refused = PICKLE[case]
    assert refusal(tmp_path, "bad.pkl", data) == refused


HUGE = "9" * 400
#: Values of every kind that JSON has, and of sizes that nothing has.
JSON_VALUES = [
    "null", "true", "1.5", "1e999", "NaN", "-1", "0", HUGE, f"-{HUGE}", str(2**63), str(-(2**63)), '"x"', '""',
    f'"{HUGE}"', '"\\ud800"', "[]", "{}",
    "[1]", "[[1]]", "[null]", '["a"]', "[1.5]", f"[{HUGE}]", '{"a": [1]}', '{"a": [null]}',
]  # fmt: skip
FIELDS = [
    "prompt_tokens", "output_tokens", "max_tokens", "n", "parent", "fork_at", "truncate_to", "arrival_s", "timestamp",
    "delay_s", "hash_ids", "block_tokens", "session_id", "input_length", "output_length", "chat_id", "parent_chat_id",
]  # fmt: skip
#: Columns of every type that Parquet has and that a trace has no use for.
PARQUET_TYPES = {
    "struct": pa.array([{"a": 1}, None]),
    "map": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int64())),
    "list": pa.array([[1], [2, None]]),
    "large list": pa.array([[2**64 - 1], [2]], pa.large_list(pa.uint64())),
    "fixed list": pa.array([None, [2]], pa.list_(pa.int64(), 1)),
    "nested list": pa.array([[[1]], [None]]),
    "binary": pa.array([b"\xff", b"a"]),
    "text view": pa.array(["1", "b"], pa.string_view()),
    "dictionary": pa.array(["a", "b"]).dictionary_encode(),
    "bool": pa.array([True, False]),
    "date": pa.array([datetime.date(2024, 1, 1)] * 2),
    "duration": pa.array([datetime.timedelta(1)] * 2),
    "decimal": pa.array([Decimal(10) ** 70, Decimal(1)], pa.decimal256(76)),
    "unsigned": pa.array([2**64 - 1, 1], pa.uint64()),
    "not a number": pa.array([float("nan"), 1.5]),
    "null": pa.nulls(2),
}


def read_or_refused(path) -> str | None:
    """The refusal, which is one line with bad rows skipped and without; None where the file is read."""
    refused = []
    for skip_bad in (False, True):
        try:
            read_with_content(path, Reading(skip_bad=skip_bad))
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 500
            refused.append(str(error))
    return refused[0] if refused else None


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ours", "mooncake", "bailian", "ragpulse/0_trace"])
def test_any_json_value_in_any_field_is_read_or_refused(tmp_path, form):
    records = [json.loads(line) for line in (SAMPLES / f"{form}.jsonl").read_text().splitlines()]
    path = tmp_path / "trace.jsonl"
    for chunks in (SAMPLES / "ragpulse").glob("[1-5]_*"):
        (tmp_path / chunks.name).write_bytes(chunks.read_bytes())
    *first, last = records
    for field in {*FIELDS, *last} if form == "ours" else last:
        for value in JSON_VALUES:
            changed = json.dumps(last | {field: "@"}).replace('"@"', value)
            path.write_text("\n".join([*map(json.dumps, first), changed]))
            read_or_refused(path)
        missing = {name: old for name, old in last.items() if name != field}
        path.write_text("\n".join(map(json.dumps, [*first, missing])))
        read_or_refused(path)


def test_a_number_of_400_digits_is_a_bad_row(tmp_path):
    path = tmp_path / "trace.jsonl"
    good = '{"input":1,"output":2}\n' * 10
    path.write_text(f'{good}{{"input":{HUGE},"output":2}}\n{good}')
    refused = f"{path}, line 11: input = a number of 1329 bits: must be a finite number; correct the row"
    assert read_or_refused(path) == refused
    trace = read(path, Reading(skip_bad=True))
    assert (len(trace), trace.left_out.bad, trace.left_out.first_bad) == (20, 1, refused)


@pytest.mark.parametrize("kind", PARQUET_TYPES)
def test_any_type_in_any_parquet_column_is_read_or_refused(tmp_path, kind):
    path = tmp_path / "trace.parquet"
    for field in FIELDS[:13]:
        columns = {"prompt_tokens": [5, 6], "output_tokens": [1, 2], "hash_ids": [[1], [2]], "session_id": ["a", "a"]}
        if field in ("fork_at", "truncate_to"):
            columns["parent"] = pa.array([None, 0])
        try:
            path.write_bytes(parquet(**columns | {field: PARQUET_TYPES[kind]}))
        except pa.ArrowNotImplementedError:
            pytest.skip("this pyarrow writes no such column")
        read_or_refused(path)


@pytest.mark.parametrize("column", [[{"a": 1}, {}], [[1], [2]], [None, [1]], [b"a", b"b"], [True, False], [1.5, 2]])
def test_a_session_that_is_no_name_is_refused(tmp_path, column):
    path = tmp_path / "trace.parquet"
    path.write_bytes(parquet(input=[1, 2], output=[1, 2], session_id=column))
    refused = read_or_refused(path)
    assert refused.startswith(f"{path}, row {2 if column[0] is None else 1}: session_id = ")
    assert refused.endswith("must be a whole number or a text; correct the row")


def test_the_same_columns_in_other_parquet_types(tmp_path):
    path = tmp_path / "trace.parquet"
    path.write_bytes(parquet(
        input=pa.array([1, 2]).dictionary_encode(),
        output=pa.array(np.array([3, 4], np.float16)),
        session_id=pa.array(["a", "a"], pa.large_string()).dictionary_encode(),
        hash_ids=pa.array([[7], [8]], pa.list_(pa.uint64(), 1)),
        block_tokens=pa.array([[1], [2]], pa.large_list(pa.int32())),
    ))  # fmt: skip
    trace = read_with_content(path)
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([1, 2], [3, 4])
    assert (trace.content.ids.tolist(), trace.content.session_id.tolist()) == ([7, 8], [1, 1])
    # pandas makes floats of whole numbers where some are missing.
    path.write_bytes(parquet(input=[1, 2, 3], output=[1, 2, 3], session_id=[4.0, None, 4.0]))
    assert read_with_content(path).content.session_id.tolist() == [1, -1, 1]


def test_a_bad_value_of_a_zipped_file_keeps_its_line(tmp_path):
    refused = refusal(tmp_path, "bad.csv.gz", gzip.compress(HEAD + b"0,1,0\n"))
    assert refused == f", line 2: output_tokens = 0: {POSITIVE}"


def test_a_damaged_parquet_file(tmp_path):
    assert refusal(tmp_path, "bad.parquet", b"PAR1 and no more").startswith(": is not a readable Parquet file (")


def test_a_key_twice_in_one_object(tmp_path):
    refused = refusal(tmp_path, "bad.jsonl", b'{"input":1,"input":1,"output":2}\n')
    assert refused == ", line 1: key = 'input': appears twice; keep one"


def test_long_values_are_shortened(tmp_path):
    refused = refusal(tmp_path, "bad.jsonl", json.dumps({"input": 1, "output": "x" * 5000}).encode())
    assert len(refused) < 200 and "xxx...xxx" in refused


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(TraceError) as caught:
        read(tmp_path / "nowhere.csv")
    assert str(caught.value) == f"{tmp_path}/nowhere.csv: no such file; check the path"
    with pytest.raises(TraceError) as caught:
        read(tmp_path)
    assert str(caught.value) == f"{tmp_path}: cannot be read (Is a directory); give a trace file"


@pytest.mark.parametrize("name", ["pipe", "/dev/null", "-"])
def test_a_pipe_and_a_device(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")  # Opened for reading without a writer it would hang.
    with pytest.raises(TraceError) as caught:
        read(name)
    remedy = "is a pipe or a device, and a trace is read more than once; save it to a file and give that"
    assert str(caught.value) == f"{name}: {remedy}"


def test_the_error_carries_its_parts(tmp_path):
    path = tmp_path / "bad.csv"
    path.write_bytes(HEAD + b"0,1,2\n0,-3,2\n")
    with pytest.raises(TraceError) as caught:
        read(path)
    error = caught.value
    assert (error.path, error.line, error.field, error.value) == (str(path), 3, "prompt_tokens", -3)
