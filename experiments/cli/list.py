"""``fragmeter list``: policies, models, GPUs, metrics and stories by their names on a command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ...reports.page.table import Column, Table
from ...sim.metrics.registry import METRICS
from ...sim.policy import policies
from ...sim.policy.base import AnyPolicy, Policy, Source
from ...sim.spec import gpu, model
from ...sim.spec.gpu import GIB, gpu_names
from ...sim.spec.model import model_names
from ...sim.spec.stored import stored_names
from ..measured.evidence import basis_of
from ..runs.output import JsonTarget, Report
from ..story.reading import story, story_names

Kind = Literal["policies", "models", "gpus", "metrics", "stories"]
_MIB, _KIB = 2**20, 2**10


def list(kind: Kind, /, *, json: JsonTarget = None) -> None:
    """List policies, models, GPUs, metrics or stories: the values of --policy, --model, --gpu, sweep's --maximize, and story.

    Args:
        kind: Kind of values.
    """
    report = Report(json)
    rows = _ROWS[kind]()
    if kind == "policies":
        report.print_line(_BY_GPU)
        report.print_line()
    shown = [row | _shortened(row) for row in rows]
    if kind == "policies":
        limits = [{name: row[name] for name in row if name not in Source._fields} for row in rows]
        shown = [{name: row[name] for name in ("policy", *Source._fields)} for row in rows]
        report.console.print(_table(limits))
        report.print_line()
    report.console.print(_table(shown))
    if kind == "models":
        report.print_line(
            f"{len(stored_names())} repositories are known by their names, too: docs/results/models.md lists them."
        )
    report.data({kind: rows})


def _shortened(row: dict[str, Any]) -> dict[str, str]:
    """Cells of the table that are shorter than in JSON: formats of weights without sizes of groups, and parts that have them."""
    form = row.get("quantization")
    return {"quantization": re.split(r"[\[-]", form)[0]} if form else {}


def _policies() -> Sequence[dict[str, Any]]:
    return [
        {
            "policy": name,
            "system": policy.system,
            "max_num_seqs": policy.default_max_num_seqs,
            "max_num_batched_tokens": policy.default_max_num_batched_tokens,
            "prefix_caching": policy.caches_prefixes,
            **_source(policy)._asdict(),
        }
        for name, policy in policies().items()
    ]


def _source(policy: type[AnyPolicy]) -> Source:
    """Of a policy that declares one itself: what holds a base class does not hold the rules that differ from it."""
    found: Source = vars(policy).get("source", Policy.source)
    return found


def _models() -> Sequence[dict[str, Any]]:
    specs = [model(name) for name in model_names()]
    return [
        {
            "model": spec.name,
            "parameters_billion": round(spec.num_params / 1e9, 2),
            "layers": spec.num_layers,
            "max_model_len": spec.max_model_len,
            "kv_kib_per_token": spec.slot_bytes() / _KIB,
            "state_mib": spec.state_bytes() / _MIB,
            "quantization": spec.quantization,
        }
        for spec in specs
    ]


def _gpus() -> Sequence[dict[str, Any]]:
    specs = [gpu(name) for name in gpu_names()]
    return [
        {
            "gpu": spec.name,
            "memory_gib": round(spec.memory_bytes / GIB, 2),
            "memory_gb_per_s": spec.memory_bytes_per_s / 1e9,
            "fp16_tflops": spec.fp16_flops_per_s / 1e12,
            "basis": basis_of(spec),
        }
        for spec in specs
    ]


def _metrics() -> Sequence[dict[str, Any]]:
    return [{"metric": path, "label": each.heading, "better": each.better} for path, each in METRICS.items()]


def _stories() -> Sequence[dict[str, Any]]:
    return [{"story": name, "title": story(name).title} for name in story_names()]


#: Headings of columns that are wider than their cells, shortened so that the table fits into 80 characters.
_HEADINGS = {
    "parameters_billion": "params\n10^9",
    "max_model_len": "max\nmodel len",
    "kv_kib_per_token": "KV KiB\n/token",
    "state_mib": "state\nMiB",
    "quantization": "quant",
    "memory_gib": "memory\nGiB",
    "memory_gb_per_s": "memory\nGB/s",
    "fp16_tflops": "fp16\nTFLOP/s",
    "basis": "step times rest on",
    "last_difference": "last difference\nfound",
}
_BY_GPU = (
    "vllm-v1 and vllm-real have vLLM's larger defaults on larger GPUs: 1,024 sequences and 8,192 tokens from 70 GiB on "
    "(A100 excepted), 16,384 tokens from 160 GiB on."
)
_ROWS: dict[Kind, Callable[[], Sequence[dict[str, Any]]]] = {
    "policies": _policies,
    "models": _models,
    "gpus": _gpus,
    "metrics": _metrics,
    "stories": _stories,
}


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = []
    for name in rows[0]:
        is_text = any(isinstance(row[name], str | bool) for row in rows)
        wraps = name not in ("policy", "model", "gpu", "metric", "system", "story", "rules_of", "held_by")
        columns.append(Column(_HEADINGS.get(name, name.replace("_", " ")), is_text, wraps))
    table = Table(*columns, gap=2)
    for row in rows:
        table.add_row(*row.values())
    return table
