"""Compares the start-ups of public logs with the answers of ``fragmeter plan``: ``python docs/startups.py [FILE.json ...]``.

Without a file it reads the collected ones. Each case has a line, a card, a release and what the log says. Cases without a release, or of a
model of which we have no shape, are counted and left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fragmeter.experiments.vllm_serve.checks import GIB, Outcome
from fragmeter.experiments.vllm_serve.line import parse_serve, version
from fragmeter.experiments.vllm_serve.start import Started, started
from fragmeter.sim.spec import gpu
from fragmeter.sim.spec.gpu import GpuSpec
from fragmeter.sim.spec.startup.capacity import StageMemory, capacity
from fragmeter.sim.types.errors import UserError

CASES = Path(__file__).parents[1] / "experiments/vllm_serve/facts/startups.json"
#: The preset with the kernels of a card that is none; its memory is the logged total, or the GiB here.
CARDS = {
    "H20": ("h200", 139.8),
    "H100 NVL": ("h100-pcie", 93.1),
    "GB10": ("gb10", 121.69),
    "RTX PRO 4500": ("rtx-5090", 31.38),
    "A40": ("a10", 44.43),
    "A6000": ("rtx-3090", 47.4),
    "A5000": ("rtx-3090", 23.6),
    "79.2": ("h100-80gb", 79.19),
    "79.19": ("h100-80gb", 79.19),
    "80 GiB": ("h100-80gb", 79.19),
    "80 GB": ("h100-80gb", 79.19),
    "46 GB": ("l40s", 44.39),
    "8.9": ("l40s", 44.39),
    "7.5": ("v100-32gb", 23.47),
    "sm_100": ("b200", 178.35),
    "23.53": ("rtx-4090", 23.53),
    "15.99": ("rtx-5090", 15.99),
    "15.55": ("rtx-5090", 15.55),
    "16 GB card": ("rtx-5090", 15.5),
}


@dataclass(frozen=True)
class Compared:
    """A case and its answer."""

    case: dict[str, Any]
    answer: Started
    outcome: Outcome
    stage: StageMemory

    @property
    def logged(self) -> dict[str, Any]:
        found: dict[str, Any] = self.case["logged"]
        return found

    @property
    def started(self) -> bool | None:
        """Whether the server started; None if the case does not say."""
        if "refused" in self.logged:
            return False
        return True if {"kv_gib", "kv_tokens", "blocks"} & set(self.logged) else None

    @property
    def is_right(self) -> bool | None:
        """Whether the answer is right. "depends" is right if its interval is narrow and holds the logged size."""
        if self.started is None:
            return None
        if self.outcome.kind != "depends":
            return (self.outcome.kind == "starts") == self.started
        return self.is_covered is not False and self.width < 0.08

    @property
    def width(self) -> float:
        """Width of the interval as a share of the memory of the GPU."""
        return (self.stage.kv_cache.high - self.stage.kv_cache.low) / self.stage.total_bytes

    @property
    def kv_gib(self) -> float | None:
        found: float | None = self.logged.get("kv_gib")
        return found

    @property
    def error(self) -> float | None:
        """GiB that are computed and not logged."""
        return None if self.kv_gib is None else self.stage.kv_cache.likely / GIB - self.kv_gib

    @property
    def is_covered(self) -> bool | None:
        if self.kv_gib is None:
            return None
        return self.stage.kv_cache.low / GIB - 0.01 <= self.kv_gib <= self.stage.kv_cache.high / GIB + 0.01

    @property
    def by_memory(self) -> tuple[str, float] | None:
        """Error of the blocks or tokens, as a share, where the logged GiB are given."""
        if self.kv_gib is None:
            return None
        found = capacity(replace(self.answer.launch, kv_cache_memory_bytes=round(self.kv_gib * GIB)))
        # What tokens mean up to 0.20.0 is a matter of ``log.py``.
        if "blocks" in self.logged:
            return "blocks", found.num_blocks / self.logged["blocks"] - 1
        if "concurrency" in self.logged and self.logged["concurrency"][0] == self.answer.launch.max_model_len:
            return "sequences", found.max_concurrency / self.logged["concurrency"][1] - 1
        return None


def card_of(case: dict[str, Any]) -> GpuSpec | None:
    if case.get("gpu"):
        found = gpu(case["gpu"])
        total = case["logged"].get("total_gib")
        return found if total is None else replace(found, memory_bytes=round(total * GIB))
    name = case["card"]["name"]
    for part, (preset, total) in CARDS.items():
        if part in name:
            total = case["logged"].get("total_gib", total)
            return replace(gpu(preset), name=name, memory_bytes=round(total * GIB))
    return None


def compared(case: dict[str, Any]) -> Compared | str:
    """The answer to a case, or why there is none."""
    if "serve" not in case:
        return "no line"
    stated = case.get("vllm") or case.get("log_lines_of")
    if stated is None:
        return "no release"
    card = card_of(case)
    if card is None:
        return f"no card: {case['card']['name']}"
    like = case.get("like", {})
    if "checkpoint" in case and not like:
        return "another checkpoint than the line names"
    extra = f" --quantization {like['quantization']}" if like.get("quantization") else ""
    try:
        answer = started(parse_serve(case["serve"] + extra, version(stated)), card, like.get("model"))
        return Compared(case, answer, answer.outcome(), capacity(answer.launch).stage)
    except UserError as error:
        return str(error)


def rows(cases: list[dict[str, Any]]) -> Iterator[str]:
    """The table: what is logged, and what is answered."""
    left_out: dict[str, int] = {}
    found: list[Compared] = []
    for case in cases:
        each = compared(case)
        if isinstance(each, str):
            left_out[each] = left_out.get(each, 0) + 1
            continue
        found.append(each)
        yield row(each)
    yield ""
    yield from summary(found)
    for reason, count in left_out.items():
        yield f"left out: {count} ({reason})"


def row(each: Compared) -> str:
    case, stage, logged = each.case, each.stage, each.logged
    words = case["serve"].split()
    model_name = words[words.index("serve") + 1] if "serve" in words else words[0]
    kv = stage.kv_cache
    cells = [
        model_name.split("/")[-1][:34],
        f"{each.answer.launch.num_gpus} x {case.get('gpu') or case['card']['name']}"[:30],
        str(case.get("vllm") or case.get("log_lines_of")),
        {True: "starts", False: "refused", None: ""}[each.started],
        each.outcome.kind + {True: "", False: " WRONG", None: ""}[each.is_right],
        "" if each.kv_gib is None else f"{each.kv_gib:.2f}",
        f"{kv.likely / GIB:.2f} ({kv.low / GIB:.2f} to {kv.high / GIB:.2f})"
        + (" OUT" if each.is_covered is False else ""),
    ]
    for name, key in (
        ("weights", "weights_gib"),
        ("activations", "peak_activation_gib"),
        ("non_torch", "non_torch_gib"),
        ("cuda_graphs", "graphs_estimated_gib"),
    ):
        part = getattr(stage, name)
        cells.append(f"{part.likely / GIB:.2f}" + (f"/{logged[key]:.2f}" if key in logged else ""))
    by_memory = each.by_memory
    cells.append("" if by_memory is None else f"{by_memory[0]} {100 * by_memory[1]:+.1f} %")
    return "| " + " | ".join(cells) + " |"


def summary(found: list[Compared]) -> Iterator[str]:
    judged = [each for each in found if each.is_right is not None]
    right = sum(bool(each.is_right) for each in judged)
    depends = sum(each.outcome.kind == "depends" for each in judged)
    bad = sum(each.outcome.kind == "starts" and not each.started for each in judged)
    yield f"right: {right} of {len(judged)}; depends: {depends}; 'starts' of a server that did not: {bad}; 'starts' for all would be right for {sum(bool(each.started) for each in judged)}"
    sized = [each for each in found if each.error is not None]
    near = sum(abs(each.error or 0) <= max(0.5, 0.03 * (each.kv_gib or 0)) for each in sized)
    far = [each for each in sized if abs(each.error or 0) > 0.04 * each.stage.total_bytes / GIB]
    covered = sum(bool(each.is_covered) for each in sized)
    yield f"KV cache within 0.5 GiB or 3 %: {near} of {len(sized)}; beyond 4 % of the card: {len(far)}; in the interval: {covered} of {len(sized)}"
    formed = [each.by_memory for each in sized if each.by_memory is not None]
    yield f"blocks or sequences within 2 % by the logged GiB: {sum(abs(error) <= 0.02 for _, error in formed)} of {len(formed)}"


if __name__ == "__main__":
    files = [Path(name) for name in sys.argv[1:]] or [CASES]
    print(*rows([case for file in files for case in json.loads(file.read_text())["cases"]]), sep="\n")
