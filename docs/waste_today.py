"""Writes docs/results/waste-today.md from the document of ``fragmeter reproduce waste-today --json FILE``."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fragmeter.experiments.today.pools import TwoLevelPool
from fragmeter.experiments.today.published import (
    KINDS,
    blocks_of_a_short_request,
    comparison,
    giant_pages,
    limits,
    notes,
)
from fragmeter.experiments.today.servers import SERVERS
from fragmeter.experiments.today.waste_today import of_load
from fragmeter.reports.page.table import markdown

HEAD = """\
# Waste of today's models

`fragmeter reproduce waste-today` serves today's models on today's cards with the defaults of vLLM 0.33 (Nemotron 3 Super with `--max-num-seqs 512`: with the
default [it does not start](../start-up.md#sequences-and-blocks-of-models-with-states)), and divides every byte of the KV cache by what it holds. The tables of this page are its result, written by `make waste-today`; nothing in them is edited by hand. No GPU
was used: step times are those of `--cost fitted`, or of `--cost roofline` where the profile of a card does not cover a model.

```sh
fragmeter reproduce waste-today --out DIR     # the page with the pictures, DIR/reproduction.html
```

## Loads

{loads}

Means are over the steps in which requests wait, because the pool or the batch is full then, and over all steps where none waits.

## Allocators

| | |
|---|---|
| `vllm` | vLLM 0.33: one pool of equal pages for all KV groups, prefix caching on. Simulated; the numbers are the run's own ledger. |
| `jenga` | After Jenga ([arXiv 2503.18292](https://arxiv.org/abs/2503.18292)): large pages of the least common multiple of the page sizes, small pages by kind of layer, taken by request. Replayed. |
| `separate` | A pool for each kind of layer, divided at the start as SGLang's defaults do: windows get 0.8 of the tokens of full attention (`swa_full_tokens_ratio`), states 0.9 of the bytes of attention (`mamba_full_memory_ratio`). Replayed. |

`jenga` and `separate` are not runs of their own. An observer records the tokens that each sequence of vLLM's run holds in each step, and both
allocators take and give back the pages of exactly these sequences. Slots of the record equal the ledger's to the slot (a test compares them).
The replay keeps vLLM's admissions, preemptions, step times and prefix hits. It shows the bytes that the same sequences pin; it cannot show larger
batches, more hits or higher throughput. *Fits* bounds the gain: the pool over the mean bytes of a sequence that ran (in separate pools, of the
fullest one). *Short* is what the sequences have under vLLM and the allocator does not have for them, in percent of the pool. Both replayed
allocators cache nothing, so their free memory includes vLLM's cached blocks. A page of `jenga` is one of a layer: of all layers of a
kind at once, a large page of Nemotron-H 8B would have 779 MiB. That of GLM-5.3-Flash has 137 MiB even so, as the keys of its indexer have
33 bytes a token: 528 a page, which divide no page of the other kinds. DeepSeek V4 Flash is under `vllm` alone: its caches have windows of three
lengths, and the record has the passed blocks of one.

DeepSeek V4 in blocks of 1,002,240 bytes (Flash): of a block the inputs of compressors at ratio 128 leave 34.6 % unused, windows 18.0 and 21.7 %, inputs at
ratio 4 14.2 %, keys and vectors 1.7 %. That 98 % of a block's bytes are lost, as has been written of it, is not so in 0.33. What is 98 % are the blocks that a chunk of a prompt
takes for a moment: 8,192 tokens take 3,360 blocks (3.14 GiB), 2,048 of them for inputs at ratio 4 and 1,024 at ratio 128, and 54 of these are
needed after the step, so that 98.4 % come back. vLLM's own scheduler takes and gives back the same. A sequence that decodes holds 24 to 26 blocks beside one for each 256
tokens, so 200 tokens have up to 27 blocks, 25.8 MiB, and 32,768 tokens up to 155.

| column | bytes |
|---|---|
| live, state | tokens and states of fixed size; the buffer of an indexer is one (GLM-5.3-Flash) |
| reserved, tail | slots of pages that will be filled, and slots past the end of a sequence |
| padding | bytes of a block that no layer of the group uses: padding of states, missing layers, and the keys of an indexer |
| stranded | free, but only for another kind of layer |
| cached, free | blocks without references that keep their contents; all else, and what is left beside whole pages |
"""
PUBLISHED = """\
## Published figures beside these

Each is computed from the settings that its source states. {limits} {kinds}
`tests/experiments/today/test_published.py` plants a wrong value in each, and errors in what computes them.

GLM-5.3-Flash is served above by its own configuration (34 layers of Kimi delta attention, 11 of sparse latent attention), on 4 H200 with a KV
cache of 16 bits. The same configuration gives the blocks that logs of other servers have: 1,152 tokens on 4 ranks, 640 on 8, 3,584 on 2 with 7
drafts.

vllm#54458 reports about 23 KV-cache groups on a server with a DFlash drafter, each with at least a page of 7,808 tokens for a request. The bytes
of a latent vector and the number of drafts are fitted to the 7,808. From the model's layers {groups} groups follow, in which a short request holds
{least} blocks while it decodes, and {most} at the most. Neither the other groups follow, as the layers of the drafter are not stated, nor does the part of
the pool that a request pins (32.9 %, 118,000 to 150,000 token equivalents), as `max_model_len` is not. Mazyod/vllm, the source of the log below, reports that the
issue did not reproduce at this severity: blocks of 1,152 tokens, no 23 groups, and 6.5 % more than its tokens for a request.

"""
EXAMPLE = """\
## One measurement

```python
from dataclasses import replace

from fragmeter.experiments.today.loads import LOADS
from fragmeter.experiments.today.servers import Server
from fragmeter.experiments.today.waste_today import measure

chat = replace(LOADS[0], requests=40)
for row in measure(Server("Nemotron-H 8B", "nemotron-h-8b", "h100-80gb"), chat, seed=0)["kv_bytes"]:
    parts = ("live", "state", "reserved", "block_tail", "page_padding", "stranded")
    print(row["allocator"], *(f"{part} {row[part]:.2f}" for part in parts))
```

```text
vllm live 0.16 state 2.34 reserved 0.09 block_tail 0.17 page_padding 0.00 stranded 0.00
jenga live 0.16 state 2.34 reserved 0.00 block_tail 0.00 page_padding 0.00 stranded 2.27
separate live 0.16 state 2.34 reserved 0.00 block_tail 0.00 page_padding 0.00 stranded 47.70
```
"""
COLUMNS = {
    "live": "live", "state": "state", "reserved": "reserved", "block_tail": "tail", "page_padding": "padding",
    "stranded": "stranded", "cached": "cached", "free": "free",
}  # fmt: skip
HBM = (
    "weights", "activations", "cuda_graphs", "outside_torch", "live", "state", "reserved", "block_tail", "page_padding", "cached",
    "free", "never_used",
)  # fmt: skip
SLOTS = ("live", "state", "reserved", "block_tail", "cached", "free")


def page(document: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    loads = list(dict.fromkeys(row["load"] for row in document["kv_bytes"]))
    texts = "\n".join(f"- {text}" for text in document["basis"][: len(loads)])
    parts = [
        HEAD.format(loads=texts),
        "## In short\n",
        *_in_short(document["kv_bytes"]),
        _in_limits(document["rows"]),
        "",
    ]
    for load in loads:
        parts += [f"## KV cache by allocator: {load}\n", *_kv_table(of_load(document["kv_bytes"], load)), ""]
    parts += [*document["unserved"], "", "## Slots, under vLLM\n"]
    parts += ["Percent of the slots of the pool. A slot of a KV group is a token in its layers.\n"]
    parts += [*_slots_table(document["slots"]), "", "## Every byte of a GPU, under vLLM\n"]
    parts += [f"GiB of one GPU, {loads[0]}. *Never used* is what `--gpu-memory-utilization` leaves out.\n"]
    parts += [*_hbm_table([row for row in document["hbm"] if row["load"] == loads[0]]), ""]
    least, most = blocks_of_a_short_request()
    parts += [
        PUBLISHED.format(
            limits=limits(document["rows"]), kinds=KINDS, groups=len(giant_pages().groups), least=least, most=most
        )
        + "\n".join(_published_table(document["rows"])),
        "",
        "Settings of the sources, what they do not state, and remarks:",
        "",
        *_notes(document["rows"]),
        "",
        EXAMPLE,
    ]
    return "\n".join(parts)


def _notes(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for found in notes(rows):
        yield f"- {found.source}{f': {found.text}' if found.text else ''}"
        yield from (f"    - {text}" for text in found.of_figures)


def _in_short(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The largest of each kind of waste, and the largest gain over vLLM."""
    of = {name: [row for row in rows if row["allocator"] == name] for name in ("vllm", "jenga", "separate")}
    padding = max(of["vllm"], key=lambda row: row["page_padding"])
    empty = max(of["vllm"], key=lambda row: row["reserved"] + row["block_tail"])
    states = max(of["vllm"], key=lambda row: row["state"])
    yield f"- Page padding under vLLM is at most {padding['page_padding']:.1f} % of the pool ({_where(padding)})."
    yield (
        f"- Empty slots of blocks that were raised to the size of a state are at most"
        f" {empty['reserved'] + empty['block_tail']:.1f} % ({_where(empty)}), beside {empty['live']:.1f} % of live tokens."
    )
    yield f"- States take up to {states['state']:.1f} % ({_where(states)}); a batch of short chats is a batch of states."
    fits = {_where(row): row["fits"] for row in of["vllm"]}
    gains = [(row["fits"] / fits[_where(row)], row) for row in of["jenga"]]
    (least, worst), (most, best) = min(gains, key=lambda pair: pair[0]), max(gains, key=lambda pair: pair[0])
    yield (
        f"- Like Jenga, at most {most:.2f} times as many sequences fit as under vLLM ({_where(best)}), and at least {least:.2f}"
        f" times ({_where(worst)}), where each request begins large pages of its own that it hardly fills: they have"
        f" {_large_page_mib(worst['server']):,.0f} MiB there, under our assumption that a page is one of a layer."
    )
    stranded, short = (max(of["separate"], key=lambda row: row[name]) for name in ("stranded", "short"))
    yield (
        f"- Separate pools strand up to {stranded['stranded']:.1f} % ({_where(stranded)}) and lack pages for up to {short['short']:.1f} % of"
        f" the pool ({_where(short)}): one division at the start does not suit every load."
    )


def _in_limits(rows: Sequence[dict[str, Any]]) -> str:
    """How many published figures are within their limits, and which are not."""
    kinds = Counter(row["kind"] for row in rows)
    within = Counter(row["kind"] for row in rows if comparison(row).passes)
    missed = [comparison(row) for row in rows if not comparison(row).passes]
    by_kind = ", ".join(f"{within[kind]} of {number} {kind}" for kind, number in kinds.items())
    misses = "; ".join(f"{found.figure} ({found.error}, limit {found.limit})" for found in missed)
    return f"- {len(rows) - len(missed)} of {len(rows)} published figures ({by_kind}) are within their limits. Missed: {misses}. Figures with drafts are computed from the layers directly."


def _large_page_mib(name: str) -> float:
    server = next(server for server in SERVERS if server.name == name)
    return TwoLevelPool(server.kinds(), 0).large_bytes / (1 << 20)


def _where(row: Mapping[str, Any]) -> str:
    return f"{row['server']}, {row['load']}"


def _kv_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from markdown(
        ["%", "", *COLUMNS.values(), "fits", "short"],
        [
            [
                row["server"] if row["allocator"] == "vllm" else "",
                row["allocator"],
                *(f"{row[name]:.1f}" for name in COLUMNS),
                f"{row['fits']:,.0f}",
                f"{row['short']:.1f}",
            ]
            for row in rows
        ],
    )


def _slots_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = [name.replace("block_", "") for name in SLOTS]
    yield from markdown(
        ["", "load", "tokens of a block", "batch", *names],
        [
            [row["server"], row["load"], f"{row['block_size']:,}", f"{row['batch']:,.1f}", *(f"{row[name]:.1f}" for name in SLOTS)]
            for row in rows
        ],
    )  # fmt: skip


def _hbm_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = [name.replace("block_", "").replace("_", " ") for name in HBM]
    yield from markdown(["", *names], [[row["server"], *(f"{row[name]:.2f}" for name in HBM)] for row in rows])


def _published_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    cells = []
    for row in rows:
        found = comparison(row)
        values = f"{row['published']:,.10g}", f"{row['simulated']:,.10g}"
        result = "pass" if found.passes else "**miss**"
        about = row["kind"], row["limit_stated"], row["source"]
        cells.append([found.figure, *values, found.error, found.limit, result, *about])
    columns = ["figure", "published", "here", "error", "limit", "result", "kind", "limit stated", "source"]
    yield from markdown(columns, cells)


if __name__ == "__main__":
    (Path(__file__).parent / "results" / "waste-today.md").write_text(
        page(json.loads(Path(sys.argv[1]).read_text("utf-8"))), encoding="utf-8"
    )
