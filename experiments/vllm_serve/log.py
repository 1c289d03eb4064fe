"""The KV cache size from a pasted vLLM start-up log, which replaces the computed size.

The tokens of ``GPU KV cache size`` are, as ``_report_kv_cache_config`` and ``get_kv_cache_capacity`` in the wheels of 0.17 to 0.33 say,

    up to 0.20.0    blocks // groups * tokens of the smallest block of a group
    since 0.20.1    int(sequences of max_model_len that fit * max_model_len)

A log says which: by its release, else because the second is the product of the line about concurrency, else by the memory that it names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from ...sim.spec.gpu import GIB
from ...sim.spec.startup.capacity import KV_CACHE, WARM_UP, capacity, warm_up
from ...sim.spec.startup.launch import Launch
from ...sim.spec.startup.non_torch import used_at_start
from ...sim.types.errors import SettingError
from ...sim.types.optional import not_none
from ...sim.types.signatures import remedy
from .line import pasted
from .log_parts import LoggedParts, read_parts

Found = TypeVar("Found")
#: Numbers in a log; one with more digits than any cache size has is ignored.
_COUNT, _DECIMAL = r"(\d[\d,]{0,20})(?![\d,])", r"(-?\d{1,12}(?:\.\d*)?)"
_BLOCKS = re.compile(
    rf"# (?:GPU|CUDA) blocks: {_COUNT}|num_gpu_blocks is: {_COUNT}|exceeds available Mamba cache blocks \({_COUNT}\)",
    re.ASCII,
)
_TOKENS = re.compile(rf"GPU KV cache size: {_COUNT} tokens", re.ASCII)
_CONCURRENCY = re.compile(rf"Maximum concurrency for {_COUNT} tokens per request: {_DECIMAL}x", re.ASCII)
_MEMORY = re.compile(
    rf"(?:Available KV cache memory: |reserved for KV Cache is |larger than the available KV cache\s+memory \(){_DECIMAL}\s?GiB",
    re.ASCII,
)
#: The line of the API server or of the engine; the third form is the picture above the API server's lines.
VERSION_LINE = re.compile(
    r"(?:vLLM API server version|LLM engine \(v|[█▀▄] +version) ?v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?([\w.+]*)"
)
#: The line of an error that ends a process, and that which only says that another process ended.
_ERROR = re.compile(r"(?:^|[\s(])((?:[A-Za-z_]\w*\.)*[A-Z]\w*Error: [^\n]+)", re.ASCII)
_WRAPPER = "Engine core initialization failed"
#: Refusals with sizes that ``checks`` compares again: the answer to the line is theirs, which may be another than the log's.
_CHECKED = (
    "No available memory for the cache blocks",
    "larger than the available KV cache",
    "larger than the maximum number of tokens that can be stored in KV cache",
    "exceeds available Mamba cache blocks",
    "less than desired GPU memory utilization",
)
_RUNS = re.compile(r"Application startup complete|Uvicorn running on|Starting vLLM (?:API )?server")
#: By how much a number with two decimals may be rounded.
_ROUNDED = 0.005
#: By which share the pools of two ranks differ.
_ALIKE = 0.005
#: The minor version within which the meaning of the tokens changed, and its last release with the first meaning.
_CHANGED, _LAST_BY_GROUPS = (0, 20), (0, 20, 0)


@dataclass(frozen=True)
class StartupLog:
    """The lines found in a log; None for each absent line.

    A refusal is one of them: it names the memory that is available, or the blocks.

    Attributes:
        num_blocks: ``# GPU blocks: 1234``.
        num_tokens: ``GPU KV cache size: 123,456 tokens``.
        concurrency: ``Maximum concurrency for 8,192 tokens per request: 15.07x``, as length and sequences.
        memory_bytes: ``Available KV cache memory: 12.34 GiB``, of one GPU.
        version: Release of vLLM; its last part is None for a build between releases.
        num_states: States of their own pool, of SGLang's log.
        parts: Sizes beside the KV cache.
        failure: The error that ended the start; None of a server that runs, and where ``checks`` compare what it names.
    """

    num_blocks: int | None = None
    num_tokens: int | None = None
    concurrency: tuple[int, float] | None = None
    memory_bytes: int | None = None
    version: tuple[int, int, int | None] | None = None
    num_states: int | None = None
    parts: LoggedParts = LoggedParts()
    failure: str | None = None

    @property
    def has_kv_cache(self) -> bool:
        """Whether the log has the size of the KV cache."""
        return any(each is not None for each in (self.num_blocks, self.num_tokens, self.concurrency, self.memory_bytes))

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the start ended for want of memory."""
        return self.failure is not None and "memory" in self.failure.lower()

    def kv_cache_bytes(self, launch: Launch) -> int:
        """The smallest KV cache of any GPU, from the most exact lines.

        These are the blocks; else tokens and concurrency, unless the memory contradicts them: they depend on the groups of layers, which those
        of a drafter that is not counted change; else the memory, which is known to 0.01 GiB.
        """
        block_bytes = capacity(launch).stage.block_bytes
        if self.num_blocks is not None:
            return self.num_blocks * block_bytes
        memory = self._by_memory(launch, block_bytes)
        ranges = [self._by_tokens(launch, memory), self._by_concurrency(launch)]
        found = memory
        for each in ranges:
            found = _common(found, each) or found
        if self.memory_bytes is not None and found == memory:
            return self.memory_bytes
        # Of several numbers that give the same tokens, the largest is sure to hold the longest sequence, as the server's did.
        left = not_none(found)
        return left[len(left) // 2 if self.num_tokens is None else -1] * block_bytes

    def disagreeing(self, launch: Launch) -> tuple[range, range] | None:
        """Numbers of blocks by two lines that cannot be of one pool of this launch: the memory or the concurrency, and tokens or concurrency.

        They may differ by ``_ALIKE``, as two ranks do.
        """
        memory = self._by_memory(launch, capacity(launch).stage.block_bytes)
        tokens, concurrency = self._by_tokens(launch, memory), self._by_concurrency(launch)
        for one, other in ((memory, tokens), (memory, concurrency), (concurrency, tokens)):
            if one is None or other is None or _common(one, other) is not None:
                continue
            apart = max(one.start, other.start) - min(one.stop, other.stop)
            if apart > _ALIKE * max(one.start, other.start):
                return one, other
        return None

    def assumes(self, launch: Launch) -> bool:
        """Whether the release decides what its tokens mean, and the log does not say which it is."""
        alone = (
            self.num_blocks is None
            and self.num_tokens is not None
            and self.concurrency is None
            and self.memory_bytes is None
        )
        return alone and self.version is None and _groups(launch)[0] > 1

    def _by_memory(self, launch: Launch, block_bytes: int) -> range | None:
        """Numbers of blocks, as the memory is rounded; None without it, and where stages have blocks of several sizes."""
        if self.memory_bytes is None or (self.num_tokens is not None and launch.deployment.pipeline_parallel > 1):
            return None
        rounded = int(_ROUNDED * GIB)
        return range((self.memory_bytes - rounded) // block_bytes, (self.memory_bytes + rounded) // block_bytes + 1)

    def _by_tokens(self, launch: Launch, memory: range | None) -> range | None:
        tokens = self.num_tokens
        if tokens is None:
            return None
        groups, size = _groups(launch)
        by_groups = range(tokens // size * groups, (tokens // size + 1) * groups)
        length = launch.max_model_len if self.concurrency is None else self.concurrency[0]
        needed = _sequence_blocks(launch, length)
        # The numbers of blocks with ``blocks * length // needed == tokens``; none if the division is rounded otherwise.
        least = -(-tokens * needed // length)
        by_product = range(least, max(least, -(-(tokens + 1) * needed // length) - 1) + 1)
        return by_groups if self._counts_groups(launch, memory, by_product) else by_product

    def _counts_groups(self, launch: Launch, memory: range | None, by_product: range) -> bool:
        """Whether the tokens have the meaning that they have up to 0.20.0."""
        if self.version is not None and self.version[:2] != _CHANGED:
            return self.version[:2] < _CHANGED
        if self.version is not None and self.version[2] is not None:
            return self.version <= _LAST_BY_GROUPS
        if self.concurrency is not None:
            length, sequences = self.concurrency
            return abs(not_none(self.num_tokens) - sequences * length) > _ROUNDED * length + 1
        if memory is not None:
            return _common(memory, by_product) is None
        return launch.release.since < _CHANGED

    def _by_concurrency(self, launch: Launch) -> range | None:
        if self.concurrency is None:
            return None
        length, sequences = self.concurrency
        needed = _sequence_blocks(launch, length)
        nearest = round(sequences * needed)
        least, most = ((sequences + sign * _ROUNDED) * needed for sign in (-1, 1))
        return range(min(nearest, math.ceil(least)), max(nearest, math.floor(most)) + 1)


def corrected(launch: Launch, log: StartupLog) -> Launch:
    """The launch with the sizes of a log in place of the computed ones; the same correction applies to changes of the launch.

    Without a size of the KV cache the parts that the log has replace the computed ones, and the others keep their intervals.
    """
    stage = capacity(launch).stage
    if log.parts.free is not None and log.parts.total is not None:
        # Two runs report a different total of the same card, so that the share counts.
        share = 1 - log.parts.free / log.parts.total
        launch = replace(launch, used_at_start_bytes=round(share * launch.gpu.memory_bytes))
    elif log.has_kv_cache:
        # What was asked for was free.
        unasked = launch.gpu.memory_bytes - stage.requested_bytes
        launch = replace(launch, used_at_start_bytes=min(used_at_start(launch).likely, unasked))
    if log.has_kv_cache:
        measured = log.kv_cache_bytes(launch) - stage.kv_cache_bytes
        launch = replace(launch, corrections=((KV_CACHE, measured),))
        if log.is_out_of_memory:
            # What the start lacked, beside what is computed.
            lacking = max(0, warm_up(launch).room.likely) + 1
            launch = replace(launch, corrections=(*launch.corrections, (WARM_UP, lacking)))
        return launch
    computed = stage.parts()
    more = tuple((name, size - computed[name].likely) for name, size in log.parts.sizes().items())
    return replace(launch, corrections=more)


def _groups(launch: Launch) -> tuple[int, int]:
    """KV groups of a launch, and tokens of their smallest block on all ranks that divide a sequence."""
    layout, ranks = launch.layout, launch.deployment.decode_context_parallel
    if layout is None:
        return 1, launch.block_tokens
    if layout.config is None:
        return len(layout.groups), launch.block_size * ranks
    return len(layout.groups), min(group.block_size for group in layout.config.groups) * ranks


def _sequence_blocks(launch: Launch, tokens: int) -> int:
    """Blocks of a sequence as long as the log's longest."""
    return replace(launch, max_model_len=tokens).sequence_blocks(tokens)


def _common(one: range | None, other: range | None) -> range | None:
    """Numbers in both ranges, or in the only one; None if there are none."""
    if one is None or other is None:
        return one if other is None else other
    return range(max(one.start, other.start), min(one.stop, other.stop)) or None


def read_log(text: str) -> StartupLog:
    """The lines of a start-up log with sizes: the last of each kind, but the smallest memory for the KV cache.

    Args:
        text: The log, or the name of its file.

    Raises:
        SettingError: The log has none.
    """
    given, text = text, pasted(text, "startup_log")
    concurrency = [(_whole(tokens), float(sequences)) for tokens, sequences in _CONCURRENCY.findall(text)]
    memory = [int(float(found) * GIB) for found in _MEMORY.findall(text)]
    log = StartupLog(
        num_blocks=_last(_whole("".join(found)) for found in _BLOCKS.findall(text)),
        num_tokens=_last(_whole(tokens) for tokens in _TOKENS.findall(text)),
        concurrency=_last(concurrency),
        memory_bytes=min(memory, default=None),
        version=_last(_version(*found) for found in VERSION_LINE.findall(text)),
        parts=read_parts(text),
        failure=_failure(text),
    )
    if not log.has_kv_cache and not log.parts:
        lines = "GPU KV cache size, Available KV cache memory, Maximum concurrency, # GPU blocks or Model loading took"
        missing = f"has none of the lines {lines}; give vLLM's output from its start"
        said = remedy(text.encode(), "", "startup_log") or missing
        raise SettingError("startup_log", " ".join(given.split())[:60], said)
    return log


def _failure(text: str) -> str | None:
    """The error that ended the last start of a log: out of memory, else the first that is not of a process that waited for another."""
    lines = (_MEMORY, _BLOCKS, _TOKENS, _CONCURRENCY, VERSION_LINE)
    ended = text[max((match.end() for line in lines for match in line.finditer(text)), default=0) :]
    runs = _RUNS.search(ended)
    ended = ended if runs is None else ended[: runs.start()]
    last = text[max((match.end() for match in VERSION_LINE.finditer(text)), default=0) :]
    errors = [
        found[1].strip()
        for each in ended.splitlines()
        if "WARNING" not in each and (found := _ERROR.search(each)) is not None
    ]
    if not errors or any(each in last for each in _CHECKED):
        return None
    own = [each for each in errors if _WRAPPER not in each] or errors
    return next((each for each in own if "out of memory" in each.lower()), own[0])


def _version(major: str, minor: str, patch: str, rest: str) -> tuple[int, int, int | None]:
    """A release; a build between releases (``0.20.1rc1.dev16``) is of no patch."""
    is_release = patch and (not rest or rest.startswith((".post", "+")))
    return int(major), int(minor), int(patch) if is_release else None


def _whole(text: str) -> int:
    return int(text.replace(",", ""))


def _last(found: Iterable[Found]) -> Found | None:
    return next(reversed(list(found)), None)
