"""Pasted command lines: what is read of them, what is named as of no effect, and what is a mistake."""

from __future__ import annotations

import json
from dataclasses import replace
from shlex import quote

import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.vllm_serve.checks import refusal, undivided
from fragmeter.experiments.vllm_serve.line import parse_serve, version
from fragmeter.experiments.vllm_serve.log import read_log
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.replica import build
from fragmeter.sim.spec.speculative import UNKNOWN_RATES, parse_speculative
from fragmeter.sim.spec.startup.capacity import capacity, longest_model_len, users
from fragmeter.sim.types.errors import NotSimulated, SettingError, UserError

READS_THE_SAME = [
    "vllm serve opt-13b --tensor-parallel-size 2 --max-model-len 2048 --enforce-eager",
    "vllm serve opt-13b --tensor_parallel_size=2 --max_model_len=2048 --enforce_eager",
    "vllm serve --enforce-eager -tp 2 --max-model-len 2048 opt-13b",
    "vllm serve opt-13b -tp=2 --max-model-len '2048' --enforce-eager",
    "$ CUDA_VISIBLE_DEVICES=0,1 nohup /opt/venv/bin/vllm serve opt-13b --tensor-parallel 2 --max-model 2048"
    " --enforce-eager > serve.log 2>&1 &",
    "vllm serve opt-13b \\\n  --tensor-parallel-size 2 \\\n  --max-model-len 2048 \\\n  --enforce-eager",
    "python3 -m vllm.entrypoints.openai.api_server --model opt-13b -tp 2 --max-model-len 2048 --enforce-eager",
    "docker run --runtime nvidia --gpus all -v models:/models --ipc=host vllm/vllm-openai:v0.21.0"
    " --model opt-13b -tp 2 --max-model-len 2048 --enforce-eager",
    "podman run -it registry.io/vllm-openai vllm serve opt-13b -tp 2 --max-model-len 2048 --enforce-eager True",
    "bash -lc 'export N=2048; vllm serve opt-13b -tp 2 --max-model-len $N --enforce-eager # short'",
    "docker run --gpus all vllm/vllm-openai:v0.21.0 bash -c 'vllm serve opt-13b -tp 2 --max-model-len 2048 --enforce-eager'",
    "docker run --entrypoint /bin/sh vllm/vllm-openai:v0.21.0 -c 'vllm serve opt-13b -tp 2 --max-model-len 2048 --enforce-eager && echo'",
    '["vllm", "serve", "opt-13b", "-tp", "2", "--max-model-len", "2048", "--enforce-eager"]',
    '["sh", "-c", "exec vllm serve opt-13b -tp 2 --max-model-len 2048 --enforce-eager"]',
]


@pytest.mark.parametrize("text", READS_THE_SAME)
def test_forms_of_one_line(text):
    line = parse_serve(text)
    assert line.model == "opt-13b"
    assert (line.whole("tensor-parallel-size"), line.whole("max-model-len")) == (2, 2048)
    assert line.switch("enforce-eager")
    assert (line.ignored, line.not_simulated) == ([], [])


def test_what_has_no_effect_and_what_is_not_simulated_is_named():
    line = parse_serve(
        "HF_TOKEN=x vllm serve opt-13b --port 8000 --served-model-name a b --no-enable-log-requests -O3"
        """ --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}' --enable-sleep-mode"""
        " --compilation-config.mode 3 --no-enable-prefix-caching"
    )
    assert line.ignored == ["--port", "--served-model-name", "--enable-log-requests"]
    assert line.not_simulated == [
        "--optimization-level (steps take the time of vLLM's own CUDA graphs; their memory is counted)",
        "--enable-sleep-mode (an allocator of its own)",
        "--compilation-config (steps take the time of vLLM's own CUDA graphs; their memory is counted)",
    ]
    counted = f"--speculative-config ({UNKNOWN_RATES}; its memory is counted)"
    assert started(line, "h100-80gb").line.not_simulated == [*line.not_simulated, counted]
    # Read for the CUDA graphs, and for nothing else.
    graphs = [line.flags.pop(name) for name in ("optimization-level", "compilation-config")]
    assert graphs == ["3", '{"mode": 3}']
    assert line.flags == {
        "enable-prefix-caching": False,
        "speculative-config": '{"method": "ngram", "num_speculative_tokens": 3}',
    }
    assert line.environment == {"HF_TOKEN": "x"}


@pytest.mark.parametrize("sampler", [None, "standard", "block"])
def test_acceptance_rates_without_their_sampler_are_refused_as_by_vllm(sampler):
    """The memory of drafts does not depend on them; the line does not start."""
    drafts = {"method": "ngram", "num_speculative_tokens": 1, "rejection_sample_method": sampler}
    line = "vllm serve opt-13b --speculative-config "
    started(parse_serve(line + quote(json.dumps(drafts))), "h100-80gb")
    drafts["synthetic_acceptance_rates"] = [0.5]
    with pytest.raises(SettingError, match="rejection_sample_method = .*: must be .synthetic. beside synthetic_acc"):
        started(parse_serve(line + quote(json.dumps(drafts))), "h100-80gb")


