"""What a command writes never destroys what is not its own, and it is known to be writable before anything runs."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from cli_runs import command
from fragmeter.experiments.cli.app import DONE, MISTAKE, NO_READER, status
from fragmeter.sim.output import files
from fragmeter.sim.output.files import leftover_name, require_apart, require_writable_file, write_whole
from fragmeter.sim.output.folders import MARKER, FolderKind, OutputFolder, check_folder, replace_folder, restore
from fragmeter.sim.types.errors import UserError

LOAD = ["--num-prompts", "3", "--request-rate", "5"]
SIMULATE = ["simulate", *LOAD]
SWEEP = ["sweep", "--num-prompts", "3", "--grid", "request_rate=5", "--jobs", "1"]
PLAN = ["plan", "--model", "opt-13b", "--gpu", "a100-80gb", "--goodput", "ttft:2000", "--num-prompts", "3"]
KIND = FolderKind("test", ("a", "b", "parts/*.json"), marker="run.json", recognises=lambda run: run["ours"])


@pytest.fixture(scope="module")
def a_result(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("results") / "run"
    assert status([*SIMULATE, "--out", str(folder)]) == DONE
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def never_run(monkeypatch) -> None:
    """Nothing may be simulated in this test."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a run was begun")

    for place in (
        "runs.serving.serve_one",
        "runs.serving.simulate_cluster",
        "runs.sweeping.simulate",
        "capacity.tasks.carry_out",
    ):
        monkeypatch.setattr(f"fragmeter.experiments.{place}", fail)


def refused(capsys, *tokens: object) -> str:
    """The one line of a command that is refused."""
    assert status([*map(str, tokens)]) == MISTAKE
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


class TestAFolderOfTheUsers:
    """Every command that writes a folder leaves it alone, and says which file is in the way."""

    COMMANDS = {
        "simulate": (*SIMULATE, "--out"),
        "cluster": (*SIMULATE, "--num-replicas", "2", "--out"),
        "sweep": (*SWEEP, "--out"),
        "plan": (*PLAN, "--out"),
        "reproduce": ("reproduce", "table1", "--out"),
        "validate": ("validate", "--quick", "--out"),
        "against": ("validate", "--against", "missing.json", "--gpu", "h100-80gb", "--out"),
        "images": ("report", "RESULT", "--out", "PAGE", "--images"),
    }

    @pytest.mark.parametrize("tokens", COMMANDS.values(), ids=COMMANDS)
    @pytest.mark.parametrize(
        "files",
        [
            {"run.json": '{"name": "x"}', "src/main.py": "pass"},
            {"run.json": '{"name": "x"}'},
            {"run.json": "{", ".git/HEAD": "ref"},
            {MARKER: '{"schema_version": 1, "kind": "something else"}'},
            {"notes.txt": "mine"},
        ],
        ids=["a run.json and sources", "a run.json", "a repository", "a marker of another kind", "notes"],
    )
    def test_is_left_alone(self, tokens, files, a_result, never_run, tmp_path, capsys):
        folder = tmp_path / "proj"
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        places = {"RESULT": a_result, "PAGE": tmp_path / "page.html"}
        before = contents(folder)
        line = refused(capsys, *(places.get(token, token) for token in tokens), folder)
        assert "holds files, but no" in line or any(f"holds {name.partition('/')[0]}, which" in line for name in files)
        assert contents(folder) == before

    def test_a_result_with_a_file_of_the_users_is_left_alone(self, a_result, never_run, tmp_path, capsys):
        folder = tmp_path / "run"
        folder.mkdir()
        for name, content in contents(a_result).items():
            (folder / name).write_bytes(content)
        (folder / "notes.txt").write_text("mine")
        line = refused(capsys, *SIMULATE, "--out", folder)
        assert "holds notes.txt, which is not a file of a simulation result" in line and "move that file away" in line
        (folder / "notes.txt").unlink()
        (folder / "kept").symlink_to(a_result)
        assert "holds kept" in refused(capsys, *SIMULATE, "--out", folder)

    @pytest.mark.parametrize("change", [{"schema_version": 99}, {"settings": None}, {"settings": {}}])
    def test_a_run_json_of_another_kind_is_no_result(self, change, a_result, never_run, tmp_path, capsys):
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps(json.loads((a_result / "run.json").read_text()) | change))
        assert "no run.json of a simulation result" in refused(capsys, *SIMULATE, "--out", folder)

    @pytest.mark.slow
    def test_what_appears_during_the_run_is_left_alone_and_the_results_are_kept(self, tmp_path, monkeypatch, capsys):
        from fragmeter.experiments.cli import simulate as verb_simulate

        out = tmp_path / "run"
        assert status([*SIMULATE, "--out", str(out)]) == DONE
        serve = verb_simulate.serve

        def meanwhile(*args: object, **more: object) -> object:
            (out / "notes.txt").write_text("mine")
            return serve(*args, **more)

        monkeypatch.setattr(verb_simulate, "serve", meanwhile)
        before = contents(out)
        assert status([*SIMULATE, "--seed", "1", "--out", str(out)]) == MISTAKE
        assert f"the results of this run are in {out}.new" in capsys.readouterr().err
        assert contents(out) == before | {"notes.txt": b"mine"}
        assert json.loads((tmp_path / "run.new" / "run.json").read_text())["settings"]["seed"] == 1


