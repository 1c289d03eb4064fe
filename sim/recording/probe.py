"""Reads the file of ``fragmeter.probe``: what a live vLLM server scheduled, and the ledger of its blocks, step by step.

docs/probe.md has the schema. The file is replayed: block tables change by its events, and every slot of the pool is counted
into a bucket when a step begins: its tokens have their blocks, and requests that finished in the step before have none:

    live         slots with tokens, those that the step computes included; a block in several tables counts once
    block_tail   slots of a request's last block past the end of its output, which the file tells when the request finishes;
                 0 for a request that has not finished by the end of the file
    reserved     the other empty slots of blocks in tables
    cached       slots of blocks in no table that have a hash
    state        blocks of layers with a fixed-size state or an indexer's ring, where the model has such layers
    free         all others

The replayed number of free blocks is compared with the one that the server wrote.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from os import PathLike
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from ..memory.accounting.buckets import BUCKETS
from ..memory.accounting.kv_groups import STATE
from ..types.errors import TraceError, UserError
from ..types.signatures import FIRST_BYTES, remedy
from ..workload.content import PromptContent

SCHEMA_VERSION = 1
_REMEDY = "record it anew with fragmeter.probe"
#: Specs of layers that keep a state of fixed size, or the ring of an indexer, in place of tokens.
STATE_SPECS = ("MambaSpec", "CircularBufferSpec")
#: Specs of layers that keep the tokens of a window or a chunk alone.
WINDOW_SPECS = ("SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec")
#: Keys of the first line, and their types.
_HEADER = {
    "vllm": str, "model": str, "num_gpu_blocks": int, "groups": list, "max_model_len": int, "max_num_seqs": int,
    "max_num_batched_tokens": int, "prefix_caching": bool, "async_scheduling": bool, "monotonic_ns": int, "unix_ns": int,
}  # fmt: skip
#: Of each kind of event the types of what follows its name; the rest of an event are whole numbers, or lists of them.
_EVENTS: dict[str, tuple[type, ...]] = {
    "add": (int, str, int, int, int, int),
    "take": (int, int),
    "release": (int, int, int, int),
    "preempt": (int, int),
    "finish": (int, int, int, str),
    "contents": (int,),
    "reset": (),
}


_OPEN_ENDED = ("take", "preempt", "finish", "contents")


@dataclass(eq=False)
class ProbedRequest:
    """A request of the server. Times are in ns of the server's monotonic clock; None for what the file does not tell.

    Attributes:
        name: vLLM's request id.
        arrival_ns: When the API server got it.
        added_ns: When the scheduler got it, which is between two steps.
        prompt_tokens, max_tokens: As given.
        output_tokens, finish_ns, reason: When it finished.
        token_ns: Ends of the steps that computed its output tokens.
        hit_tokens: Tokens found in the prefix cache, one a admission.
        residencies: (start, first token, end, whether it was preempted) of each admission.
        contents: Hashes of the full blocks of its prompt and output; each covers all tokens before, too.
    """

    name: str
    arrival_ns: int
    added_ns: int
    prompt_tokens: int
    max_tokens: int
    output_tokens: int | None = None
    finish_ns: int | None = None
    reason: str | None = None
    token_ns: list[int] = field(default_factory=list)
    hit_tokens: list[int] = field(default_factory=list)
    residencies: list[tuple[int, int, int, bool]] = field(default_factory=list)
    contents: tuple[int, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether it has all of its output, and was not aborted."""
        return self.reason in ("length", "stop")


