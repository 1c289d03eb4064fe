"""Flags of ``vllm serve`` by release: each is simulated, of no effect, or not simulated with its reason."""

from __future__ import annotations

import json
import runpy

import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.vllm_serve.flags import (
    CHANGES_MEMORY,
    NOT_SIMULATED,
    READ,
    UNCHANGED,
    VARIABLES,
    VARIABLES_OF_TIMES,
    flags,
    releases,
    spellings,
)
from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.sim.spec.kernels import EXPERTS_VARIABLES
from fragmeter.sim.types.errors import SettingError, UserError
from paths import ROOT

CONFIG = {"config"}
#: Flags without an effect on memory, scheduling or step times; a new flag of vLLM's is read before it is put here.
IGNORED = set((ROOT / "tests" / "data" / "vllm_flags_without_effect.txt").read_text("utf-8").split())
READ_VARIABLES = {
    "VLLM_ALL2ALL_BACKEND", "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "VLLM_ATTENTION_BACKEND", "VLLM_DEEPEP_BUFFER_SIZE_MB",
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "VLLM_PP_LAYER_PARTITION", "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_USE_V1",
    *EXPERTS_VARIABLES,
}  # fmt: skip


def test_every_flag_of_vllm_has_one_answer():
    lists = [READ, IGNORED, NOT_SIMULATED.keys(), CONFIG]
    assert sum(map(len, lists)) == len(set().union(*lists))
    assert set().union(*lists) == flags().keys()
    assert CHANGES_MEMORY.keys() <= NOT_SIMULATED.keys()
    variables = [READ_VARIABLES, VARIABLES.keys(), VARIABLES_OF_TIMES.keys()]
    assert sum(map(len, variables)) == len(set().union(*variables))
    assert set(spellings().values()) <= flags().keys()


def test_releases_are_those_that_were_read():
    assert (releases()[0], releases()[-1]) == ((0, 8), (0, 33)) and len(releases()) == 26
    known = flags()
    # As the sources of 0.17 and 0.22 have them.
    assert (known["swap-space"].last, known["spec-method"].first) == ((0, 17), (0, 22))
    assert known["swap-space"].is_of((0, 6)) and not known["swap-space"].is_of((0, 18))


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("--enable-prefix-caching", True),
        ("--no-enable-prefix-caching", False),
        ("--disable-prefix-caching", False),
        ("--enable-prefix-caching=false", False),
        ("--enable_prefix_caching", True),
        ("--enable-prefix", True),
    ],
)
def test_spellings_of_a_switch(written, value):
    assert parse_serve(f"vllm serve opt-13b {written}").flags == {"enable-prefix-caching": value}


def test_a_flag_with_a_value_takes_it():
    """A list of paths was taken for a second model."""
    line = parse_serve("vllm serve opt-13b --disable-access-log-for-endpoints /health,/metrics --max-num-seqs 8")
    assert (line.model, line.flags) == ("opt-13b", {"max-num-seqs": "8"})


@pytest.mark.parametrize(
    "written",
    [
        "--no-enable-sleep-mode",
        "--enable-sleep-mode=false",
        "--runner generate",
        "--mm-processor-cache-gb 0",
    ],
)
def test_what_is_turned_off_takes_no_memory(written):
    line = parse_serve(f"vllm serve opt-13b {written}")
    assert not line.not_simulated and not line.uncounted and line.ignored


def test_values_that_change_nothing_are_of_flags_that_are_not_simulated():
    assert UNCHANGED.keys() <= NOT_SIMULATED.keys()
    assert parse_serve("vllm serve opt-13b --runner pooling").uncounted_names == ["--runner"]


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve opt-13b --max-num-seqs 8; echo started",
        "docker run --entrypoint vllm vllm/vllm-openai:v0.21.0 serve opt-13b --max-num-seqs 8",
        "export MODEL=opt-13b SEQS=8; vllm serve $MODEL --max-num-seqs ${SEQS}",
        "IMAGE=vllm/vllm-openai:v0.21.0\ndocker run -e VLLM_USE_V1=1 $IMAGE --model ${MODEL:-opt-13b} --max-num-seqs 8",
    ],
)
def test_a_line_within_others_ends_and_begins_where_a_shell_and_a_container_say(text):
    line = parse_serve(text)
    assert (line.model, line.whole("max-num-seqs")) == ("opt-13b", 8)
    assert all(";" not in value for value in line.environment.values())
    assert line.version == ((0, 21) if "v0.21.0" in text else None)


@pytest.mark.parametrize(
    ("given", "gpus"),
    [
        ("--gpus 2", 2),
        ("--gpus=all", None),
        ("--gpus '\"device=0,3\"'", 2),
        ("--gpus device=GPU-3a23c669", 1),
        ("", None),
    ],
)
def test_the_gpus_of_a_container_are_those_of_the_line(given, gpus):
    assert parse_serve(f"docker run {given} -p 80:80 vllm/vllm-openai:v0.21.0 opt-13b -tp 2").gpus == gpus


def test_a_comment_ends_a_line():
    line = parse_serve("vllm serve opt-13b \\\n  --max-model-len 1024        # half of 2K")
    assert (line.model, line.flags) == ("opt-13b", {"max-model-len": "1024"})