class TestAPlaceThatCannotBeReplaced:
    @pytest.mark.parametrize("name", [".", "..", "./", "../run", "link"])
    @pytest.mark.parametrize("tokens", [SIMULATE, SWEEP], ids=["simulate", "sweep"])
    def test_the_current_folder_and_those_above_are_refused(
        self, tokens, name, a_result, never_run, monkeypatch, capsys, tmp_path
    ):
        folder = tmp_path / "above" / "run"
        folder.mkdir(parents=True)
        for each, content in contents(a_result).items():
            (folder / each).write_bytes(content)
        monkeypatch.chdir(folder)
        (tmp_path / "link").symlink_to(folder)
        target = tmp_path / "link" if name == "link" else name
        before = contents(folder)
        line = refused(capsys, *tokens, "--out", target)
        assert "is the current folder, or one above it; name a folder inside it, such as" in line
        assert contents(folder) == before

    @pytest.mark.skipif(not os.path.ismount("/proc"), reason="this system has no /proc")
    def test_a_mount_point_is_refused(self, never_run, tmp_path, capsys):
        (tmp_path / "link").symlink_to("/proc")
        for place in ("/proc", tmp_path / "link"):
            line = refused(capsys, *SIMULATE, "--out", place)
            assert f"is a mount point; name a folder inside it, such as {place}/result" in line

    def test_a_bind_mount_is_a_mount_point(self, never_run, tmp_path, monkeypatch, capsys):
        """As a container mounts a folder of the file system that it is on: only the kernel's table says so."""
        mounted = tmp_path / "with a blank"
        mounted.mkdir()
        table = f"26 1 0:1 /a {str(mounted).replace(' ', chr(92) + '040')} rw - ext4 /dev/sda rw\n"
        read_text = Path.read_text
        monkeypatch.setattr(
            Path, "read_text", lambda path, *more: table if str(path).endswith("mountinfo") else read_text(path, *more)
        )
        assert "is a mount point" in refused(capsys, *SIMULATE, "--out", mounted)

    @pytest.mark.slow
    def test_a_link_to_a_result_is_followed(self, tmp_path):
        link, folder = tmp_path / "latest", tmp_path / "run-1"
        link.symlink_to(folder)
        for seed in (1, 2):
            assert status([*SIMULATE, "--seed", str(seed), "--out", str(link)]) == DONE
            assert link.is_symlink() and not folder.is_symlink()
            assert json.loads((folder / "run.json").read_text())["settings"]["seed"] == seed
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "run-1"]


