"""A scheduler for ``vllm serve`` that also writes down what it schedules, for ``fragmeter report``.

    FRAGMETER_PROBE=steps.jsonl.gz vllm serve MODEL --scheduler-cls fragmeter.probe.ProbeScheduler

It is vLLM's own scheduler; docs/probe.md has the schema of the file. An error ends the recording with one warning, and the
server goes on. This module needs vLLM and the standard library alone.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain, groupby, repeat
from time import monotonic_ns, time_ns
from typing import Any

PATH = "FRAGMETER_PROBE"
SCHEMA_VERSION = 1
_FLUSH_NS = 1_000_000_000
#: Bytes of a block's hash that are written: enough to tell 10 million blocks apart.
_HASH_BYTES = 7
#: Specs of KV groups with block tables that only grow.
_KEEPS_ALL = ("FullAttentionSpec", "MLAAttentionSpec")


class ProbeScheduler:
    """Makes the scheduler that vLLM would choose, synchronous or asynchronous, and attaches a probe to it."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        chosen = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
        scheduler = chosen(vllm_config, *args, **kwargs)
        if path := os.environ.get(PATH):
            _Probe(scheduler, path)
        return scheduler


def _new_file(path: str) -> Any:
    """A text file of this name, with a number where one exists: a server that is restarted keeps the recording before its crash."""
    root, extension = os.path.splitext(path)
    opened = gzip.open if path.endswith(".gz") else open
    name, number = path, 0
    while True:
        try:
            # Devices and pipes always exist.
            return opened(name, "wt" if os.path.exists(name) and not os.path.isfile(name) else "xt")
        except FileExistsError:
            number += 1
            name = f"{root}.{number}{extension}"