def test_drafts_by_flags_of_their_own_are_those_of_the_object():
    apart = parse_serve("vllm serve opt-13b --spec-method ngram --spec-tokens 3")
    assert apart.flags == {"speculative-config": '{"method": "ngram", "num_speculative_tokens": 3}'}
    with pytest.raises(SettingError, match="excludes method"):
        parse_serve("""vllm serve opt-13b --spec-method ngram -sc '{"method": "ngram", "num_speculative_tokens": 3}'""")


def test_a_flag_of_another_release_is_named():
    line = "vllm serve opt-13b --swap-space 4 --spec-method ngram --spec-tokens 3"
    assert parse_serve(line, (0, 16)).of_other_releases == ["--spec-method (since 0.22)", "--spec-tokens (since 0.22)"]
    assert parse_serve(line).of_other_releases == ["--swap-space (up to 0.17)"]
    assert parse_serve("vllm serve opt-13b --seed 1", (0, 5)).of_other_releases == []


@pytest.mark.parametrize(("release", "starts"), [("0.18", False), ("0.17", True), (None, True)])
def test_a_flag_that_the_stated_release_does_not_have_is_the_answer(release, starts, tmp_path, capsys):
    stated = [] if release is None else ["--vllm", release]
    line = "vllm serve opt-13b --swap-space 4 --seed 1"
    assert (
        status(["plan", "--gpu", "h100-80gb", *stated, "--serve", line, "--json", str(tmp_path / "found.json")]) == DONE
    )
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert found["parser_error"] == (None if starts else "unrecognized arguments: --swap-space 4")
    assert (found["starts"], found["outcome"]) == ((True, "starts") if starts else (False, "does not start"))
    # What would happen without the flag.
    assert found["memory"]["kv_cache_bytes"] > 20 << 30
    assert capsys.readouterr().out.startswith("It starts" if starts else "It does not start")


def test_what_no_release_has_is_refused_and_what_one_may_have_is_named():
    with pytest.raises(UserError, match="no release of vLLM from 0.8 to 0.33 has it; did you mean --max-num-seqs"):
        parse_serve("vllm serve opt-13b --max-num-seq-s 5")
    line = parse_serve("vllm serve opt-13b --of-tomorrow 5 --also --max-num-seqs 8", (0, 34))
    assert line.flags == {"max-num-seqs": "8"}
    assert line.uncounted_names == ["--of-tomorrow", "--also"]


def test_images_of_other_projects_say_nothing_of_the_release():
    command = "docker run --gpus all {} --model opt-13b"
    assert parse_serve(command.format("lmcache/vllm-openai:v0.3.14")).version is None
    assert parse_serve(command.format("docker.io/vllm/vllm-openai:v0.11.2")).version == (0, 11)


@pytest.mark.slow
def test_what_is_not_counted_stands_in_the_first_line(capsys):
    serve = "VLLM_REPLICATE_EMBED=1 vllm serve opt-13b --enable-sleep-mode --attention-backend FLASHINFER"
    assert status(["plan", "--gpu", "h100-80gb", "--serve", serve]) == DONE
    shown = capsys.readouterr().out
    first, *rest = " ".join(shown.split()).split(" starts: ")
    assert first == "Without --enable-sleep-mode, VLLM_REPLICATE_EMBED, not counted, it"
    assert "VLLM_REPLICATE_EMBED=1 (embeddings on every rank)" in rest[0]
    plan = ["--goodput", "ttft:5000", "--request-rate", "1", "--num-prompts", "100", "--seeds", "1"]
    assert status(["plan", "--gpu", "h100-80gb", "--serve", serve, *plan]) == DONE
    assert capsys.readouterr().out.startswith("Without --enable-sleep-mode, VLLM_REPLICATE_EMBED, not counted:\n")
    load = ["--request-rate", "1", "--num-prompts", "50", "--seeds", "1"]
    assert status(["diagnose", "--gpu", "h100-80gb", "--serve", serve, *load]) == DONE
    assert capsys.readouterr().out.startswith("Without --enable-sleep-mode, VLLM_REPLICATE_EMBED, not counted: ")


def test_without_any_the_first_line_is_the_answer(capsys):
    assert status(["plan", "--gpu", "h100-80gb", "--serve", "vllm serve opt-13b --port 8000"]) == DONE
    assert capsys.readouterr().out.startswith("It starts: ")


def test_an_unknown_flag_on_the_command_line(capsys):
    assert status(["plan", "--gpu", "h100-80gb", "--serve", "vllm serve opt-13b --max-modell-len 5"]) == MISTAKE
    assert "did you mean --max-model-len?" in capsys.readouterr().err


def test_pasted_lines_are_counted():
    counts = runpy.run_path(str(ROOT / "docs" / "pasted_lines.py"))["counts"]
    lines = ["vllm serve opt-13b --port 1", "vllm serve opt-175b", "vllm serve not/known --seed 1", "vllm serve a b"]
    outcomes, flags, reasons = counts(lines, "h200")
    assert outcomes == {"starts": 1, "refused by vLLM": 1, "read, not answered": 1, "not read": 1}
    assert flags == {("of no effect", "port"): 1, ("of no effect", "seed"): 1}
    assert [reason.split(":")[0] for reason in reasons] == ["not answered", "not read"]


def test_graphs_that_decide_whether_a_line_starts_are_not_called_uncounted():
    """A remedy with them would contradict its own answer."""
    assert parse_serve("vllm serve opt-13b -cc.cudagraph_mode PIECEWISE -O1").uncounted == []
