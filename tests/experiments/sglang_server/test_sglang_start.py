"""A line of SGLang on a GPU: the settings, the memory and the candidates that commands make of it as of a line of vLLM."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import numpy as np
import pytest

from fragmeter.experiments.capacity.candidates import candidates
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.diagnose.server import server_of
from fragmeter.experiments.sglang_server.start import parse_line, read_start_log, started
from fragmeter.sim import settings, simulate
from fragmeter.sim.engine.replica import build
from fragmeter.sim.spec import gpu
from fragmeter.sim.spec.startup.sglang import num_slots
from fragmeter.sim.types.errors import NotSimulated, SettingError
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.sim.workload.workload import Workload

START = "python3 -m sglang.launch_server --model-path qwen3-8b"
LINES = {
    "": {},
    "--tp 2 --mem-fraction-static 0.8 --schedule-policy lpm": {
        "tensor_parallel_size": 2, "mem_fraction_static": 0.8, "schedule_policy": "lpm",
    },
    "--page-size 16 --max-running-requests 40 --disable-overlap-schedule --disable-radix-cache": {
        "block_size": 16, "max_num_seqs": 40, "disable_overlap_schedule": True, "enable_prefix_caching": False,
    },
    "--kv-cache-dtype fp8_e5m2 --context-length 8192 --max-total-tokens 20000": {
        "kv_cache_dtype": "fp8", "max_model_len": 8192, "num_gpu_blocks_override": 20_000,
    },
}  # fmt: skip


@pytest.mark.parametrize("flags", LINES, ids=lambda flags: flags.split(" ")[0] or "plain")
def test_a_line_serves_as_the_settings_of_its_flags(flags):
    """Built from the line or from the flags of ``simulate``, a replica decides and takes the same."""
    direct = settings(policy="sglang", model="qwen3-8b", gpu="h100-80gb", **LINES[flags])
    (candidate,) = candidates(parse_line(f"{START} {flags}"), ["h100-80gb"], {})
    of_line, of_flags = build(candidate.settings), build(direct)
    assert of_line.policy.limits == of_flags.policy.limits
    assert of_line.memory.capacity_slots == of_flags.memory.capacity_slots == candidate.started.pool().num_tokens
    rng = np.random.default_rng(1)
    load = Workload(
        "drawn",
        arrival_ticks=np.sort(rng.integers(0, 2 * PER_SECOND, 60)),
        prompt_tokens=rng.integers(10, 2000, 60),
        output_tokens=rng.integers(1, 300, 60),
    )
    rows = [simulate(each, load).log.rows for each in (candidate.settings, direct)]
    assert all((rows[0][name] == rows[1][name]).all() for name in rows[0])


@pytest.mark.parametrize("flags", ["--tp 2", "--pp-size 2 --tp 2", "--page-size 64"])
def test_the_parts_of_the_memory_are_the_card(flags):
    answer = started(parse_line(f"{START} {flags}"), "h100-80gb")
    for stage in answer.stages():
        parts = stage.weights.likely + stage.activations.likely + stage.non_torch.likely + stage.kv_cache_bytes
        assert parts == gpu("h100-80gb").memory_bytes
    fewest = min(stage.num_blocks for stage in answer.stages())
    assert fewest == answer.pool().num_blocks == num_slots(answer.launch, None) // answer.launch.block_size


def test_candidates_have_the_flags_of_the_axes():
    """Ranks that do not divide the heads, and weights that leave no slots, are candidates that do not start."""
    line, axes = parse_line(f"{START} --schedule-policy lpm"), {"tensor_parallel_size": ["1", "2", "3"]}
    small, large, undivided = candidates(line, ["l4"], axes)
    assert "leaves no slots on l4" in small.refused and "must divide the 32 heads" in undivided.refused
    assert large.num_gpus == 2 and large.settings.value("schedule_policy") == "lpm"
    assert large.started.line.words() == "--schedule-policy lpm --tp-size 2"
    other, own = candidates(line, ["h100-80gb"], {"policy": ["vllm-v1", "none"]})
    pools = [build(each.settings).memory.capacity_slots for each in (other, own)]
    assert (other.settings.policy, own.settings.policy) == ("vllm-v1", "sglang")
    assert pools[0] == pytest.approx(pools[1], abs=32)


def test_states_that_cannot_be_copied_turn_the_overlap_schedule_off():
    """As SGLang does unless the line names the strategy, or there is no radix cache."""
    states = "sglang serve LiquidAI/LFM2-1.2B --max-mamba-cache-size 400"
    plain, named, uncached = (
        started(parse_line(f"{states} {flags}"), "h100-80gb")
        for flags in ("", "--mamba-radix-cache-strategy no_buffer", "--disable-radix-cache")
    )
    assert plain.refused is uncached.refused is None
    assert [each.replica.policy.schedules_ahead for each in (plain, uncached)] == [False, True]
    assert "give disable_overlap_schedule, too" in named.refused


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            "openai/gpt-oss-20b --swa-full-tokens-ratio 0.0001",
            "slots for windows, and a request may need 641; give more",
        ),
        (
            "qwen3-8b --enable-hierarchical-cache --hicache-ratio 1000",
            "pages on the host, more than 67,108,864; lower it",
        ),
    ],
)
def test_limits_of_the_simulation_are_no_reason_why_a_server_does_not_start(flags, text):
    with pytest.raises(NotSimulated, match=text):
        started(parse_line(f"sglang serve {flags}"), "h100-80gb")


@pytest.mark.parametrize("axis", ["gpu_memory_utilization", "data_parallel_size", "watermark", "kv_offloading_size"])
def test_flags_of_vllm_are_refused(axis):
    with pytest.raises(SettingError, match="is of vLLM, and the line starts SGLang"):
        candidates(parse_line(START), ["h100-80gb"], {axis: ["1"]})


def test_a_named_pool_is_kept_when_flags_change():
    """The start-up log has fewer slots than are computed: what the server lacks, it lacks with other flags, too."""
    line = parse_line(START)
    log = read_start_log(line, "[2026-11-20 10:00:41 TP0] max_total_num_tokens=350000, chunked_prefill_size=8192")
    computed, named = started(line, "h100-80gb").pool(), started(line, "h100-80gb", log=log)
    assert named.pool().num_tokens == named.settings().num_gpu_blocks_override == 350_000 != computed.num_tokens
    fp8 = named.changed({"kv-cache-dtype": "fp8"})
    assert fp8.pool().num_tokens == pytest.approx(700_000, abs=2)
    assert fp8.changed({"kv-cache-dtype": None}).pool().num_tokens == 350_000


def test_flags_without_an_effect_are_said(tmp_path, capsys):
    """By the rule of unread settings: each alone, and not where another flag of the line gives it one."""
    flags = {
        "--hicache-ratio 3": "nothing is copied to the host",
        "--mamba-ssm-dtype bfloat16": "qwen3-8b has no layers with a state",
        "--swa-full-tokens-ratio 0.5": "SGLang gives the windows of qwen3-8b no pool of their own",
        "--retraction-policy priority": "requests are not served by priority",
    }
    for flag, why in flags.items():
        named = f"{flag.partition(' ')[0]} ({why})"
        assert started(parse_line(f"sglang serve qwen3-8b {flag}"), "h100-80gb").without_effect == (named,)
    for line in (
        "qwen3-8b --enable-hierarchical-cache --hicache-ratio 3",
        "gpt-oss-20b --swa-full-tokens-ratio 0.5",
        "qwen3-8b --retraction-policy priority --enable-priority-scheduling",
        # The default of a flag asks for nothing.
        "qwen3-8b --hicache-ratio 2 --mamba-full-memory-ratio 0.9",
    ):
        assert started(parse_line(f"sglang serve {line}"), "h100-80gb").without_effect == ()
    out = tmp_path / "answer.json"
    words = ["plan", "--gpu", "h100-80gb", "--serve", f"sglang serve qwen3-8b {' '.join(flags)}", "--json", str(out)]
    assert status(words) == DONE
    assert sorted(json.loads(out.read_text())["without_effect"]) == sorted(
        f"{flag.partition(' ')[0]} ({why})" for flag, why in flags.items()
    )
    assert "Has no effect: " in capsys.readouterr().out


class TestLogOfAServerWithoutAComputedPool:
    """By the arithmetic the weights leave no slots; the log says how many there are."""

    LINE = "sglang serve meta-llama/Llama-3.1-70B-Instruct --tp-size 2 --mem-fraction-static 0.7"

    def test_the_log_wins(self):
        line = parse_line(self.LINE)
        assert "leaves no slots" in started(line, "h100-80gb").refused
        named = started(
            line, "h100-80gb", log=read_start_log(line, "max_total_num_tokens=35000, chunked_prefill_size=8192")
        )
        assert named.refusal() is None and named.pool().num_tokens == named.settings().num_gpu_blocks_override == 35_000
        # What the computed pool lacked, the arithmetic of other flags lacks, too.
        assert named.changed({"kv-cache-dtype": "fp8"}).pool().num_tokens == pytest.approx(70_000, abs=2)
        larger = named.changed({"mem-fraction-static": "0.75"}).pool().num_tokens
        assert larger == pytest.approx(35_000 + 0.05 * gpu("h100-80gb").memory_bytes / (40 * 8 * 128 * 2 * 2), rel=0.01)

    def test_its_states_too(self):
        line = parse_line("sglang serve Qwen/Qwen3-Next-80B-A3B-Instruct --tp-size 2")
        states = "[2026-11-20 TP0] Mamba Cache is allocated. max_mamba_cache_size: 100, conv_state size: 0.04GB, ssm_state size: 1.76GB"
        pool = "max_total_num_tokens=35000, chunked_prefill_size=8192"
        # Without them nothing says how many there are.
        assert "leaves no slots" in started(line, "h100-80gb", log=read_start_log(line, pool)).refused
        named = started(line, "h100-80gb", log=read_start_log(line, f"{states}\n{pool}"))
        assert (named.pool().num_tokens, named.own_pool().slots, named.launch.max_num_seqs) == (35_000, 100, 20)
        assert named.changed({"max-num-batched-tokens": "4096"}).own_pool().slots == 100

    def test_plan_answers_with_it(self, tmp_path, capsys):
        (tmp_path / "sglang.log").write_text("max_total_num_tokens=35000, chunked_prefill_size=8192")
        words = ["plan", "--gpu", "h100-80gb", "--serve", self.LINE]
        assert status(words) == DONE and "does not start" in capsys.readouterr().out
        assert status([*words, "--startup-log", str(tmp_path / "sglang.log")]) == DONE
        assert "It starts: " in (shown := capsys.readouterr().out) and "35,000 tokens fit" in shown

    def test_another_fault_is_none_of_the_pool(self):
        line = parse_line(self.LINE.replace("size 2", "size 3"))
        named = started(line, "h100-80gb", log=read_start_log(line, "max_total_num_tokens=35000, chunked"))
        assert "must divide" in named.refused


def test_a_change_is_one_of_sglangs_flags():
    server = server_of(parse_line(f"{START} --max-total-tokens 30000"), "h100-80gb", None, None)
    larger = [*server.started.larger_pools()]
    assert [server.line.flag_text(*next(iter(each.items()))) for each in larger[:1]] == ["without --max-total-tokens"]
    assert server.changed(larger[0]).pool.num_tokens > 300_000
    assert larger[1]["mem-fraction-static"] == "0.937"
    assert server.changed({"watermark": "0.02"}) is None
    assert server.changed({"tensor-parallel-size": "3"}) is None


def test_room_for_outputs_is_memory():
    """Four of 16 tokens run, of which 8 are to come; the next asks for 100 and 16. With ``ignore_eos`` all that is to come is kept, else
    at least 9.8 % of it; without ``max_tokens`` an output is the rest of the length, clipped to 4,096."""
    own = build(settings(policy="sglang", model="qwen3-8b", gpu="h100-80gb", max_model_len=8192)).policy
    lengths = {name: np.full(3, tokens) for name, tokens in (("prompt_tokens", 100), ("output_tokens", 16))}
    load = Workload("equal", np.zeros(3, dtype=np.int64), **lengths, max_tokens=lengths["output_tokens"])
    four = np.array([0, 4])
    assert own.slots_to_admit(load, 1, four) == pytest.approx([117, 117 + 4 * 8 * 0.098])
    ignoring = replace(load, ignore_eos=np.ones(3, dtype=np.int64))
    assert own.slots_to_admit(ignoring, 1, four) == pytest.approx([117, 117 + 4 * 8])
    undeclared = replace(load, max_tokens=None)
    assert own.slots_to_admit(undeclared, 64, four) == pytest.approx(
        [100 + 4096 + 64, 100 + 4096 + 64 + 4 * 4096 * 0.098]
    )


def test_a_small_pool_of_sglangs_is_the_cause(tmp_path):
    """Requests that wait for the outputs of the running ones wait for the KV cache, which is 91 % full at most."""
    out = tmp_path / "found.json"
    words = (
        "diagnose --gpu h100-80gb --serve 'sglang serve qwen3-8b --mem-fraction-static 0.28' --input-len 1000 --output-len 400"
        f" --request-rate 15 --num-prompts 200 --seeds 1 --jobs 1 --json {out}"
    )
    assert status(shlex.split(words)) == DONE
    found = json.loads(out.read_text())
    assert found["causes"] == ["small pool"] and found["advised"] == {"mem-fraction-static": "0.829"}
    assert found["as_served"]["max_usage"] < 0.95 and found["as_served"]["preemptions"] == 0


@pytest.mark.slow
def test_a_plan_buys_for_a_line(tmp_path, capsys):
    out = tmp_path / "plan.json"
    line = f"{START} --schedule-policy lpm --enable-mixed-chunk"
    words = (
        f"plan --gpu h100-80gb,l4 --goodput ttft:500 --input-len 500 --output-len 50 --num-prompts 100 --request-rate 4 --seeds 1 --jobs 1"
        f" --max-num-seqs 64 --serve {shlex.quote(line)} --json {out}"
    )
    assert status(shlex.split(words)) == DONE
    printed = " ".join(capsys.readouterr().out.split())
    assert "Without --enable-mixed-chunk, not counted: Buy 1 x h100-80gb" in printed
    assert "Set: --schedule-policy lpm --max-running-requests 64" in printed
    first, second = json.loads(out.read_text())["candidates"]
    assert "leaves no slots" in second["refused"] and first["settings"]["policy"] == "sglang"
    memory = first["memory"]
    parts = [memory[name][1] for name in ("weights", "activations", "non_torch", "kv_cache")]
    assert sum(parts) == memory["total_bytes"]
