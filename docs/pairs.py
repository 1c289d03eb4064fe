"""Which options of ``vllm-v1`` combine, by a run of every pair: ``python docs/pairs.py`` prints the tables, ``--write`` writes them into
docs/policies.md, between two comments.

A pair that is refused has the message of the run, and what the start-up checks of vLLM (``experiments.vllm_serve``) say of its line.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fragmeter.experiments.vllm_serve.line import parse_serve, version
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.reports.page.table import markdown
from fragmeter.sim.cluster import Cluster, simulate_cluster
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.spec import gpu
from fragmeter.sim.types.errors import NotSimulated, SettingError
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload

PAGE = Path(__file__).with_name("policies.md")
BEGIN, END = "<!-- pairs: python docs/pairs.py --write -->", "<!-- end of the pairs -->"
_DRAFTS = {"num_speculative_tokens": 2, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2}
#: Models by what their layers keep; a pair of two of them would be another model.
MODELS = {
    "windows": {"model": "gpt-oss-120b", "tensor_parallel_size": 16},
    "states": {"model": "qwen3-next-80b-a3b", "tensor_parallel_size": 4},
    "block sizes": {"model": "gemma-4-26b-a4b"},
    "compressed": {"model": "deepseek-v4-flash", "tensor_parallel_size": 8},
    "indexer": {"model": "deepseek-v3.2", "tensor_parallel_size": 16},
    "indexer and states": {"model": "glm-5.3-flash", "tensor_parallel_size": 8},
    "latent vectors": {"model": "deepseek-v3", "tensor_parallel_size": 16},
}
#: Settings that ask for each feature, or none where the workload or the cluster does.
FEATURES: dict[str, dict[str, Any]] = MODELS | {
    **{
        name: {"speculative_config": json.dumps({"method": method, **_DRAFTS})}
        for name, method in {"n-grams": "ngram", "EAGLE": "eagle", "MTP": "mtp"}.items()
    },
    "offloading": {"kv_offloading_size": 64},
    "priority": {"scheduling_policy": "priority"},
    "interval": {"prefill_schedule_interval": 3},
    "n": {},
    "disaggregation": {},
    "data parallel": {"data_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "context parallel": {"decode_context_parallel_size": 2},
    # A multiple of the blocks of all models. Without one of them it needs windows.
    "retention": {"prefix_cache_retention_interval": 11520, **MODELS["windows"]},
}
#: Methods of drafts, of which a run has one.
_METHODS = ("n-grams", "EAGLE", "MTP")
#: A model whose layers all keep every token, with experts, which engines share, and with query heads of a KV head that ranks divide.
_PLAIN = {"model": "qwen3-30b-a3b", "tensor_parallel_size": 8}


#: The release whose start-up is asked.
_RELEASE = "0.33"
_UNUSED = "prefix_cache_retention_interval is set but this model has no sliding-window or Mamba layers"
#: What vLLM says of pairs that are no flags of one line, but of a connector, ``NixlConnector``; and where its start is not computed.
_IN_VLLM = {
    ("indexer", "retention"): _UNUSED,
    ("latent vectors", "retention"): _UNUSED,
    (
        "n",
        "disaggregation",
    ): "starts; reads the blocks of one sample for all (`Potentially invalid KV blocks for unrecognized request`)",
    (
        "disaggregation",
        "context parallel",
    ): "must be 1 or equal to the NIXL transfer parallel size; is only supported for MLA models",
}


class Pair(NamedTuple):
    """Two features, the same twice for one alone.

    Attributes:
        is_apart: Whether samples are served as requests of their own.
        message: Of the refusal of the run; None if it runs.
        in_vllm: vLLM's refusal of the line; "starts"; None if its start is not computed, or the line has no such feature.
    """

    one: str
    other: str
    is_apart: bool
    message: str | None
    in_vllm: str | None

    @property
    def cell(self) -> str:
        """Whether the pair runs, or who refuses."""
        if self.message is None:
            return "apart" if self.is_apart else "yes"
        return "here" if self.in_vllm in ("starts", None) else "vLLM"


def pair_of(one: str, other: str) -> Pair:
    """Serve four requests with two features."""
    given = {**_PLAIN, "enable_prefix_caching": True, "max_model_len": 4096}
    # A model comes first of the features and decides.
    for feature in sorted({one, other}, key=[*FEATURES].index, reverse=True):
        given |= FEATURES[feature]
    in_vllm = _IN_VLLM.get((one, other)) or _start(given)
    return Pair(one, other, "n" in (one, other), _refusal({one, other}, given), in_vllm)


def _refusal(asked: set[str], given: dict[str, Any]) -> str | None:
    facts: dict[str, Any] = {"content": PromptContent.of_sessions(np.zeros(4, dtype=np.int64))}
    if "priority" in asked:
        facts["priority"] = np.arange(4)
    if "n" in asked:
        facts["n"] = np.full(4, 2)
    work = Workload("four", np.zeros(4), np.array([40, 60, 80, 100]), np.full(4, 12), **facts)
    engines = given.get("data_parallel_size", 1)
    try:
        chosen = settings(policy="vllm-v1", gpu="h200", **given)
        if "disaggregation" in asked:
            simulate_cluster(chosen, work, Cluster(prefill_replicas=engines, decode_replicas=engines))
        elif engines > 1:
            simulate_cluster(chosen, work, Cluster(num_replicas=engines))
        else:
            simulate(chosen, work)
    except SettingError as error:
        return str(error)
    return None


def _start(given: dict[str, Any]) -> str | None:
    flags = {name: value for name, value in given.items() if name not in ("model", "enable_prefix_caching")}
    line = " ".join(f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in flags.items())
    try:
        found = started(parse_serve(f"vllm serve {given['model']} {line}", version(_RELEASE)), gpu("h200"))
    except NotSimulated:
        return None
    refusal = found.outcome().refusal
    return "starts" if refusal is None else refusal.text


def pairs() -> Iterator[Pair]:
    """All pairs, in the order of the features."""
    for one, other in combinations_with_replacement(FEATURES, 2):
        if one == other or not (other in MODELS or {one, other} <= {*_METHODS}):
            yield pair_of(one, other)


def tables(found: Sequence[Pair]) -> str:
    """The table of pairs, and that of the refused ones."""
    cells = {(pair.one, pair.other): pair.cell for pair in found}
    columns = [name for name in FEATURES if name not in MODELS]
    head = ["", "alone", *columns]
    rows: list[list[str | None]] = [
        [one, cells[one, one], *(cells.get((one, other)) for other in columns)] for one in FEATURES
    ]
    for row in rows:
        if row[0] in columns:
            # Alone it is in the second column.
            row[2 + columns.index(row[0])] = None
    refused = [
        (f"{pair.one}, {pair.other}", f"`{_shown(pair.message)}`", pair.in_vllm or "not computed")
        for pair in found
        if pair.message is not None
    ]
    return "\n".join([*markdown(head, rows), "", *markdown(["refused", "message", f"vLLM {_RELEASE}"], refused)])


def _shown(message: str) -> str:
    """A message without the drafts' JSON."""
    return re.sub(r"'\{.*\}'", "'...'", message)


def text_between(page: str) -> str:
    """The tables that the page has."""
    return page.split(f"{BEGIN}\n\n")[1].split(f"\n\n{END}")[0]


def main(arguments: Sequence[str]) -> None:
    """Print the tables or write them."""
    found = tables([*pairs()])
    if arguments != ["--write"]:
        print(found)
        return
    page = PAGE.read_text("utf-8")
    PAGE.write_text(page.replace(f"\n{text_between(page)}\n", f"\n{found}\n"), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
