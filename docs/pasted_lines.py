"""How many pasted lines are read, and how many answered: `python docs/pasted_lines.py LINES.json.gz [GPU]`.

The file is a list of objects with a ``line`` (``vllm serve ...`` or ``docker run ...``). A line is read where its model and flags are
known. It is answered where it starts or vLLM would refuse it, by the facts of its model; else the reason is printed. Flags
are counted by what becomes of them.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter

from fragmeter.experiments.vllm_serve.flags import NOT_SIMULATED, READ
from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.sim.types.errors import UserError


def counts(lines: list[str], gpu: str) -> tuple[Counter[str], Counter[tuple[str, str]], list[str]]:
    """Lines by outcome, flags by outcome and name, and why each of the others is not answered."""
    outcomes, flags, reasons = Counter[str](), Counter[tuple[str, str]](), []
    for text in lines:
        try:
            line = parse_serve(text)
        except UserError as error:
            outcomes["not read"] += 1
            reasons.append(f"not read: {error}")
            continue
        for name in line.named:
            kind = "simulated" if name in READ else "not simulated" if name in NOT_SIMULATED else "of no effect"
            flags[kind, name] += 1
        try:
            answer = started(line, gpu)
            outcomes["refused by vLLM" if answer.refusal() else "starts"] += 1
        except UserError as error:
            outcomes["read, not answered"] += 1
            reasons.append(f"not answered: {error}")
    return outcomes, flags, reasons


if __name__ == "__main__":
    path, gpu = sys.argv[1], (sys.argv[2:] or ["h200"])[0]
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
        lines = [each["line"] for each in json.load(file)]
    outcomes, flags, reasons = counts(lines, gpu)
    print(f"{len(lines)} lines on {gpu}:", ", ".join(f"{count} {what}" for what, count in outcomes.most_common()))
    for kind in ("simulated", "of no effect", "not simulated"):
        found = {name: count for (of, name), count in flags.most_common() if of == kind}
        print(
            f"{kind}: {sum(found.values())} uses of {len(found)} flags:",
            ", ".join(f"{name} {n}" for name, n in found.items()),
        )
    print(*reasons, sep="\n")
