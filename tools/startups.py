"""Start-ups of public logs beside the answers of ``fragmeter plan --serve``: ``python -m tools.startups --markdown FILE``.

Each case has a line, a card, a release and what the log says. Cases without a release, or of a model of which we have no shape, are
counted and left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from fragmeter.experiments.runs.output import Report
from fragmeter.experiments.vllm_serve.checks import Outcome
from fragmeter.experiments.vllm_serve.line import parse_serve, version
from fragmeter.experiments.vllm_serve.start import Started, started
from fragmeter.reports.page.table import Table, markdown
from fragmeter.sim.spec import gpu
from fragmeter.sim.spec.gpu import GIB, GpuSpec
from fragmeter.sim.spec.startup.capacity import StageMemory, capacity
from fragmeter.sim.spec.startup.non_torch import SIZES, link
from fragmeter.sim.types.errors import UserError

#: The preset that stands in for a card that is none, by a part of its name or of what the log says; its memory is the logged total, or the GiB
#: here, of each rank where they differ. The server edition of an RTX PRO 4500 shows no desktop.
CARDS: dict[str, tuple[str, *tuple[float, ...]]] = {
    "RTX PRO 4500 Blackwell Server Edition": ("rtx-pro-4500", 31.38),
    "RTX 5000 Ada": ("rtx-6000-ada", 31.5),
    "3050 6GB": ("rtx-3060-12gb", 5.66),
    "RTX 6000 24 GB": ("rtx-2080-ti", 23.47),
    "5090 Laptop": ("rtx-5090", 23.4),
    "RTX 3050": ("rtx-3060-12gb", 4.0),
    "GTX 1660": ("rtx-2080-ti", 5.6),
    "79.2": ("h100-80gb", 79.19),
    "79.19": ("h100-80gb", 79.19),
    "80 GiB": ("h100-80gb", 79.19),
    "80 GB": ("h100-80gb", 79.19),
    "46 GB": ("l40s", 44.39),
    "8.9": ("l40s", 44.39),
    "7.5": ("rtx-2080-ti", 23.47),
    "sm_100": ("b200", 178.35),
    "23.53": ("rtx-4090", 23.53),
    "15.99": ("rtx-5080", 15.99),
    "15.55": ("rtx-5080", 15.55),
    "16 GB card": ("rtx-5080", 15.5),
    "5070 Ti and RTX 5090 D": ("rtx-5090", 15.47, 31.36),
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
    def parts(self) -> list[float | None]:
        """Logged GiB of weights, activations, memory outside of torch and CUDA graphs."""
        logged = self.logged
        graphs, activations = logged.get("graphs_estimated_gib"), logged.get("peak_activation_gib")
        if activations is not None and "consumed_gib" in logged:
            activations -= graphs or 0
        return [logged.get("weights_gib"), activations, logged.get("non_torch_gib"), graphs]

    @property
    def outside_of_torch(self) -> float | None:
        """Logged GiB outside of torch; since 0.27 what is consumed beside the weights."""
        logged = self.logged
        found: float | None = logged.get("non_torch_gib")
        if found is None and {"consumed_gib", "weights_gib"} <= logged.keys():
            found = logged["consumed_gib"] - logged["weights_gib"]
        return found

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


def card_of(case: dict[str, Any]) -> GpuSpec | list[GpuSpec] | None:
    """The GPU of a case with the memory that its log has; None if it is none that ``CARDS`` stands in for."""
    if case.get("gpu"):
        found = gpu(case["gpu"])
        total = case["logged"].get("total_gib")
        return found if total is None else replace(found, memory_bytes=round(total * GIB))
    name = case["card"]["name"]
    for part, (preset, *sizes) in CARDS.items():
        if part in name:
            totals = [case["logged"]["total_gib"]] if "total_gib" in case["logged"] else sizes
            return [replace(gpu(preset), name=name, memory_bytes=round(total * GIB)) for total in totals]
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


COLUMNS = (
    "model", "GPUs", "vLLM", "server", "answer", "KV logged", "KV computed", "weights", "activations", "non-torch", "graphs", "by its GiB",
)  # fmt: skip


def _short(reason: str) -> str:
    """Why a case is left out, without the remedy."""
    return "its model is not known" if reason.startswith("model = ") else reason.split(";")[0]


def row(each: Compared) -> list[str]:
    """A row of the table, by ``COLUMNS``."""
    case, stage = each.case, each.stage
    words = case["serve"].split()
    name = words[words.index("serve") + 1].split("/")[-1]
    kind = each.outcome.kind
    low, likely, high = (size / GIB for size in stage.kv_cache)
    interval = f"{likely:.2f} ({low:.2f} to {high:.2f})"
    by_memory = each.by_memory
    return [
        name,
        f"{each.answer.launch.num_gpus} x {case.get('gpu') or case['card']['name']}",
        str(case.get("vllm") or case.get("log_lines_of")),
        {True: "starts", False: "refused", None: ""}[each.started],
        f"**{kind}**" if each.is_right is False else kind,
        "" if each.kv_gib is None else f"{each.kv_gib:.2f}",
        f"**{interval}**" if each.is_covered is False else interval,
        *(_part(size.likely / GIB, logged) for size, logged in zip(stage.parts().values(), each.parts, strict=True)),
        "" if by_memory is None else f"{100 * by_memory[1]:+.1f} %",
    ]


def _part(size: float, logged: float | None) -> str:
    return f"{size:.2f}" + ("" if logged is None else f" / {logged:.2f}")


def summary(found: list[Compared]) -> Table:
    """How many answers are right, sizes near and intervals wide enough, beside what a constant answer would score."""
    judged = [each for each in found if each.is_right is not None]
    bad = sum(each.outcome.kind == "starts" and not each.started for each in judged)
    sized = [each for each in found if each.error is not None]
    near = sum(abs(each.error or 0) <= max(0.5, 0.03 * (each.kv_gib or 0)) for each in sized)
    far = sum(abs(each.error or 0) > 0.04 * each.stage.total_bytes / GIB for each in sized)
    formed = [each.by_memory[1] for each in sized if each.by_memory is not None]
    counts = (
        ("answers that are right", sum(bool(each.is_right) for each in judged), len(judged)),
        ('"starts" for all would be right', sum(bool(each.started) for each in judged), len(judged)),
        ('"depends"', sum(each.outcome.kind == "depends" for each in judged), len(judged)),
        ('"starts" of a server that did not', bad, len(judged)),
        ("KV cache within 0.5 GiB or 3 %", near, len(sized)),
        ("KV cache beyond 4 % of the card", far, len(sized)),
        ("logged KV cache in the interval", sum(bool(each.is_covered) for each in sized), len(sized)),
        ("blocks or sequences within 2 % by the logged GiB", sum(abs(error) <= 0.02 for error in formed), len(formed)),
    )
    table = Table("", "count", "of")
    for each in counts:
        table.add_row(*each)
    return table


def entries() -> list[str]:
    """The entries of ``non_torch.SIZES`` with their logs."""
    lines = []
    for since, sizes in SIZES:
        for (linked, least), each in sizes.items():
            sized = ", ".join(f"{size:.2f}" for size in each[:3])
            lines.append((f"0.{since}" if since else "", linked, str(least) if least else "", sized, each.logs))
    return markdown(("since", "link", "capability", "least, likely, most", "logs"), lines)


def left_card_out(found: list[Compared]) -> list[str]:
    """The median of the other cards' logs of a kind beside those of each card: what a constant would be without it."""
    kinds: dict[tuple[str, bool], list[tuple[str, float]]] = {}
    for each in found:
        launch, logged = each.answer.launch, each.outside_of_torch
        if logged is not None:
            kind = link(launch.gpu, launch.num_gpus), launch.release.since >= (0, 18)
            kinds.setdefault(kind, []).append((launch.gpu.name, logged))
    lines = []
    for (linked, is_late), sizes in sorted(kinds.items()):
        for card in sorted({name for name, _ in sizes}):
            own, others = ([size for name, size in sizes if (name == card) == mine] for mine in (True, False))
            middle = f"{median(others):.2f}" if others else "none"
            releases = "since 0.18" if is_late else "up to 0.17"
            lines.append((linked, releases, card, ", ".join(f"{size:.2f}" for size in sorted(own)), middle))
    return markdown(("link", "releases", "card", "logged", "median of the others"), lines)