class ProbedStep(NamedTuple):
    """A call of the server's scheduler that computed something, preempted a request, or left nothing running.

    Attributes:
        start_ns, end_ns: From the call of ``schedule`` to the return of ``update_from_output``.
        begin_ns: When its computation can begin: asynchronous scheduling calls ``schedule`` while the step before runs.
        tokens: (request, tokens that it computes), in the order of the scheduler.
        decode_context: Sum of the context lengths of requests that decode, new tokens included.
        repeated_slots: Slots that requests that decode read again: those of blocks that the tables of several of them name, once for each
            table beyond the first. Of KV groups the first that keeps every token counts (``Memory.repeated_slots``).
        prefill_tokens: Tokens of requests that do not decode.
        prefill_pairs: Causal (query, key) pairs of these.
        sampled: Requests that yield a token.
        waiting: Requests in the queue.
        evicted: Blocks that lost their contents since the step before.
        buckets: Slots by bucket when its computation begins.
        preempted: Requests that lost their blocks since the step before, ascending.
        hits: (request, tokens found in the prefix cache) of each admission, in order.
        free: Blocks in no table after the call of ``schedule``.
        blocks: ``blocks_digest`` of the tables then; 0 unless it is asked for.
    """

    start_ns: int
    end_ns: int
    begin_ns: int
    tokens: tuple[tuple[int, int], ...]
    decode_context: int
    repeated_slots: int
    prefill_tokens: int
    prefill_pairs: int
    sampled: int
    waiting: int
    evicted: int
    buckets: dict[str, int]
    preempted: tuple[int, ...]
    hits: tuple[tuple[int, int], ...]
    free: int
    blocks: int


class ProbedTables(NamedTuple):
    """Block tables of a request in a step.

    Attributes:
        request: Its number.
        computed: Tokens computed, those of the step included.
        target: Tokens of its prompt and output; None if it does not finish.
        groups: Block ids of each KV group, from 1; 0 for an entry without a block.
    """

    request: int
    computed: int
    target: int | None
    groups: tuple[tuple[int, ...], ...]


Watch = Callable[[int, list[ProbedTables], list[int]], None]
"""Gets the number of a step that computes tokens, the tables of requests that hold blocks, ascending, and the cached blocks.

It is called again for the same step if requests finish between its schedule and its computation.
"""


@dataclass(frozen=True, eq=False)
class ProbedRun:
    """What a live server did.

    Attributes:
        header: The first line of the file.
        block_size: Slots of a block.
        requests: In the order in which the scheduler got them.
        preemptions: (ns, request), in order.
        steps: In order. A step without tokens stands for the time up to the next step.
        cut: Whether the file ends early, as that of a killed server does: within a line, or without the end of a
            compressed file.
    """

    header: Mapping[str, Any]
    block_size: int
    requests: list[ProbedRequest]
    preemptions: list[tuple[int, int]]
    steps: list[ProbedStep]
    cut: bool

    def content(self, requests: Sequence[int]) -> PromptContent:
        """The contents of some requests, in this order: the blocks that several of them begin with."""
        chains = [self.requests[number].contents for number in requests]
        times = Counter(chain.from_iterable(chains))
        shared = [[block for block in blocks if times[block] > 1] for blocks in chains]
        numbers = {block: number for number, block in enumerate(dict.fromkeys(chain.from_iterable(shared)))}
        ids = np.array([numbers[block] for blocks in shared for block in blocks], dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum([len(blocks) for blocks in shared], dtype=np.int64)])
        return PromptContent(offsets, ids, np.full(len(ids), self.block_size), covers_outputs=True)

    def buckets(self) -> dict[str, np.ndarray]:
        """Slots by bucket, int64 [steps]."""
        names = self.steps[0].buckets if self.steps else BUCKETS
        return {name: np.array([step.buckets[name] for step in self.steps], dtype=np.int64) for name in names}


def read_probe(path: str | PathLike[str], digests: bool = False, watch: Watch | None = None) -> ProbedRun:
    """Read the file of a probe.

    Args:
        digests: Whether steps get a digest of their block tables.
        watch: Called in each step that computes tokens.

    Raises:
        TraceError: A line is not as the probe writes it; names the line, the field, the value and a remedy.
        UserError: The file cannot be read.
    """
    lines, cut = _lines(path)
    first = next(lines, None)
    if first is None:
        if cut:
            raise TraceError(path, 1, None, None, f"is incomplete, and there is no other line; {_REMEDY}")
        raise TraceError(path, None, None, None, f"is empty; {_REMEDY}")
    header = _header(path, *first)
    rest = list(lines)
    replay = _Replay(path, header, _outputs(rest), digests, watch)
    for number, line in rest:
        replay.step(number, line)
    return ProbedRun(header, replay.block_size, replay.requests, replay.preemptions, replay.steps, bool(cut))


