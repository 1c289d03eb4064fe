"""Calibration: that each probe does what its point says, and what becomes of the samples."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode

from fragmeter.gpu.calibrate import calibrate, points
from fragmeter.gpu.calibrate import grid as calibrate_grid
from fragmeter.gpu.calibrate.fitting import fit
from fragmeter.gpu.calibrate.probes import MATRICES, Probes
from fragmeter.gpu.calibrate.repeats import repeated_reads
from fragmeter.gpu.devices import devices, timing
from fragmeter.gpu.model.layers import Layer, multiply
from fragmeter.gpu.model.skeleton import Skeleton
from fragmeter.sim.cost.op_model import OpModel
from fragmeter.sim.cost.operations import FROM_TABLES, OPERATIONS
from fragmeter.sim.spec import ModelSpec
from fragmeter.sim.spec import model as model_spec
from fragmeter.sim.types.errors import SettingError

SPEC = ModelSpec("small", 3, 96, 6, 2, 16, 160, 211, 256, gated_mlp=True)
BLOCKS, BLOCK_SIZE = 64, 16
#: No sizes of 2 or 3 rows, which a CPU fills up to 4.
GRID = replace(calibrate_grid.QUICK, ragged=((4, 60),))
MOVES = ("block_copy", "swap_out", "swap_in")


class Spy:
    """A device that writes down what its operations are asked for, as points would have it."""

    def __init__(self) -> None:
        self._device = devices.open("cpu")
        self.torch_device = self._device.torch_device
        self.host_empty, self.free_bytes = self._device.host_empty, self._device.free_bytes
        self.seen: list[dict] = []

    prepared = devices.CpuDevice.prepared

    def run(self, call):
        getattr(self, call.operation)(*call.layer, *call.step)
        self._device.run(call)

    def reshape_and_cache(self, key, value, key_cache, value_cache, slots):
        assert key.shape == value.shape and len(set(slots.tolist())) == len(key)
        self.seen.append({"op": "kv_write", "tokens": len(key), "kv_heads": key.shape[1], "head_dim": key.shape[2]})

    def decode_attention(self, out, query, keys, values, tables, contexts, block_size, longest):
        again = self._check(keys, tables, contexts, block_size, longest)
        sizes = {"batch": len(query), "context_tokens": int(contexts.sum()), "block_size": block_size}
        shared = {"repeated_tokens": again * block_size} if again else {}
        self.seen.append({"op": "decode_attention", **sizes, **shared, **self._heads(query, keys)})

    def contiguous_attention(self, out, query, keys, values, starts, contexts, longest):
        pieces = sorted(zip(starts.tolist(), contexts.tolist(), strict=True))
        ends = [0, *(start + context for start, context in pieces)]
        assert all(end <= start for end, (start, _) in zip(ends, pieces)) and ends[-1] <= len(keys)
        assert longest == contexts.max()
        sizes = {"batch": len(query), "context_tokens": int(contexts.sum())}
        heads = {"heads": query.shape[1], "kv_heads": keys.shape[1], "head_dim": query.shape[2]}
        self.seen.append({"op": "contiguous_attention", **sizes, **heads})

    def prefill_attention(self, out, query, keys, values, tables, starts, contexts, block_size, most, longest):
        assert not self._check(keys, tables, contexts, block_size, longest)
        lens = starts.diff().tolist()
        assert most == max(lens) and sum(lens) == len(query)
        pairs = sum(
            context - later for new, context in zip(lens, contexts.tolist(), strict=True) for later in range(new)
        )
        sizes = {"tokens": len(query), "pairs": pairs, "context_tokens": int(contexts.sum())}
        self.seen.append({"op": "prefill_attention", **sizes, **self._heads(query, keys)})

    def copy_blocks(self, keys, values, mapping):
        assert not set(mapping[:, 0].tolist()) & set(mapping[:, 1].tolist())
        self._moved("block_copy", len(mapping), [*keys, *values])
        self._device.copy_blocks(keys, values, mapping)

    def swap_blocks(self, source, destination, mapping):
        self._moved("swap_out" if len(source) == BLOCKS else "swap_in", len(mapping), [source])
        self._device.swap_blocks(source, destination, mapping)

    def _moved(self, op, blocks, caches):
        # In the simulator's 16 bits an element, where the caches have 32.
        size = sum(cache[0].numel() * 2 * blocks for cache in caches)
        self.seen.append({"op": op, "bytes": size, "blocks": len(caches) * blocks})

    @staticmethod
    def _check(keys, tables, contexts, block_size, longest):
        """Every block id is one of the cache's; how many are named again."""
        used = [
            block
            for table, context in zip(tables.tolist(), contexts.tolist(), strict=True)
            for block in table[: -(-context // block_size)]
        ]
        assert keys.shape[1] == block_size and longest == contexts.max()
        assert all(0 <= block < len(keys) for block in used)
        return len(used) - len(set(used))

    @staticmethod
    def _heads(query, keys):
        return {"heads": query.shape[1], "kv_heads": keys.shape[2], "head_dim": query.shape[2]}


class Stopwatch:
    """Says that every call of an operation takes 10 us, and one that the host takes part in 1,000; nothing is aside."""

    quantile, cold_bytes, how = 0.5, 1 << 20, "by rote"

    def sampler(self, work, captured=True):
        us = 10.0 if captured else 1000.0
        return lambda: us

    def aside(self, between):
        pass

    before = aside


@pytest.fixture()
def spy():
    return Spy()


@pytest.fixture()
def probes(spy):
    skeleton = Skeleton(SPEC, spy, BLOCKS, BLOCK_SIZE, host_blocks=4)
    with torch.inference_mode():
        yield Probes(skeleton, GRID, Stopwatch(), seed=7)


def test_every_operation_is_probed(probes):
    found = Counter(probe.point["op"] for probe in probes.operations())
    assert set(found) | {"step", "prefill_step", "launches"} == set(OPERATIONS) - FROM_TABLES


def test_a_probe_of_a_devices_operation_asks_for_what_its_point_says(probes, spy):
    """At every turn; a swap is one call for each cache, which together move what the point says."""
    watched = ("kv_write", "decode_attention", "contiguous_attention", "prefill_attention", *MOVES)
    for probe in probes.operations():
        for number in (0, 1, 5):
            spy.seen.clear()
            probe.work(number)
            if probe.parts:
                assert spy.seen == [*probe.parts]
            elif probe.point["op"] in MOVES:
                moved = {size: sum(one[size] for one in spy.seen) for size in ("bytes", "blocks")}
                assert probe.point == {"op": spy.seen[0]["op"], **moved}
            else:
                assert spy.seen == ([probe.point] if probe.point["op"] in watched else [])


def test_probes_of_fp8_are_those_of_16_bits_over_half_of_the_bytes():
    """Every one runs on a CPU."""

    def points_of(**kept) -> list[dict]:
        device = devices.open("cpu")
        skeleton = Skeleton(SPEC, device, BLOCKS, BLOCK_SIZE, host_blocks=4, **kept)
        with torch.inference_mode():
            probes = list(Probes(skeleton, GRID, Stopwatch(), seed=7).operations())
            for probe in probes:
                probe.work(0)
        return [probe.point for probe in probes]

    read = {"kv_write", "decode_attention", "contiguous_attention", "prefill_attention"}
    for wide, narrow in zip(points_of(), points_of(kv_cache_dtype="fp8"), strict=True):
        if wide["op"] in read:
            # Smaller caches take more tables to be cold, and so other random contexts.
            same = {"kv_element_bytes": 1, "context_tokens": narrow.get("context_tokens")}
            assert narrow == wide | {name: value for name, value in same.items() if value is not None}
        elif wide["op"] in MOVES:
            assert narrow == wide | {"bytes": wide["bytes"] // 2}
        else:
            assert narrow == wide


def test_tables_that_share_name_the_same_blocks_first_and_others_then(probes):
    """Three quarters of the shortest of each group, in whole blocks: 3 of 4; and a lone table shares nothing."""
    contexts = [80, 65, 100, 64, 90]
    table = probes._table(contexts, BLOCK_SIZE, group=2).tolist()
    blocks = [set(row[: -(-context // BLOCK_SIZE)]) for row, context in zip(table, contexts, strict=True)]
    common = {(one, other): len(blocks[one] & blocks[other]) for other in range(5) for one in range(other)}
    assert {pair: count for pair, count in common.items() if count} == {(0, 1): 3, (2, 3): 3}
    assert table[0][:3] == table[1][:3] and table[2][:3] == table[3][:3]


def test_the_share_of_a_repeated_read_comes_back_from_points_that_have_it():
    """Also where a call is 3 % longer than modelled, if not the same ones; calls of few bytes say nothing."""
    sizes = {"op": "decode_attention", "heads": 8, "kv_heads": 2, "head_dim": 64, "block_size": 16}
    entry = {"coefficients": {"t0_us": 10, "bytes_per_s": 1e12}}

    def point(batch: int, context: int, repeated: int, share: float, factor: float = 1.0) -> dict:
        tokens = context - repeated + share * repeated
        us = OpModel(**entry).us(OPERATIONS["decode_attention"](batch, tokens, 8, 2, 64))
        return sizes | {
            "batch": batch,
            "context_tokens": context,
            "repeated_tokens": repeated,
            "us": factor * float(us),
        }

    batches = (32, 64, 128, 256)
    for share in (0.0, 0.3, 1.0):
        assert repeated_reads([point(each, 1000 * each, 700 * each, share) for each in batches], entry) == share
    noisy = [point(each, 1000 * each, 700 * each, 0.3, factor) for each, factor in zip(batches, (0.97, 1, 1, 1.03))]
    assert repeated_reads(noisy, entry) == 0.3
    # Below nothing, and above a first read.
    assert repeated_reads([point(32, 32000, 22000, 0.0, 0.5)], entry) == 0
    assert repeated_reads([point(32, 32000, 22000, 1.0, 1.5)], entry) == 1
    assert repeated_reads([point(2, 60, 30, 0.3)], entry) is None
    assert repeated_reads([sizes | {"batch": 1, "context_tokens": 9, "us": 1}], entry) is None


def test_the_spread_of_an_operation_is_that_of_its_median_point():
    """A step's own time may be a small part of the step that was timed: its samples spread by the whole."""
    measured = [
        {"op": "gemm", "us": us, "iqr_us": iqr_us} for us, iqr_us in ((10.0, 1.0), (100.0, 2.0), (1000.0, 500.0))
    ]
    measured.append({"op": "step", "us": 20.0, "iqr_us": 10.0, "whole_us": 400.0})
    assert points.spread(measured) == {"gemm": 0.1, "step": 0.025}


def test_points_that_read_blocks_again_are_not_those_of_the_operation():
    points_of = [
        {"op": "kv_write", "tokens": tokens, "kv_heads": 2, "head_dim": 64, "us": 2.0 + tokens}
        for tokens in (1, 2, 4, 8)
    ]
    again = points_of[0] | {"repeated_tokens": 16, "us": 1000.0}
    assert fit([*points_of, again]) == fit(points_of)


def stepped_batches(probes, count):
    """The batches of the first steps."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes._skeleton, "step", seen.append)
        for step in itertools.islice(probes.steps(), count):
            step.work(0)
    return seen


def gemm_flops(work) -> int:
    """Of the matrix products in one call, as torch counts them; attention has its own operations."""
    with FlopCounterMode(display=False) as counter:
        work(0)
    counts = counter.get_flop_counts().get("Global", {})
    return sum(flops for operation, flops in counts.items() if str(operation) in ("aten.mm", "aten.addmm"))


@pytest.mark.slow
def test_gemm_probes_multiply_what_their_points_say_and_elementwise_ones_nothing(probes):
    for probe in probes.operations():
        point = probe.point
        wanted = 2 * point["m"] * point["n"] * point["k"] if point["op"] == "gemm" else 0
        if point["op"] in ("gemm", "elementwise", "embedding"):
            assert gemm_flops(probe.work) == wanted


class Passing(Stopwatch):
    """Runs what is aside, and says which calls those were."""

    def __init__(self):
        self.is_aside = False

    def aside(self, between):
        self.is_aside = True
        between()
        self.is_aside = False

    before = aside


@pytest.fixture()
def passing(spy):
    skeleton, watch = Skeleton(SPEC, spy, BLOCKS, BLOCK_SIZE, host_blocks=4), Passing()
    with torch.inference_mode():
        yield Probes(skeleton, GRID, watch, seed=7), skeleton, watch


@pytest.fixture()
def products(passing, monkeypatch):
    """The products of every call: whether aside, the layer of the matrix, which the output head has not, and the rows."""
    _, skeleton, watch = passing
    layers = enumerate(skeleton.weights.layers)
    layer_of = {id(getattr(layer, name)): number for number, layer in layers for name in MATRICES}
    seen = []

    def multiplied(hidden, matrix):
        seen.append((watch.is_aside, layer_of.get(id(matrix)), len(hidden)))
        return multiply(hidden, matrix)

    monkeypatch.setattr("fragmeter.gpu.calibrate.probes.multiply", multiplied)
    monkeypatch.setattr(Layer.forward, "__defaults__", (multiplied,))
    return seen


def test_a_layer_passes_before_each_gemm_and_leaves_its_matrix_cold(passing, products):
    """Every layer's matrix in turn, behind the GEMMs of another layer, of as many tokens."""
    probes, skeleton, _ = passing
    layers = skeleton.weights.layers
    assert len(layers) > 1
    gemms = [one for one in probes.operations() if one.point["op"] == "gemm" and one.point["n"] != SPEC.vocab_size]
    for probe in gemms:
        for number in range(2 * len(layers)):
            products.clear()
            probe.work(number)
            *before, timed = products
            assert timed == (False, number % len(layers), probe.point["m"])
            assert before == [(True, (number - 1) % len(layers), probe.point["m"])] * len(MATRICES)


@pytest.mark.parametrize(("cache_bytes", "number"), [(1 << 30, 3), (1, 1)])
def test_all_layers_pass_before_the_head_or_as_many_as_the_caches_hold(passing, products, cache_bytes, number):
    probes, _, watch = passing
    watch.cold_bytes = cache_bytes
    heads = [one for one in probes.operations() if one.point["op"] == "gemm" and one.point["n"] == SPEC.vocab_size]
    assert len(heads) > 1
    for probe in heads:
        products.clear()
        probe.work(0)
        rows = probe.point["m"]
        assert products == [(True, at, rows) for at in range(number) for _ in MATRICES] + [(False, None, rows)]


def test_three_steps_pass_before_each_step(passing, monkeypatch):
    probes, skeleton, watch = passing
    seen = []
    monkeypatch.setattr(skeleton, "step", lambda batch: seen.append((watch.is_aside, batch)))
    for probe in probes.steps():
        seen.clear()
        probe.work(0)
        assert [is_aside for is_aside, _ in seen] == [True] * 3 + [False]
        assert len({id(batch) for _, batch in seen}) == 1


def test_on_a_gpu_six_decodes_of_its_sequences_pass_before_each_step(passing, monkeypatch):
    probes, skeleton, watch = passing
    monkeypatch.setattr(Skeleton, "captures", True)
    seen = []
    monkeypatch.setattr(skeleton, "step", lambda batch: seen.append((watch.is_aside, batch)))
    prompts = 0
    for probe in probes.steps():
        seen.clear()
        probe.work(0)
        assert [is_aside for is_aside, _ in seen] == [True] * 6 + [False]
        *before, timed = [batch for _, batch in seen]
        prompts += not timed.only_decodes
        for batch in before:
            assert batch.only_decodes and batch.context_lens.tolist() == timed.context_lens.tolist()
            assert (batch.block_tables == timed.block_tables).all()
    assert prompts == 3


def test_a_step_does_the_operations_of_its_parts(probes, spy):
    """By the device's own account and by torch's count of products; each part is among the operations."""
    measured = {points.key(probe.point) for probe in probes.operations()}
    steps = list(probes.steps())
    # A slot: K and V of 3 layers, 2 heads of 16, 2 bytes each.
    read = [384 * sum(batch.context_lens.tolist()) for batch in stepped_batches(probes, 2)]
    assert [step.point for step in steps] == [
        {"op": "step", "rows": 1, "kv_bytes": read[0]},
        {"op": "step", "rows": 4, "kv_bytes": read[1]},
        {"op": "prefill_step", "rows": 1, "tokens": 16},
        {"op": "prefill_step", "rows": 1, "tokens": 32},
        {"op": "prefill_step", "rows": 5, "tokens": 20},
    ]
    for step in steps:
        spy.seen.clear()
        flops = gemm_flops(step.work)
        wanted = [part for count, part in step.parts for _ in range(count)]
        assert flops == sum(2 * part["m"] * part["n"] * part["k"] for part in wanted if part["op"] == "gemm")
        on_device = [part for part in wanted if part["op"] in ("kv_write", "decode_attention", "prefill_attention")]
        assert sorted(map(points.key, spy.seen)) == sorted(map(points.key, on_device))
        assert {points.key(part) for _, part in step.parts} <= measured


def test_mixed_attention_is_held_against_its_parts(monkeypatch, spy):
    """Of 10 us a call, as every call here: two calls apart take 20."""
    monkeypatch.setattr(timing, "stopwatch", lambda _: Stopwatch())
    skeleton = Skeleton(SPEC, spy, BLOCKS, BLOCK_SIZE, host_blocks=4)
    samples = calibrate.Samples(skeleton, GRID, 0)
    samples.take(GRID.rounds, calibrate.unwatched)
    found = [point for point in samples.points() if point["op"] == "mixed_attention"]
    sizes = ("batch", "tokens", "pairs", "heads", "us", "apart_us")
    wanted = [(1, 16, 16 * 64 + 16 * 17 // 2, 6, 10.0, 20.0), (4, 32, 32 * 33 // 2, 6, 10.0, 20.0)]
    assert [tuple(point[size] for size in sizes) for point in found] == wanted
    assert fit(found)["mixed_attention"]["coefficients"]["each_us"] == 0.5


@pytest.mark.parametrize("grid", [calibrate_grid.CPU, calibrate_grid.CUDA, calibrate_grid.QUICK])
def test_what_steps_are_made_of_is_in_the_grid(grid):
    batches, contexts, prompts = ({size for size in sizes if size} for sizes in zip(*grid.steps, strict=True))
    assert batches <= {*grid.batches} and contexts <= {*grid.contexts} and prompts <= {*grid.chunks}
    assert 0 in grid.prefixes
    sizes = (grid.batches, grid.contexts, grid.chunks, grid.prefixes)
    assert all({*mixed} <= {*known} for mixed, known in zip(zip(*grid.mixed, strict=True), sizes, strict=True))


def test_a_step_that_a_graph_replays_does_not_say_what_it_reads(probes, monkeypatch):
    """On a GPU weights come from memory in any case."""
    monkeypatch.setattr(Skeleton, "captures", True)
    assert [set(step.point) for step in probes.steps() if step.point["op"] == "step"] == [{"op", "rows"}] * 2


def test_a_cpu_measures_every_number_of_rows_up_to_16_and_steps_that_read_more_kv_than_weights():
    """Products of up to 16 rows are no smooth function of the rows. The steps begin where KV is 1 % of what they read."""
    grid, spec = calibrate_grid.CPU, model_spec("toy-llama")
    assert {*range(1, 17)} <= {*grid.tokens} & {*grid.head_rows}
    slot_bytes, weight_bytes = spec.slot_bytes("fp32"), spec.weight_bytes("fp32")
    read = [batch * context * slot_bytes for batch, context, prompt in grid.steps if batch and not prompt]
    assert min(read) < 0.01 * weight_bytes and max(read) > 1.5 * weight_bytes
    many = {batch for batch, context, prompt in grid.steps if not prompt and batch * context * slot_bytes > 1e8}
    few = {batch for batch, context, prompt in grid.steps if not prompt and batch * context * slot_bytes < 2e7}
    # Else the share of the rows and that of KV would be the same.
    assert len(many & few) > 1


def test_calls_of_a_cpu_come_behind_calls_of_as_many_tokens(monkeypatch, spy):
    """What a step runs over its tokens is sampled together, from the most tokens down; and steps from the most KV down."""
    monkeypatch.setattr(timing, "stopwatch", lambda _: Stopwatch())
    samples = calibrate.Samples(Skeleton(SPEC, spy, BLOCKS, BLOCK_SIZE, host_blocks=4), GRID, 0)
    indices = []

    def watch(items, *, total):
        for index, taken in items:
            indices.extend([index] * len(taken))
            yield index, taken

    samples.take(2, watch)
    probes = [*samples._operations, *samples._steps]
    assert len(indices) == 2 * len(probes)
    for order in (indices[: len(probes)], indices[len(probes) :]):
        kinds = [points.kind(probes[index].point) for index in order]
        for name in ("layer", "step", "decode_attention"):
            places = [place for place, (kind, _) in enumerate(kinds) if kind == name]
            sizes = [kinds[place][1] for place in places]
            assert len(set(sizes)) > 1 and places == list(range(places[0], places[-1] + 1))
            assert sizes == sorted(sizes, reverse=True)
        few = {probes[index].point["op"] for index, kind in zip(order, kinds) if kind == ("layer", 4)}
        assert few == {"gemm", "kv_write", "elementwise", "embedding"}


def test_a_steps_own_time_is_what_its_operations_leave(monkeypatch, spy):
    """Decodes or a prompt: embedding, head, in each of 3 layers 4 GEMMs, elementwise, KV write and attention: 23 calls.

    Of 10 us each: 1,000 - 230 = 770 us. Both kinds of attention make 26 calls. With calls of 50 us they would take
    longer than the step: 2 % of it are left.
    """
    monkeypatch.setattr(timing, "stopwatch", lambda _: Stopwatch())
    skeleton = Skeleton(SPEC, spy, BLOCKS, BLOCK_SIZE, host_blocks=4)
    watched = []

    def watch(items, *, total):
        watched.append(total)
        for item in items:
            watched.append(item)
            yield item

    samples = calibrate.Samples(skeleton, GRID, 0)
    samples.take(GRID.rounds, watch)
    found = samples.points()
    steps = [point for point in found if point["op"] in ("step", "prefill_step")]
    timed = {"iqr_us": 0.0, "samples": GRID.rounds, "whole_us": 1000.0}
    alike, mixed = timed | {"us": 770.0, "parts_us": 230.0}, timed | {"us": 740.0, "parts_us": 260.0}
    wanted = [points.step(lens) | alike for lens in ([1], [1] * 4, [16], [32])]
    wanted.append(points.step([1] * 4 + [16]) | mixed)
    left = ("kv_bytes", "decodes", "context_tokens")
    assert [{name: value for name, value in step.items() if name not in left} for step in steps] == wanted
    assert watched[0] == len(watched) - 1 == (GRID.rounds + 1) * len(found)
    whole = timing.Timing(1000.0, 3.0, 2)
    slow = {points.key(point): 50.0 for point in found}
    step = next(iter(Probes(skeleton, GRID, Stopwatch(), 0).steps()))
    assert calibrate.beside(step, whole, slow)["us"] == 20.0


def test_a_steps_own_time_is_beside_the_models_of_its_operations(monkeypatch, spy):
    """Of 20 us a GEMM, of 1 us any other call: of the decodes 13 GEMMs and 10 others, which leave 730 us of 1,000."""
    monkeypatch.setattr(timing, "stopwatch", lambda _: Stopwatch())
    samples = calibrate.Samples(Skeleton(SPEC, spy, BLOCKS, BLOCK_SIZE, host_blocks=4), GRID, 0)
    samples.take(GRID.rounds, calibrate.unwatched)
    plain = samples.points()
    ops = {name: {"coefficients": {"t0_us": 20.0 if name == "gemm" else 1.0}} for name in OPERATIONS}
    found = samples.points(ops)
    others = [point for point in found if "step" not in point["op"]]
    assert others == [point for point in plain if "step" not in point["op"]]
    rests = {(point["rows"], point.get("tokens")): point["us"] for point in found if "step" in point["op"]}
    assert rests == {(1, None): 730, (4, None): 730, (1, 16): 730, (1, 32): 730, (5, 20): 727}


def test_the_result_is_of_the_samples_of_all_parts(monkeypatch, spy):
    """A machine with calls of 10 us in the first part, and of 20 us in the second and third: warmed up once, and the median."""
    call_us, warmed = [10.0], []

    class Drifting(Stopwatch):
        def sampler(self, work, captured=True):
            warmed.append(work)
            return lambda: call_us[0]

    monkeypatch.setattr(timing, "stopwatch", lambda _: Drifting())
    samples = calibrate.Samples(Skeleton(SPEC, spy, BLOCKS, BLOCK_SIZE, host_blocks=4), GRID, 0)
    samples.take(2, calibrate.unwatched)
    calls, first = len(warmed), samples.points()
    assert {point["us"] for point in first if "step" not in point["op"]} == {10.0}
    call_us[0] = 20.0
    for _ in range(2):
        samples.take(2, calibrate.unwatched)
    assert len(warmed) == calls == len(first) and samples.parts == 3
    assert {point["us"] for point in samples.points() if "step" not in point["op"]} == {20.0}
    assert {point["samples"] for point in samples.points()} == {6}


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_gpu_mixes_kinds_of_calls_and_launches_while_it_computes(on_gpu, monkeypatch, spy):
    """On a CPU, calls of a kind follow each other; there is nothing that overlaps."""
    mixed: list[bool] = []
    found: list[bool] = []

    def interleaved(samplers, rounds, seed, kinds):
        mixed.append(kinds is None)
        assert kinds is None or len(kinds) == len(samplers)
        return iter([(index, sampler()) for index, sampler in enumerate(samplers)])

    monkeypatch.setattr(timing, "stopwatch", lambda _: Stopwatch())
    monkeypatch.setattr(timing, "interleaved", interleaved)
    measuring = calibrate.Measuring.__new__(calibrate.Measuring)
    samples = calibrate.Samples(Skeleton(SPEC, spy, BLOCKS, BLOCK_SIZE, host_blocks=4), GRID, 0)
    measuring._points, measuring._says = samples, {}
    measuring._on_gpu = samples._on_gpu = on_gpu
    samples.take(1, calibrate.unwatched)

    def fit(measured, overlapped=False):
        measured = list(measured)
        if {point["op"] for point in measured} > {"step", "prefill_step"}:
            found.append(overlapped)
            return {name: {"coefficients": {"t0_us": 1.0}, "fit": {}} for name in OPERATIONS}
        # Once more, beside the models of their operations.
        assert not on_gpu and {point["parts_us"] for point in measured} == {23.0, 26.0}
        return {}

    monkeypatch.setattr(calibrate, "fit", fit)
    monkeypatch.setattr(calibrate, "repeated_reads", lambda measured, entry: 0.4)
    assert measuring.document()["repeated_reads"] == 0.4
    assert (mixed, found) == ([on_gpu], [on_gpu])


def test_a_block_that_leaves_no_room_is_refused():
    with pytest.raises(
        SettingError, match="^block_size = 4096: there is room for 0 blocks of small, and 8 are moved; take smaller"
    ):
        calibrate.calibrate(SPEC, devices.open("cpu"), block_size=4096, quick=True)


@pytest.mark.parametrize("grid", [GRID, replace(GRID, tokens=(1, 500, 900), chunks=(100, 200))], ids=["few", "many"])
def test_room_is_left_for_what_the_probes_hold(grid, monkeypatch):
    held, random = [], Probes._random

    def counted(probes, *shape):
        made = random(probes, *shape)
        held.append(made.nbytes)
        return made

    monkeypatch.setattr(Probes, "_random", counted)
    skeleton = Skeleton(SPEC, devices.open("cpu"), BLOCKS, BLOCK_SIZE, host_blocks=max(grid.moved_blocks))
    list(Probes(skeleton, grid, SimpleNamespace(cold_bytes=1), 0).operations())
    # Queries count twice, with what attention gives; those of a few decodes, and the head's inputs, do not.
    assert 0.95 * sum(held) <= calibrate.input_bytes(SPEC, grid, "fp32") <= 1.2 * sum(held)