@cache
def cases() -> list[dict[str, Any]]:
    """The cases of ``startups.json``."""
    return list(json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))["cases"])


def markdown_parts(answers: Sequence[Compared | str]) -> dict[str, str]:
    """The parts of docs/results/startups.md that are computed, by the names of their places."""
    found = [each for each in answers if isinstance(each, Compared)]
    tables = {
        "summary": summary(found).markdown(),
        "cases": markdown(COLUMNS, map(row, found)),
        "left out": [f"- {count}: {reason}" for reason, count in left_out(answers)],
        "memory outside of torch": entries(),
        "without a card": left_card_out(found),
    }
    return {name: "\n".join(lines) for name, lines in tables.items()}


def left_out(answers: Iterable[Compared | str]) -> list[tuple[str, int]]:
    """Why cases have no answer, the most frequent reason first."""
    counted = Counter(_short(each) for each in answers if isinstance(each, str))
    return sorted(counted.items(), key=lambda item: (-item[1], item[0]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer all cases; report how many answers are right and which are wrong. Returns the exit status: 2 for an error."""
    parser = argparse.ArgumentParser(prog="python -m tools.startups", description=__doc__)
    parser.add_argument("--markdown", help="page with places for the tables; - for standard output")
    chosen = parser.parse_args(arguments)
    try:
        report = Report(None, markdown=chosen.markdown)
        answers = [*map(compared, cases())]
        found = [each for each in answers if isinstance(each, Compared)]
        report.console.print(summary(found))
        for each in found:
            if each.is_right is False:
                report.print_line(f"wrong: {each.case['source']}: {each.outcome.kind}")
        for reason, count in left_out(answers):
            report.print_line(f"left out: {count}: {reason}")
        report.markdown_parts("Start-ups beside public logs", lambda: markdown_parts(answers))
    except UserError as error:
        print(f"tools.startups: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