def _lines(path: str | PathLike[str]) -> tuple[Iterator[tuple[int, dict[str, Any]]], list[str]]:
    """The lines of a file with their numbers, and a list that gets the last line if it is incomplete."""
    cut: list[str] = []

    def read() -> Iterator[tuple[int, dict[str, Any]]]:
        """The lines, as they are asked for."""
        for number, text in enumerate(_texts(path, cut), 1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                raise TraceError(path, number, None, None, f"is no JSON; {_REMEDY}") from None
            if not isinstance(line, dict):
                raise TraceError(path, number, None, None, f"is no JSON object; {_REMEDY}")
            yield number, line

    return read(), cut


def _texts(path: str | PathLike[str], cut: list[str]) -> Iterator[str]:
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else open(path, "rb") as file:
            try:
                if (said := remedy(file.peek(FIRST_BYTES), path, "probe")) is not None:
                    raise TraceError(path, None, None, None, said)
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        cut.append("")
                        return
                    try:
                        yield line.decode()
                    except UnicodeDecodeError:
                        raise TraceError(path, number, None, None, f"is no UTF-8; {_REMEDY}") from None
            except EOFError:
                # The server was killed before the end of the compressed file.
                cut.append("")
            except (gzip.BadGzipFile, zlib.error):
                raise TraceError(path, None, None, None, f"is damaged; {_REMEDY}") from None
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); name the file that FRAGMETER_PROBE named"
        ) from None


def _header(path: str | PathLike[str], number: int, line: dict[str, Any]) -> dict[str, Any]:
    if "fragmeter_probe" not in line:
        raise TraceError(path, number, None, None, f"is not the first line of a probe; {_REMEDY}")
    if line["fragmeter_probe"] != SCHEMA_VERSION:
        remedy = f"this version reads {SCHEMA_VERSION}; {_REMEDY}"
        raise TraceError(path, number, "fragmeter_probe", line["fragmeter_probe"], remedy)
    for name, kind in _HEADER.items():
        value = line.get(name)
        if type(value) is not kind or (kind is int and not _is_count(value, 0 if name.endswith("_ns") else 1)):
            raise TraceError(path, number, name, value, f"must be {_MEANT[kind]}; {_REMEDY}")
    for group in line["groups"]:
        if not (isinstance(group, list) and len(group) == 2 and type(group[0]) is str and _is_count(group[1], 1)):
            raise TraceError(path, number, "groups", group, f"must be [name of a spec, block size]; {_REMEDY}")
    sizes = {size for spec, size in line["groups"] if spec not in STATE_SPECS}
    if len(sizes) != 1:
        remedy = "blocks of one size are supported, in at least one group that keeps tokens"
        raise TraceError(path, number, "groups", line["groups"], remedy)
    return line


_MEANT = {str: "text", int: "a whole number above 0", list: "a list", bool: "true or false"}


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 2**63


def _outputs(lines: list[tuple[int, dict[str, Any]]]) -> dict[int, int]:
    """Output tokens of every request that finishes; what is not as it should be is found in the replay."""
    found: dict[int, int] = {}
    for _, line in lines:
        events = line.get("events", [])
        for event in events if isinstance(events, list) else []:
            if isinstance(event, list) and event[:1] == ["finish"] and all(map(_is_count, event[1:4])):
                found.update([(event[1], event[3])] if len(event) > 3 else [])
    return found


def blocks_digest(tables: Mapping[int, Iterable[Any]], cached: Iterable[int]) -> int:
    """A checksum of block tables, by request and KV group, and of the ids of those free blocks that a look-up can find."""
    return crc32(repr((sorted((number, *groups) for number, groups in tables.items()), sorted(cached))).encode())


class _Live:
    """A request in the server."""

    def __init__(self, request: ProbedRequest, groups: int, output_tokens: int | None) -> None:
        self.request = request
        #: Tokens of prompt and output; None if the request does not finish.
        self.target = None if output_tokens is None else request.prompt_tokens + output_tokens
        self.tables: list[list[int]] = [[] for _ in range(groups)]
        self.computed = self.generated = 0
        self.decodes = False
        self.residency: list[int] | None = None


