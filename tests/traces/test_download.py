"""Public traces: fetched from an origin on this machine, held against the checksum of their requests."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.sim.types.errors import SettingError
from fragmeter.traces import download, read
from paths import SAMPLES

real_traces = pytest.mark.skipif("FRAGMETER_TRACES" not in os.environ, reason="FRAGMETER_TRACES names no folder")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def origin(monkeypatch):
    """The samples' folder behind a server; its address."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SAMPLES)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def offer(monkeypatch, *urls: str, sha256: str | None = None) -> None:
    """Let there be one public trace, called ``sample``."""
    monkeypatch.setattr(download, "PUBLIC", (download.Public("sample", "Made up", urls, "MIT", sha256),))


@pytest.mark.slow
def test_a_trace_is_fetched_and_verified(tmp_path, capsys, monkeypatch, origin):
    known = download.requests_sha256(read(SAMPLES / "azure2023.csv"))
    offer(monkeypatch, f"{origin}/azure2023.csv", sha256=known)
    assert status(["traces", "get", "sample", "--out", str(tmp_path / "new"), "--json", "-"]) == DONE
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "path": str(tmp_path / "new" / "azure2023.csv"),
        "licence": "MIT",
        "verified": True,
    }
    assert printed.err == ""
    assert (tmp_path / "new" / "azure2023.csv").read_bytes() == (SAMPLES / "azure2023.csv").read_bytes()


@pytest.mark.slow
def test_what_belongs_beside_it_comes_too(tmp_path, capsys, monkeypatch, origin):
    files = sorted(path.name for path in (SAMPLES / "ragpulse").iterdir())
    offer(monkeypatch, *(f"{origin}/ragpulse/{name}" for name in files))
    assert status(["traces", "get", "sample", "--out", str(tmp_path)]) == DONE
    assert sorted(os.listdir(tmp_path)) == files
    assert "Unverified: no checksum of it is known here." in capsys.readouterr().out


@pytest.mark.slow
def test_other_requests_than_those_that_are_known(tmp_path, capsys, monkeypatch, origin):
    offer(monkeypatch, f"{origin}/azure2023.csv", sha256="0" * 64)
    assert status(["traces", "get", "sample", "--out", str(tmp_path)]) == MISTAKE
    assert f"not {'0' * 64}; delete it, and fetch it again" in capsys.readouterr().err


@pytest.mark.slow
def test_a_file_that_has_gone(tmp_path, capsys, monkeypatch, origin):
    offer(monkeypatch, f"{origin}/nothing.csv")
    assert status(["traces", "get", "sample", "--out", str(tmp_path)]) == MISTAKE
    assert "nothing.csv: the origin answers 404; look there for where it has gone" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_without_a_network(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        offer(monkeypatch, f"http://127.0.0.1:{unused.getsockname()[1]}/trace.csv")
        assert status(["traces", "get", "sample", "--out", str(tmp_path)]) == MISTAKE
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1 and "cannot be fetched (ConnectionError); is there a network here?" in complaint


def test_without_the_package_that_fetches(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    assert status(["traces", "get", "mooncake-conversation", "--out", str(tmp_path)]) == MISTAKE
    complaint = capsys.readouterr().err
    assert (
        "needs the package pooch: pip install -e '.[traces]' in the checkout, or fetch the file by hand from https://raw"
        in complaint
    )


def test_the_catalogue_is_of_known_names():
    with pytest.raises(SettingError, match="name = 'unknown': choose one of azure2023-conv, azure2023-code,"):
        download.public("unknown")
    names = [entry.name for entry in download.PUBLIC]
    assert len(set(names)) == len(names)
    for entry in download.PUBLIC:
        assert entry.licence and all(url.startswith("https://") for url in entry.urls)


@real_traces
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("azure2023-conv", "azure2023_conv.csv.gz"),
        ("azure2023-code", "azure2023_code.csv.gz"),
        ("mooncake-conversation", "mooncake_conversation.jsonl.gz"),
        ("ragpulse", "ragpulse.jsonl.gz"),
        ("vidur-arxiv", "arxiv_summarization_llama2.csv.gz"),
    ],
)
def test_checksums_are_those_of_traces_that_were_read(name, file):
    trace = read(Path(os.environ["FRAGMETER_TRACES"]) / file)
    assert download.requests_sha256(trace) == download.public(name).requests_sha256
