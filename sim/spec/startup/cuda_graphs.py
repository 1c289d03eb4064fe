"""CUDA graphs that vLLM captures at its start, by release, and the memory that they take.

The mode (``cudagraph_mode``; ``VllmConfig.__post_init__`` and ``OPTIMIZATION_LEVEL_TO_CONFIG``):

    given                        else by --optimization-level: 0 NONE, 1 PIECEWISE, 2 and 3 FULL_AND_PIECEWISE
    up to 0.11                   the level is that of compilation, 3 by default and piecewise, without graphs below 3; the default is
                                 PIECEWISE, and FULL_AND_PIECEWISE in 0.11 and for models with states
    without VLLM_COMPILE         PIECEWISE becomes NONE, FULL_AND_PIECEWISE becomes NONE and since 0.30 FULL_DECODE_ONLY
    by the attention's kernels   ``resolve_cudagraph_mode_and_sizes``: FULL becomes FULL_AND_PIECEWISE where they capture decodes alone, and
                                 with drafts whole steps become PIECEWISE where they capture one token a sequence

The sizes in tokens (``_set_cudagraph_sizes``), up to a largest of twice the sequences, at most 512, and at most the tokens of a step:

    up to 0.11   1, 2, 4, multiples of 8
    since 0.12   1, 2, 4, multiples of 8 up to 256, of 16 above
    since 0.13   the largest counts the tokens of a decode with drafts
    since 0.17   1 to 32 with --performance-mode interactivity
    since 0.20   the tokens of a step too
    since 0.28   the largest is at most 1,024 on compute capability 10
    since 0.29   with drafts, whole numbers of sequences too
    since 0.31   without drafts, the number of sequences too

gpt-oss has a largest of 1,024. Read in the wheels of 0.8.5, 0.9.2, 0.10.0, 0.10.2 and of 0.11.0 to 0.33; up to 0.10.0 they lack the list, which is
that of 0.10.2 here, and 0.11.1 and 0.11.2 have the list of 0.12.

Graphs of whole steps are those of at most ``max_num_seqs`` decodes. The second model runner rounds each up to whole sequences, the first one
rounds the list. LoRA doubles all (``cudagraph_specialize_lora``).

Memory that capture takes, fitted to the logs of ``tools/profiles/graphs.json`` (``docs/results/start-up-logs.md`` has the errors):

    layers * (0.25 MiB * piecewise graphs + 0.15 MiB * graphs of whole steps), times 0.71 on Blackwell
    + layers * graphs * 0.17 MiB      where NCCL reduces: ranks on PCIe that cannot read each other's memory
    + layers * graphs * 0.135 MiB     with experts, where other kernels reduce; neither on several Hopper cards with experts since 0.18
    all three times 0.41 since 0.29   as logged of two dense models on one card each
    + 76 MiB + graphs * 0.95 MiB      with experts
    + workspaces of attention, with graphs of whole steps: FlashAttention 3 has 32 partial outputs in fp32 of the largest step
      (``flash_attn_max_num_splits_for_cuda_graph``), FlashInfer 394 MiB (``VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE``)

Layers are those of a drafter too, which the first model runner captures in pieces alone (``initialize_cudagraph_keys`` of
``llm_base_proposer.py``). A graph holds the parameters of its kernels, which a layer and a graph have about the same number of. All graphs share a pool of intermediate
tensors, that of the largest, which is small beside them.

vLLM estimates this before it forms the KV cache (``profile_cudagraph_memory``): it captures the two largest of each mode, and takes the second's
memory for each of the others. That is 0.95 to 1.5 times what capture takes. The second runner captures all in pieces, and two whole steps, which take
more than in the pool of all graphs. The first runner captures the first whole step with a context of as
many tokens as a step has, and since 0.26 the temporary tensors of gated delta nets count in it: about 2 KiB a token and value head
(vllm-project/vllm#50780 and #52872), where that is more than the workspace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ...types.errors import SettingError
from .estimate import Estimate, exactly

MIB = 1 << 20
NONE, PIECEWISE, FULL, DECODES, BOTH = "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"
#: vLLM's ``CUDAGraphMode`` in the order of its numbers, which stand for the first three.
MODES = (NONE, PIECEWISE, FULL, DECODES, BOTH)
_BY_LEVEL = (NONE, PIECEWISE, BOTH, BOTH)
_LARGEST, _LARGEST_BLACKWELL, _LARGEST_GPT_OSS = 512, 1024, 1024
_INTERACTIVE = 32
_SIZES = "cudagraph_capture_sizes"


class Support(Enum):
    """Steps that kernels of attention capture: vLLM's ``AttentionCGSupport``."""

    SINGLE_TOKENS = 1
    DECODES = 2
    ALL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSettings:
    """What a line says of CUDA graphs.

    Attributes:
        mode: One of ``MODES``; None is the default.
        level: ``--optimization-level``; None is the default.
        compiled: Whether the compilation mode is VLLM_COMPILE; None is by the level.
        sizes: ``--cudagraph-capture-sizes``, up to 0.11 ``--cuda-graph-sizes`` with more than one number.
        largest: ``--max-cudagraph-capture-size``, up to 0.11 ``--cuda-graph-sizes`` with one number.
        interactive: Whether ``--performance-mode`` is interactivity.
        enforce_eager: Whether there are no graphs.
        lora: Whether adapters are served.
        custom_all_reduce: Whether ranks may reduce without NCCL.
    """

    mode: str | None = None
    level: int | None = None
    compiled: bool | None = None
    sizes: tuple[int, ...] | None = None
    largest: int | None = None
    interactive: bool = False
    enforce_eager: bool = False
    lora: bool = False
    custom_all_reduce: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBatch:
    """What decides the graphs beside what a line says of them.

    Attributes:
        minor: Minor version of the release.
        query_tokens: Tokens of a sequence in a decode: one, and its drafts.
        second_runner: Whether the second model runner captures.
        support: Steps that the kernels of all layers capture.
        data_center_blackwell: Whether the card has compute capability 10.
        gpt_oss: Whether the model is gpt-oss.
        states: Whether the model has layers with states.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    minor: int
    query_tokens: int = 1
    second_runner: bool = False
    support: Support = Support.DECODES
    data_center_blackwell: bool = False
    gpt_oss: bool = False
    states: bool = False


class Captures(NamedTuple):
    """The graphs that are captured, in tokens of a step.

    Attributes:
        mode: One of ``MODES``, as vLLM resolves it.
        piecewise: Sizes of the graphs between the layers' attention.
        full: Sizes of the graphs of whole steps.
        cases: Graphs of each size: two with LoRA.
    """

    mode: str = NONE
    piecewise: tuple[int, ...] = ()
    full: tuple[int, ...] = ()
    cases: int = 1

    @property
    def decodes_full(self) -> bool:
        """Whether whole decode steps are captured."""
        return self.mode in (FULL, DECODES, BOTH)

    @property
    def largest(self) -> int:
        """Tokens of the largest graph; 0 without one."""
        return max((*self.piecewise, *self.full), default=0)


def graph_mode(value: object, field: str = "cudagraph_mode") -> str | None:
    """A mode as JSON has it: its name in any case, or its number or numbers; None for null.

    Raises:
        SettingError: vLLM has no such mode.
    """
    if value is None:
        return None
    name = value.upper() if isinstance(value, str) else None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2:
        name = MODES[value]
    if name not in MODES:
        raise SettingError(field, value, f"one of {', '.join(MODES)}")
    return name


def captures(settings: GraphSettings, batch: GraphBatch) -> Captures:
    """The graphs that vLLM captures.

    Raises:
        SettingError: vLLM refuses the sizes.
    """
    mode = _supported(_configured(settings, batch), settings, batch)
    if mode == NONE:
        return Captures()
    sizes = capture_sizes(settings, batch)
    whole = mode in (FULL, DECODES, BOTH)
    if whole and batch.query_tokens > 1 and not batch.second_runner:
        sizes = _whole_sequences(sizes, batch.query_tokens)
    mixed = sizes if mode in (PIECEWISE, BOTH) else ()
    full = sizes if mode == FULL else _decodes(sizes, batch) if whole else ()
    return Captures(mode, mixed, full, 1 + settings.lora)


def _compiled(settings: GraphSettings, batch: GraphBatch) -> bool:
    if settings.compiled is not None:
        return settings.compiled
    if batch.minor < 12:
        return settings.level in (None, 3)
    return settings.level != 0


def _configured(settings: GraphSettings, batch: GraphBatch) -> str:
    """The mode of the configuration."""
    compiled = _compiled(settings, batch)
    if settings.enforce_eager:
        return NONE
    if settings.mode is not None:
        mode = settings.mode
    elif batch.minor >= 12:
        mode = _BY_LEVEL[2 if settings.level is None else settings.level]
    else:
        mode = (BOTH if batch.minor == 11 or batch.states else PIECEWISE) if compiled else NONE
    if compiled or mode not in (PIECEWISE, BOTH):
        return mode
    return DECODES if mode == BOTH and batch.minor >= 30 else NONE


def _supported(mode: str, settings: GraphSettings, batch: GraphBatch) -> str:
    """The mode that the kernels of attention can capture."""
    compiled = _compiled(settings, batch)
    if mode == FULL and batch.support is not Support.ALL:
        mode = BOTH if compiled else DECODES
    drafts = batch.query_tokens > 1 and batch.support is Support.SINGLE_TOKENS
    return (PIECEWISE if compiled else NONE) if mode in (DECODES, BOTH) and drafts else mode


def capture_sizes(settings: GraphSettings, batch: GraphBatch) -> tuple[int, ...]:
    """``cudagraph_capture_sizes``, ascending, before they are rounded to whole sequences.

    Raises:
        SettingError: vLLM refuses the sizes; its message is the remedy.
    """
    tokens = batch.max_num_batched_tokens
    if settings.sizes is not None:
        kept = tuple(sorted(size for size in set(settings.sizes) if size <= tokens))
        end = kept[-1] if kept else 0
        if not settings.sizes:
            raise SettingError(_SIZES, [], f"{_SIZES} should contain at least one element when using cuda graph.")
        if settings.largest not in (None, end):
            custom = f"customized max_cudagraph_capture_size(={settings.largest})"
            remedy = f"{custom} should be consistent with the max value of {_SIZES}(={end})"
            raise SettingError(_SIZES, list(settings.sizes), remedy)
        return kept
    query = batch.query_tokens if batch.minor >= 13 else 1
    ceiling = _LARGEST_BLACKWELL if batch.data_center_blackwell and batch.minor >= 28 else _LARGEST
    given = settings.largest
    if given is None and batch.gpt_oss:
        given = _LARGEST_GPT_OSS
    largest = min(2 * batch.max_num_seqs * query, ceiling) if given is None else given
    sizes = set(_strided(min(tokens, largest), settings, batch))
    if batch.minor >= 20 and tokens <= largest:
        sizes.add(tokens)
    if given is None:
        sizes.update(size for size in _decode_sizes(batch, query, largest, ceiling) if size <= tokens)
    return tuple(sorted(sizes))


def _strided(largest: int, settings: GraphSettings, batch: GraphBatch) -> Iterable[int]:
    if batch.minor < 12 and not batch.gpt_oss:
        yield from (size for size in (1, 2, 4, *range(8, largest + 1, 8)) if size <= largest)
        return
    if settings.interactive and batch.minor >= 17:
        yield from range(1, min(largest, _INTERACTIVE) + 1)
    yield from (size for size in (1, 2, 4) if size <= largest)
    yield from range(8, min(largest + 1, 256), 8)
    yield from range(256, largest + 1, 16)


def _decode_sizes(batch: GraphBatch, query: int, largest: int, ceiling: int) -> Iterable[int]:
    """Sizes of whole decode steps that need not be on a stride."""
    if query > 1 and batch.minor >= 29:
        most = min(batch.max_num_seqs, ceiling)
        counts = [count for count in (1, 2, 4) if count <= most]
        counts += [*range(8, min(most + 1, 256), 8), *range(256, most + 1, 16), most]
        yield from (count * query for count in counts if count * query <= largest)
    elif query == 1 and batch.minor >= 31 and batch.max_num_seqs <= largest:
        yield batch.max_num_seqs


def _whole_sequences(sizes: Sequence[int], query: int) -> tuple[int, ...]:
    """``adjust_cudagraph_sizes_for_spec_decode``: each rounded up to whole sequences, where the largest allows it.

    Raises:
        SettingError: No size holds a sequence.
    """
    if not sizes:
        return ()
    rounded = {-(-size // query) * query for size in sizes}
    kept = tuple(sorted(size for size in rounded if size <= sizes[-1]))
    if not kept and query > sizes[-1]:
        raise SettingError(_SIZES, list(sizes), f"must hold a decode of {query} tokens")
    return kept or (query,)


def _decodes(sizes: Sequence[int], batch: GraphBatch) -> tuple[int, ...]:
    """The sizes of whole decode steps."""
    query, most = batch.query_tokens, batch.query_tokens * batch.max_num_seqs
    if not sizes:
        return ()
    if batch.second_runner:
        rounded = {-(-size // query) * query for size in sizes}
        return tuple(sorted(size for size in rounded if size <= min(most, sizes[-1])))
    return tuple(size for size in sizes if query <= size <= most)


class Reduction(Enum):
    """How ranks add their parts: with none, in kernels that read each other's memory, or by NCCL."""

    ALONE = 0
    CUSTOM = 1
    NCCL = 2
    UNKNOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphShape:
    """What decides the memory of a graph on a rank.

    Attributes:
        minor: Minor version of the release.
        num_layers: Layers of the rank's stage.
        reduction: Of its ranks; in an unknown one NCCL is likely.
        experts: Whether layers have experts.
        blackwell: Whether the card is of the Blackwell generation.
        output_bytes: fp32 output of attention of a token in one layer, on the rank, where FlashAttention 3 is taken; else 0.
        flashinfer: Whether FlashInfer computes attention.
        transient_heads: Value heads of gated delta nets on the rank, under the first model runner; else 0.
        second_runner: Whether the second model runner captures.
        drafter_layers: Layers of a drafter on the rank.
        drafter_passes: Passes of the drafter that are captured with each whole step: none by the first model runner, and by the second one
            its first pass and, with more than one draft, that of the others.
    """

    minor: int
    num_layers: int
    reduction: Reduction = Reduction.ALONE
    experts: bool = False
    blackwell: bool = False
    output_bytes: int = 0
    flashinfer: bool = False
    transient_heads: int = 0
    second_runner: bool = False
    drafter_layers: int = 0
    drafter_passes: int = 0


