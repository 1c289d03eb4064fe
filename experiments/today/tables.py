"""The tables of ``reproduce waste-today``: one for the terminal, the page and Markdown; and its Markdown, part by part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...reports.page.table import Column, Table
from ..paper.comparison import Payload
from ..paper.rows import Row
from .cached import cached_table
from .pools import TwoLevelPool
from .replay import BUCKETS
from .servers import SERVERS

#: Headings of buckets that are shorter on the terminal than their names.
HEADINGS = {"padding": "pad", "reserved": "resv", "stranded": "strand"}


#: What a GPU's memory holds under vLLM, and the buckets of its slots.
_MEMORY = (
    "weights", "activations", "cuda_graphs", "outside_torch", "live", "state", "reserved", "block_tail", "page_padding", "cached",
    "free", "never_used",
)  # fmt: skip
_SLOTS = ("live", "state", "reserved", "block_tail", "cached", "free")


def kv_table(load: str, rows: Sequence[Row], whole: bool = True) -> Table:
    """Bytes of the KV cache by bucket, in percent, with a row for each allocator.

    Args:
        whole: Whether it has the cards and what is short, for which 80 columns have no room.
    """
    more = ("short",) * whole
    headings = (each if whole else HEADINGS.get(each, each) for each in (*map(heading, BUCKETS), "fits", *more))
    table = Table(load, Column("pool", is_text=True), *headings, gap=1)
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        last = after is None or after["server"] != row["server"]
        name = row["server"] if whole else row["server"].split(",")[0]
        cells = (
            *(f"{row[each]:.1f}" for each in BUCKETS),
            f"{row['fits']:,.0f}",
            *(f"{row[each]:.1f}" for each in more),
        )
        table.add_row(name if row["allocator"] == "vllm" else "", row["allocator"], *cells, ends_group=last)
    return table


def heading(bucket: str) -> str:
    """A bucket as a column is headed."""
    return bucket.removeprefix("block_").removeprefix("page_")


def _slots_table(rows: Sequence[Row]) -> Table:
    table = Table("", Column("load", is_text=True), "tokens of a block", "batch", *map(heading, _SLOTS))
    for row in rows:
        cells = (f"{row[name]:.1f}" for name in _SLOTS)
        table.add_row(row["server"], row["load"], f"{row['block_size']:,}", f"{row['batch']:,.1f}", *cells)
    return table


def _memory_table(rows: Sequence[Row]) -> Table:
    table = Table("", *(name.removeprefix("block_").replace("_", " ") for name in _MEMORY))
    for row in rows:
        table.add_row(row["server"], *(f"{row[name]:.2f}" for name in _MEMORY))
    return table


def of_load(rows: Sequence[Row], load: str) -> list[Row]:
    """The rows of a load; one row for a model in which all layers keep the same, as its pages are alike everywhere."""
    mine = [row for row in rows if row["load"] == load]
    alike = {row["server"] for row in mine if row["allocator"] == "jenga"} - {
        row["server"] for row in mine if _differs(row, mine)
    }
    return [row for row in mine if row["allocator"] == "vllm" or row["server"] not in alike]


def _differs(row: Row, rows: Sequence[Row]) -> bool:
    """Whether an account differs from vLLM's in more than what vLLM caches."""
    [base] = [each for each in rows if each["server"] == row["server"] and each["allocator"] == "vllm"]
    return any(abs(row[bucket] - base[bucket]) > 0.01 for bucket in BUCKETS if bucket not in ("cached", "free"))


def markdown_parts(payload: Payload) -> dict[str, str]:
    """The parts of docs/results/waste-today.md that are computed, by the names of their places."""
    loads = list(dict.fromkeys(row["load"] for row in payload["kv_bytes"]))
    lines = {
        "loads": [f"- {text}" for text in payload["basis"][: len(loads)]],
        "in short": [*_in_short(payload["kv_bytes"])],
        **{load: kv_table(load, of_load(payload["kv_bytes"], load)).markdown() for load in loads},
        "unserved": payload["unserved"],
        "slots": _slots_table(payload["slots"]).markdown(),
        "memory of a GPU": _memory_table([row for row in payload["hbm"] if row["load"] == loads[0]]).markdown(),
        "cached": cached_table(payload["cached"]).markdown(),
        **({"cached of a record": cached_table(record).markdown()} if (record := payload["cached_of_record"]) else {}),
    }
    return {name: "\n".join(each) for name, each in lines.items()}


def _in_short(rows: Sequence[Row]) -> Iterator[str]:
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


def _large_page_mib(name: str) -> float:
    server = next(server for server in SERVERS if server.name == name)
    return TwoLevelPool(server.kinds(), 0).large_bytes / (1 << 20)


def _where(row: Row) -> str:
    return f"{row['server']}, {row['load']}"
