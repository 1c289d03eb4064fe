"""Lines of models with states that have more sequences than blocks: public reports, releases, graphs, and every command that reads them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fragmeter.experiments.capacity.candidates import candidates
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.diagnose.server import server_of
from fragmeter.experiments.measured.start import Server, replica, started_line
from fragmeter.experiments.vllm_serve.line import parse_serve, version
from fragmeter.experiments.vllm_serve.remedies import remedies
from fragmeter.experiments.vllm_serve.start import Started, started
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.replica import build
from fragmeter.sim.spec import gpu, gpu_names
from fragmeter.sim.spec.gpu import GIB
from fragmeter.sim.spec.releases import release
from fragmeter.sim.spec.startup.capacity import capacity
from fragmeter.sim.spec.startup.launch import batch_defaults
from fragmeter.sim.types.errors import SettingError, UserError

LINE = "vllm serve qwen3.6-27b -q fp8 --max-model-len 32768 --num-gpu-blocks-override 600"


def answer(text: str, card: str = "h100-80gb", vllm: str = "0.33") -> Started:
    return started(parse_serve(text, version(vllm)), card)


def kind(found: Started) -> str | None:
    refused = found.refusal()
    return refused and refused.kind


# Of public reports: recipes#551, NVIDIA-AI-Blueprints/retail-shopping-assistant#95, vllm#49064 and recipes#906. The second states no release, and
# the first release with the check is 0.20.
REPORTS = [
    ("h100-80gb", "0.22", "qwen3.6-27b -q fp8 --gpu-memory-utilization 0.95", 856),
    ("h100-80gb", "0.20", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8 -tp 2", 524),
    ("h200", "0.29", "zai-org/GLM-5.3-Flash -tp 4", 512),
]


@pytest.mark.slow
@pytest.mark.parametrize(("card", "vllm", "line", "blocks"), REPORTS)
def test_reported_servers_do_not_start_with_the_default_and_start_with_the_remedy(card, vllm, line, blocks):
    refused = answer(f"vllm serve {line}", card, vllm)
    assert refused.launch.max_num_seqs == 1024
    assert kind(refused) == "states"
    first = next(remedies(refused.launch))
    assert first.flag == "--max-num-seqs"
    least, most = (capacity(replace(refused.launch, outlook=end)).num_blocks for end in ("low", "high"))
    # GLM's number is that of its largest graph.
    assert int(first.value) == blocks == 512 or 0.97 * least <= blocks <= 1.03 * most
    assert kind(answer(f"vllm serve {line} --max-num-seqs {first.value}", card, vllm)) is None
    alone = {remedy.flag: remedy.value for remedy in remedies(refused.launch)}
    assert {"-cc.cudagraph_mode", "--enforce-eager"} <= alone.keys()
    for flag in ("--max-num-seqs", "-cc.cudagraph_mode", "--enforce-eager"):
        assert kind(answer(f"vllm serve {line} {flag} {alone[flag]}", card, vllm)) is None


def test_a_sequence_more_than_blocks_is_refused_in_the_words_of_vllm():
    assert kind(answer(f"{LINE} --max-num-seqs 600")) is None
    refused = answer(f"{LINE} --max-num-seqs 601").refusal()
    assert refused is not None
    assert refused.text.startswith(
        "max_num_seqs (601) exceeds available Mamba cache blocks (600). Each decode sequence"
    )
    assert "Please lower max_num_seqs to at most 600 or increase gpu_memory_utilization." in refused.text


def test_all_blocks_of_a_pool_count_whatever_the_groups():
    # Of six packed groups four keep states.
    line = "vllm serve zai-org/GLM-5.3-Flash -tp 4 --max-model-len 32768 --num-gpu-blocks-override 600 --max-num-seqs"
    assert len(answer(f"{line} 600", "h200").launch.layout.groups) == 6
    assert kind(answer(f"{line} 600", "h200")) is None
    assert kind(answer(f"{line} 601", "h200")) == "states"


@pytest.mark.parametrize(
    ("flags", "vllm", "starts"),
    [
        ("", "0.33", False),
        ("", "0.20", False),
        ("", "0.19", True),
        ("", "0.18", True),
        ("--enforce-eager", "0.33", True),
        ("-cc.cudagraph_mode PIECEWISE", "0.33", True),
        ("-cc.cudagraph_mode=piecewise", "0.33", True),
        ("""--compilation-config '{"cudagraph_mode": "PIECEWISE"}'""", "0.25", True),
        ("--compilation-config.mode 3 --compilation-config.cudagraph_mode PIECEWISE", "0.33", True),
        ("-cc.cudagraph_mode FULL", "0.33", False),
        ("-cc.cudagraph_mode FULL_DECODE_ONLY", "0.33", False),
        ("-O0", "0.33", True),
        ("-O1", "0.33", True),
        ("-O2", "0.33", False),
        ("-O1 -cc.cudagraph_mode FULL_AND_PIECEWISE", "0.33", False),
        # Without compilation no graph is piecewise, and up to 0.29 there was none then.
        ("-cc.mode none", "0.33", False),
        ("-cc.mode none", "0.29", True),
        ("-cc.mode 0 -cc.cudagraph_mode FULL_DECODE_ONLY", "0.29", False),
    ],
)
def test_only_graphs_of_whole_decode_steps_and_later_releases_need_a_block_a_sequence(flags, vllm, starts):
    assert (kind(answer(f"{LINE} {flags}", vllm=vllm)) is None) == starts


def test_models_without_states_need_none():
    line = "vllm serve {} --max-model-len 512 --num-gpu-blocks-override 600 --max-num-seqs 1024"
    for name in ("llama-3.1-8b", "gemma-3-27b"):
        assert kind(answer(line.format(name))) is None


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("-cc.cudagraph_mode HALF", "--compilation-config.cudagraph_mode = 'HALF': one of NONE, PIECEWISE, FULL"),
        ("-cc '{\"mode\": 3'", "--compilation-config = '{\"mode\": 3': is not readable JSON"),
        ("-cc " + "[" * 20_000, "is not readable JSON"),
    ],
)
def test_a_mode_that_vllm_does_not_have_is_a_mistake(flags, complaint, capsys):
    assert status(["plan", "--gpu", "h100-80gb", "--serve", f"{LINE} {flags}"]) == MISTAKE
    captured = capsys.readouterr()
    assert complaint in captured.err and captured.err.count("\n") == 1


@pytest.mark.slow
def test_every_command_that_reads_the_line_says_so():
    text = f"{LINE} --max-num-seqs 601"
    words = answer(text).refusal().text
    line = parse_serve(text)
    (candidate,) = candidates(line, ["h100-80gb"], {})
    assert candidate.refused == f"{words} With --max-num-seqs 600 it would."
    with pytest.raises(UserError) as diagnosed:
        server_of(line, "h100-80gb", None, None)
    with pytest.raises(UserError) as validated:
        described = Server(text, None, "h100-80gb", None, None, {})
        replica(described, started_line(described), None)
    assert words in str(diagnosed.value) and words in str(validated.value)
    starting = text.replace("601", "600")
    assert candidates(parse_serve(starting), ["h100-80gb"], {})[0].refused is None
    assert server_of(parse_serve(starting), "h100-80gb", None, None).refused() is None


def test_a_change_of_a_diagnosis_must_start_too():
    server = server_of(parse_serve(f"{LINE} --max-num-seqs 400"), "h100-80gb", None, None)
    assert server.changed({"max-num-seqs": "600"}) is not None
    assert server.changed({"max-num-seqs": "601"}) is None


def test_a_simulated_server_with_the_pool_of_its_start_has_a_block_a_sequence():
    given = {"policy": "vllm-v1", "model": "qwen3.6-27b", "gpu": "h100-80gb", "max_model_len": 32_768}
    with pytest.raises(SettingError, match="max_num_seqs = 1024: exceeds the 303 blocks for states"):
        build(settings(**given))
    for other in ({"max_num_seqs": 303}, {"enforce_eager": True}, {"vllm_release": "0.19"}):
        assert build(settings(**given, **other)).num_blocks >= 303


@pytest.mark.slow
def test_the_answer_names_the_smallest_change_first(capsys):
    assert status(["plan", "--gpu", "h100-80gb", "--serve", LINE]) == DONE
    text = " ".join(capsys.readouterr().out.split())
    assert "Each of these alone would start: --max-num-seqs 600 " in text


def test_defaults_of_a_step_are_those_of_the_release_and_the_card():
    def defaults(card: str, minor: int) -> tuple[int, int]:
        return batch_defaults(gpu(card), release((0, minor)))

    assert defaults("b200", 33) == defaults("mi300x", 28) == (16_384, 1024)
    assert defaults("b200", 27) == defaults("h100-80gb", 33) == defaults("h200", 8) == (8192, 1024)
    assert defaults("a100-80gb", 33) == defaults("a100-80gb", 9) == defaults("l40s", 33) == (2048, 256)
    assert defaults("a100-80gb", 8) == (8192, 1024)
    assert defaults("a100-40gb", 8) == (2048, 256)
    # A line's own tokens limit the sequences that are the default.
    assert answer("vllm serve llama-3.1-8b --max-num-batched-tokens 512").launch.max_num_seqs == 512


@pytest.mark.parametrize("minor", [9, 18, 30, 33])
def test_defaults_of_a_step_are_those_of_the_memory_and_of_a_name_with_a100(minor):
    """As ``get_batch_defaults`` has it: an A800 is an A100 by everything but its name."""
    for name in gpu_names():
        memory = gpu(name).memory_bytes / GIB
        expected = (8192, 1024) if memory >= 70 and "a100" not in name else (2048, 256)
        if memory >= 160 and minor >= 28:
            expected = (16_384, 1024)
        assert batch_defaults(gpu(name), release((0, minor))) == expected, name
    a100, a800, a40 = (batch_defaults(gpu(name), release((0, minor))) for name in ("a100-80gb", "a800-80gb", "a40"))
    assert a100 == a40 == (2048, 256) and a800 == (8192, 1024)


@pytest.mark.parametrize(
    ("name", "tokens", "seqs"), [("lab-A100-80gb", 2048, 256), ("A800-SXM4-80GB", 8192, 1024), ("my-gpu", 8192, 1024)]
)
def test_defaults_on_a_card_of_a_file_are_those_of_its_name(name, tokens, seqs, tmp_path, capsys):
    """Whatever shares of its figures it has: ``architecture`` is no part of vLLM's rule."""
    sheet = {
        "name": name, "architecture": "a100", "compute_capability": 8.0, "memory_bytes": 84_987_740_160, "memory_gb_per_s": 2039,
        "fp16_tflops": 312, "pcie_gb_per_s": 32, "nvlink_gb_per_s": 200, "source": "test",
    }  # fmt: skip
    (tmp_path / "card.json").write_text(json.dumps(sheet))
    found = answer("vllm serve llama-3.1-8b", str(tmp_path / "card.json"))
    assert (found.launch.max_num_batched_tokens, found.launch.max_num_seqs) == (tokens, seqs)
    line = ["plan", "--serve", "vllm serve llama-3.1-8b --max-model-len 8192", "--gpu", str(tmp_path / "card.json")]
    assert status([*line, "--json", "-"]) == DONE
    planned = json.loads(capsys.readouterr().out)
    assert (planned["max_num_batched_tokens"], planned["max_num_seqs"]) == (tokens, seqs)


