"""CUDA graphs by release: their lists beside those of public logs, and their memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fragmeter.sim.spec import Deployment, gpu, model
from fragmeter.sim.spec.releases import release
from fragmeter.sim.spec.startup.cuda_graphs import (
    BOTH,
    NONE,
    PIECEWISE,
    Captures,
    GraphBatch,
    GraphSettings,
    GraphShape,
    Reduction,
    Support,
    captured_bytes,
    captures,
    estimated_bytes,
    graph_mode,
)
from fragmeter.sim.spec.startup.launch import Launch
from fragmeter.sim.spec.startup.launched_graphs import captures_of, shape_of
from fragmeter.sim.types.errors import SettingError

MIB = 1 << 20


def graphs(minor: int, seqs: int, tokens: int = 8192, settings: GraphSettings = GraphSettings(), **more) -> Captures:
    batch = GraphBatch(max_num_seqs=seqs, max_num_batched_tokens=tokens, minor=minor, **more)
    return captures(settings, batch)


@pytest.mark.parametrize(
    ("minor", "seqs", "more", "piecewise", "full"),
    [
        # Logs: "Profiling CUDA graph memory", and the progress of capture before 0.18; count and largest.
        (10, 1024, {"states": True}, (67, 512), (67, 512)),
        (10, 256, {}, (67, 512), None),
        (11, 256, {}, (67, 512), (35, 256)),
        (19, 256, {}, (51, 512), (35, 256)),
        (19, 1024, {}, (51, 512), (51, 512)),
        (22, 128, {"tokens": 2048}, (35, 256), (19, 128)),
        (23, 20, {}, (8, 40), (5, 16)),
        (19, 4, {"tokens": 2048}, (4, 8), (3, 4)),
        # Four drafts, on kernels that capture one token a sequence.
        (24, 10, {"query_tokens": 5, "support": Support.SINGLE_TOKENS}, (15, 96), None),
        (24, 192, {}, (43, 384), (27, 192)),
    ],
)
def test_the_graphs_are_those_of_logs(minor, seqs, more, piecewise, full):
    found = graphs(minor, seqs, **more)
    assert (len(found.piecewise), found.piecewise[-1]) == piecewise
    assert (len(found.full), found.full[-1]) == full if full else not found.full


def test_releases_differ_in_their_sizes():
    assert graphs(27, 300).piecewise[-1] == graphs(28, 300).piecewise[-1] == 512
    dc = {"data_center_blackwell": True}
    assert [graphs(minor, 1024, **dc).piecewise[-1] for minor in (27, 28)] == [512, 1024]
    assert graphs(30, 256, gpt_oss=True).piecewise[-1] == 1024
    # 300 sequences are on no stride, nor are 100 with three tokens each.
    assert [300 in graphs(minor, 300).full for minor in (30, 31)] == [False, True]
    assert [300 in graphs(minor, 100, query_tokens=3, second_runner=True).piecewise for minor in (28, 29)] == [
        False,
        True,
    ]
    assert [len(graphs(minor, 8, settings=GraphSettings(interactive=True)).piecewise) for minor in (16, 17)] == [5, 16]
    assert [graphs(minor, 512, tokens=100).piecewise[-1] for minor in (19, 20)] == [96, 100]


def test_levels_and_modes():
    modes = [graphs(33, 8, settings=GraphSettings(level=level)).mode for level in range(4)]
    assert modes == [NONE, PIECEWISE, BOTH, BOTH]
    # Without compilation there are no graphs between the layers' attention.
    off = GraphSettings(level=0, mode=BOTH)
    assert [graphs(minor, 8, settings=off).mode for minor in (29, 30)] == [NONE, "FULL_DECODE_ONLY"]
    assert [graph_mode(value) for value in (0, 1, 2, "full_and_piecewise", None)] == [
        NONE,
        PIECEWISE,
        "FULL",
        BOTH,
        None,
    ]
    assert graphs(33, 8, settings=GraphSettings(enforce_eager=True, mode="FULL")) == Captures()
    for wrong in (3, True, "half", [2, 1]):
        with pytest.raises(SettingError):
            graph_mode(wrong)


@pytest.mark.parametrize(
    "settings", [GraphSettings(level=0), GraphSettings(mode=NONE), GraphSettings(enforce_eager=True)]
)
def test_no_graphs_take_nothing(settings):
    found = graphs(33, 256, settings=settings)
    shape = GraphShape(minor=33, num_layers=32, experts=True, flashinfer=True)
    assert captured_bytes(found, shape) == estimated_bytes(found, shape, 8192) == (0, 0, 0)


def test_memory_grows_with_graphs_layers_and_ranks():
    shape = GraphShape(minor=20, num_layers=32)
    few, many = graphs(20, 8), graphs(20, 256)
    base = captured_bytes(many, shape)
    assert base.low < base.likely < base.high
    assert captured_bytes(few, shape).likely * 5 < base.likely
    assert captured_bytes(many, replace(shape, num_layers=64)).likely == pytest.approx(2 * base.likely, rel=1e-6)
    assert captured_bytes(many, replace(shape, reduction=Reduction.NCCL)).low > base.likely
    unknown = captured_bytes(many, replace(shape, reduction=Reduction.UNKNOWN))
    assert unknown.low == base.low and unknown.likely > base.likely
    assert captured_bytes(many._replace(cases=2), shape).likely == 2 * base.likely
    assert captured_bytes(many, replace(shape, minor=29)).likely < base.likely / 2


def test_workspaces_come_with_graphs_of_whole_steps():
    shape = GraphShape(minor=20, num_layers=32)
    # Llama 3.1 8B: 32 partial outputs of 512 tokens, of 32 heads of 128 in fp32.
    split = replace(shape, output_bytes=4 * 32 * 128)
    found, pieces = graphs(20, 1024), graphs(20, 1024, settings=GraphSettings(mode=PIECEWISE))
    assert captured_bytes(found, split).likely - captured_bytes(found, shape).likely == 256 * MIB
    assert captured_bytes(pieces, split) == captured_bytes(pieces, shape)
    assert captured_bytes(found, replace(shape, flashinfer=True)).low - captured_bytes(found, shape).low == 394 * MIB


def test_temporary_tensors_of_gated_delta_nets_count_as_graphs():
    # vllm-project/vllm#52872: 0.52 GiB up to 4,096 tokens a step, 0.89 with 8,192.
    found = graphs(27, 8, query_tokens=1)
    shape = GraphShape(minor=27, num_layers=64, blackwell=True, flashinfer=True, transient_heads=48)
    at = {tokens: estimated_bytes(found, shape, tokens).likely / (1 << 30) for tokens in (2048, 4096, 8192)}
    assert at[2048] == at[4096] == pytest.approx(0.52, abs=0.06)
    assert at[8192] == pytest.approx(0.89, abs=0.06)
    assert estimated_bytes(found, replace(shape, minor=25), 8192).likely == estimated_bytes(found, shape, 2048).likely


def test_a_launch_says_what_its_graphs_depend_on():
    launch = Launch(
        model=model("llama-3.1-8b"),
        gpu=gpu("h100-80gb"),
        max_model_len=8192,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        release=release((0, 20)),
        tensor_parallel=2,
    )
    shape = shape_of(launch, range(32))
    assert shape == GraphShape(minor=20, num_layers=32, reduction=Reduction.CUSTOM, output_bytes=4 * 16 * 128)
    assert len(captures_of(launch).full) == 51
    pcie = shape_of(
        replace(launch, gpu=gpu("l40s"), tensor_parallel=4, deployment=Deployment(kv_dtype="fp8", cuda_graphs=True)),
        range(16),
    )
    assert (pcie.reduction, pcie.flashinfer, pcie.output_bytes) == (Reduction.NCCL, True, 0)
    assert captures_of(replace(launch, deployment=Deployment())) == Captures()
