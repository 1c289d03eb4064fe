"""Files of the user that are no settings: too deep, too large, too many digits, another encoding. One line each, exit status 2."""

from __future__ import annotations

import io
import json
import tracemalloc
import zipfile

import numpy as np
import pytest

from fragmeter.experiments.cli.app import MISTAKE, status
from fragmeter.sim.output.archives import load_archive, save_archive
from fragmeter.sim.types import user_files
from fragmeter.sim.types.errors import UserError

SIMULATE = ("simulate", "--num-prompts", "3", "--request-rate", "1")
LINE = "vllm serve Qwen/Qwen3-8B"
#: Where a command takes a file, or JSON in a flag. FILE is its path, and its ending.
DOORS = {
    "model": (".json", (*SIMULATE, "--model", "FILE")),
    "gpu": (".json", (*SIMULATE, "--gpu", "FILE")),
    "cost": (".json", (*SIMULATE, "--cost", "FILE")),
    "server": (".json", (*SIMULATE, "--server", "FILE")),
    "trace": (".json", ("simulate", "--trace", "FILE")),
    "lines": (".jsonl", ("simulate", "--trace", "FILE")),
    "curve": (".csv", (*SIMULATE[:3], "--rate-curve", "FILE")),
    "story": (".toml", ("story", "FILE")),
    "prices": (
        ".json",
        ("plan", "--model", "opt-13b", "--gpu", "a100-40gb", "--goodput", "ttft:1000", "--prices", "FILE"),
    ),
    "prices in TOML": (
        ".toml",
        ("plan", "--model", "opt-13b", "--gpu", "a100-40gb", "--goodput", "ttft:1000", "--prices", "FILE"),
    ),
    "line": (".txt", ("plan", "--gpu", "h200", "--serve", "FILE")),
    "log": (".log", ("plan", "--gpu", "h200", "--serve", LINE, "--startup-log", "FILE")),
    "metrics": (".txt", ("diagnose", "--gpu", "h200", "--serve", LINE, "--metrics", "FILE")),
    "benchmark": (".json", ("validate", "--gpu", "h200", "--model", "opt-13b", "--against", "FILE")),
    "load": (".json", ("traces", "sample", "FILE", "drawn.csv")),
}
DEEP, DIGITS = "[" * 100_000, "1" * 5_000
CONTENTS = {
    "deep": lambda key: f"{key}{DEEP}",
    "digits": lambda key: f"{key}{DIGITS}",
    "latin-1": lambda key: f"{key}'größer'".encode("latin-1"),
    "zeros": lambda key: b"\0" * 5_000,
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("door", DOORS)
def test_a_file_that_is_none(door, content, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ending, words = DOORS[door]
    made = CONTENTS[content]("given = " if ending == ".toml" else "")
    (tmp_path / f"file{ending}").write_bytes(made if isinstance(made, bytes) else made.encode())
    assert status([word.replace("FILE", f"file{ending}") for word in words]) == MISTAKE
    said = capsys.readouterr().err
    assert (said.count("\n"), "internal fault" in said) == (1, False), said
    assert len(said) < 600, said[:600]


@pytest.mark.parametrize(
    "value", [DEEP, DIGITS, f'{{"num_speculative_tokens": {DIGITS}}}'], ids=["deep", "digits", "key"]
)
@pytest.mark.parametrize("door", ["flag", "line", "key of a line"])
def test_json_in_a_flag(door, value, capsys):
    flags = {
        "flag": (*SIMULATE, "--policy", "vllm-v1", "--speculative-config", value),
        "line": ("plan", "--gpu", "h200", "--serve", f"{LINE} --speculative-config '{value}'"),
        "key of a line": (
            "plan",
            "--gpu",
            "h200",
            "--serve",
            f"{LINE} --speculative-config '{value}' --speculative-config.method mtp",
        ),
    }
    assert status(list(flags[door])) == MISTAKE
    said = capsys.readouterr().err
    assert (said.count("\n"), "internal fault" in said, len(said) < 600) == (1, False, True), said[:600]


def test_a_file_beyond_the_limit_is_read_no_further(tmp_path, monkeypatch):
    monkeypatch.setattr(user_files, "MOST_BYTES", 10)
    (tmp_path / "eleven").write_bytes(b"12345678901")
    (tmp_path / "ten").write_bytes(b"\xef\xbb\xbf4567890")
    with pytest.raises(UserError, match="has more than"):
        user_files.content_of(tmp_path / "eleven", "cost")
    assert user_files.text_of(tmp_path / "ten", "cost") == "4567890"
    # A device without an end.
    with pytest.raises(UserError, match="has more than"):
        user_files.content_of("/dev/zero", "cost")


@pytest.mark.slow
def test_an_archive_is_measured_before_it_is_unpacked(tmp_path):
    path = tmp_path / "blocks.npz"
    save_archive(path, {"schema_version": 1}, {"zeros": np.zeros(2**27, dtype=np.uint8)})
    assert path.stat().st_size < 2**18
    tracemalloc.start()
    with pytest.raises(UserError, match="134,218,\\d+ bytes unpacked"):
        load_archive(path, "map", ["zeros"], 1, "record it anew", 2**20)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_a_directory_that_understates_the_size_of_an_archive(tmp_path):
    """The directory says ten bytes; what follows is not read."""
    path, content = tmp_path / "blocks.npz", io.BytesIO()
    np.lib.format.write_array(content, np.zeros(2**20, dtype=np.uint8))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("meta.npy", _npy(np.array(json.dumps({"schema_version": 1}))))
        archive.writestr("zeros.npy", content.getvalue())
        archive.getinfo("zeros.npy").file_size = 10
    with pytest.raises(UserError, match="is not a map"):
        load_archive(path, "map", ["zeros"], 1, "record it anew", 2**30)


def _npy(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.lib.format.write_array(content, array)
    return content.getvalue()