def test_prefixes_beside_states_are_cached_by_default_since_0_28():
    # Of 48 gated delta nets in three groups the state at hand, and a second one for prefixes.
    blocks = {vllm: answer(LINE, vllm=vllm).launch.sequence_blocks(32_768) for vllm in ("0.27", "0.28")}
    assert blocks["0.28"] - blocks["0.27"] == 3
    assert answer(f"{LINE} --enable-prefix-caching", vllm="0.27").launch.sequence_blocks(32_768) == blocks["0.28"]
    assert answer("vllm serve llama-3.1-8b", vllm="0.20").launch.enable_prefix_caching


def test_blocks_of_a_line_are_those_that_the_check_counts():
    line = "vllm serve qwen3.6-27b -q fp8 --max-model-len 32768 --max-num-seqs {} --kv-cache-memory-bytes 20G"
    blocks = capacity(answer(line.format(1)).launch).num_blocks
    assert kind(answer(line.format(blocks))) is None
    assert kind(answer(line.format(blocks + 1))) == "states"


@pytest.mark.parametrize(("card", "exports"), [("h200", True), ("rtx-5090", True), ("gb10", True), ("rtx-3090", False)])
def test_kernels_export_states_by_the_compute_capability_of_a_card(card, exports):
    """FlashInfer's kernel of gated delta nets runs on capabilities 9, 10 and 12, whatever the card is called."""
    found = answer("vllm serve qwen3.6-27b -tp 2 --max-model-len 8192 --enable-prefix-caching", card, "0.33")
    config = found.launch.layout.config
    assert config.exports_states == exports
    assert (config.block_size % 64 == 0) or not exports
