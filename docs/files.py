"""Writes docs/files.md from the table of signatures: python docs/files.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fragmeter.reports.page.table import markdown
from fragmeter.sim.types import signatures
from fragmeter.sim.types.signatures import Signature

PAGE = Path(__file__).with_suffix(".md")
HEAD = """\
# Files that are recognised

Every command looks at the beginning of a file before it reads it. A file that is a known kind, and not the one that is expected, gets
one line: what it is, and what to do with it.

```
server.log: is a start-up log of vLLM, not a trace of requests; give it as --startup-log beside --serve, or to diagnose as --log
```

The first row that fits decides; kinds that the command reads come before all others. JSON is recognised by keys of its first object
(`a.b` is `b` within `a`), a CSV by its first line, other text by a line in its first MiB. Nothing else of a file is a reason to refuse
it: a file that no row fits goes to the reader, which names what it lacks. With `--columns` only archives and files that are no text are
refused. [traces.md](traces.md) has the units and the assumptions of each trace format.

`python docs/files.py` writes this page from `sim/types/signatures.py`.
"""
#: Headings, and their rows.
SECTIONS = {
    "Traces and results of benchmarks": signatures.TRACES,
    "Servers, and tools that watch them": signatures.SERVERS,
    "Command lines and deployments": signatures.DEPLOYMENTS,
    "Models and GPUs": signatures.MODELS,
    "fragmeter's own outputs": signatures.OWN,
    "Loads, results and data that lack something": signatures.DATA,
    "Archives and other wrappings": signatures.WRAPPINGS,
}
#: Flags by the places that take files.
FLAGS = {
    "trace": "`--trace`", "benchmark": "`--against`, `--bench`", "metrics": "`--metrics`", "startup_log": "`--startup-log`",
    "serve": "`--serve`", "model": "`--model`", "gpu": "`--gpu`", "tokenizer": "`--tokenizer`", "probe": "`--probe`",
}  # fmt: skip


def page() -> str:
    """The page as Markdown."""
    return HEAD + "".join(f"\n## {heading}\n\n{table(rows)}" for heading, rows in SECTIONS.items())


def table(rows: Sequence[Signature]) -> str:
    """Rows of signatures, in their order."""
    flags = (", ".join(flag for place, flag in FLAGS.items() if place in row.read_as) for row in rows)
    cells = ((row.what, row.mark.text, read or "–", row.use) for row, read in zip(rows, flags, strict=True))
    return "\n".join(markdown(("file", "recognised by", "read by", "elsewhere"), cells)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
