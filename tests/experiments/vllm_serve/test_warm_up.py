"""vLLM captures CUDA graphs and samples after it allocated the KV cache: a line that asks for too much of the card runs out of memory there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fragmeter.experiments.vllm_serve.checks import Outcome, outcome
from fragmeter.experiments.vllm_serve.line import parse_serve, version
from fragmeter.experiments.vllm_serve.remedies import remedies
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.sim.spec import gpu
from fragmeter.sim.spec.startup.activations import phases, warm_up_bytes
from fragmeter.sim.spec.startup.capacity import capacity, profile, warm_up
from fragmeter.sim.spec.startup.launch import Launch

GIB = 1 << 30
LINE = "vllm serve Qwen/Qwen2.5-72B-Instruct --tensor-parallel-size 4 --max-model-len 8192 --gpu-memory-utilization "


def launch(share: float, more: str = "", release: str = "0.19.0") -> Launch:
    return started(parse_serve(f"{LINE}{share} {more}", version(release)), gpu("l40s")).launch


def judged(share: float, **changed: object) -> Outcome:
    return outcome(replace(launch(share), used_at_start_bytes=int(1.2 * GIB), **changed))


def test_a_larger_share_leaves_too_little():
    """0.19 does not count the graphs: their 2.55 GiB (2.62 in a log of this line) have to fit beside the share."""
    kinds = [judged(share).kind for share in (0.85, 0.88, 0.92, 0.96)]
    assert kinds == ["starts", "starts", "depends", "does not start"]
    refused = judged(0.96).refusal
    assert refused is not None and refused.kind == "warm-up"


def test_what_is_left_is_all_but_the_share_and_what_the_profiled_step_gave_back():
    line = launch(0.9)
    stage, found = capacity(line).stage, warm_up(replace(line, used_at_start_bytes=GIB))
    # The pool is whole blocks.
    beside = stage.requested_bytes - stage.activations.likely - stage.kv_cache.likely % stage.block_bytes
    free = stage.total_bytes - GIB - beside
    # Some of the profiled step's segments cannot be used.
    assert 0 < free - found.left.likely < 0.1 * stage.activations.likely
    assert found.room.likely == found.left.likely - found.graphs.likely - found.sampler
    # Of 256 sequences: at least logits in 16 and in 32 bits.
    assert found.sampler > 6 * 256 * line.model.vocab_size


def test_a_release_that_counts_the_graphs_leaves_them_their_room():
    before, since = (launch(0.9, release=release) for release in ("0.19.0", "0.22.0"))
    more = warm_up(since).room.likely - warm_up(before).room.likely
    assert more == pytest.approx(capacity(since).stage.cuda_graphs.likely, abs=0.3 * GIB)


def test_the_users_own_pool_counts():
    stage = capacity(launch(0.9)).stage
    blocks = (stage.total_bytes - stage.weights.likely - 3 * GIB) // stage.block_bytes
    assert judged(0.9, num_gpu_blocks_override=blocks).kind == "does not start"
    assert judged(0.9, num_gpu_blocks_override=blocks // 2).kind == "starts"


def test_without_graphs_it_starts():
    assert outcome(replace(launch(0.95, "--enforce-eager"), used_at_start_bytes=int(1.2 * GIB))).kind == "starts"
    found = {remedy.flag for remedy in remedies(replace(launch(0.95), outlook="low"))}
    assert {"--gpu-memory-utilization", "--enforce-eager"} <= found


@pytest.mark.parametrize(
    ("line", "release", "kind"),
    [
        # Weights and the profiled step take 78.9 of 79.2 GiB, and 1.5 are in use before, however small the cache is.
        (
            "Qwen/Qwen3-Next-80B-A3B-Instruct -tp 2 --max-model-len 4096 --enforce-eager --kv-cache-memory-bytes 1G",
            "0.33.0",
            "profile",
        ),
        # Without graphs the sampler of 1,024 sequences still takes 2.2 GiB, where weights and cache leave 0.4.
        ("Qwen/Qwen3-32B --kv-cache-memory-bytes 17G --enforce-eager", "0.19.0", "warm-up"),
        ("meta-llama/Llama-3.1-8B-Instruct --kv-cache-memory-bytes 62G --enforce-eager", "0.33.0", "warm-up"),
        ("Qwen/Qwen3-32B --kv-cache-memory-bytes 13G --enforce-eager", "0.19.0", None),
    ],
)
def test_a_given_size_leaves_the_profiled_step_and_the_sampler_their_room(line, release, kind):
    found = started(parse_serve(f"vllm serve {line}", version(release)), gpu("h100-80gb"))
    refused = found.outcome().refusal
    assert (refused and refused.kind) == kind
    assert found.outcome().kind == ("starts" if kind is None else "does not start")


def test_the_profiled_step_does_not_depend_on_the_size_of_the_cache():
    line = launch(0.9)
    assert profile(replace(line, kv_cache_memory_bytes=GIB)) == profile(line)
    stage, found = capacity(line).stage, profile(line)
    assert found.peak.likely == stage.weights.likely + stage.non_torch.likely + stage.activations.likely
    # The card is that much smaller than its memory.
    used = stage.total_bytes - found.peak.likely + 1
    assert outcome(replace(line, used_at_start_bytes=used, gpu_memory_utilization=0.5)).refusal.kind == "profile"


def test_the_doubt_of_a_given_size_is_that_of_the_weights_too():
    beside = capacity(launch(0.9)).stage
    given = replace(launch(0.9), kv_cache_memory_bytes=beside.kv_cache.likely)
    wide, narrow = warm_up(given).left, warm_up(launch(0.9)).left
    assert wide.likely == narrow.likely and wide.high - wide.low > narrow.high - narrow.low


def qwen3(release: str, more: str = "", environment: str = "") -> Launch:
    line = f"{environment} vllm serve Qwen/Qwen3-30B-A3B-FP8 --max-num-seqs 768 --max-model-len 8192 {more}"
    return started(parse_serve(line.strip(), version(release)), gpu("l4")).launch


def test_the_second_runner_warms_up_with_all_that_a_request_can_ask_for():
    """One of four L4s under 0.29 could not allocate 446 MiB, the softmax of 768 rows in 32 bits, beside as many logits twice and in 16 bits."""
    found = qwen3("0.29.0", "-tp 2")
    row = found.model.vocab_size * 768
    assert warm_up_bytes(found) == pytest.approx(14 * row, rel=0.01) and 4 * row // 2**20 == 445
    assert phases(found, range(48), last=True).sampler < 0.4 * warm_up_bytes(found)
    # A step of 2,048 tokens has half as many prompts of two, or of five with three drafts.
    assert warm_up_bytes(replace(found, max_num_seqs=2000)) == pytest.approx(14 * row * 1024 // 768, rel=0.01)
    # Without FlashInfer, up to 0.22 and where a variable says so, none is masked and none normalized.
    others = qwen3("0.22.0", "", "VLLM_USE_V2_MODEL_RUNNER=1"), qwen3("0.29.0", "", "VLLM_USE_FLASHINFER_SAMPLER=0")
    assert all(warm_up_bytes(each) == pytest.approx(6 * row, rel=0.01) for each in others)
    # The first runner samples as in its profile.
    first = qwen3("0.29.0", "", "VLLM_USE_V2_MODEL_RUNNER=0")
    assert not first.second_runner and found.second_runner
    assert warm_up_bytes(first) == pytest.approx(phases(first, range(48), last=True).sampler, rel=0.01)


def test_it_samples_beside_the_graphs_until_0_29_and_before_them_since():
    before, since = (warm_up(replace(qwen3(release), used_at_start_bytes=0)) for release in ("0.29.0", "0.30.0"))
    assert before.room.likely == before.left.likely - before.graphs.likely - before.sampler
    assert since.room.likely == since.left.likely - max(since.graphs.likely, since.sampler)
    assert before.taken.likely == before.graphs.likely + before.sampler
    assert since.taken.likely == max(since.graphs.likely, since.sampler)


def test_a_server_that_started_and_failed_depends():
    """Llama 3.1 8B under 0.17.1 on an RTX 3090, with a desktop of 1.7 GiB one day: it started with 5.68 GiB, and failed with 5.61."""
    line = "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 8192"
    found = started(parse_serve(line, version("0.17.1")), gpu("rtx-3090"))
    assert found.outcome().kind == "depends" and found.outcome().warm_up is not None
    used = {size: outcome(replace(found.launch, used_at_start_bytes=int(size * GIB))).kind for size in (0.3, 1.0, 2.0)}
    assert used == {0.3: "starts", 1.0: "starts", 2.0: "depends"}


def test_a_start_that_depends_names_what_a_later_one_gets():
    """Qwen3 32B AWQ under 0.28 on an RTX 5090 at 0.70 was refused with 0.45 GiB, and started with 3.00."""
    line = parse_serve(
        "vllm serve Qwen/Qwen3-32B-AWQ -q awq --max-model-len 8192 --gpu-memory-utilization 0.7", version("0.28.0")
    )
    card = replace(gpu("rtx-5090"), memory_bytes=int(31.36 * GIB))
    found = started(line, card, "qwen3-32b")
    judged = found.outcome()
    assert judged.kind == "depends" and judged.refusal is not None and judged.refusal.kind == "KV cache"
    assert judged.kv_cache.likely / GIB == pytest.approx(0.45, abs=0.1)
    assert judged.later / GIB == pytest.approx(3.0, abs=0.1) and judged.later > judged.needed_bytes
    eager = outcome(replace(found.launch, deployment=replace(found.launch.deployment, cuda_graphs=False)))
    assert eager.later is None
