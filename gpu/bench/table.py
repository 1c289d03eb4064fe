"""Formats benchmark rows as text lines; does not import torch."""

from __future__ import annotations

from typing import Any


def shares(row: dict[str, Any], peaks: dict[str, float | None]) -> dict[str, float]:
    """Our bandwidth as a share of each known peak."""
    reached = row.get("fragmeter", {}).get("bytes_per_s")
    return {f"share_of_{name}": reached / peak for name, peak in peaks.items() if reached and peak}


HEADINGS = (
    f"{'batch':>5} {'context':>7} {'heads':>8} {'caches':>13} {'KV MB':>8} {'us':>9} {'GB/s':>7} {'of sheet':>8} {'of copy':>8}"
    f" {'torch us':>9} {'gather us':>9} {'FlashInfer':>10}"
)


def line(row: dict[str, Any]) -> str:
    """One row as a line of text."""
    heads = f"{row['heads']:>4},{row['kv_heads']:<3}"
    shape = f"{row['batch']:>5} {row['context']:>7} {heads} {row['kv_dtype']:>13} {row['kv_bytes'] / 1e6:>8.1f}"
    if "left_out" in row:
        return f"{shape} left out: {row['left_out']}"
    mine = row.get("fragmeter", {})
    if "why" in mine:
        state = "failed" if mine["exists"] else "not measured"
        return f"{shape} {state}: {mine['why']}"
    shares_of = (row.get(f"share_of_{name}") for name in ("data_sheet", "copy"))
    parts = ["-" if share is None else f"{share:.0%}" for share in shares_of]
    found = (row.get(way, {}).get("us") for way in ("torch", "gather", "flashinfer"))
    times = ["-" if us is None else f"{us:.1f}" for us in found]
    ours = (f"{mine['us']:.1f}", f"{mine['bytes_per_s'] / 1e9:.1f}") if mine else ("-", "-")
    reached = f"{ours[0]:>9} {ours[1]:>7} {parts[0]:>8} {parts[1]:>8}"
    return f"{shape} {reached} {times[0]:>9} {times[1]:>9} {times[2]:>10}"