def test_the_engine_of_releases_before_v1_is_named():
    """Their lines are taken as V1 would serve them."""

    def named(tag: str, more: str = "") -> list[str]:
        line = f"docker run {more} vllm/vllm-openai:{tag} --model opt-13b"
        return started(parse_serve(line), "h100-80gb").line.not_simulated

    (note,) = named("v0.6.6.post1")
    assert note.startswith("the V0 engine of vLLM 0.6 (") and "--policy vllm-v0 " in note
    assert named("v0.7.3") != [] == named("v0.7.3", "-e VLLM_USE_V1=1") == named("v0.8.0") == named("v0.33.0")
    # The older engine could be chosen for some releases more.
    assert named("v0.10.2", "-e VLLM_USE_V1=0") != [] == named("v0.11.0", "-e VLLM_USE_V1=0")


def test_a_revision_and_other_kernels_are_not_simulated():
    line = parse_serve(
        "vllm serve Qwen/Qwen3-8B --revision abc --linear-backend triton --disable-custom-all-reduce --seed 3"
    )
    assert line.ignored == ["--seed"]
    assert line.not_simulated == [
        "--revision (the facts are those of the preset, or of the repository's main branch)",
        "--linear-backend (kernels are those that vLLM chooses)",
        "--disable-custom-all-reduce (all-reduces are vLLM's own)",
    ]


def test_variables_that_choose_kernels_leave_the_memory_as_it_is():
    line = parse_serve("VLLM_DISABLED_KERNELS=MarlinLinearKernel VLLM_MLA_DISABLE=1 vllm serve llama-3.1-8b")
    memory = "VLLM_MLA_DISABLE=1 (a KV cache of whole heads in place of latent vectors)"
    times = "VLLM_DISABLED_KERNELS=MarlinLinearKernel (kernels are those that vLLM chooses)"
    assert (line.not_simulated, line.uncounted) == ([memory, times], [memory])


@pytest.mark.parametrize(
    ("line", "backend", "left_out"),
    [
        ("vllm serve llama-3.1-8b --attention-backend FLASHINFER", "FLASHINFER", []),
        ('vllm serve llama-3.1-8b --attention-config \'{"backend": "TRITON_ATTN"}\'', "TRITON_ATTN", []),
        ("vllm serve llama-3.1-8b --attention-config.backend flash_attn", "FLASH_ATTN", []),
        ("vllm serve llama-3.1-8b --attention-backend auto", None, []),
        ("vllm serve llama-3.1-8b --attention-backend TURBOQUANT", None, ["--attention-backend TURBOQUANT"]),
        ("vllm serve llama-3.1-8b --attention-config.flash_attn_version 2", None, ["--attention-config"]),
        (
            "VLLM_ATTENTION_BACKEND=FLASHINFER vllm serve llama-3.1-8b",
            None,
            ["VLLM_ATTENTION_BACKEND=FLASHINFER"],
        ),
    ],
)
def test_the_backend_of_attention_is_that_of_the_line(line, backend, left_out):
    found = parse_serve(line)
    chosen = started(found, "a100-80gb").settings().policy_options
    assert chosen.attention_backend == backend
    assert [text.partition(" (")[0] for text in found.not_simulated] == left_out


@pytest.mark.parametrize(
    ("line", "card", "backend"),
    [
        (
            "docker run -e VLLM_MXFP4_USE_MARLIN=1 vllm/vllm-openai:v0.22.0 --model openai/gpt-oss-120b",
            "h100-80gb",
            "marlin",
        ),
        # Gone in 0.24.
        (
            "docker run -e VLLM_MXFP4_USE_MARLIN=1 vllm/vllm-openai:v0.24.0 --model openai/gpt-oss-120b",
            "h100-80gb",
            None,
        ),
        ("docker run -e VLLM_MXFP4_USE_MARLIN=1 vllm/vllm-openai:v0.22.0 --model llama-3.1-8b", "h100-80gb", None),
        (
            "docker run -e VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=1 vllm/vllm-openai:v0.22.0 --model openai/gpt-oss-120b",
            "b200",
            "flashinfer_trtllm_afp8",
        ),
        ("vllm serve openai/gpt-oss-120b --moe-backend marlin", "h100-80gb", "marlin"),
        # The default.
        ("vllm serve openai/gpt-oss-120b --moe-backend triton", "h100-80gb", None),
        ("VLLM_USE_DEEP_GEMM=1 vllm serve minimax-m2.5 -tp 4", "h200", "deep_gemm"),
        ("VLLM_USE_DEEP_GEMM=0 vllm serve minimax-m2.5 -tp 4", "h200", None),
    ],
)
def test_kernels_of_experts_are_those_that_a_line_asks_for(line, card, backend):
    found = started(parse_serve(line), card)
    assert found.settings().policy_options.moe_backend == backend


