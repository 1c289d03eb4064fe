"""Models of any KV groups, cases that strain their pools, and runs of both as plain numbers."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from hypothesis import strategies as st

from engine_runs import settings_of, workload_of
from fragmeter.sim.config.settings import Settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory import BUCKETS
from fragmeter.sim.memory.accounting.kv_groups import FULL, SLIDING
from fragmeter.sim.runs.integrals import Accounts
from fragmeter.sim.runs.run import Run
from fragmeter.sim.spec import model
from fragmeter.sim.spec.pool import block_bytes
from oracle import Limits, Pool, Request
from oracle.hybrid import Groups
from strategies import Case, small_costs

#: The rarer kind has one layer, so that a group has one.
MODES, HOST = st.sampled_from(["recompute", "swap"]), st.integers(0, 30)
COUNTS = [(1, 1), (1, 2), (2, 1), (0, 1), (1, 3)]


@cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()


@cache
def model_of(groups: Groups) -> str:
    """Path of a ``config.json`` with so many groups of a layer each."""
    kinds = ["full_attention"] * groups.full + ["sliding_attention"] * groups.sliding
    config = {
        "model_type": "llama",
        "num_hidden_layers": len(kinds),
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 100,
        "vocab_size": 100,
        "max_position_embeddings": 4096,
        "sliding_window": groups.window,
        "layer_types": kinds,
    }
    path = Path(_folder().name) / f"{groups.full}-{groups.sliding}-{groups.window}" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(config))
    return str(path)


@dataclass(frozen=True)
class HybridCase:
    """A case, and the groups that its pool serves; ``case.pool`` counts pages."""

    case: Case
    groups: Groups

    def fitted(self, policy: str) -> HybridCase:
        """Limits with a token budget not below ``max_num_seqs``, as vLLM V1 requires, and no swapping, which it lacks."""
        limits = self.case.limits
        if policy == "vllm-v1":
            budget = max(limits.max_num_batched_tokens, limits.max_num_seqs)
            limits = replace(limits, max_num_batched_tokens=budget, preemption_mode="recompute")
        return replace(self, case=replace(self.case, limits=limits))


def settings_for(policy: str, hybrid: HybridCase, window: tuple[int, int] | None = None, **switches) -> Settings:
    """The settings for the pool of a case, on the device and on the host."""
    case, path = hybrid.case, model_of(hybrid.groups)
    # A page has keys and values of one layer.
    page = block_bytes(model(path), block_size=case.pool.block_size) // (hybrid.groups.full + hybrid.groups.sliding)
    pool = case.pool if case.limits.preemption_mode == "swap" else replace(case.pool, host_blocks=0)
    chosen = settings_of(policy, pool, case.limits, window, host_block_bytes=page, **switches)
    return replace(chosen, model=path)


def serve(policy: str, hybrid: HybridCase, window: tuple[int, int] | None = None, **switches) -> Run:
    """Run a case; ``switches`` are settings."""
    case = hybrid.case
    chosen = settings_for(policy, hybrid, window)
    chosen = replace(chosen, **switches)
    return simulate(chosen, workload_of(case.requests, case.limits.max_model_len), case.cost)


def group_buckets_at_rows(run: Run) -> list[list[dict[str, int]]]:
    """The ledger of each group in the first step of every row, without what is free; the full groups first."""
    groups, rows = run.log.groups, []
    for kind in (FULL, SLIDING):
        accounts = Accounts(run.log, groups._replace(kinds=(kind,)))
        columns = {name: column.tolist() for name, column in accounts.at_rows().items()}
        columns["free"] = [0] * len(columns["free"])
        rows += [
            [dict(zip(BUCKETS, values)) for values in zip(*(columns[name] for name in BUCKETS))]
        ] * groups.kinds.count(kind)
    return [list(row) for row in zip(*rows)]


@st.composite
def hybrid_cases(
    draw: st.DrawFn, most: int = 7, longest: int = 40, costs: st.SearchStrategy = small_costs
) -> HybridCase:
    """Prompts and outputs on either side of the window, over a pool of pages for one to all of them."""
    full, sliding = draw(st.sampled_from(COUNTS))
    groups = Groups(full, sliding, draw(st.integers(1, longest // 2)))
    size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    now, requests = 0, []
    for _ in range(draw(st.integers(1, most))):
        now += draw(st.sampled_from([0, 0, 1, 121, 700]))
        prompt = draw(st.integers(1, longest - 1))
        requests.append(Request(now, prompt, draw(st.integers(1, longest - prompt))))
    largest = (full + sliding) * max(-(-(r.prompt_tokens + r.output_tokens) // size) for r in requests)
    pages = int(largest * draw(st.sampled_from([0.5, 0.7, 1, 1.3, 2, 4]))) + 1
    limits = Limits(
        max_model_len=longest + draw(st.sampled_from([0, 30])),
        max_num_batched_tokens=draw(st.sampled_from([4, 8, 16, 2560])),
        max_num_seqs=draw(st.sampled_from([1, 2, 4, 64])),
        watermark_fraction=draw(st.sampled_from([0.0, 0.1])),
        preemption_mode=draw(MODES),
    )
    return HybridCase(Case(requests, Pool(pages, size, draw(HOST)), limits, draw(costs)), groups)


@st.composite
def crowded_hybrid_cases(draw: st.DrawFn) -> HybridCase:
    """Outputs that pass short windows again and again, over a pool with a few pages more than the largest asks for:
    which sequence finds a page depends on which gave one back before."""
    full, sliding = draw(st.sampled_from([(0, 1), (0, 1), (1, 1), (1, 3)]))
    groups, size = Groups(full, sliding, draw(st.integers(2, 9))), draw(st.integers(1, 4))
    now, requests = 0, []
    for _ in range(draw(st.integers(2, 7))):
        now += draw(st.sampled_from([0, 0, 121, 150, 500]))
        requests.append(Request(now, draw(st.integers(1, 10)), draw(st.integers(4, 30))))
    budget = draw(st.integers(4, 9))
    longest = max(-(-(r.prompt_tokens + r.output_tokens) // size) for r in requests)
    most = -(-(groups.window - 1 + budget) // size) + 1
    pages = full * longest + sliding * min(most, longest) + draw(st.integers(0, 8))
    watermark = draw(st.sampled_from([0.0, 0.1, 0.3]))
    bounds = Limits(40, budget, draw(st.sampled_from([2, 4])), watermark, preemption_mode=draw(MODES))
    return HybridCase(Case(requests, Pool(pages, size, draw(HOST)), bounds, draw(small_costs)), groups)
