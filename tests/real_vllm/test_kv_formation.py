"""KV groups, block sizes, pages and blocks of ``form_kv_cache`` beside those of the installed vLLM.

Every preset at several tensor-parallel sizes, and random models of all kinds of layers. What is compared is ``Answer``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from unittest import mock

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)

from fragmeter.sim.spec import (
    AttentionLayer,
    CacheSettings,
    KvCacheConfig,
    ModelSpec,
    RingLayer,
    Span,
    StateLayer,
    cache_layers,
    form_kv_cache,
    gpu,
    kv_cache,
    kv_layers,
    model,
    model_names,
    stages,
)
from fragmeter.sim.spec.attention import FULL
from fragmeter.sim.spec.startup.capacity import capacity, fits, longest_model_len
from fragmeter.sim.spec.startup.launch import Launch
from fragmeter.sim.types.errors import SettingError

from . import layers as vllm_layers
from . import server
from .server import Setup, start
from .shapes import Layer

_MODELS, _MODELS_A_TEST = 1200, 50
_KINDS = {
    "full_attention": "full",
    "mla_attention": "mla",
    "sliding_window": "sliding",
    "chunked_local_attention": "chunked",
    "mamba": "state",
    "unknown": "ring",
}
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True)
class Group:
    """A group: its layers, what it is, tokens of a block; of each layer bytes of a page, with padding and without."""

    layers: tuple[int, ...]
    kind: str
    block_size: int
    pages: tuple[int, ...]
    unpadded: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What a server starts with."""

    num_blocks: int
    bytes_per_block: int
    scheduler_block_size: int
    hash_block_size: int
    mamba_cache_mode: str
    mamba_block_size: int | None
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Refusal:
    """A server does not start; with the longest model that it would start with, where the refusal says so."""

    longest: int | None = None


@dataclass(frozen=True)
class Case:
    """A model on a rank, a server and its memory."""

    layers: tuple[kv_layers.Layer, ...]
    settings: CacheSettings
    available_bytes: int


@dataclass(frozen=True)
class WideLayer(Layer):
    """V has heads of another size than K."""

    head_size_v: int = 0


def spec_of(layer: Layer, config: object) -> KVCacheSpec:
    spec = vllm_layers.spec_of(layer, config)
    return replace(spec, head_size_v=layer.head_size_v) if isinstance(layer, WideLayer) else spec


def _vllm_layer(layer: kv_layers.Layer) -> Layer:
    if isinstance(layer, StateLayer):
        dtypes = tuple(_DTYPES[dtype] for dtype in layer.dtypes)
        return Layer("state", state_shapes=layer.shapes, state_dtypes=dtypes, export_tokens=layer.export_tokens)
    shape = (layer.kind, layer.span.tokens, layer.num_kv_heads, layer.head_size)
    if layer.head_size_v is None:
        return Layer(*shape, dtype=_DTYPES[layer.dtype])
    return WideLayer(*shape, dtype=_DTYPES[layer.dtype], head_size_v=layer.head_size_v)


