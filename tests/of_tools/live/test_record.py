"""Recording a server: with a stand-in for the ``vllm`` command, which answers as the real one does and computes nothing."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fragmeter.experiments.measured.server_metrics import read_metrics
from fragmeter.sim.types.errors import UserError
from tools.live import server as server_module
from tools.live.__main__ import main
from tools.live.loads import BLOCK_SIZE, SESSIONS, Load, Session, at_rates, write_data
from tools.live.record import record
from tools.live.server import VOCABULARY, Server, word, write_model

VLLM = """\
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

arguments = dict(zip(sys.argv[1:], sys.argv[2:]))
if sys.argv[1] == "serve":
    if "--dies" in sys.argv:
        sys.exit("no memory")
    with open("{pids}", "a") as pids:
        print(os.getpid(), file=pids)
    child = os.fork()
    if not child:
        # A worker that does not end when it is asked to.
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open("{pids}", "a") as pids:
            print(os.getpid(), file=pids)
        signal.pause()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            if self.path == "/v1/models":
                self.wfile.write(b'{{"data": [{{"id": "' + arguments["--served-model-name"].encode() + b'"}}]}}')
            if self.path == "/metrics":
                self.wfile.write(b'vllm:num_requests_running 1\\nvllm:num_preemptions_total 3\\nvllm:other_bucket 5\\n')

        def log_message(self, *args):
            pass

    HTTPServer((arguments["--host"], int(arguments["--port"])), Handler).serve_forever()
else:
    count = int(arguments["--num-prompts"])
    done = count - ("--fails" in sys.argv)
    result = {{"completed": done, "input_lens": [4] * count, "output_lens": [3] * count, "start_times": [1.0] * count,
              "ttfts": [0.5] * count, "itls": [[0.25, 0.5]] * count, "generated_texts": ["x"] * count}}
    with open(arguments["--result-filename"], "w") as file:
        json.dump(result, file)
"""
QUICK = Session("quick", {"max-num-seqs": 2}, (Load("one", 2, ()), Load("two", 3, ())))


@pytest.fixture
def python(tmp_path, monkeypatch):
    """The interpreter of an environment with the stand-in as its ``vllm``."""
    monkeypatch.setattr(server_module, "STOP_S", 1)
    (tmp_path / "bin").mkdir()
    script = f"#!{sys.executable}\n" + VLLM.format(pids=tmp_path / "pids")
    (tmp_path / "bin" / "vllm").write_text(script)
    (tmp_path / "bin" / "vllm").chmod(0o755)
    return tmp_path / "bin" / "python"


def alive(tmp_path):
    """Processes of the stand-in that still run; one that has ended may wait for its parent to notice."""
    found = []
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        status = Path(f"/proc/{pid}/status")
        if status.exists() and "State:\tZ" not in status.read_text():
            found.append(pid)
    return found


@pytest.mark.slow
def test_a_session_leaves_its_results_and_no_process(python, tmp_path):
    folder = tmp_path / "out"
    record(QUICK, python, folder)
    assert alive(tmp_path) == []
    about = json.loads((folder / "session.json").read_text())
    assert about["flags"] == {"max-num-seqs": 2} and list(about["loads_s"]) == ["one", "two"]
    result = json.loads((folder / "two.json").read_text())
    assert result["itls"] == [[0.75]] * 3 and "generated_texts" not in result
    text = (folder / "two.metrics.txt").read_text()
    assert "vllm:other_bucket" not in text
    assert read_metrics(folder / "two.metrics.txt").preemptions == 0


@pytest.mark.slow
def test_a_load_with_a_failed_request_stops_the_server(python, tmp_path):
    failing = replace(QUICK, loads=(replace(QUICK.loads[0], arguments=("--fails",)),))
    with pytest.raises(UserError, match=r"one.log: 1 of 2 requests were answered"):
        record(failing, python, tmp_path / "out")
    assert alive(tmp_path) == []
    assert not (tmp_path / "out" / "session.json").exists()


@pytest.mark.slow
def test_a_server_that_does_not_start_names_its_log(python, tmp_path):
    (tmp_path / "out").mkdir()
    with (
        pytest.raises(UserError, match=r"server.log: the server did not start"),
        Server(python, tmp_path, {"dies": 1}, tmp_path / "out"),
    ):
        pass
    assert "no memory" in (tmp_path / "out" / "server.log").read_text()


def test_a_url_without_a_server_is_one_line_and_leaves_nothing(tmp_path, capsys):
    arguments = [
        "--url",
        "http://127.0.0.1:9",
        "--probe",
        "steps.jsonl",
        "--model",
        ".",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("http://127.0.0.1:9: does not answer as a vLLM server") and "correct --url" in line
    assert not (tmp_path / "out").exists()


def test_the_data_of_the_loads_are_the_same_every_time(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_data(tmp_path / name)
        write_model(tmp_path / name / "model")
    for file in ("sharegpt.json", "sessions.jsonl", "ramp.jsonl", "model/config.json", "model/tokenizer.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    turns = [json.loads(line) for line in (tmp_path / "one" / "sessions.jsonl").read_text().splitlines()]
    assert [turn["timestamp"] for turn in turns] == sorted(turn["timestamp"] for turn in turns)
    by_session: dict[int, list[int]] = {}
    for turn in turns:
        assert len(turn["hash_ids"]) == -(-turn["input_length"] // BLOCK_SIZE)
        before = by_session.get(turn["hash_ids"][0], [])
        assert turn["hash_ids"][: len(before)] == before
        by_session[turn["hash_ids"][0]] = turn["hash_ids"]
    ramp = [json.loads(line) for line in (tmp_path / "one" / "ramp.jsonl").read_text().splitlines()]
    times = [each["timestamp"] for each in ramp]
    assert times == sorted(times) and times[-1] - times[len(times) // 2] < times[len(times) // 2]
    shared = [block for each in ramp for block in each["hash_ids"]]
    assert len(set(shared)) < len(shared) * 2 / 3
    vocabulary = json.loads((tmp_path / "one" / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(vocabulary) == VOCABULARY and all(vocabulary[word(token)] == token for token in range(VOCABULARY))


def test_a_rate_factor_changes_rates_and_nothing_else():
    ample = SESSIONS[0]
    faster = at_rates(ample, 10)
    changed = {
        (before, after)
        for old, new in zip(ample.loads, faster.loads, strict=True)
        for before, after in zip(old.arguments, new.arguments, strict=True)
        if before != after
    }
    assert changed == {("0.001", "0.0001"), ("1.5", "15.0"), ("3", "30.0"), ("1", "10.0"), ("4", "40.0")}
    assert at_rates(ample, 1).loads[0] == ample.loads[0]