def test_kernels_of_experts_that_a_release_has_not_are_refused_and_unknown_ones_named():
    with pytest.raises(
        SettingError, match="vLLM 0.33 has no such kernels for experts in mxfp4 on h100-80gb, and does not start"
    ):
        started(parse_serve("vllm serve openai/gpt-oss-120b --moe-backend deep_gemm"), "h100-80gb")
    left_out = parse_serve("vllm serve openai/gpt-oss-120b --moe-backend hpc").not_simulated
    assert [text.partition(" (")[0] for text in left_out] == ["--moe-backend hpc"]


def test_releases_up_to_0_14_read_the_variable():
    image = "docker run -e VLLM_ATTENTION_BACKEND=FLASHINFER vllm/vllm-openai:v{} --model llama-3.1-8b"
    lines = {release: parse_serve(image.format(release)) for release in ("0.14.1", "0.15.1")}
    assert [line.text("attention-backend", "") for line in lines.values()] == ["FLASHINFER", ""]
    assert [len(line.not_simulated) for line in lines.values()] == [0, 1]


def test_flags_of_the_scheduler_are_settings_of_the_simulation():
    line = "vllm serve llama-3.1-8b --max-model-len 8192 --no-scheduler-reserve-full-isl --max-num-active-seqs 64"
    line += " --long-prefill-token-threshold 1k --long-prefill-token-threshold-adaptive --prefill-schedule-interval 2"
    chosen = started(parse_serve(line), "h100-80gb").settings().policy_options
    assert (chosen.long_prefill_token_threshold, chosen.long_prefill_token_threshold_adaptive) == (1000, True)
    assert (chosen.max_num_active_seqs, chosen.prefill_schedule_interval) == (64, 2)
    assert not chosen.scheduler_reserve_full_isl
    plain = started(parse_serve("vllm serve llama-3.1-8b --long-prefill-token-threshold 0"), "h100-80gb").settings()
    assert plain.policy_options.long_prefill_token_threshold == 0


def test_checkpoints_within_prompts_are_a_setting():
    line = "vllm serve openai/gpt-oss-20b --max-model-len 8192 --prefix-cache-retention-interval 512"
    for more, size in (("", 0), (" --kv-offloading-size 8", 8)):
        found = started(parse_serve(line + more), "h100-80gb")
        chosen = found.settings().policy_options
        assert (chosen.prefix_cache_retention_interval, chosen.kv_offloading_size) == (512, size)
        assert not found.line.not_simulated


@pytest.mark.parametrize(
    ("value", "tokens"), [("8k", 8000), ("8K", 8192), ("1m", 1_000_000), ("1M", 2**20), ("25.6k", 25_600)]
)
def test_numbers_as_people_write_them(value, tokens):
    assert parse_serve(f"vllm serve opt-13b --max-model-len {value}").whole("max-model-len") == tokens


MISTAKES = {
    "": "serve = '': starts no server",
    "python train.py": "serve = 'python train.py': starts no server; paste a line with vllm serve MODEL",
    "vllm serve 'opt-13b": "No closing quotation",
    "vllm serve --port 80": "names no model",
    "vllm serve opt-13b --max-model-length 9": "--max-model-length: no release of vLLM from 0.8 to 0.33 has it; did"
    " you mean --max-model-len?",
    "vllm serve opt-13b --max-model-len": "serve = '--max-model-len': needs a value",
    "vllm serve opt-13b --max-model-len many": "--max-model-len = 'many': must be a whole number",
    "vllm serve opt-13b --max-model-len 1.5": "must be a whole number",
    "vllm serve opt-13b --max-model-len 1.5K": "must be a whole number",
    "vllm serve opt-13b --gpu-memory-utilization 92": "--gpu-memory-utilization = '92': must be above 0",
    "vllm serve opt-13b opt-66b": "serve = 'opt-66b': is neither a flag nor the value of one",
    "vllm serve opt-13b --config a.yaml": "config = 'a.yaml': ",
    "vllm serve unknown/unknown-3b": "model = 'unknown/unknown-3b': is no preset, no stored file is of it, and it is not in the local cache of the Hugging Face hub; HF_HUB_OFFLINE forbids",
    "vllm serve opt-13b --dtype float64": "--dtype = 'float64': is not supported",
    "vllm serve opt-13b --kv-cache-dtype turboquant_k8v4": "--kv-cache-dtype = 'turboquant_k8v4': is vLLM's, and its scales are not counted",
    "vllm serve opt-13b -q bitsandbytes": "--quantization = 'bitsandbytes': is not supported",
}