class Fitted(NamedTuple):
    """Constants of the formula in the module docstring; bytes are of a layer and a graph.

    Attributes:
        piece, whole: Bytes in a piecewise graph and in one of a whole step.
        nccl: Bytes that are added where NCCL reduces.
        experts: Bytes that are added with experts, where other kernels reduce.
        expert_bytes: Bytes with experts, of all graphs together.
        expert_graph: Bytes with experts, of each graph.
        blackwell: Factor of the first two.
        since_29: Factor of the first four.
    """

    piece: float
    whole: float
    nccl: float
    experts: float
    expert_bytes: float
    expert_graph: float
    blackwell: float
    since_29: float


FITTED = Fitted(0.25 * MIB, 0.15 * MIB, 0.17 * MIB, 0.135 * MIB, 76 * MIB, 0.95 * MIB, 0.71, 0.41)
_SPLITS, _FLASHINFER_BYTES = 32, 394 * MIB
#: The logged memory of graphs, workspaces apart, over the likely one, in four of five logs.
_SPREAD, _EXPERTS_SPREAD = (0.78, 1.3), (0.6, 1.9)
#: vLLM's estimate over what capture takes: low, likely, high.
_ESTIMATED = (0.95, 1.1, 1.3)
#: The same of the second model runner, which captures the two largest graphs of whole steps alone, and those in pieces all: a
#: graph of whole steps has 0.205 MiB a layer there, as 15 boots of dense models on cards without FlashAttention 3 log within 8 % (mondegreens/apron).
_FIRST_SAMPLED, SAMPLED, _SAMPLED = 29, FITTED._replace(whole=0.5 * MIB), (0.95, 1.0, 1.2)
_TRANSIENT_BYTES = (2048, 2048, 2731)
_FIRST_TRANSIENT, _LAST_TRANSIENT = 26, 28


