"""That a calibration times decode attention in the launches of a captured and of an eager step: as many blocks for as many sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fragmeter.gpu.calibrate import grid as calibrate_grid
from fragmeter.gpu.calibrate.probes import Probes
from fragmeter.gpu.devices import devices
from fragmeter.gpu.model import graphs as skeleton_graphs
from fragmeter.gpu.model.batch import Batch
from fragmeter.gpu.model.skeleton import Skeleton
from fragmeter.gpu.ops import cache, paged_attention, prefill
from fragmeter.sim.spec import ModelSpec

SPEC = ModelSpec("small", 2, 128, 8, 2, 64, 160, 211, 4096, gated_mlp=True)
BLOCK_SIZE, BLOCKS = 16, 1500
NO_SIZES = dict.fromkeys(
    (
        "tokens",
        "head_rows",
        "ragged",
        "block_sizes",
        "shared",
        "chunks",
        "prefixes",
        "prompts",
        "mixed",
        "moved_blocks",
        "steps",
    ),
    (),
)


class Launches:
    """Kernels of a device with room for 396 blocks, as an H200 has for groups of 8 heads, that write down their launches."""

    multiprocessor_shared_bytes = 228 * 1024

    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def places(self, kernel, threads, shared_bytes) -> int:
        return 396

    def prepared(self, kernel, grid, block, arguments, changing=(), touched=(), shared_bytes=0):
        name = kernel.expression.partition("<")[0]

        def launch(pointers=()) -> None:
            if name == "decode_attention":
                self.seen.append((name, grid, int(arguments[9])))

        return launch


class Stopwatch:
    quantile, cold_bytes, how = 0.5, 1, "none"

    def aside(self, between):
        pass


@pytest.fixture()
def launches(monkeypatch):
    found = Launches()
    for module in (paged_attention, prefill, cache):
        monkeypatch.setattr(module, "kernels_for", lambda array: found)
    # On the CPU a capture is the call itself.
    monkeypatch.setattr(skeleton_graphs, "capture", lambda work: (lambda: None, work()))
    return found


def skeleton(graphs: bool) -> Skeleton:
    return Skeleton(SPEC, devices.open("shim"), BLOCKS, BLOCK_SIZE, "fp16", graphs=graphs)


def of_a_step(launches: Launches, rows: int, tokens: int, graphs: bool) -> list[tuple]:
    """The launches of one layer of a step that decodes so many sequences of so many tokens."""
    tables = np.arange(rows * -(-tokens // BLOCK_SIZE)).reshape(rows, -1)
    launches.seen.clear()
    skeleton(graphs).step(Batch.paged([1] * rows, [tokens] * rows, [0] * rows, tables, BLOCK_SIZE))
    return launches.seen[: len(launches.seen) // SPEC.num_layers]


def of_a_probe(launches: Launches, rows: int, tokens: int, **sizes) -> dict[str, list[tuple]]:
    """The launches of each probe, by its operation."""
    known = {**NO_SIZES, "batches": (rows,), "contexts": (tokens,), **sizes}
    probes = Probes(skeleton(True), replace(calibrate_grid.QUICK, **known), Stopwatch(), seed=3)
    found = {}
    with torch.inference_mode():
        for probe in probes.operations():
            launches.seen.clear()
            probe.work(0)
            found[probe.point["op"]] = [*launches.seen]
    return found


@pytest.mark.parametrize(("rows", "tokens"), [(8, 2300), (5, 1500), (1, 700), (3, 50), (20, 900)])
def test_a_probe_launches_what_a_captured_step_launches(launches, rows, tokens):
    """Lengths of a probe are within a tenth of its own; here all of them are padded to the same power of two."""
    wanted = of_a_step(launches, rows, tokens, graphs=True)
    assert of_a_probe(launches, rows, tokens)["decode_attention"] == wanted
    # Rows are padded, too.
    ((_, _, sequences),) = wanted
    assert sequences == {8: 8, 5: 8, 1: 1, 3: 4, 20: 24}[rows]


def test_eager_steps_launch_what_captured_steps_do(launches):
    """The longest context of 8 sequences of 2,100 tokens is padded to 4,096 in a captured step."""
    captured, eager = (of_a_step(launches, 8, 2100, graphs) for graphs in (True, False))
    assert captured == eager == [("decode_attention", (396, 1, 1), 8)]


def test_a_capture_shares_no_buffers_with_the_calls_before_it(launches, monkeypatch):
    """Buffers from before a capture would be free for other tensors while its graph still writes to them."""
    made = []
    for name in ("empty", "zeros"):
        make = getattr(paged_attention, name)
        monkeypatch.setattr(paged_attention, name, lambda *how, make=make: made.append(how[0]) or make(*how))
    known = {**NO_SIZES, "batches": (8,), "contexts": (2300,)}
    probes = Probes(skeleton(True), replace(calibrate_grid.QUICK, **known), Stopwatch(), seed=3)
    with torch.inference_mode():
        work = next(probe.work for probe in probes.operations() if probe.point["op"] == "decode_attention")
        for _ in range(2):  # a warm-up, and a capture
            made.clear()
            for number in range(2 * SPEC.num_layers):
                work(number)
            assert made == ["partial_states", "partial_values", "counters"] * 2


def test_beside_a_prompt_decodes_are_timed_as_they_run_eager(launches):
    """A step with a prompt is not captured."""
    found = of_a_probe(launches, 5, 1500, chunks=(64,), prefixes=(0,), mixed=((5, 1500, 64, 0),))
    padded, mixed = found["decode_attention"][0], found["mixed_attention"][0]
    assert padded[2] == 8 and mixed[2] == 5