class _Probe:
    """Writes a line for each step of a scheduler; ``events`` are those since the last step was scheduled."""

    def __init__(self, scheduler: Any, path: str) -> None:
        self._requests = self._evicted = self._flushed_ns = 0
        #: Of each request: its number, entries written in each group, and blocks that may be released; tokens computed.
        self._known: dict[str, tuple[int, Counter[int], dict[int, dict[int, Any]]]] = {}
        self._computed: dict[str, int] = {}
        self._lines: list[tuple[Any, dict[str, Any]]] = []
        self._tokens: list[tuple[str, int]] | None = None
        self._events: list[Any] = []
        self._ended = False
        self._note(self._start, scheduler, path)

    def _note(self, method: Callable[..., None] | None, *args: Any) -> None:
        try:
            if method and not self._ended:
                method(*args)
        except Exception as error:  # whatever it is, the server goes on
            self._ended = True
            logging.getLogger("vllm").warning("fragmeter.probe: the recording ends: %r", error)

    def _start(self, scheduler: Any, path: str) -> None:
        """Open the file, write its header and wrap the calls to record."""
        self._scheduler, self._manager, config = scheduler, scheduler.kv_cache_manager, scheduler.vllm_config
        specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
        self._shrinking = [at for at, spec in enumerate(specs) if type(spec).__name__ not in _KEEPS_ALL]
        if scheduler.connector is not None:
            raise NotImplementedError("KV connectors hold blocks of finished requests")
        if getattr(config.parallel_config, "decode_context_parallel_size", 1) > 1:
            raise NotImplementedError("with decode context parallelism a block has more tokens than its spec")
        if config.parallel_config.data_parallel_size > 1:
            root, extension = os.path.splitext(path)
            path = f"{root}.rank{config.parallel_config.data_parallel_rank}{extension}"
        # Open as long as the server runs.
        self._file: Any = _new_file(path)
        model, pool, caches = config.model_config, self._manager.block_pool, config.cache_config
        limits = ("max_num_seqs", "max_num_batched_tokens", "async_scheduling")
        self._write(
            {"fragmeter_probe": SCHEMA_VERSION, "vllm": __import__("vllm").__version__, "model": model.model}
            | {"num_gpu_blocks": pool.num_gpu_blocks, "prefix_caching": bool(caches.enable_prefix_caching)}
            | {"max_model_len": model.max_model_len}
            | {"groups": [[type(spec).__name__, spec.block_size] for spec in specs]}
            | {name: getattr(config.scheduler_config, name) for name in limits}
            | {"monotonic_ns": monotonic_ns(), "unix_ns": time_ns()}
        )
        self._wrap(scheduler, "add_request", self._added)
        self._wrap(scheduler, "schedule", self._scheduled)
        self._wrap(scheduler, "update_from_output", self._updated)
        self._wrap(scheduler, "shutdown", self._closed)
        self._wrap(pool, "_maybe_evict_cached_block", self._evicting)
        self._wrap(pool, "reset_prefix_cache", self._reset)
        # A table is gone when its blocks are free.
        self._wrap(self._manager, "free", before=self._freed)

    def _wrap(self, owner: Any, name: str, after: Any = None, before: Any = None) -> None:
        call = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start_ns = monotonic_ns()
            self._note(before, *args)
            result = call(*args, **kwargs)
            self._note(after, result, start_ns, *args)
            return result

        setattr(owner, name, wrapped)

    def _added(self, result: None, start_ns: int, request: Any) -> None:
        name, lengths = request.request_id, (request.num_prompt_tokens, request.max_tokens)
        if name not in self._known:
            unix_ns = round(request.arrival_time * 1e9)
            self._events.append(["add", self._requests, name, start_ns, unix_ns, *lengths])
            self._begin(name, self._requests)
            self._requests += 1

    def _scheduled(self, output: Any, start_ns: int, *args: Any) -> None:
        tokens, again, new = output.num_scheduled_tokens, output.scheduled_cached_reqs, output.scheduled_new_reqs
        names = [*again.req_ids, *(each.req_id for each in new)]
        before = [*again.num_computed_tokens, *(each.num_computed_tokens for each in new)]
        computed = self._numbered((name, past) for name, past in zip(names, before) if self._computed[name] != past)
        self._computed |= {name: past + tokens[name] for name, past in zip(names, before)}
        # In the order in which blocks were released and taken.
        for name, blocks in zip(names, chain(again.new_block_ids, repeat(True))):
            if blocks is not None or self._shrinking:
                self._note_table(name)
        line = {"start": start_ns, "waiting": self._scheduler.get_request_counts()[1]}
        line["free"] = self._manager.block_pool.get_num_free_blocks()
        if (scheduled := list(tokens.items())) != self._tokens:
            line["tokens"], self._tokens = self._numbered(scheduled), scheduled
        others = {"computed": computed, "evicted": self._evicted, "events": self._events}
        self._lines.append((output, line | {key: value for key, value in others.items() if value}))
        self._events, self._evicted = [], 0

    def _numbered(self, pairs: Iterable[tuple[str, int]]) -> list[int]:
        return [each for name, value in pairs for each in (self._known[name][0], value)]

    def _updated(self, result: Any, start_ns: int, output: Any, *args: Any) -> None:
        expected, line = self._lines.pop(0)
        if expected is not output:
            raise RuntimeError("steps end in another order than they were scheduled")
        self._write(line | {"end": monotonic_ns()})

    def _freed(self, request: Any) -> None:
        name = request.request_id
        self._note_table(name)
        # Run lengths in each group: blocks without a hash, with one, without, and so on.
        tables = [[False, *map(_has_hash, table)] for table in self._manager.get_blocks(name).blocks]
        runs = [[len(list(run)) - (place == 0) for place, (_, run) in enumerate(groupby(table))] for table in tables]
        number = self._known.pop(name)[0]
        if request.is_finished():
            del self._computed[name]
            # The name may come again.
            self._tokens, reason = None, str(request.get_finished_reason())
            if hashes := request.block_hashes:
                self._events.append(["contents", number, *(int.from_bytes(each[:_HASH_BYTES]) for each in hashes)])
            self._events.append(["finish", number, monotonic_ns(), request.num_output_tokens, reason, *runs])
        else:
            self._events.append(["preempt", number, monotonic_ns(), *runs])
            self._begin(name, number)

    def _evicting(self, evicted: bool, *args: Any) -> None:
        self._evicted += evicted

    def _reset(self, done: bool, *args: Any) -> None:
        self._events += [["reset"]] * done

    def _closed(self, *args: Any) -> None:
        for _, line in self._lines:
            self._write(line)
        self._write({"events": self._events})
        self._file.close()
        self._ended = True

    def _begin(self, name: str, number: int) -> None:
        self._known[name] = number, Counter(), {group: {} for group in self._shrinking}
        self._computed[name] = 0

    def _note_table(self, name: str) -> None:
        """Note what a block table has released, and what it has taken."""
        number, entries, held = self._known[name]
        tables = self._manager.get_blocks(name).blocks
        for group, blocks in held.items():
            gone, kept = [], 0
            for at, block in blocks.items():
                # Windows release their first blocks, and of states there are two or three.
                if tables[group][at] is not block:
                    gone.append(at)
                elif (kept := kept + 1) == 3:
                    break
            self._events += [["release", number, group, at, int(_has_hash(blocks.pop(at)))] for at in gone]
        for group, table in enumerate(tables):
            if new := table[entries[group] :]:
                self._events.append(["take", number, group, *(block.block_id for block in new)])
                if group in held:
                    held[group] |= {at: block for at, block in enumerate(new, entries[group]) if not block.is_null}
                entries[group] = len(table)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        if monotonic_ns() - self._flushed_ns > _FLUSH_NS or not self._scheduler.running:
            self._file.flush()
            self._flushed_ns = monotonic_ns()


def _has_hash(block: Any) -> bool:
    return block.block_hash is not None
