"""What the user gets wrong: exit status 2, one line that says where and what to do, and nothing left behind."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from calibrations import document
from fragmeter.experiments.cli.app import FAULT, MISTAKE, status
from fragmeter.sim.output.files import write_whole
from fragmeter.sim.policy.registry import OPTIONAL, POLICIES
from fragmeter.sim.spec import gpu_names, model_names
from fragmeter.sim.types.errors import UserError

HEAD = "arrival_s,prompt_tokens,output_tokens\n"

TRACES = {
    "wrong column": (
        "arrival_s,prompt_tokens,reply\n0,7,5\n",
        ", line 1: columns = 'arrival_s,prompt_tokens,reply': no column output_tokens;"
        " name it output_tokens or output or output_length, or say by --columns which it is",
    ),
    "negative length": (
        HEAD + "0,7,5\n1,-3,5\n",
        ", line 3: prompt_tokens = -3: must be 1 or more; correct or drop the row",
    ),
    "NaN": (
        HEAD + "0,7,nan\n",
        ", line 2: output_tokens = nan: must be a whole number of tokens; correct the row",
    ),
    "arrivals far apart": (
        HEAD + "9e6,7,5\n9e6,7,5\n2,7,5\n",
        ", line 4: arrival_s = 2: is more than 97 days before the first; cut the trace, correct the row, or give"
        " --time-unit",
    ),
}


def refused(capsys: pytest.CaptureFixture, *tokens: object) -> str:
    """The one line that a mistaken command line is answered with."""
    assert status([str(token) for token in tokens]) == MISTAKE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("fragmeter: ").rstrip("\n")


@pytest.mark.parametrize(("text", "complaint"), TRACES.values(), ids=TRACES)
@pytest.mark.parametrize("verb", [["simulate"], ["reproduce", "fig2"]], ids=["simulate", "reproduce"])
def test_a_trace_that_cannot_be_true(text, complaint, verb, tmp_path, capsys):
    trace, out, data = tmp_path / "trace.csv", tmp_path / "out", tmp_path / "data.json"
    trace.write_text(text)
    line = refused(capsys, *verb, "--trace", trace, "--out", out, "--json", data)
    assert line == f"{trace}{complaint}"
    assert list(tmp_path.iterdir()) == [trace]


@pytest.mark.parametrize("verb", [["simulate"], ["reproduce", "all"]], ids=["simulate", "reproduce"])
def test_a_missing_file(verb, tmp_path, capsys):
    missing = tmp_path / "missing.csv"
    line = refused(capsys, *verb, "--trace", missing, "--out", tmp_path / "out")
    assert line == f"{missing}: no such file; check the path"
    assert not any(tmp_path.iterdir())


def test_a_request_longer_than_the_model_is_named_by_its_line(tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text(HEAD + "0,7,5\n\n1,2000,49\n")
    line = refused(capsys, "simulate", "--trace", trace, "--out", tmp_path / "out")
    assert line == (
        f"{trace}, line 4: prompt_tokens + output_tokens = 2049: longer than the model's 2048 tokens;"
        " shorten or drop the request, or take a longer model"
    )
    assert list(tmp_path.iterdir()) == [trace]


MISTAKES = {
    "policy": (
        ["simulate", "--policy", "fifo"],
        f"policy = 'fifo': one of {', '.join(POLICIES | OPTIONAL)}, or package.module:ClassName",
    ),
    "gpu": (
        ["simulate", "--gpu", "tpu", "--request-rate", "1"],
        f"gpu = 'tpu': one of {', '.join(gpu_names())}, or a JSON file of a GPU",
    ),
    "model": (
        ["simulate", "--model", "gpt-5"],
        f"model = 'gpt-5': one of {', '.join(model_names())}, or a path to a config.json",
    ),
    "setting": (
        ["simulate", "--block-size", "0"],
        "block_size = 0: must be at least 1",
    ),
    "window": (
        ["simulate", "--window", "9", "3"],
        "window = (9.0, 3.0): must end after it starts",
    ),
    "no arrivals": (
        ["compare", "--set", "block_size=8", "--set", "block_size=16", "--num-prompts", "5"],
        "request_rate: Synthetic sharegpt has no arrivals; give a request rate",
    ),
    "rate": (
        ["simulate", "--request-rate", "nan"],
        "request_rate = nan: must be positive; inf lets all requests arrive at 0",
    ),
    "share": (
        ["simulate", "--gpu-memory-utilization", "nan", "--request-rate", "1"],
        "gpu_memory_utilization = nan: must be a number",
    ),
    "attainment": (
        ["plan", "--gpu", "h200", "--model", "opt-13b", "--goodput", "ttft:500", "--attainment", "nan"],
        "attainment = 'nan': must be a number",
    ),
    "no model file": (
        ["simulate", "--model", "none/config.json"],
        "model = 'none/config.json': is no file here; give the path of a config.json, or a preset",
    ),
    "no model served": (
        ["plan", "--gpu", "h200", "--serve", "vllm serve"],
        "serve = 'vllm serve': names no model; paste a line with vllm serve MODEL",
    ),
    "no prompts": (
        ["simulate", "--num-prompts", "0", "--request-rate", "1"],
        "num_prompts = 0: must be 1 or more",
    ),
    "rule": (
        ["simulate", "--max-tokens", "half", "--request-rate", "1"],
        "max_tokens = 'half': choose true, pow2 or a number of tokens",
    ),
    "seed": (
        ["simulate", "--seed", "-1", "--request-rate", "1"],
        "seed = -1: must be at least 0",
    ),
    "tokens": (
        ["simulate", "--max-tokens", "9" * 5000, "--request-rate", "1"],
        f"max_tokens = '{'9' * 399}...: no model is that long; give at most 2147483648",
    ),
    "seeds": (["reproduce", "fig2", "--seeds", "0"], "seeds = 0: must be at least 1"),
    "flag for a file": (
        ["doctor", "--json", "--verbose"],
        "json = '--verbose': is a flag; name a file, or - for standard output",
    ),
}


@pytest.mark.parametrize(("tokens", "complaint"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistaken_command_line(tokens, complaint, capsys):
    assert refused(capsys, *tokens) == complaint


#: Files with a wrong content, and lines that name them in place of FILE.
FILES = {
    "an empty rate curve": (
        ["simulate", "--rate-curve", "FILE"],
        "",
        "FILE: is empty; give a header and one rate a line",
    ),
    "a log that is another file": (
        ["plan", "--gpu", "h200", "--serve", "vllm serve opt-13b", "--startup-log", "FILE"],
        "ERROR 11-26 out of disk\n",
        "startup_log = 'FILE': has none of the lines GPU KV cache size, Available KV cache memory, Maximum concurrency, # GPU blocks or Model loading took;"
        " give vLLM's output from its start",
    ),
    "a GPU without its memory": (
        ["simulate", "--request-rate", "1", "--gpu", "FILE"],
        '{"name": "x"}',
        "FILE: memory_bytes = None: is missing; give it",
    ),
    "a GPU with another field": (
        ["simulate", "--request-rate", "1", "--gpu", "FILE"],
        '{"colour": "x"}',
        "FILE: colour = 'x': is not a known field; correct its name, or leave it out",
    ),
}


@pytest.mark.parametrize(("tokens", "text", "complaint"), FILES.values(), ids=FILES)
def test_a_file_with_a_wrong_content(tokens, text, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = "given.json"
    (tmp_path / name).write_text(text)
    found = refused(capsys, *(token.replace("FILE", name) for token in tokens))
    assert found == complaint.replace("FILE", name)


def test_a_folder_without_a_model(tmp_path, capsys):
    found = refused(capsys, "simulate", "--model", tmp_path)
    assert found == f"model = '{tmp_path}': is a folder without a config.json; name another, or a preset"


BOUNDS = {
    "window": (["0", "1e30"], "8000000"),
    "swap_space": (["1e300"], "65536"),
    "step_scale": (["1e300"], "1000"),
    "num_gpu_blocks_override": (["100000000000"], "67108864"),
    "block_size": (["65537"], "65536"),
    "max_model_len": (["2147483649"], "2147483648"),
    "max_num_seqs": (["2147483649"], "2147483648"),
    "max_num_batched_tokens": (["2147483649"], "2147483648"),
}


@pytest.mark.parametrize(("field", "values", "most"), [(name, *row) for name, row in BOUNDS.items()], ids=BOUNDS)
def test_a_setting_beyond_any_machine(field, values, most, capsys):
    line = refused(capsys, "simulate", "--ids", "--request-rate", "1", f"--{field.replace('_', '-')}", *values)
    assert line == f"{field} = {float(values[-1]) if 'e' in values[-1] else int(values[-1])}: must be at most {most}"


def test_a_step_of_next_to_no_time(capsys):
    line = refused(capsys, "simulate", "--step-scale", "1e-300", "--request-rate", "1")
    assert line == "step_scale = 1e-300: must be at least 0.001"


# What only the model and the GPU can tell: named as the user's flag is.
MISFITS = {
    "ranks": (
        ["--tensor-parallel-size", "3"],
        "tensor_parallel_size = 3: must divide the 40 heads of opt-13b",
    ),
    "weights": (
        ["--model", "opt-175b"],
        "tensor_parallel_size = 1: opt-175b leaves no KV blocks on a100-40gb; use more or larger GPUs",
    ),
    "block": (
        ["--block-size", "65536"],
        "block_size = 65536: opt-13b leaves room for 15732 slots on 1 x a100-40gb; take smaller blocks",
    ),
    "cost": (
        ["--cost", "vidur"],
        "cost = 'vidur': one of paper, roofline, fitted, or the path of a calibration file (.json)",
    ),
    "no calibration": (
        ["--cost", "none.json"],
        "cost = 'none.json': cannot be read: No such file or directory",
    ),
    "length": (
        ["--max-model-len", "99999"],
        "max_model_len = 99999: opt-13b has positions for 2048; give no more",
    ),
}


@pytest.mark.parametrize(("tokens", "complaint"), MISFITS.values(), ids=MISFITS)
def test_a_setting_that_does_not_fit_the_model_or_the_gpu(tokens, complaint, capsys):
    assert refused(capsys, "simulate", "--request-rate", "1", "--num-prompts", "5", *tokens) == complaint


def test_a_calibration_file_with_a_wrong_field(tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document(gemm={"coefficients": {"t0_us": -1}})))
    line = refused(capsys, "simulate", "--request-rate", "1", "--num-prompts", "5", "--cost", path)
    where = "mine.json: ops.gemm.coefficients.t0_us = -1"
    assert line == f"{where}: must be at least 0"


def test_a_seed_is_checked_also_where_nothing_is_drawn(tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text(HEAD + "0,7,5\n")
    assert refused(capsys, "simulate", "--trace", trace, "--seed", "-1") == "seed = -1: must be at least 0"


PARSING = {
    "short flag": (
        ["simulate", "-dp", "2"],
        ["-dp: fragmeter simulate has no such flag; did you mean --data-parallel-size?"],
    ),
    "flag": (["simulate", "--polcy", "orca"], ["--polcy: fragmeter simulate has no such flag; did you mean --policy?"]),
    "flag by its noun": (
        ["simulate", "--rate", "2"],
        ["--rate: fragmeter simulate has no such flag; did you mean --request-rate?"],
    ),
    "flag by its first words": (["simulate", "--max-num", "2"], ["did you mean --max-num-seqs?"]),
    "number": (["simulate", "--request-rate", "x"], ["request_rate = 'x': must be a number"]),
    "share": (["compare", "--confidence", "x"], ["confidence = 'x': must be a number"]),
    "switch": (["simulate", "--ids=perhaps"], ["ids = 'perhaps': must be true or false"]),
    "choice": (["simulate", "--quantization", "int3"], ["quantization = 'int3': one of awq, gptq, int8, fp8"]),
    "verb": (["reprodce"], ["command = 'reprodce': one of reproduce, simulate, ", "; did you mean reproduce?"]),
    "verb of traces": (["traces", "stat"], ["command = 'stat': one of list, get, ", "; did you mean stats?"]),
    "figure": (["reproduce", "fig99"], ["figure = 'fig99': one of table1, fig1, fig3, "]),
    "no figure": (["reproduce"], ["FIGURE: needs a value; see fragmeter reproduce --help"]),
    "no value": (["simulate", "--gpu"], ["--gpu: needs a value; see fragmeter simulate --help"]),
    "one value of two": (["simulate", "--window", "3"], ["--window: needs 2 values; see fragmeter simulate --help"]),
    "twice": (["simulate", "--seed", "1", "--seed", "2"], ["--seed: is given more than once; keep one"]),
    "too much": (["doctor", "twice"], ["twice: fragmeter doctor takes no further arguments; leave it out"]),
}


@pytest.mark.parametrize(("tokens", "named"), PARSING.values(), ids=PARSING)
def test_a_command_line_that_cannot_be_parsed(tokens, named, capsys):
    line = refused(capsys, *tokens)
    assert [word for word in named if word in line] == named


def test_a_trace_shorter_than_what_is_asked_for(tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text(HEAD + "0,7,5\n")
    assert refused(capsys, "simulate", "--trace", trace, "--num-prompts", 2) == (
        "num_prompts = 2: the trace has no more than 1; ask for fewer"
    )
    assert refused(capsys, "simulate", "--trace", trace, "--dataset", "alpaca") == (
        "--trace and --dataset exclude each other; give one of them"
    )


@pytest.mark.parametrize(
    "verb", [["simulate", "--request-rate", "1"], ["reproduce", "waste"]], ids=["simulate", "reproduce"]
)
@pytest.mark.parametrize("flag", ["--out", "--json"])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(verb, flag, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fragmeter.sim.engine.engine.Engine.__init__", lambda *_: pytest.fail("was run"))
    file = tmp_path / "file"
    file.touch()
    line = refused(capsys, *verb, flag, file / "below")
    assert line == f"{file / 'below'}: cannot be written (Not a directory); choose another place"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_is_no_file_for_the_data(tmp_path, capsys):
    assert refused(capsys, "doctor", "--json", tmp_path) == f"{tmp_path}: is a folder; name a file"


def test_a_write_that_fails_leaves_the_old_file_and_no_part(tmp_path, monkeypatch):
    target = tmp_path / "data.json"
    target.write_text("old")

    class Full(io.FileIO):
        def write(self, content: bytes) -> int:
            super().write(content[:3])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda self, mode: Full(self, mode))
    with pytest.raises(UserError, match="data.json: cannot be written \\(No space left on device\\)"):
        write_whole(target, "new and longer")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"data.json": b"old"}


class TestAFaultOfOurs:
    @pytest.fixture(autouse=True)
    def _broken(self, monkeypatch):
        def broken() -> None:
            raise ZeroDivisionError("two\nlines")

        monkeypatch.setattr("fragmeter.experiments.cli.doctor.probe", broken)

    def test_is_one_line_that_says_how_to_report_it(self, capsys, monkeypatch):
        monkeypatch.delenv("FRAGMETER_DEBUG", raising=False)
        assert status(["doctor"]) == FAULT
        assert capsys.readouterr().err == (
            "fragmeter: an internal fault (ZeroDivisionError: two lines);"
            " please report it with the output of FRAGMETER_DEBUG=1\n"
        )

    def test_shows_its_traceback_where_that_is_asked_for(self, capsys, monkeypatch):
        monkeypatch.setenv("FRAGMETER_DEBUG", "1")
        assert status(["doctor"]) == FAULT
        error = capsys.readouterr().err
        assert error.startswith("Traceback (most recent call last)")
        assert error.endswith("the output of FRAGMETER_DEBUG=1\n")