class _Replay:
    """Block tables and counts of the pool, line by line."""

    def __init__(
        self,
        path: str | PathLike[str],
        header: Mapping[str, Any],
        outputs: Mapping[int, int],
        digests: bool,
        watch: Watch | None,
    ) -> None:
        self._path, self._number, self._outputs, self._digests, self._watch = path, 0, outputs, digests, watch
        self._is_state = [spec in STATE_SPECS for spec, _ in header["groups"]]
        full = (place for place, (spec, _) in enumerate(header["groups"]) if spec not in (*STATE_SPECS, *WINDOW_SPECS))
        self._full = next(full, None)
        self.block_size = next(size for spec, size in header["groups"] if spec not in STATE_SPECS)
        self._blocks = header["num_gpu_blocks"] - 1
        self._unix_less_monotonic_ns = header["unix_ns"] - header["monotonic_ns"]
        self.requests: list[ProbedRequest] = []
        self.preemptions: list[tuple[int, int]] = []
        self._alive: dict[int, _Live] = {}
        self.steps: list[ProbedStep] = []
        self._tokens: list[int] = []
        self._references: dict[int, int] = {}
        self._cached: set[int] = set()
        # Blocks in tables of groups that keep tokens, and of states.
        self._held = [0, 0]
        # Tokens computed, summed over requests; entries without a block, and entries beyond the first of a block, in groups
        # that keep tokens; block_tail.
        self._computed = self._nulls = self._shared = self._tail = 0
        self._evicted = 0
        # Since the last step.
        self._preempted: list[int] = []
        self._hits: list[tuple[int, int]] = []

    def step(self, number: int, line: dict[str, Any]) -> None:
        """Replay a line."""
        self._number = number
        events = line.get("events", [])
        if not isinstance(events, list):
            raise self._error("events", events, "must be a list")
        for event in events:
            self._event(event)
            # With asynchronous scheduling the step before ends after this one was scheduled, and before it runs.
            if event[0] == "finish" and self.steps and event[2] <= self.steps[-1].begin_ns:
                self.steps[-1] = self.steps[-1]._replace(buckets=self._buckets())
                self._show()
        if "start" not in line:
            return
        start, end, waiting, free, evicted = (
            self._count(line, name, missing)
            for name, missing in (("start", None), ("end", -1), ("waiting", None), ("free", None), ("evicted", 0))
        )
        if end == -1:
            # The server ended within the step.
            end = start
        if end < start or (self.steps and start < self.steps[-1].start_ns):
            raise self._error("start", start, "must not be before the step before, or after the step's end")
        self._evicted += evicted
        for request, computed in self._pairs(line, "computed", []):
            self._count_computed(self._of(request, "computed"), computed)
        pairs = self._pairs(line, "tokens", None)
        context = prefill = attended = sampled = 0
        decoding = []
        for request, tokens in pairs:
            live = self._of(request, "tokens")
            if live.decodes:
                context += live.computed + tokens
                decoding.append(live)
            else:
                prefill += tokens
                attended += tokens * live.computed + tokens * (tokens + 1) // 2
            sampled += self._compute(request, live, tokens, start, end)
        buckets = self._buckets()
        if len(self._references) != self._blocks - free:
            raise self._error("free", free, f"the block tables leave {self._blocks - len(self._references)}")
        if pairs or self._preempted or not self._references:
            begin = max(start, self.steps[-1].end_ns) if self.steps else start
            self.steps.append(
                ProbedStep(
                    start_ns=start,
                    end_ns=end,
                    begin_ns=begin,
                    tokens=tuple(pairs),
                    decode_context=context,
                    repeated_slots=self._repeated_slots(decoding),
                    prefill_tokens=prefill,
                    prefill_pairs=attended,
                    sampled=sampled,
                    waiting=waiting,
                    evicted=self._evicted,
                    buckets=buckets,
                    preempted=tuple(sorted(self._preempted)),
                    hits=tuple(self._hits),
                    free=free,
                    blocks=blocks_digest(self._tables(), self._cached) if self._digests else 0,
                )
            )
            self._evicted = 0
            self._preempted.clear()
            self._hits.clear()
            self._show()

    def _repeated_slots(self, decoding: Iterable[_Live]) -> int:
        if not self._shared or self._full is None:
            return 0
        named = Counter(chain.from_iterable(live.tables[self._full] for live in decoding))
        named.pop(0, None)
        return self.block_size * (named.total() - len(named))

    def _show(self) -> None:
        if self._watch is not None and self.steps[-1].tokens:
            held = [
                ProbedTables(number, live.computed, live.target, tuple(map(tuple, live.tables)))
                for number, live in sorted(self._alive.items())
                if any(live.tables)
            ]
            self._watch(len(self.steps) - 1, held, sorted(self._cached))

    def _compute(self, number: int, live: _Live, tokens: int, start: int, end: int) -> bool:
        """A request computes tokens. Returns whether it yields an output token."""
        request = live.request
        if live.residency is None:
            live.residency = [start, end]
            request.hit_tokens.append(live.computed)
            self._hits.append((number, live.computed))
        self._count_computed(live, live.computed + tokens)
        known = request.prompt_tokens + live.generated
        # Of steps scheduled ahead the last one may compute a token in vain, after an EOS.
        if live.computed < known or (live.target is not None and known >= live.target):
            return False
        live.generated += 1
        if not live.decodes:
            live.residency[1] = end
        live.decodes = True
        request.token_ns.append(end)
        return True

    def _event(self, event: Any) -> None:
        kind = event[0] if isinstance(event, list) and event else None
        if not isinstance(kind, str) or kind not in _EVENTS:
            raise self._error("events", event, f"must be one of {', '.join(_EVENTS)}")
        types, given = _EVENTS[kind], event[1:]
        fits = len(given) >= len(types) and all(
            _is_count(value) if wanted is int else type(value) is wanted for value, wanted in zip(given, types)
        )
        if not fits:
            raise self._error("events", event, f"{kind} has other values")
        rest = given[len(types) :]
        getattr(self, f"_{kind}")(*given[: len(types)], *([rest] if kind in _OPEN_ENDED else []))

    def _add(self, request: int, name: str, added_ns: int, unix_ns: int, prompt_tokens: int, max_tokens: int) -> None:
        if request != len(self.requests) or not prompt_tokens:
            raise self._error("events", ["add", request, name], f"must be request {len(self.requests)}, with a prompt")
        arrival_ns = min(added_ns, unix_ns - self._unix_less_monotonic_ns)
        self.requests.append(ProbedRequest(name, arrival_ns, added_ns, prompt_tokens, max_tokens))
        self._alive[request] = _Live(self.requests[-1], len(self._is_state), self._outputs.get(request))

    def _take(self, request: int, group: int, blocks: list[int]) -> None:
        live, table = self._table(request, group)
        self._tail -= self._tail_of(live, group)
        for block in blocks:
            if not (_is_count(block) and block <= self._blocks):
                raise self._error("events", ["take", request, group, block], f"must be a block up to {self._blocks}")
            table.append(block)
            if not block:
                self._nulls += not self._is_state[group]
                continue
            references = self._references.get(block, 0)
            self._references[block] = references + 1
            self._cached.discard(block)
            if references:
                self._shared += not self._is_state[group]
            else:
                self._held[self._is_state[group]] += 1
        self._tail += self._tail_of(live, group)

    def _release(self, request: int, group: int, at: int, hashed: int) -> None:
        _, table = self._table(request, group)
        if at >= len(table) or not table[at]:
            raise self._error("events", ["release", request, group, at], "names no block")
        self._give_back(table[at], group, bool(hashed))
        table[at] = 0
        self._nulls += not self._is_state[group]

    def _preempt(self, request: int, ns: int, runs: list[Any]) -> None:
        live = self._clear(request, runs)
        self.preemptions.append((ns, request))
        self._preempted.append(request)
        live.decodes = False
        self._end_residency(live, ns, True)

    def _finish(self, request: int, ns: int, output_tokens: int, reason: str, runs: list[Any]) -> None:
        live = self._clear(request, runs)
        live.request.output_tokens, live.request.finish_ns, live.request.reason = output_tokens, ns, reason
        self._end_residency(live, ns, False)
        del self._alive[request]

    def _contents(self, request: int, hashes: list[Any]) -> None:
        if not all(map(_is_count, hashes)):
            raise self._error("events", ["contents", request], "must be whole numbers")
        self._of(request, "events").request.contents = tuple(hashes)

    def _reset(self) -> None:
        self._cached.clear()

    def _end_residency(self, live: _Live, ns: int, preempted: bool) -> None:
        if live.residency is not None:
            start, first = live.residency
            live.request.residencies.append((start, min(first, ns), ns, preempted))
            live.residency = None

    def _clear(self, request: int, runs: list[Any]) -> _Live:
        """A request gives up its blocks. ``runs`` says of each group how many in turn have no hash, have one, ..."""
        live = self._of(request, "events")
        for group, table in enumerate(live.tables):
            lengths = runs[group] if group < len(runs) else None
            if not (isinstance(lengths, list) and all(map(_is_count, lengths)) and sum(lengths) == len(table)):
                raise self._error(
                    "events", lengths, f"must be run lengths of the {len(table)} entries of request {request}"
                )
            self._tail -= self._tail_of(live, group)
            self._nulls -= 0 if self._is_state[group] else table.count(0)
            hashed = chain.from_iterable(repeat(place % 2 == 1, length) for place, length in enumerate(lengths))
            for block, has_hash in zip(table, hashed, strict=True):
                if block:
                    self._give_back(block, group, has_hash)
        live.tables = [[] for _ in live.tables]
        self._count_computed(live, 0)
        return live

    def _give_back(self, block: int, group: int, hashed: bool) -> None:
        references = self._references[block] - 1
        if references:
            self._references[block] = references
            self._shared -= not self._is_state[group]
            return
        del self._references[block]
        self._held[self._is_state[group]] -= 1
        if hashed:
            self._cached.add(block)

    def _tables(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        return {number: tuple(map(tuple, live.tables)) for number, live in self._alive.items() if any(live.tables)}

    def _buckets(self) -> dict[str, int]:
        size, groups = self.block_size, self._is_state.count(False)
        live, tail = groups * self._computed - size * (self._nulls + self._shared), self._tail
        held, state, cached = size * self._held[0], size * self._held[1], size * len(self._cached)
        found = dict.fromkeys(BUCKETS, 0) | {"live": live, "reserved": held - live - tail, "block_tail": tail}
        found |= {"cached": cached, "free": size * self._blocks - held - state - cached}
        return found | ({STATE: state} if any(self._is_state) else {})

    def _count_computed(self, live: _Live, computed: int) -> None:
        self._computed += computed - live.computed
        live.computed = computed

    def _tail_of(self, live: _Live, group: int) -> int:
        if live.target is None or self._is_state[group]:
            return 0
        return max(0, len(live.tables[group]) * self.block_size - live.target)

    def _table(self, request: int, group: int) -> tuple[_Live, list[int]]:
        if group >= len(self._is_state):
            raise self._error("events", group, f"must be one of {len(self._is_state)} KV groups")
        live = self._of(request, "events")
        return live, live.tables[group]

    def _of(self, request: int, field: str) -> _Live:
        if request not in self._alive:
            raise self._error(field, request, "must be a request that was added and has not finished")
        return self._alive[request]

    def _pairs(self, line: dict[str, Any], name: str, missing: list[int] | None) -> list[tuple[int, int]]:
        """A list of requests and numbers in turn; without one the last ``tokens``."""
        values = line.get(name, self._tokens if missing is None else missing)
        if not (isinstance(values, list) and not len(values) % 2 and all(map(_is_count, values))):
            raise self._error(name, values, "must be a list of requests and numbers in turn")
        if missing is None:
            self._tokens = values
        return list(zip(values[::2], values[1::2]))

    def _count(self, line: dict[str, Any], name: str, missing: int | None) -> int:
        value: Any = line.get(name, missing)
        if not _is_count(value, -1 if missing == -1 else 0):
            raise self._error(name, value, "must be a whole number, 0 or more")
        return int(value)

    def _error(self, field: str, value: object, remedy: str) -> TraceError:
        return TraceError(self._path, self._number, field, value, f"{remedy}; {_REMEDY}")