def captured_bytes(found: Captures, shape: GraphShape, fitted: Fitted = FITTED) -> Estimate:
    """Memory that capture takes on a GPU: what "Graph capturing finished ... took" logs."""
    if found.mode == NONE:
        return exactly(0)
    fixed = _workspace_bytes(found, shape)
    return Estimate(*(fixed + part for part in _graphs(found, shape, fitted)))


def estimated_bytes(found: Captures, shape: GraphShape, max_num_batched_tokens: int) -> Estimate:
    """What vLLM logs as "Estimated CUDA graph memory": the bytes that it subtracts from the KV cache, where it does.

    It does by default since 0.20 (``VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS``), the second model runner since 0.29. With the variable both
    can be had since 0.18.
    """
    if found.mode == NONE:
        return exactly(0)
    workspace = _workspace_bytes(found, shape)
    transient = [0, 0, 0]
    if found.full and _FIRST_TRANSIENT <= shape.minor <= _LAST_TRANSIENT:
        transient = [each * shape.transient_heads * max_num_batched_tokens for each in _TRANSIENT_BYTES]
    sampled = shape.second_runner and shape.minor >= _FIRST_SAMPLED
    graphs = _graphs(found, shape, SAMPLED if sampled else FITTED)
    parts = zip(graphs, _SAMPLED if sampled else _ESTIMATED, transient, strict=True)
    return Estimate(*(max(workspace, held) + int(part * factor) for part, factor, held in parts))


