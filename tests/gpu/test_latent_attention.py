"""Decode attention over latent vectors (MLA): the kernel's own source, built for the CPU, against float64; and planted bugs."""

from __future__ import annotations

import itertools
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

import gpu_cases
from fragmeter.gpu.check.latent import LatentCase, latent_case
from fragmeter.gpu.ops import arrays, latent_attention, source
from fragmeter.gpu.ops.cpu_kernels import CpuKernels
from fragmeter.gpu.ops.launching import Kernels
from fragmeter.sim.types.errors import KernelFault, SettingError
from paths import ROOT
from tools.kernels import compile_gate, instructions

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

#: A tile has 32 tokens: four tiles and a part of one, two and a part, none, one token, one tile, one token more.
CONTEXTS = [141, 70, 0, 1, 32, 33]
KIB = 1024


def run(given: LatentCase, kernels: Kernels | None = None, partition_tokens: int | None = None) -> np.ndarray:
    """The output; nothing behind it is written, where a block has room for more heads than there are."""
    named = given.arguments()
    batch, heads, _ = named["query"].shape
    whole = np.full((batch * heads + max(source.LATENT_HEADS), source.LATENT_DIM), np.nan, named["query"].dtype)
    named["out"] = whole[: batch * heads].reshape(batch, heads, -1)
    views = {name: arrays.view(name, one) if isinstance(one, np.ndarray) else one for name, one in named.items()}
    call = latent_attention.Call(**views)
    call.check()
    call.prepared(kernels or CpuKernels(), partition_tokens).launch()
    assert np.isnan(whole[batch * heads :].astype(np.float32)).all()
    return named["out"]


def check(given: LatentCase, kernels: Kernels | None = None, partition_tokens: int | None = None) -> None:
    tolerance = gpu_cases.TOLERANCE[given.given.query.dtype.name]
    assert gpu_cases.error(run(given, kernels, partition_tokens), given.expected()) <= tolerance


def steep(given: LatentCase) -> LatentCase:
    """With queries 12 times as long: the maximum rises in many tiles by more than the kernel leaves as it is."""
    given.given.query[:] *= 12
    return given