@pytest.mark.parametrize(("text", "complaint"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_one_line(text, complaint, capsys):
    assert status(["plan", "--gpu", "h100-80gb", "--serve", text]) == MISTAKE
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert complaint in captured.err


@pytest.mark.parametrize(("tokens", "complaint"), [(0, "must be 1 or more"), (2049, "than max_model_len = 2048")])
def test_a_mean_length_that_cannot_be(tokens, complaint, capsys):
    line = ["--gpu", "h100-80gb", "--serve", "vllm serve opt-13b", "--mean-tokens", str(tokens)]
    assert status(["plan", *line]) == MISTAKE
    assert complaint in capsys.readouterr().err


def test_line_and_log_may_be_in_files(tmp_path, capsys):
    line, log = tmp_path / "serve.sh", tmp_path / "vllm.log"
    line.write_text("#!/bin/bash\nexec vllm serve opt-13b \\\n  --max-num-seqs 32\n")
    log.write_text("INFO 1\nINFO GPU KV cache size: 16,000 tokens\n")
    assert status(["plan", "--gpu", "h100-80gb", "--serve", str(line), "--startup-log", str(log)]) == DONE
    text = " ".join(capsys.readouterr().out.split())
    assert "has a KV cache of 1,000 blocks (16,000 tokens, by vLLM's own log)" in text


@pytest.mark.parametrize(
    ("name", "form", "kv_dtype", "parameters"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", None, "bf16", 8_030_261_248),
        ("google/gemma-3-27b-it", None, "bf16", 27_432_406_640),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", None, "bf16", 107_769_861_120),
        ("deepseek-ai/DeepSeek-R1", "fp8", "bf16", 671_026_419_200),
        ("nvidia/Llama-3.1-70B-Instruct-FP8", "fp8", "fp8", 70_553_706_496),
        ("facebook/opt-13b", None, "bf16", 12_853_473_280),
    ],
)
def test_a_repository_has_the_formats_of_its_own_files(name, form, kv_dtype, parameters):
    launch = started(parse_serve(f"vllm serve {name} -tp 8"), "h200").launch
    assert (launch.deployment.quantization, launch.deployment.kv_dtype) == (form, kv_dtype)
    assert launch.model.num_params == pytest.approx(parameters, rel=2e-3)


def test_a_model_with_fixed_size_states_is_a_simulation_with_the_same_blocks():
    line = "vllm serve Qwen/Qwen3-Next-80B-A3B-Instruct --tensor-parallel-size 4 --max-model-len 32K"
    # Since 0.33 kernels of an H200 export states at multiples of 64 tokens.
    cases = (("", (0, 33), 3, 64), ("", (0, 32), 2, 16), (" --no-enable-prefix-caching", (0, 33), 1, 16))
    for flags, minor, blocks, step in cases:
        answer = started(replace(parse_serve(line + flags), version=minor), "h200")
        replica = build(answer.settings())
        # A state a rank: inputs of 3 tokens in 2,048 channels, and 8 heads of 128 x 128; of attention a token has 1,024 bytes.
        tokens = step * -(-(3 * 2048 * 2 + 8 * 128 * 128 * 2) // (1024 * step))
        assert answer.launch.block_tokens == replica.block_size == tokens
        assert replica.num_blocks == capacity(answer.launch).num_blocks
        assert answer.launch.sequence_blocks(32_768) == -(-32_768 // replica.block_size) + 3 * blocks
        assert refusal(answer.launch) is None


def test_states_need_groups_of_their_own():
    line = "vllm serve Qwen/Qwen3-Next-80B-A3B-Instruct -tp 4 --disable-hybrid-kv-cache-manager"
    refused = refusal(started(parse_serve(line), "h200").launch)
    assert refused and refused.kind == "KV groups"


def launched(flags: str, gpu: str = "h100-80gb"):
    return started(parse_serve(f"vllm serve llama-3.1-8b {flags}"), gpu)


def test_defaults_depend_on_the_gpu():
    def batch(gpu: str):
        launch = launched("", gpu).launch
        return launch.max_num_batched_tokens, launch.max_num_seqs

    assert batch("h100-80gb") == batch("h200") == (8192, 1024)
    assert batch("a100-80gb") == batch("a100-40gb") == (2048, 256)


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("", None),
        ("-tp 3", "parallel"),
        ("-tp 2 -pp 40", "parallel"),
        ("--max-num-batched-tokens 512 --max-num-seqs 1024", "batch"),
        ("--max-model-len 200000", "length"),
        ("--gpu-memory-utilization 1", "free memory"),
        ("--gpu-memory-utilization 0.2", "no KV cache"),
        ("--gpu-memory-utilization 0.3", "KV cache"),
        ("--gpu-memory-utilization 0.3 --max-model-len auto", None),
        ("--gpu-memory-utilization 0.2 --max-model-len -1", "no KV cache"),
        ("--gpu-memory-utilization 0.2 --kv-cache-memory-bytes 20G", None),
        ("--kv-cache-memory-bytes 59G", None),
        ("--kv-cache-memory-bytes 62G", "warm-up"),
        ("--kv-cache-memory-bytes 65G", "KV memory"),
        ("-tp 2 --kv-cache-memory-bytes 65G", None),
    ],
)
def test_what_vllm_would_complain_of(flags, kind):
    answer = launched(flags)
    refused = refusal(answer.launch)
    assert (refused and refused.kind) == kind


def test_older_releases_left_more_to_cuda_graphs_and_took_more_for_samples():
    def memory(front: str):
        return capacity(started(parse_serve(f"{front} --model llama-3.1-8b"), "h100-80gb").launch).stage

    latest, older, oldest = (memory(f"docker run vllm/vllm-openai:{tag}") for tag in ("latest", "v0.19.1", "v0.10.2"))
    assert latest.cuda_graphs.likely > 0 == older.cuda_graphs.likely == oldest.cuda_graphs.likely
    shares = [round(stage.requested_bytes / stage.total_bytes, 4) for stage in (latest, older, oldest)]
    assert shares == [0.92, 0.9, 0.9]
    # The first model runner has rows of logits for the 132 multiprocessors since 0.17; the latest is the second one.
    rows = 4 * 132 * 128_256
    assert older.activations.likely - latest.activations.likely == rows
    assert oldest.activations.likely - older.activations.likely == (38 - 14) * 1024 * 128_256 - rows
    counting = "docker run -e VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS={} vllm/vllm-openai:{}"
    assert memory(counting.format(1, "v0.19.1")).cuda_graphs.likely > 2**28
    assert memory(counting.format(0, "latest")).cuda_graphs.likely == 0


def test_the_release_may_be_given(capsys):
    line = ["--gpu", "h100-80gb", "--serve", "vllm serve opt-13b", "--json", "-"]
    assert status(["plan", *line, "--vllm", "0.16"]) == DONE
    assert '"vllm_since": "0.15"' in capsys.readouterr().out
    assert status(["plan", *line, "--vllm", "new"]) == MISTAKE
    assert "vllm = 'new': must be a release, as 0.16" in capsys.readouterr().err


def test_auto_takes_the_longest_that_fits():
    answer = launched("--gpu-memory-utilization 0.3 --max-model-len auto")
    longest = answer.launch.max_model_len
    assert longest == longest_model_len(launched("--gpu-memory-utilization 0.3").launch)
    assert longest % 16 == 0 and 0 < longest < 131_072
    assert launched("--max-model-len auto").launch.max_model_len == 131_072


def test_users_that_fit_leave_out_the_null_block_and_the_last_token():
    launch = launched("--max-num-seqs 4").launch
    # 2,000 tokens are 125 blocks, and so are 2,001: the last one is not stored.
    for tokens in (2000, 2001):
        assert [users(launch, blocks, tokens) for blocks in (0, 125, 126, 250, 251, 10_000)] == [0, 0, 1, 1, 2, 79]


LOGS = {
    "INFO kv_cache_utils.py:829 GPU KV cache size: 476,016 tokens": 29_751,
    "INFO gpu_executor.py: # GPU blocks: 1952, # CPU blocks: 2048": 1952,
    "INFO Maximum concurrency for 8,192 tokens per request: 15.07x": round(15.07 * 512),
    "(Worker_TP0) Available KV cache memory: 12.34 GiB\n(Worker_TP1) Available KV cache memory: 12.30 GiB": int(
        12.30 * 2**30
    )
    // 2**21,
}


@pytest.mark.parametrize(("text", "blocks"), LOGS.items(), ids=LOGS)
def test_a_start_up_log_counts_in_place_of_the_reckoning(text, blocks):
    line = parse_serve("vllm serve llama-3.1-8b --max-model-len 8192")
    answer = started(line, "h100-80gb", log=read_log(text))
    assert capacity(answer.launch).num_blocks == blocks
    assert answer.settings() == settings(**answer.settings().as_dict())
    assert answer.settings().num_gpu_blocks_override == blocks


@pytest.mark.parametrize(
    "text",
    [
        "GPU KV cache size: , tokens",
        f"GPU KV cache size: {'9' * 400} tokens",
        "Available KV cache memory: 1.2.3 GiB",
        "Available KV cache memory: . GiB",
        f"Available KV cache memory: {'9' * 400} GiB",
        "Maximum concurrency for 8,192 tokens per request: .x",
        f"# GPU blocks: {'9' * 5000}, # CPU blocks: 0",
    ],
)
def test_a_log_line_without_a_number_is_skipped(text):
    with pytest.raises(UserError, match="has none of the lines GPU KV cache size"):
        read_log(text)
    assert read_log(f"{text}\n# GPU blocks: 1,952, # CPU blocks: 0").num_blocks == 1952


def test_a_log_that_says_nothing_is_a_mistake():
    with pytest.raises(UserError, match="has none of the lines GPU KV cache size"):
        read_log("INFO Starting to load model")


def test_the_simulation_that_is_named_has_the_pool_that_was_computed(capsys):
    assert status(["plan", "--gpu", "a100-80gb", "--serve", "vllm serve opt-13b"]) == DONE
    text = capsys.readouterr().out
    blocks = capacity(started(parse_serve("vllm serve opt-13b"), "a100-80gb").launch).num_blocks
    command = next(line for line in text.splitlines() if line.startswith("As a simulation: "))
    assert f"--num-gpu-blocks-override {blocks}" in command
    assert status([*command.split()[4:], "--request-rate", "1", "--num-prompts", "5"]) == DONE


def test_drafts_are_settings_where_a_line_says_how_many_are_accepted():
    line = "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 8192"
    plain = started(parse_serve(line), "h100-80gb")
    head = f"{line} --speculative-config.method eagle3 --speculative-config.num_speculative_tokens 3"
    counted = started(parse_serve(head), "h100-80gb")
    assert capacity(counted.launch).num_blocks < capacity(plain.launch).num_blocks
    assert counted.settings().value("speculative_config") is None and len(counted.line.not_simulated) == 1
    rates = '{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5'
    drafts = f'{rates}, "method": "eagle3", "num_speculative_tokens": 3}}'
    found = started(parse_serve(f"{line} -sc '{drafts}'"), "h100-80gb")
    assert found.settings().value("speculative_config") == drafts and not found.line.not_simulated
    assert found.launch.num_gpus == 1 and capacity(found.launch) == capacity(counted.launch)


@pytest.mark.parametrize(
    ("drafts", "error"),
    [
        ('{"method": "suffix", "num_speculative_tokens": 3}', "(method 'suffix' must be one of "),
        ('{"method": "mtp", "quantization": "fp8"}', "(quantization 'fp8' is not simulated; leave it out)"),
    ],
)
def test_drafts_of_other_methods_are_not_simulated(drafts: str, error: str):
    line = parse_serve(f"vllm serve opt-13b --speculative-config '{drafts}'")
    assert [each.startswith(f"--speculative-config {error}") for each in line.not_simulated] == [True]
    assert not line.flags
    with pytest.raises(SettingError, match="is no JSON"):
        parse_serve("vllm serve opt-13b --speculative-config '{'")


@pytest.mark.parametrize(
    ("release", "begins"),
    [("0.30.0", "With the blocks of 0.33 (those of 0.30 are not known), it starts"), ("0.33.0", "It starts")],
)
def test_blocks_that_are_not_known_for_a_release_are_named_first(release, begins, capsys):
    line = f"docker run vllm/vllm-openai:v{release} deepseek-ai/DeepSeek-V4-Flash -tp 4"
    assert status(["plan", "--gpu", "h200", "--serve", line]) == DONE
    assert " ".join(capsys.readouterr().out.split()).startswith(begins)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_eagle_beside_an_indexer_and_states_is_not_counted_and_no_reason_not_to_start(method, capsys):
    """vLLM serves them: the answer is that of the line without drafts, and says so."""
    plain = "vllm serve zai-org/GLM-5.3-Flash -tp 4 --max-num-seqs 256"
    drafted = f'{plain} --speculative-config \'{{"method": "{method}", "num_speculative_tokens": 3}}\''
    texts = {}
    for each in (plain, drafted):
        assert status(["plan", "--gpu", "h200", "--serve", each]) == DONE
        texts[each] = " ".join(capsys.readouterr().out.split())
    note = "beside which draft models and EAGLE are not simulated; its memory is not counted)"
    assert texts[drafted].startswith(f"Without --speculative-config, not counted, {texts[plain][0].lower()}t starts: ")
    assert texts[drafted].endswith(note) and note not in texts[plain] and "larger GPU" not in texts[drafted]
    found = started(parse_serve(drafted), "h200")
    assert isinstance(found.uncounted, NotSimulated)
    assert found.settings() == started(parse_serve(plain), "h200").settings()
    speculative = parse_speculative(parse_serve(drafted).text("speculative-config", ""), needs_rates=False)
    with pytest.raises(NotSimulated):
        undivided(replace(found.launch, speculative=speculative))


@pytest.mark.parametrize(
    ("line", "method", "states"),
    [
        ("Qwen/Qwen3-Next-80B-A3B-Instruct -tp 2", "mtp", 3),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct -tp 2", "ngram", 3),
        ("openai/gpt-oss-120b", "eagle3", 0),
    ],
)
def test_drafts_beside_windows_or_states_take_memory_and_are_no_simulation(line, method, states, capsys):
    plain = f"vllm serve {line}"
    drafted = f'{plain} --speculative-config \'{{"method": "{method}", "num_speculative_tokens": 3}}\''
    before, after = (started(parse_serve(each), "h200").launch for each in (plain, drafted))
    layers = after.layout.config.groups
    kept = sum(len(group.layers) for group in before.layout.groups)
    assert sum(len(group.layers) for group in layers) == kept + (method != "ngram")
    # A sequence of one token: a block of each group, and in groups of states one more for each draft.
    groups = sum(group.kind == "state" for group in layers)
    assert (groups > 0) == (states > 0)
    assert after.decode_blocks(1) == len(layers) + states * groups
    assert status(["plan", "--gpu", "h200", "--serve", drafted]) == DONE
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("It starts: ") and "its memory is counted" in text


def test_the_public_pools_of_drafts_beside_states():
    """Two RTX 3090 with 11.05 GiB and MTP of three drafts log 623,873 tokens (club-3090#642), and 622,408 in another start."""
    line = parse_serve(
        "vllm serve Qwen/Qwen3.6-27B -q auto_round --kv-cache-dtype fp8 --dtype float16 --max-model-len 262144 -tp 2 --max-num-seqs 8"
        ' --max-num-batched-tokens 8192 --enable-prefix-caching --speculative-config \'{"method":"mtp","num_speculative_tokens":3}\'',
        version("0.24"),
    )
    launch = started(line, "rtx-3090", "qwen3.6-27b").launch
    tokens = [capacity(replace(launch, kv_cache_memory_bytes=round(gib * 2**30))).num_tokens for gib in (11.05, 11.06)]
    assert tokens == [622_408, 623_873]


def test_drafts_of_ngrams_beside_windows_take_no_memory():
    """Without look-ahead the blocks of a window are those of a server without drafts; its graphs are of as many tokens as a step has."""
    plain = "vllm serve openai/gpt-oss-120b"
    drafted = f'{plain} --speculative-config \'{{"method": "ngram", "num_speculative_tokens": 3}}\''
    without, with_drafts = (started(parse_serve(line), "h200") for line in (plain, drafted))
    assert with_drafts.uncounted is None
    before, after = (capacity(each.launch).stage for each in (without, with_drafts))
    assert after.block_bytes == before.block_bytes and after.weights == before.weights
    assert with_drafts.launch.decode_blocks(5000) == without.launch.decode_blocks(5003)
    assert after.num_blocks == pytest.approx(before.num_blocks, rel=0.005)


@pytest.mark.slow
def test_a_line_that_does_not_start_without_its_drafts_says_that(capsys):
    line = """vllm serve zai-org/GLM-5.3-Flash -sc '{"method": "mtp", "num_speculative_tokens": 2}'"""
    assert status(["plan", "--gpu", "h200", "--serve", line]) == DONE
    text = " ".join(capsys.readouterr().out.split())
    assert (
        text.startswith("Without --speculative-config, not counted, it does not start: ")
        and "--tensor-parallel-size 4" in text
    )


DRAFTS = json.dumps(
    {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2,
    }
)


@pytest.mark.parametrize(
    ("flags", "runs"),
    [
        ("llama-3.1-8b --kv-offloading-size 20", True),
        ("openai/gpt-oss-120b", True),
        ("openai/gpt-oss-120b --kv-offloading-size 20", True),
        ("google/gemma-4-31b-it --kv-offloading-size 20", True),
        ("openai/gpt-oss-120b -pp 2 --max-num-seqs 64", True),
        ("llama-3.1-8b -pp 2 --kv-offloading-size 20", True),
        (f"llama-3.1-8b -pp 2 --no-async-scheduling --speculative-config '{DRAFTS}'", False),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct -tp 2 --max-num-seqs 64 --kv-offloading-size 20", True),
    ],
)
def test_a_simulation_is_named_exactly_where_it_runs(flags, runs, capsys):
    assert status(["plan", "--gpu", "h200", "--serve", f"vllm serve {flags}"]) == DONE
    lines = capsys.readouterr().out.splitlines()
    named = [each for each in lines if each.startswith("As a simulation: ")]
    refused = [each for each in lines if each.startswith("Not simulated: ")]
    assert (len(named), len(refused)) == (int(runs), int(not runs))
    chosen = started(parse_serve(f"vllm serve {flags}"), "h200").settings()
    if runs:
        assert status([*named[0].split()[4:], "--request-rate", "1", "--num-prompts", "5"]) == DONE
    else:
        with pytest.raises(NotSimulated) as error:
            build(chosen)
        assert refused == [f"Not simulated: {error.value}"]
    capsys.readouterr()
    assert status(["plan", "--gpu", "h200", "--serve", f"vllm serve {flags}", "--json", "-"]) == DONE
    reasons = json.loads(capsys.readouterr().out)["not_simulated"]
    assert reasons == [each.removeprefix("Not simulated: ") for each in refused]


def test_offloading_is_a_setting_as_far_as_it_is_simulated():
    line = "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 8192 --kv-offloading-size 40"
    native = started(parse_serve(line), "h100-80gb")
    assert native.settings().value("kv_offloading_size") == 40 and not native.line.not_simulated
    other = started(parse_serve(f"{line} --kv-offloading-backend lmcache"), "h100-80gb")
    assert other.settings().value("kv_offloading_backend") == "lmcache" and not other.line.not_simulated
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 40 << 30},
    }
    plain = line.removesuffix(" --kv-offloading-size 40")
    own = started(parse_serve(f"{plain} --kv-transfer-config {quote(json.dumps(config))}"), "h100-80gb")
    hosts = [each.settings().policy_options.offloading.host_bytes for each in (native, own)]
    assert hosts == [40 << 30] * 2 and not own.line.not_simulated
    # LMCache's chunks are not simulated over several KV groups, and no host is behind a connector to other servers.
    chunks = "vllm serve openai/gpt-oss-20b --kv-transfer-config.kv_connector {} --kv-transfer-config.kv_role kv_both"
    for connector in ("LMCacheConnectorV1", "NixlConnector"):
        found = started(parse_serve(chunks.format(connector)), "h100-80gb")
        assert found.line.not_simulated == ["--kv-transfer-config (a KV cache that is moved or kept elsewhere)"]
        assert (
            found.line.uncounted_names == ["--kv-transfer-config"]
            and found.settings().value("kv_transfer_config") is None
        )
    with pytest.raises(SettingError, match="kv_offloading_size = 1e-05: holds no block"):
        build(started(parse_serve(line.replace("size 40", "size 0.00001")), "h100-80gb").settings())


