"""Pickles that would run something: refused before they do."""

from __future__ import annotations

import copyreg
import gzip
import os
import pickle

import numpy as np
import pytest

from fragmeter.sim.types.errors import TraceError
from fragmeter.traces import read

REFUSED = "refused, never run: a pickled trace is a list of (prompt, output) in plain ints; save it as CSV instead"


class Command:
    """Runs a shell command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple:
        return os.system, (self.command,)


def refused_instruction(path) -> str:
    with pytest.raises(TraceError) as caught:
        read(path)
    assert str(caught.value) == f"{path}: pickle instruction = {caught.value.value!r}: {REFUSED}"
    return caught.value.value


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_runs_a_command_does_not_run_it(tmp_path, protocol):
    mark, path = tmp_path / "ran", tmp_path / "evil.pkl"
    path.write_bytes(pickle.dumps([(1, 2), Command(f"touch '{mark}'")], protocol))
    assert refused_instruction(path) == ("GLOBAL" if protocol < 4 else "SHORT_BINUNICODE")
    assert not mark.exists()
    pickle.loads(path.read_bytes())  # the usual way does run it
    assert mark.exists()


@pytest.mark.parametrize(
    ("program", "instruction"),
    [
        (b"\x80\x02cos\nsystem\n.", "GLOBAL"),
        (b"\x80\x04\x93.", "STACK_GLOBAL"),
        (b"\x80\x02])R.", "REDUCE"),
        (b"\x80\x02]]b.", "BUILD"),
        (b"\x80\x02])\x81.", "NEWOBJ"),
        (b"(ios\nsystem\n.", "INST"),
        (b"(]o.", "OBJ"),
        (b"Psomething\n.", "PERSID"),
        (b"]Q.", "BINPERSID"),
        (b"\x80\x05\x97.", "NEXT_BUFFER"),
        (b"\x80\x02}.", "EMPTY_DICT"),
        (b"\x80\x04\x8f.", "EMPTY_SET"),
        (b"\x80\x02X\x01\x00\x00\x00a.", "BINUNICODE"),
        (b"\x80\x02N.", "NONE"),
        (b"\x80\x02\x88.", "NEWTRUE"),
        (b"\x80\x02]2.", "DUP"),
        (b"\x80\x02]\xff.", "opcode 255"),
    ],
)
def test_every_other_instruction_is_refused(tmp_path, program, instruction):
    path = tmp_path / "evil.pkl"
    path.write_bytes(program)
    assert refused_instruction(path) == instruction


def test_an_extension_code_is_refused_though_python_knows_it(tmp_path):
    path = tmp_path / "evil.pkl"
    path.write_bytes(b"\x80\x02\x82\xf0.")
    copyreg.add_extension("os", "getpid", 0xF0)
    try:
        assert pickle.loads(path.read_bytes()) is os.getpid
        assert refused_instruction(path) == "EXT1"
    finally:
        copyreg.remove_extension("os", "getpid", 0xF0)


def test_a_pickle_inside_gzip_is_refused_as_well(tmp_path):
    path = tmp_path / "evil.pkl.gz"
    path.write_bytes(gzip.compress(pickle.dumps(Command("true"), 2)))
    assert refused_instruction(path) == "GLOBAL"


def test_numpy_numbers_are_refused_with_the_remedy(tmp_path):
    path = tmp_path / "numpy.pkl"
    path.write_bytes(pickle.dumps([(np.int64(3), 4)], 2))
    assert refused_instruction(path) == "GLOBAL"


def test_pairs_that_share_one_memory_are_pairs(tmp_path):
    path, pair = tmp_path / "shared.pkl", (300, 4)
    path.write_bytes(pickle.dumps([pair, pair, pair]))
    assert read(path).prompt_tokens.tolist() == [300, 300, 300]
