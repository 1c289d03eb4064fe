"""Files that cannot be true: each is refused in one line that says where, what and what to do."""

from __future__ import annotations

import gzip
import io
import json
import pickle

import pyarrow as pa
import pyarrow.parquet
import pytest

from fragmeter.sim.errors import TraceError
from fragmeter.traces import read

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
    "unsorted": (
        HEAD + b"5,1,2\n5,1,2\n4.5,1,2\n",
        ", line 4: arrival_s = 4.5: is before the row above; sort the rows by arrival",
    ),
    "early": (HEAD + b"-0.5,1,2\n", ", line 2: arrival_s = -0.5: must be 0 or more; count from the start of the run"),
    "timeless": (HEAD + b"0,1,2\n,1,2\n", ", line 3: arrival_s = None: is missing; give a time, 0 or more"),
    "never": (HEAD + b"0,1,2\ninf,1,2\n", ", line 3: arrival_s = inf: must be a finite time; correct or drop the row"),
    "unix time": (
        HEAD + b"1700000000.5,1,2\n",
        ", line 2: arrival_s = 1700000000.5: must be below 8388608; subtract the first arrival from all",
    ),
    "date": (
        HEAD + b"2024-01-01 10:00:00,1,2\n",
        ", line 2: arrival_s = '2024-01-01 10:00:00': must be a time, 0 or more; correct the row",
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
    "told too little": (
        b"input,output,max_tokens\n1,5,5\n1,5,4\n",
        ", line 3: max_tokens = 4: must be at least output, the output that comes; raise it or leave the column out",
    ),
    "wrong column": (
        b"prompt,output\n1,2\n",
        ", line 1: columns = 'prompt,output': no column prompt_tokens; name it prompt_tokens or input or input_length",
    ),
    "no header": (
        b"\n21,518\n8,66\n",
        ", line 2: columns = '21,518': no column prompt_tokens; name it prompt_tokens or input or input_length",
    ),
    "one column": (
        b"input\n1\n",
        ", line 1: columns = 'input': no column output_tokens; name it output_tokens or output or output_length",
    ),
    "column twice": (
        b"input,input,output\n1,2,3\n",
        ", line 1: columns = 'input,input,output': input is there twice; keep one",
    ),
    "no rows": (HEAD, ": has a header and no rows; give one request a line"),
    "empty": (b"", ": is empty; give a header and one request a line"),
    "blank": (b"\xef\xbb\xbf \n\n", ": is empty; give a header and one request a line"),
    "latin-1": (b"input,output\n1,\xff\n", ", line 2: is no UTF-8 text; save the file as UTF-8"),
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
        b'{"timestamp":5,"input":1,"output":2}\n{"timestamp":4,"input":1,"output":2}\n',
        ", line 2: timestamp = 4: is before the row above; sort the rows by arrival",
    ),
    "cut": (
        b'{"input":1,"output":2}\n{"input":1,\n',
        ", line 2: row = '{\"input\":1,': is no JSON object; give one object a line",
    ),
    "on two lines": (
        b'{"input":1,\n"output":2}\n',
        ", line 1: row = '{\"input\":1,': is no JSON object; give one object a line",
    ),
    "two on a line": (
        b'{"input":1,"output":2} {}\n',
        ", line 1: row = '{\"input\":1,\"output\":2} {}': is no JSON object; give one object a line",
    ),
    "list": (b"[1,2]\n", ", line 1: row = '[1,2]': is no JSON object; give one object a line"),
    "wrong key": (
        b'{"prompt":1,"output":2}\n',
        ", line 1: columns = 'prompt,output': no column prompt_tokens; name it prompt_tokens or input or input_length",
    ),
}

PARQUET = {
    "negative": (parquet(input=[1, 2], output=[1, -7]), f", row 2: output = -7: {POSITIVE}"),
    "missing": (parquet(input=[1, 2], output=[1, None]), f", row 2: output = None: {MISSING}"),
    "text": (parquet(input=[1, 2], output=["1", "2"]), f", row 1: output = '1': {NUMBER}"),
    "list": (parquet(input=[[1, 2]], output=[1]), f", row 1: input = [1, 2]: {NUMBER}"),
    "wrong column": (
        parquet(input=[1], x=[1]),
        ": columns = 'input,x': no column output_tokens; name it output_tokens or output or output_length",
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
    "cut": (pickle.dumps([(1, 2)])[:-4], f": is no readable pickle (EOFError): {PICKLE_REMEDY}"),
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


def test_a_bad_value_of_a_zipped_file_keeps_its_line(tmp_path):
    refused = refusal(tmp_path, "bad.csv.gz", gzip.compress(HEAD + b"0,1,0\n"))
    assert refused == f", line 2: output_tokens = 0: {POSITIVE}"


def test_a_damaged_parquet_file(tmp_path):
    assert refusal(tmp_path, "bad.parquet", b"PAR1 and no more").startswith(": is no readable Parquet file (")


def test_a_key_twice_in_one_object(tmp_path):
    refused = refusal(tmp_path, "bad.jsonl", b'{"input":1,"input":1,"output":2}\n')
    assert refused == ", line 1: key = 'input': is there twice; keep one"


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


def test_the_error_carries_its_parts(tmp_path):
    path = tmp_path / "bad.csv"
    path.write_bytes(HEAD + b"0,1,2\n0,-3,2\n")
    with pytest.raises(TraceError) as caught:
        read(path)
    error = caught.value
    assert (error.path, error.line, error.field, error.value) == (str(path), 3, "prompt_tokens", -3)