def _vllm_layers(layers: Sequence[kv_layers.Layer]) -> tuple[Layer, ...]:
    rings = [layer for layer in layers if isinstance(layer, RingLayer)]
    if not rings:
        return tuple(map(_vllm_layer, layers))
    # Of sparse attention beside states: a latent vector, the keys of an indexer with a scale of 4 bytes, and their buffer.
    tokens, width = rings[0].key_tokens, rings[0].width
    found = []
    for layer in layers:
        if isinstance(layer, RingLayer):
            found.append(Layer("ring", layer.tokens, head_size=width))
        elif isinstance(layer, AttentionLayer):
            is_key = layer.page_bytes(tokens) == width // 2 + 4
            found.append(
                Layer("key", tokens, head_size=width // 2 + 4) if is_key else replace(_vllm_layer(layer), kind="rows")
            )
        else:
            found.append(_vllm_layer(layer))
    return tuple(found)


def setup_of(case: Case) -> Setup:
    settings = case.settings
    return Setup(
        layers=_vllm_layers(case.layers),
        block_size=settings.block_size or kv_cache.BLOCK_SIZE,
        max_model_len=settings.max_model_len,
        max_num_seqs=1,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        prefix_caching=settings.enable_prefix_caching,
        asynchronous=settings.max_concurrent_batches == 2,
        num_blocks=settings.num_gpu_blocks_override,
        disable_hybrid=settings.disable_hybrid_kv_cache_manager,
        available_bytes=case.available_bytes,
    )


@cache
def real(case: Case) -> Answer | Refusal:
    """What the installed vLLM starts with."""
    placed: list[KVCacheConfig] = []
    # The scheduler's own copy has one layer's pages for all.
    workers = mock.patch.object(server.Recorder, "initialize_from_config", lambda self, configs: placed.extend(configs))
    try:
        with workers, mock.patch.object(server, "spec_of", spec_of):
            engine = start(setup_of(case))
    except (ValueError, NotImplementedError) as error:
        return Refusal(_longest(r"estimated maximum model length is (\d+)", error))
    config, scheduler = placed[0], engine.scheduler
    cache_config = engine.vllm_config.cache_config
    return Answer(
        config.num_blocks,
        config.kv_cache_tensors[0].size // config.num_blocks,
        scheduler.block_size,
        scheduler.hash_block_size,
        cache_config.mamba_cache_mode,
        cache_config.mamba_block_size,
        _real_groups(config),
    )


def _real_groups(config: KVCacheConfig) -> tuple[Group, ...]:
    return tuple(map(_real_group, config.kv_cache_groups))


def _real_group(group: KVCacheGroupSpec) -> Group:
    spec = group.kv_cache_spec
    uniform = isinstance(spec, UniformTypeKVCacheSpecs)
    each = [spec.kv_cache_specs[name] if uniform else spec for name in group.layer_names]
    return Group(
        tuple(map(int, group.layer_names)),
        _KINDS[get_kv_cache_spec_kind(spec).value],
        spec.block_size,
        tuple(one.page_size_bytes for one in each),
        tuple(one.real_page_size_bytes for one in each),
    )


def _longest(pattern: str, error: Exception) -> int | None:
    found = re.search(pattern, str(error))
    return int(found[1]) if found else None


def ours(case: Case) -> Answer | Refusal:
    """What ``form_kv_cache`` says that it starts with."""
    try:
        config = form_kv_cache(case.layers, case.settings)
        num_blocks = config.num_blocks(case.available_bytes)
    except SettingError as error:
        return Refusal(_longest(r"at most (\d+) tokens fit", error))
    return Answer(
        num_blocks,
        config.bytes_per_block,
        config.scheduler_block_size,
        config.hash_block_size,
        config.mamba_cache_mode,
        config.mamba_block_size,
        _our_groups(config),
    )


def _our_groups(config: KvCacheConfig) -> tuple[Group, ...]:
    return tuple(
        Group(
            group.layers,
            group.kind,
            group.block_size,
            tuple(spec.page_size_bytes for spec in group.specs),
            tuple(spec.unpadded_page_size_bytes for spec in group.specs),
        )
        for group in config.groups
    )


# Models.


def _export_tokens(spec: ModelSpec) -> int:
    return spec.mixer.export_tokens(9, 33) if spec.mixer else 0


def _preset_cases() -> Iterable[tuple[str, Case]]:
    for name in model_names():
        spec = model(name)
        for ranks in (1, 2, 4, 8):
            for dtype in ("fp16", "fp8"):
                for disable in (False, True):
                    try:
                        layers = cache_layers(spec, dtype, ranks, "bf16", _export_tokens(spec))
                    except SettingError:
                        continue
                    settings = CacheSettings(
                        max_model_len=min(8192, spec.max_model_len),
                        max_num_batched_tokens=2048,
                        disable_hybrid_kv_cache_manager=disable,
                        enable_prefix_caching=ranks < 4,
                    )
                    case = f"{name}-{ranks}-{dtype}-{disable}"
                    yield case, Case(layers, settings, _memory(layers, settings, random.Random(case)))


def _attention(draw: random.Random, ranks: int, kind: str, dtype: str) -> AttentionLayer:
    if kind == "mla":
        return AttentionLayer(num_kv_heads=1, head_size=draw.choice([192, 320, 576]), dtype=dtype, latent=True)
    return AttentionLayer(
        num_kv_heads=max(1, draw.choice([1, 2, 4, 8, 8, 8, 16, 6, 12]) // ranks),
        head_size=draw.choice([64, 128, 128, 128, 192, 256, 80]),
        span=FULL if kind == "full" else Span(kind, draw.choice([1, 100, 128, 512, 1024, 4096, 8192])),
        head_size_v=draw.choice([None, None, None, None, None, None, 64, 128]),
        dtype=dtype,
    )


def _state(draw: random.Random, ranks: int) -> StateLayer:
    heads, size = draw.choice([8, 16, 32, 48, 64, 128]), draw.choice([64, 128])
    channels, inputs = draw.choice([1024, 4352, 8192, 8448]), draw.choice([2, 3])
    shapes = ((inputs, channels // ranks), (heads // ranks, size, draw.choice([16, 64, 128])))
    dtypes = (draw.choice(["fp16", "bf16"]), draw.choice(["fp16", "bf16", "fp32", "fp32"]))
    return (
        StateLayer(shapes=shapes, dtypes=dtypes)
        if draw.random() < 0.9
        else StateLayer(shapes=shapes[:1], dtypes=dtypes[:1])
    )


def _pattern(draw: random.Random, ranks: int) -> list[kv_layers.Layer]:
    """Layers of one to four kinds, in a pattern that is repeated, or in any order."""
    dtype = draw.choice(["fp16", "bf16", "bf16", "fp8", "fp32"])
    first = draw.choice(["full", "full", "full", "mla", "sliding", "state"])
    kinds = [
        first,
        *draw.choices(["full", "sliding", "sliding", "chunked", "mla", "state", "state"], k=draw.randrange(4)),
    ]
    attention = {kind: _attention(draw, ranks, kind, dtype) for kind in kinds if kind != "state"}
    shared = draw.random() < 0.6
    template = next(iter(attention.values()), None)
    found: list[kv_layers.Layer] = []
    for kind in kinds:
        if kind == "state":
            found.append(_state(draw, ranks))
        elif shared and kind in ("full", "sliding", "chunked") and template and not template.latent:
            # Most models have the same heads in all layers.
            span = attention[kind].span if draw.random() < 0.7 else _attention(draw, ranks, kind, dtype).span
            found.append(replace(template, span=span))
        else:
            found.append(_attention(draw, ranks, kind, dtype))
    if draw.random() < 0.7:
        return [layer for layer in found for _ in range(draw.choice([1, 1, 2, 3, 5]))] * draw.randint(1, 6)
    many = [layer for layer in found for _ in range(draw.randint(1, 20))]
    draw.shuffle(many)
    return many


def _exporting(layers: list[kv_layers.Layer], export_tokens: int) -> list[kv_layers.Layer]:
    """The same, if prefills export all states."""
    return [replace(layer, export_tokens=export_tokens) if isinstance(layer, StateLayer) else layer for layer in layers]


@cache
def random_case(seed: int) -> Case:
    """A model, a server, and memory."""
    draw = random.Random(seed)
    ranks = draw.choice([1, 1, 2, 4, 8])
    layers = tuple(_exporting(_pattern(draw, ranks), draw.choice([0, 0, 1, 64])))
    settings = CacheSettings(
        max_model_len=draw.choice([17, 512, 4096, 8192, 40_000, 131_072, 262_144]),
        max_num_batched_tokens=draw.choice([64, 2048, 8192, 16_384]),
        block_size=draw.choice([None, 16, 16, 16, 32, 64, 128, 256, 8, 24, 48]),
        enable_prefix_caching=draw.random() < 0.6,
        max_concurrent_batches=draw.choice([1, 2]),
        disable_hybrid_kv_cache_manager=draw.random() < 0.15,
        num_gpu_blocks_override=draw.choice([None] * 7 + [2, 10_000]),
    )
    return Case(layers, settings, _memory(layers, settings, draw))


def _memory(layers: Sequence[kv_layers.Layer], settings: CacheSettings, draw: random.Random) -> int:
    """Bytes for a sequence and more, exactly one sequence, or a byte short of that; few blocks, as vLLM makes them all."""
    try:
        config = form_kv_cache(layers, settings)
    except SettingError:
        return 1 << 34
    exact = config.sequence_bytes(settings.max_model_len) + config.bytes_per_block
    return exact + draw.choice([0, -1, -draw.randrange(exact), *(draw.randrange(1000 * config.bytes_per_block),) * 3])


def _differing(cases: Iterable[tuple[str, Case]]) -> dict[str, str]:
    found = {}
    for name, case in cases:
        theirs, mine = real(case), ours(case)
        if theirs != mine:
            found[name] = f"{case.settings}\n  vLLM {theirs}\n  ours {mine}"
    return found


def _random_cases(first: int, number: int) -> list[tuple[str, Case]]:
    return [(str(seed), random_case(seed)) for seed in range(first, first + number)]


def _report(differing: dict[str, str]) -> str:
    return "\n".join(f"{name}: {text}"[:3000] for name, text in differing.items())


def test_presets_have_the_groups_and_blocks_of_vllm(record_property):
    cases = list(_preset_cases())
    differing = _differing(cases)
    record_property("compared/presets", [len(cases), 0, len(differing)])
    assert not differing, _report(differing)


@pytest.mark.parametrize("first", range(0, _MODELS, _MODELS_A_TEST))
def test_random_models_have_the_groups_and_blocks_of_vllm(first: int, record_property):
    cases = _random_cases(first, _MODELS_A_TEST)
    differing = _differing(cases)
    record_property("compared/formed", [len(cases), 0, len(differing)])
    assert not differing, _report(differing)


def test_the_random_models_are_of_all_kinds():
    answers = [real(case) for _, case in _random_cases(0, _MODELS)]
    formed = [answer for answer in answers if isinstance(answer, Answer)]
    assert len(formed) >= 600
    # Rings are in presets alone.
    assert {group.kind for answer in formed for group in answer.groups} == set(_KINDS.values()) - {"ring"}
    assert sum(isinstance(answer, Refusal) and answer.longest is not None for answer in answers) >= 20
    assert sum(isinstance(answer, Refusal) and answer.longest is None for answer in answers) >= 20
    assert sum(len(answer.groups) > 1 for answer in formed) >= 300
    assert sum(any(group.pages != group.unpadded for group in answer.groups) for answer in formed) >= 50
    assert sum(len({group.block_size for group in answer.groups}) > 1 for answer in formed) >= 20
    assert sum(any(len(set(group.pages)) > 1 for group in answer.groups) for answer in formed) >= 3


def _most(counts: list[int]) -> int:
    """The rule of vLLM in 2025."""
    return max(counts) if max(counts) < 1.25 * min(counts) else min(counts)


_FAULTS = {
    "group size": ("_group_size", _most),
    "blocks are not raised for states": (
        "_align",
        lambda layers, settings: kv_cache._Blocks(
            settings.block_size or 16, settings.block_size or 16, None, settings.kernel_block_size
        ),
    ),
    "pages are not unified": ("_unify_pages", lambda specs: specs),
    "windows in blocks of any size": ("_round_down", lambda tokens, multiple: tokens),
    "groups in runs": (
        "_split",
        lambda bucket, size: [tuple(bucket[i : i + size]) for i in range(0, len(bucket), size)],
    ),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_planted_fault_is_noticed(fault):
    name, function = _FAULTS[fault]
    with mock.patch.object(kv_cache, name, function):
        assert _differing(_random_cases(0, _MODELS))


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_pipeline_stages_have_the_groups_and_blocks_of_vllm(first: int, record_property):
    """Groups are formed of the whole model, and the stage with the fewest blocks decides."""
    compared, differing = 0, []
    for name, case in _random_cases(first, 50):
        if len(case.layers) < 4 or case.settings.num_gpu_blocks_override:
            continue
        parts = stages(len(case.layers), 3)
        try:
            mine = form_kv_cache(case.layers, case.settings)
        except SettingError:
            continue
        setup = setup_of(case)
        config = server.config_of(setup)
        vllm_layers.align_block_size(config, setup.layers)
        config.cache_config.kv_cache_layout = "LBNHC"
        specs = [{str(number): spec_of(setup.layers[number], config) for number in part} for part in parts]
        memory = [1 << 41, 1 << 42, 1 << 41]
        theirs = get_kv_cache_configs(config, specs, memory, get_global_kv_cache_groups(config, specs))
        placed = [mine.on_stage(part) for part in parts]
        blocks = min(one.num_blocks(bytes_) for one, bytes_ in zip(placed, memory, strict=True))
        compared += 1
        if any(
            (_real_groups(real), real.num_blocks) != (_our_groups(one), blocks)
            for real, one in zip(theirs, placed, strict=True)
        ):
            differing.append(name)
    record_property("compared/stages", [compared, 0, len(differing)])
    assert compared and not differing


def _launches() -> Iterable[Launch]:
    """Presets with states on several GPUs, in memory for many sequences and for hardly one."""
    for name in model_names():
        for ranks in (1, 2, 4) if model(name).mixer else ():
            for caching in (True, False):
                launch = Launch(
                    model=model(name),
                    gpu=gpu("h200"),
                    max_model_len=8192,
                    max_num_seqs=256,
                    max_num_batched_tokens=8192,
                    tensor_parallel=ranks,
                    enable_prefix_caching=caching,
                )
                try:
                    block = capacity(launch).stage.block_bytes
                except SettingError:
                    continue
                exact = (launch.sequence_blocks(8192) + 1) * block
                yield from (replace(launch, kv_cache_memory_bytes=bytes_) for bytes_ in (None, exact, exact - 1))


def test_launches_with_states_have_the_blocks_of_vllm(record_property):
    """The pool of ``plan`` and of ``vllm-v1``; and the longest model that fits, where vLLM does not start."""
    compared, differing = 0, []
    for launch in _launches():
        found, config = capacity(launch), launch.layout.config
        dtype, exports = launch.deployment.kv_dtype, _export_tokens(launch.model)
        layers = cache_layers(launch.model, dtype, launch.tensor_parallel, export_tokens=exports)
        theirs = real(Case(layers, config.settings, found.stage.kv_cache_bytes))
        mine = found.num_blocks if fits(launch) else Refusal(longest_model_len(launch) or None)
        compared += 1
        if (theirs.num_blocks if isinstance(theirs, Answer) else theirs) != mine:
            differing.append(f"{launch}\n  vLLM {theirs}\n  ours {mine}")
    record_property("compared/launches", [compared, 0, len(differing)])
    assert compared >= 60 and not differing, "\n".join(differing)