@pytest.mark.parametrize(
    ("line", "gpu"),
    [("llama-3.1-8b", "gb10"), ("llama-3.1-8b -pp 2 --max-model-len auto --gpu-memory-utilization 0.95", "a10")],
)
def test_a_start_may_depend_on_what_is_free(line, gpu):
    judged = started(parse_serve(f"vllm serve {line}"), gpu).outcome()
    assert judged.kind == "depends" and judged.needed_bytes is None and judged.free is not None
    assert judged.free.low < judged.needed_free_bytes <= judged.free.high
    launch = started(parse_serve(f"vllm serve {line}"), gpu).launch
    assert judged.needed_free_bytes == int(launch.gpu_memory_utilization * launch.gpu.memory_bytes)


@pytest.mark.parametrize(
    ("flags", "vllm", "tokens", "seqs"),
    [
        # As ``_set_default_max_num_seqs_and_batched_tokens_args`` in the wheels of 0.11 to 0.32 has it.
        ("", "0.32", 8192, 1024),
        ("--max-num-seqs 2 --max-model-len 1024", "0.32", 2048, 2),
        ("--max-num-seqs 2 --max-model-len 1024", "0.12", 2048, 2),
        ("--max-num-seqs 2 --max-model-len 1024", "0.11", 8192, 2),
        ("--max-num-seqs 2 --max-model-len 1024 --max-num-batched-tokens 4096", "0.32", 4096, 2),
        ("--performance-mode throughput", "0.32", 16_384, 2048),
        ("--performance-mode throughput --max-num-seqs 100", "0.32", 16_384, 100),
        ("--performance-mode throughput --max-num-batched-tokens 1000", "0.32", 1000, 1000),
        ("--performance-mode balanced", "0.32", 8192, 1024),
        ("--no-enable-chunked-prefill --max-model-len 20000", "0.32", 20_000, 1024),
        ("--no-enable-chunked-prefill --max-model-len 4000", "0.32", 8192, 1024),
        ("--no-enable-chunked-prefill --max-model-len 4000", "0.11", 4000, 1024),
        ("--no-enable-chunked-prefill --max-model-len 1000 --max-num-seqs 4", "0.32", 4000, 4),
    ],
)
def test_defaults_of_a_step_depend_on_sequences_and_their_length(flags, vllm, tokens, seqs):
    line = parse_serve(f"vllm serve llama-3.1-8b {flags}", version(vllm))
    found = started(line, "h100-80gb")
    assert (found.launch.max_num_batched_tokens, found.launch.max_num_seqs) == (tokens, seqs)
    assert not [each for each in found.line.not_simulated if "performance" in each]