def test_the_reference_is_attention_written_out():
    """Token by token, with scores of 576 dimensions and values of the first 512."""
    given = latent_case("float16", 2, 16, [20, 3])
    named, found = given.arguments(), given.expected()
    assert found.shape == (2, 2, 512)
    for sequence, context in enumerate([20, 3]):
        table = named["block_tables"][sequence]
        vectors = [named["kv_cache"][table[token // 16], token % 16].astype(float) for token in range(context)]
        for head in range(2):
            query = named["query"][sequence, head].astype(float)
            weights = [np.exp(192**-0.5 * sum(query * vector)) for vector in vectors]
            wanted = sum(weight * vector[:512] for weight, vector in zip(weights, vectors, strict=True)) / sum(weights)
            assert np.allclose(found[sequence, head], wanted, rtol=1e-9)


@needs_compiler
@pytest.mark.parametrize("block_size", [16, 32, 64, 7, 48])
def test_16_heads_agree_with_float64(block_size):
    check(latent_case("bfloat16", 16, block_size, CONTEXTS))
    check(steep(latent_case("bfloat16", 16, block_size, CONTEXTS, 1)), CpuKernels(1))
    check(latent_case("bfloat16", 5, block_size, CONTEXTS))


@pytest.mark.slow
@needs_compiler
def test_128_heads_agree_with_float64():
    """Two blocks of 64."""
    check(latent_case("bfloat16", 128, 64, CONTEXTS))
    check(steep(latent_case("bfloat16", 128, 64, CONTEXTS)))


@pytest.mark.slow
@needs_compiler
def test_partitions_are_merged():
    """Ends at, before and after a partition's edge; a sequence that most partitions know nothing of; an empty one."""
    for made in (lambda given: given, steep):
        check(made(latent_case("bfloat16", 16, 16, [300, 192, 1, 0, 65])), partition_tokens=64)


#: A100; H100; cards of 100 KiB, which have no block of 64 heads.
CARDS = [164 * KIB, 228 * KIB, 100 * KIB]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("dtype", source.LATENT_DTYPES)
@pytest.mark.parametrize(("shared_bytes", "heads"), list(itertools.product(CARDS, [16, 20, 64, 128])))
def test_every_card_agrees_with_float64(shared_bytes, heads, dtype):
    for block_size, partition_tokens in itertools.product((1, 16, 32, 64), (None, 64)):
        for made in (lambda given: given, steep):
            check(made(latent_case(dtype, heads, block_size, CONTEXTS)), CpuKernels(1, shared_bytes), partition_tokens)


@pytest.mark.slow
@needs_compiler
def test_a_deeper_ring_and_the_order_of_threads_change_nothing():
    given = latent_case("bfloat16", 16, 16, CONTEXTS)
    first, *others = (run(given, CpuKernels(seed, shared)).tobytes() for seed in range(3) for shared in CARDS[:2])
    assert others == [first] * 5


@needs_compiler
def test_scores_far_apart_leave_one_token_all_the_weight():
    given = latent_case("bfloat16", 16, 16, [40])
    given.given.query[:] *= 200
    check(given)


@needs_compiler
def test_the_scale_of_scores_is_the_callers():
    given = replace(latent_case("bfloat16", 16, 16, [40]), softmax_scale=0.02)
    check(given)
    assert gpu_cases.error(given.expected(), replace(given, softmax_scale=192**-0.5).expected()) > 0.1


BUGS = {
    "copies are read before they arrive": ("cp_async_wait<Of::kAhead - 1>", "cp_async_wait<Of::kAhead>"),
    "other warps' copies are not waited for": (
        "__syncthreads();\n            fetch",
        "__syncwarp();\n            fetch",
    ),
    "scores are added up before all are there": ("__syncthreads();  // all parts", "__syncwarp();  // all parts"),
    "weights are read before they are there": ("__syncthreads();  // the weights", "__syncwarp();  // the weights"),
    "what lies past the end is not zeroed": ("eight * kPerLoad<Scalar>, valid);", "eight * kPerLoad<Scalar>, true);"),
    "a tile is fetched into the place that is read": (
        "storage.tiles[tile % kStages] + threadIdx.x / 8",
        "storage.tiles[(tile + 1) % kStages] + threadIdx.x / 8",
    ),
    "blocks are looked up for another tile": (
        "find_next_blocks(tile + Of::kAhead + 1);",
        "find_next_blocks(tile + Of::kAhead);",
    ),
    "a tile begins where a block does": ("            offset[turn] += tokens.tokens_left;\n", ""),
    "the next block is not entered": ("                ++place[turn];\n", ""),
    "block ids are taken for slots": ("id[turn] * tokens.block_size + offset[turn]", "id[turn] + offset[turn]"),
    "one token too many is weighed": ("8 * eight + side < left ?", "8 * eight + side <= left ?"),
    "the last token is left out": ("8 * eight + side < left ?", "8 * eight + side + 1 < left ?"),
    "a part of the dimensions is not scored": ("of < Of::kParts;", "of < Of::kParts - 1;"),
    "the rotary part is taken for values": ("warp * Of::kDimLoads + lane", "8 + warp * Of::kDimLoads + lane"),
    "parts of queries change places": ("place / 2 * 8 + 2 * (lane % 4)", "place % 2 * 8 + 2 * (lane % 4)"),
    "keys are in another order": (
        "rows[first + 8 * eight + lane / 16 * 8 + lane % 8][load]",
        "rows[first + 8 * eight + lane % 16][load]",
    ),
    "values are not transposed": ("ptx::ldmatrix_trans(values", "ptx::ldmatrix(values"),
    "the maximum is of half the lanes": (
        "distance < 4; distance *= 2)\n            highest",
        "distance < 2; distance *= 2)\n            highest",
    ),
    "a maximum that is too low remains": ("highest > maximum + kSlack", "maximum == kNoScore"),
    "old sums are not rescaled": ("        sum *= factor;\n", ""),
    "old outputs are not rescaled": ("        if (changed)\n", "        if (false)\n"),
    "outputs are rescaled for the first strip alone": (
        "eight < kHeads / 8; ++eight) changed",
        "eight < 1; ++eight) changed",
    ),
    "the sum is of half the lanes": ("distance < 4; distance *= 2) sum +=", "distance < 2; distance *= 2) sum +="),
    "scores are not scaled": ("scores[eight][side] * scale", "scores[eight][side]"),
    "heads past the last are written": ("if (head >= heads) continue;", ""),
    "all queries are of the first sequence": ("(long long)sequence * num_heads + first_head;", "first_head;"),
    "partitions begin at the first token": (
        "block_size, start, end, blocks_a_tile",
        "block_size, 0, end, blocks_a_tile",
    ),
}
#: Where the outputs are a tile behind.
LAG_BUGS = {
    "the last tile's values are not added": ("first_token(tile - kLag) < tokens.end", "first_token(tile) < tokens.end"),
    "a tile is overwritten before its values are added": ("kAhead = kStages - 1 - kLag;", "kAhead = kStages - 1;"),
    "weights are written where others are read": (
        "storage.weights[tile % (1 + kLag)][head]",
        "storage.weights[(tile + 1) % (1 + kLag)][head]",
    ),
    "values are added before their weights are there": ("add_values(tile - 1);", "add_values(tile);"),
}
#: Those of every run of the tests; each is a build of the kernel.
OFTEN = {
    "copies are read before they arrive",
    "other warps' copies are not waited for",
    "weights are read before they are there",
    "one token too many is weighed",
    "old outputs are not rescaled",
    "the rotary part is taken for values",
}


def plant(monkeypatch, right: str, wrong: str) -> None:
    whole = source.latent_attention
    monkeypatch.setattr(source, "latent_attention", lambda *of: gpu_cases.planted(whole(*of), right, wrong))


@needs_compiler
@pytest.mark.parametrize("bug", [pytest.param(bug, marks=() if bug in OFTEN else pytest.mark.slow) for bug in BUGS])
def test_a_planted_bug_is_caught(bug, monkeypatch):
    plant(monkeypatch, *BUGS[bug])
    with pytest.raises((AssertionError, KernelFault)):
        for partition_tokens, seed in itertools.product((256, 64), range(3)):
            # In fp16 weights overflow from 65,520 on.
            given = latent_case("float16" if seed == 2 else "bfloat16", 12, 7, [141, 70, 43], seed)
            check(steep(given) if seed else given, CpuKernels(seed, 228 * KIB), partition_tokens)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("bug", LAG_BUGS)
def test_a_planted_bug_with_64_heads_is_caught(bug, monkeypatch):
    plant(monkeypatch, *LAG_BUGS[bug])
    with pytest.raises((AssertionError, KernelFault)):
        for seed in range(3):
            check(latent_case("bfloat16", 64, 16, [141, 70, 43], seed), CpuKernels(seed))


@pytest.mark.parametrize("shared_bytes", CARDS)
def test_blocks_fit_every_card(shared_bytes):
    blocks = source.latent_blocks(shared_bytes)
    assert [block.heads for block in blocks] == ([16, 32] if shared_bytes == 100 * KIB else [16, 32, 64])
    assert all(block.shared_bytes + KIB <= shared_bytes and block.stages >= 2 + block.lag for block in blocks)
    assert latent_attention.block_for(1, shared_bytes) == latent_attention.block_for(16, shared_bytes) == blocks[0]
    assert latent_attention.block_for(17, shared_bytes) == blocks[1]
    assert latent_attention.block_for(128, shared_bytes) == blocks[-1]


def test_the_documented_blocks_are_those_of_the_source():
    """Of each architecture; instructions of a warp a tile make those a KV byte."""
    text = (ROOT / "docs" / "results" / "kernels.md").read_text().partition("## Latent attention (MLA)")[2]
    table = re.findall(r"^\| (\d+), (sm_.*?) \|(.*)\|$", text, re.MULTILINE)
    found, wanted = [], []
    for heads, architectures, cells in table:
        threads, registers, stages, shared, resident, per_tile, a_byte = map(float, cells.split("|"))
        block = source.LatentBlock(int(heads), int(stages))
        assert (threads, shared) == (block.threads, round(block.shared_bytes / KIB, 1))
        assert a_byte == round(per_tile * threads / 32 / (source.LATENT_TILE * source.LATENT_KEY_DIM * 2), 3)
        for architecture in architectures.split(" and "):
            found.append((architecture, block))
            size = int(registers), block.shared_bytes, architecture, block.threads
            assert resident == instructions.resident_blocks(*size)
    for architecture, shared_bytes in compile_gate.SHARED_BYTES.items():
        wanted += [(architecture, block) for block in source.latent_blocks(shared_bytes)]
    assert sorted(found, key=str) == sorted(wanted, key=str)


@needs_compiler
def test_the_launch_gives_the_shared_memory_that_the_kernel_needs(monkeypatch):
    needed = source.LatentBlock.shared_bytes.fget
    monkeypatch.setattr(source.LatentBlock, "shared_bytes", property(lambda block: needed(block) - 16))
    for heads in (16, 128):
        with pytest.raises(KernelFault, match="bytes of dynamic shared memory, and the kernel needs"):
            run(latent_case("bfloat16", heads, 16, [3]))


@needs_compiler
def test_a_wild_block_id_is_a_fault():
    given = latent_case("bfloat16", 16, 16, [40, 20])
    given.given.block_tables[1, 1] = 10**6
    with pytest.raises(KernelFault, match=r"<__nv_bfloat16, 16, 4>: block \(0, 0, 1\), .* outside every array"):
        run(given)


def arguments(**changes) -> dict:
    return latent_case("float16", 20, 16, [40, 20]).arguments() | changes


@needs_compiler
def test_forward_takes_arrays_and_torch_tensors():
    torch = pytest.importorskip("torch")
    given = latent_case("bfloat16", 16, 16, [40, 20])
    named = given.arguments()
    out = latent_attention.forward(**named, check_ids=True)
    assert out.shape == (2, 16, 512) and out.tobytes() == run(given).tobytes()
    tensors = dict(named)
    for name in ("query", "kv_cache"):
        tensors[name] = torch.from_numpy(named[name].astype(np.float32)).bfloat16()
    found = latent_attention.forward(**tensors)
    assert found.dtype == torch.bfloat16
    assert found.float().numpy().tobytes() == out.astype(np.float32).tobytes()


@needs_compiler
def test_one_preparation_serves_every_layer():
    layers = [latent_case("bfloat16", 16, 16, [40, 20], seed) for seed in range(2)]
    first, *_ = named = [layer.arguments() for layer in layers]
    out = np.empty((2, 16, 512), first["query"].dtype)
    call = latent_attention.prepare(out, **first)
    for layer, own in zip(layers, named, strict=True):
        own_tables = replace(layer, given=replace(layer.given, block_tables=first["block_tables"]))
        # Blocks of the second layer lie where the first one's tables say.
        cache = layers[0].given.key_cache if layer is layers[0] else np.roll(layers[0].given.key_cache, 1, axis=-1)
        own_tables = replace(own_tables, given=replace(own_tables.given, key_cache=cache))
        call(out, own["query"], cache[:, :, 0])
        assert gpu_cases.error(out, own_tables.expected()) <= gpu_cases.TOLERANCE["bfloat16"]
    with pytest.raises(SettingError, match=r"^query.shape = \(1, 16, 576\): must be \(2, 16, 576\)"):
        call(out, first["query"][:1], first["kv_cache"])


MISTAKES = {
    "query.dtype = 'float32'": dict(query=np.zeros((2, 20, 576), np.float32)),
    "query.shape = (2, 20, 512)": dict(query=np.zeros((2, 20, 512), np.float16)),
    "num_heads = 0": dict(query=np.zeros((2, 0, 576), np.float16)),
    "kv_cache.dtype = 'float32'": dict(kv_cache=np.zeros((5, 16, 576), np.float32)),
    "kv_cache.shape = (5, 16, 1, 576)": dict(kv_cache=np.zeros((5, 16, 1, 576), np.float16)),
    "kv_cache.shape = (5, 8, 576)": dict(kv_cache=np.zeros((5, 8, 576), np.float16)),
    "kv_cache = 'misaligned memory'": dict(kv_cache=np.zeros(16 * 576 + 4, np.float16)[4:].reshape(1, 16, 576)),
    "block_tables.shape = (3, 4)": dict(block_tables=np.zeros((3, 4), np.int32)),
    "context_lens.dtype = 'int64'": dict(context_lens=np.zeros(2, np.int64)),
    "block_size = 0": dict(block_size=0),
    "max_context_len = 65": dict(max_context_len=65),
    "softmax_scale = 0": dict(softmax_scale=0),
    "softmax_scale = nan": dict(softmax_scale=float("nan")),
    "block_tables[0, 2] = -1": dict(block_tables=np.array([[0, 1, -1, -9], [3, 4, -9, -9]], np.int32)),
    "context_lens[1] = 41": dict(context_lens=np.array([40, 41], np.int32)),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_clear_line(message):
    with pytest.raises(SettingError) as caught:
        latent_attention.forward(**arguments(**MISTAKES[message]), check_ids=True)
    assert str(caught.value).startswith(f"{message}: ") and "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_120"])
def test_instances_compile_without_spills(architecture):
    """All of bfloat16; the slow test of the gate has those of float16 and of the other architectures, too."""
    pytest.importorskip("cupy", reason="CuPy is not installed (extra: kernels)")
    blocks = source.latent_blocks(compile_gate.SHARED_BYTES[architecture])
    found = compile_gate.compiled([source.latent_attention("bfloat16", block) for block in blocks], architecture)
    assert len(found) == len(blocks)
    for block, one in zip(blocks, found, strict=True):
        assert one.spill_bytes == 0 < one.registers and one.registers * block.threads <= 65536, one
