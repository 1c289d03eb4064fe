"""Two processes that write into one folder, and recordings of one name: neither loses a file of the other."""

from __future__ import annotations

import gc
import gzip
import subprocess
import sys

import pytest

from fragmeter import probe
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.sim.output.folders import FolderKind, OutputFolder
from fragmeter.sim.types.errors import SettingError

KIND = FolderKind("trial", ("*.json",))
#: Writes a file, says so, and keeps the folder until its input ends.
WRITER = """
import sys
from fragmeter.sim.output.folders import FolderKind, OutputFolder
folder = OutputFolder(sys.argv[1], FolderKind("trial", ("*.json",)))
folder.write("first.json", "1")
print("written", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def writer(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, tmp_path / "out"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "written\n"
    yield process
    process.kill()
    process.communicate()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_a_second_writer_is_refused_by_the_first_ones_number(writer, tmp_path):
    with pytest.raises(SettingError, match=f"is written by process {writer.pid}; wait"):
        OutputFolder(tmp_path / "out", KIND)
    writer.communicate("")
    OutputFolder(tmp_path / "out", KIND).write("second.json", "2")
    gc.collect()
    assert names(tmp_path / "out") == ["first.json", "fragmeter.json", "second.json"]


@pytest.mark.slow
def test_a_killed_writer_leaves_the_folder_open(writer, tmp_path):
    writer.kill()
    writer.communicate()
    OutputFolder(tmp_path / "out", KIND).write("second.json", "2")
    gc.collect()
    assert names(tmp_path / "out") == ["first.json", "fragmeter.json", "second.json"]


@pytest.mark.slow
def test_a_writer_that_began_before_there_was_a_folder_is_refused_at_its_first_file(tmp_path, request):
    late = OutputFolder(tmp_path / "out", KIND)
    first = request.getfixturevalue("writer")
    with pytest.raises(SettingError, match=f"is written by process {first.pid}; wait"):
        late.write("second.json", "2")
    assert "second.json" not in names(tmp_path / "out")


#: Claims a result, as a run does until it is written.
CLAIMER = """
import sys
from fragmeter.sim.metrics.result import check_target
claim = check_target(sys.argv[1])
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_second_run_into_one_result_is_refused_before_it_begins(tmp_path, capsys):
    """Both ended well, and the second one's results were gone."""
    out = tmp_path / "out"
    first = subprocess.Popen(
        [sys.executable, "-c", CLAIMER, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout.readline() == "claimed\n"
    assert status(["simulate", "--num-prompts", "5", "--out", str(out)]) == MISTAKE
    assert f"is written by process {first.pid}; wait for its end" in capsys.readouterr().err
    # A killed one leaves its file, which the next one takes and removes.
    first.kill()
    first.communicate()
    assert status(["simulate", "--num-prompts", "5", "--out", str(out)]) == DONE
    gc.collect()
    assert names(tmp_path) == ["out"]


def test_one_process_may_open_a_folder_twice(tmp_path):
    one, two = (OutputFolder(tmp_path / "out", KIND) for _ in range(2))
    one.write("first.json", "1")
    two.write("second.json", "2")
    assert {"first.json", "second.json"} <= {*names(tmp_path / "out")}


def test_a_restarted_server_keeps_the_recording_before_its_crash(tmp_path):
    path = str(tmp_path / "steps.jsonl.gz")
    for text in ("crashed", "second", "third"):
        with probe._new_file(path) as file:
            file.write(text)
    found = {each.name: gzip.open(each, "rt").read() for each in tmp_path.iterdir()}
    assert found == {"steps.jsonl.gz": "crashed", "steps.jsonl.1.gz": "second", "steps.jsonl.2.gz": "third"}
    with probe._new_file("/dev/null") as nowhere:
        assert nowhere.name == "/dev/null"