def _workspace_bytes(found: Captures, shape: GraphShape) -> int:
    if not found.full:
        return 0
    splits = _SPLITS * found.full[-1] * shape.output_bytes
    return splits + (_FLASHINFER_BYTES if shape.flashinfer else 0)


def _graphs(found: Captures, shape: GraphShape, fitted: Fitted) -> Estimate:
    """Memory of the graphs, without the workspaces of attention."""
    factor = fitted.since_29 if shape.minor >= 29 else 1.0
    pieces = found.cases * len(found.piecewise) * (shape.num_layers + shape.drafter_layers)
    whole = found.cases * len(found.full) * (shape.num_layers + shape.drafter_layers * shape.drafter_passes)
    own = factor * (pieces * fitted.piece + whole * fitted.whole) * (fitted.blackwell if shape.blackwell else 1)
    if shape.experts:
        own += (
            fitted.expert_bytes + factor * found.cases * (len(found.piecewise) + len(found.full)) * fitted.expert_graph
        )
    spare = shape.experts and shape.output_bytes > 0 and shape.minor >= _FIRST_SPARE
    captured = 0 if spare else pieces + whole
    surely = fitted.experts * captured if shape.experts and shape.reduction is Reduction.CUSTOM else 0.0
    likely = fitted.nccl * captured if shape.reduction in (Reduction.NCCL, Reduction.UNKNOWN) else 0.0
    surely += likely if shape.reduction is Reduction.NCCL else 0.0
    likely = max(surely, likely)
    low, high = _EXPERTS_SPREAD if shape.experts else _SPREAD
    # No log of a capture says that these are fewer since 0.29, too.
    most = own + (factor if fitted is SAMPLED else 1) * likely
    return Estimate(int(low * (own + factor * surely)), int(own + factor * likely), int(high * most))


#: The first minor version of which logs of experts on several Hopper cards (Mixtral 8x7B and gpt-oss 20B under 0.19, and under 0.20 Qwen3 235B, of
#: which NCCL reduces over NVLink) have no more than those on one; of Qwen3 Next under 0.10.2 they had.
_FIRST_SPARE = 18