#: Places that take no file, and commands with a file as their last word.
FILE_PLACES = {
    "missing folder": "missing/data.json",
    "a file as folder": "file/data.json",
    "a folder": "folder",
    "a long name": "x" * 300,
    "a loop of links": "loop",
}
FILE_COMMANDS = {
    "simulate": (*SIMULATE, "--json"),
    "a recorded plan": (*SIMULATE, "--record-plan"),
    "sweep": (*SWEEP, "--out", "out", "--json"),
    "compare": ("compare", "--waste", "--num-prompts", "3", "--out"),
    "report": ("report", "RESULT", "--perfetto"),
    "convert": ("traces", "convert", "trace.csv"),
    "sample": ("traces", "sample", "load.json"),
    "synth": ("traces", "synth", "trace.csv", "--out"),
    "calibrate": ("calibrate", "--quick", "--out"),
    "doctor": ("doctor", "--json"),
}


class TestNothingRunsBeforeOutputsAreWritable:
    @pytest.mark.parametrize(
        ("tokens", "place"),
        [
            pytest.param(tokens, place, id=f"{name}, {label}")
            for name, tokens in FILE_COMMANDS.items()
            for label, place in FILE_PLACES.items()
            # The report makes missing folders.
            if (name, label) != ("report", "missing folder")
        ],
    )
    def test_a_file(self, tokens, place, a_result, never_run, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "file").write_text("mine")
        ending = ".csv" if tokens[:2] in (("traces", "convert"), ("traces", "sample")) else ""
        place += ending
        (tmp_path / f"folder{ending}").mkdir()
        (tmp_path / f"loop{ending}").symlink_to(f"loop{ending}")
        line = refused(capsys, *(str(a_result) if token == "RESULT" else token for token in tokens), place)
        assert place in line
        assert (tmp_path / "file").read_text() == "mine"
        assert {path.name for path in tmp_path.iterdir()} == {"file", f"folder{ending}", f"loop{ending}"}

    @pytest.mark.parametrize("place", ["file", "file/run", "x" * 300, "loop"])
    @pytest.mark.parametrize("tokens", [SIMULATE, SWEEP, PLAN, ["reproduce", "table1"]], ids=lambda tokens: tokens[0])
    def test_a_folder(self, tokens, place, never_run, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "file").write_text("mine")
        (tmp_path / "loop").symlink_to("loop")
        assert place in refused(capsys, *tokens, "--out", place)
        assert (tmp_path / "file").read_text() == "mine"

    def test_a_write_protected_file_is_refused(self, tmp_path, monkeypatch):
        target = tmp_path / "data.json"
        target.write_text("kept")
        monkeypatch.setattr(os, "access", lambda path, mode: os.fspath(path) != os.fspath(target))
        with pytest.raises(UserError, match="data.json: is write-protected; choose another place"):
            require_writable_file(target)

    @pytest.mark.parametrize(
        ("outputs", "complaint"),
        [
            (("--out", "run", "--json", "run/summary.json"), "out = 'HERE/run': is the folder of json = "),
            (("--json", "same", "--record-plan", "same"), "record_plan = 'HERE/same': is also json = 'HERE/same'"),
            (("--trace", "trace.csv", "--json", "trace.csv"), "json = 'HERE/trace.csv': is also trace = "),
            (("--trace", "run/requests.parquet", "--out", "run"), "out = 'HERE/run': is the folder of trace = "),
        ],
    )
    def test_outputs_that_would_destroy_each_other_or_an_input_are_refused(
        self, outputs, complaint, never_run, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "trace.csv").write_text("prompt_tokens,output_tokens\n1,1\n")
        (tmp_path / "run").mkdir()
        line = refused(capsys, *SIMULATE, *outputs)
        assert complaint.replace("HERE", str(tmp_path)) in line
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "trace.csv"]

    SERVE = "vllm serve meta-llama/Llama-2-7b-hf"

    @pytest.mark.parametrize(
        ("tokens", "lost"),
        [
            (("compare", "run", "run", "--json", "run/run.json"), "run/run.json"),
            (("report", "run", "--out", "run/requests.parquet"), "run/requests.parquet"),
            (("report", "run", "--perfetto", "run/summary.json"), "run/summary.json"),
            (("sweep", "--grid", "trace=b.csv,trace.csv", "--out", "new", "--json", "trace.csv"), "trace.csv"),
            (("compare", "--set", "seed=1,trace=trace.csv", "--set", "seed=1", "--json", "trace.csv"), "trace.csv"),
            ((*SIMULATE, "--model", "config.json", "--json", "config.json"), "config.json"),
            ((*SIMULATE, "--cost", "config.json", "--out", "new", "--json", "config.json"), "config.json"),
            (("plan", "--serve", "serve.txt", "--gpu", "h200", "--json", "serve.txt"), "serve.txt"),
            (("plan", "--serve", SERVE, "--gpu", "h200", "--startup-log", "log", "--json", "log"), "log"),
            ((*PLAN, "--prices", "prices.json", "--json", "prices.json"), "prices.json"),
            (
                ("validate", "--against", "b.json", "--gpu", "h200", "--serve", "serve.txt", "--json", "serve.txt"),
                "serve.txt",
            ),
            (("traces", "stats", "trace.csv", "--tokenizer", "config.json", "--json", "config.json"), "config.json"),
            (("reproduce", "fig2", "--trace", "trace.csv", "--json", "trace.csv"), "trace.csv"),
        ],
    )
    def test_no_input_is_overwritten_whatever_names_it(
        self, tokens, lost, a_result, never_run, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.chdir(tmp_path)
        for name in ("trace.csv", "b.csv", "config.json", "serve.txt", "log", "prices.json", "b.json"):
            (tmp_path / name).write_text("mine")
        (tmp_path / "run").mkdir()
        for name, content in contents(a_result).items():
            (tmp_path / "run" / name).write_bytes(content)
        before = contents(tmp_path)
        assert f"{tmp_path / lost}'; choose another place" in refused(capsys, *tokens)
        assert contents(tmp_path) == before

    @pytest.mark.slow
    def test_a_page_in_the_folder_of_its_run_is_written_again(self, a_result, tmp_path):
        (tmp_path / "run").mkdir()
        for name, content in contents(a_result).items():
            (tmp_path / "run" / name).write_bytes(content)
        for _ in range(2):
            assert status(["report", str(tmp_path / "run"), "--out", str(tmp_path / "run" / "page.html")]) == DONE

    @pytest.mark.slow
    def test_a_folder_may_have_the_name_of_a_policy(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for _ in range(2):
            assert status([*SIMULATE, "--policy", "orca-max", "--out", "orca-max"]) == DONE

    def test_the_config_in_the_folder_of_a_model_is_an_input(self, never_run, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "llama").mkdir()
        (tmp_path / "llama" / "config.json").write_text("mine")
        assert "choose another place" in refused(capsys, *SIMULATE, "--model", "llama", "--json", "llama/config.json")
        assert (tmp_path / "llama" / "config.json").read_text() == "mine"

    def test_streams_may_be_shared(self):
        require_apart({"json": "/dev/null", "out": "/dev/null"}, {"trace": ["/dev/stdin"]})


class TestWhatIsNoFile:
    @pytest.fixture
    def fifo(self, tmp_path) -> Iterator[Callable[[], bytes]]:
        """A named pipe with a reader; what the reader got."""
        os.mkfifo(tmp_path / "pipe")
        got: list[bytes] = []
        reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()), daemon=True)
        reader.start()
        yield lambda: (reader.join(timeout=60), got[0])[1]

    def test_a_pipe_is_written_into(self, fifo, tmp_path):
        # The reader's thread may not have opened the pipe yet: until then it has no reader.
        while True:
            try:
                write_whole(tmp_path / "pipe", "content")
                break
            except UserError:
                continue
        assert fifo() == b"content"
        assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)

    def test_a_pipe_without_a_reader_is_an_error_and_no_wait(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(UserError, match="pipe: cannot be written"):
            write_whole(tmp_path / "pipe", "content")

    @pytest.mark.parametrize("device", ["/dev/null", "/dev/full"])
    def test_a_device_remains_a_device(self, device, capsys):
        if not os.path.exists(device):
            pytest.skip(f"this system has no {device}")
        expected = DONE if device == "/dev/null" else MISTAKE
        assert status(["doctor", "--json", device]) == expected
        assert stat.S_ISCHR(os.stat(device).st_mode)
        if expected == MISTAKE:
            assert capsys.readouterr().err == (
                "fragmeter: /dev/full: cannot be written (No space left on device); choose another place\n"
            )

    def test_a_link_is_kept_and_its_file_is_replaced(self, tmp_path):
        target, link = tmp_path / "data.json", tmp_path / "link.json"
        target.write_text("old")
        target.chmod(0o640)
        link.symlink_to("data.json")
        assert status(["doctor", "--json", str(link)]) == DONE
        assert link.is_symlink() and json.loads(target.read_text())["parts"]
        assert stat.S_IMODE(target.stat().st_mode) == 0o640
        dangling = tmp_path / "dangling.json"
        dangling.symlink_to("new.json")
        write_whole(dangling, "content")
        assert dangling.is_symlink() and (tmp_path / "new.json").read_text() == "content"

    @pytest.mark.slow
    @pytest.mark.parametrize("target", ["-", "/dev/stdout", "/dev/fd/1"])
    def test_standard_output_takes_one_document_and_no_text(self, target, tmp_path):
        with (tmp_path / "printed").open("w") as printed:
            done = subprocess.run(command("traces", "list", "--json", target), stdout=printed, timeout=60)
        assert done.returncode == DONE
        assert {"sets", "public"} <= json.loads((tmp_path / "printed").read_text()).keys()
        piped = subprocess.run(command("traces", "list", "--json", target), capture_output=True, timeout=60)
        assert json.loads(piped.stdout) == json.loads((tmp_path / "printed").read_text())

    @pytest.mark.slow
    def test_a_page_goes_to_standard_output(self, a_result, capsys, tmp_path):
        assert status(["report", str(a_result), "--out", "-"]) == DONE
        printed = capsys.readouterr().out
        assert printed.startswith("<!DOCTYPE html>") and printed.rstrip().endswith("</html>")
        assert status(["report", str(a_result), "--out", "-", "--json", "-"]) == MISTAKE
        assert "standard output has json already; name a file" in capsys.readouterr().err

    @pytest.mark.slow
    def test_a_reader_that_leaves_ends_the_program_quietly(self):
        line = f"{sys.executable} -m fragmeter traces list --json - | head -c 10 >/dev/null; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
        # Small enough to be in the pipe before its reader has gone, or not.
        assert done.stdout.strip() in (str(NO_READER), str(DONE)) and done.stderr == ""

    @pytest.mark.slow
    @pytest.mark.parametrize("tokens", [["simulate", "--help"], ["traces", "list"]], ids=["help", "text"])
    def test_so_does_a_reader_that_reads_nothing(self, tokens):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(command(*tokens), stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
        os.close(write)
        assert (done.returncode, done.stderr) == (NO_READER, "")


class TestALeftover:
    """Files that a killed command leaves beside a target go when the next one writes it; the user's stay."""

    @pytest.mark.slow
    def test_part_files_of_dead_processes_go_and_those_of_live_ones_are_kept(self, tmp_path):
        target = tmp_path / "data.json"
        dead, living = (tmp_path / leftover_name(target, f"{pid}-part") for pid in (1, 2))
        other = tmp_path / leftover_name(tmp_path / "other.json", "3-part")
        for path in (dead, other):
            path.write_text("half")
        script = "import sys; from fragmeter.sim.output.files import hold; f = open(sys.argv[1], 'w');"
        script += "print(hold(f.fileno()), flush=True); sys.stdin.read()"
        holder = subprocess.Popen(
            [sys.executable, "-c", script, living], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert holder.stdout.readline() == "True\n"
        require_writable_file(target)
        assert not dead.exists() and living.exists() and other.exists()
        holder.communicate("")
        require_writable_file(target)
        assert not living.exists() and other.exists()

    def test_a_new_folder_of_the_dead_goes_with_its_own_files_alone(self, tmp_path):
        out = tmp_path / "run"
        for number, extra in (("1", ()), ("2", ("notes.txt",))):
            left = tmp_path / leftover_name(out, f"new-{number}")
            left.mkdir()
            for name in ("a", *extra):
                (left / name).write_text("x")
        check_folder(out, KIND)
        [kept] = tmp_path.iterdir()
        assert kept.name.endswith("new-2") and (kept / "notes.txt").exists()

    def test_part_files_in_a_folder_of_ours_go(self, tmp_path):
        folder = OutputFolder(tmp_path / "out", FolderKind("test", ("a", "parts/*.json")))
        folder.write("a", "1")
        folder.write("parts/b.json", "2")
        left = tmp_path / "out" / "parts" / leftover_name(tmp_path / "x", "9-part")
        left.write_text("half")
        # Its claim of the folder goes with it.
        del folder
        OutputFolder(tmp_path / "out", FolderKind("test", ("a", "parts/*.json")))
        assert not left.exists()
        assert contents(tmp_path / "out").keys() == {"a", "parts/b.json", MARKER}


def test_a_replaced_folder_keeps_its_mode_and_nothing_is_left_beside_it(tmp_path):
    out = tmp_path / "run"
    for text in ("1", "2"):
        writers = {"run.json": lambda path: path.write_text('{"ours": true}'), "a": partial(Path.write_text, data=text)}
        replace_folder(out, KIND, writers)
        assert (out / "a").read_text() == text
        out.chmod(0o750)
    replace_folder(out, KIND, writers)
    assert stat.S_IMODE(out.stat().st_mode) == 0o750
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_writer_that_fails_leaves_the_earlier_folder(tmp_path):
    def fails(_: Path) -> None:
        raise OSError(28, "No space left on device")

    out = tmp_path / "run"
    replace_folder(out, KIND, {"run.json": lambda path: path.write_text('{"ours": true}')})
    with pytest.raises(UserError, match="cannot be written .No space left on device.; choose another place"):
        replace_folder(out, KIND, {"a": lambda path: path.write_text("half"), "run.json": fails})
    assert contents(out) == {"run.json": b'{"ours": true}'}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("locks", ["of a living process", "of the dead", "none"])
def test_an_old_result_gets_its_name_back_unless_its_command_lives(locks, tmp_path, monkeypatch):
    """The state between the two renames of a system that cannot exchange names."""
    out = tmp_path / "run"
    old = tmp_path / leftover_name(out, "old")
    old.mkdir()
    (old / "a").write_text("1")
    if locks == "none":
        monkeypatch.setitem(sys.modules, "fcntl", None)
    holder = os.open(old, os.O_RDONLY)
    if locks == "of a living process":
        assert files.hold(holder)
    restore(out)
    os.close(holder)
    assert out.exists() == (locks != "of a living process") and old.exists() != out.exists()


def test_results_are_read_under_the_name_that_a_killed_command_left(a_result, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(a_result, tmp_path / leftover_name(out, "old"))
    assert status(["compare", str(out), str(a_result), "--json", "-"]) == DONE
    assert contents(out) == contents(a_result)
