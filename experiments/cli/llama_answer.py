"""The answer to a ``llama-server`` line: whether it fits the GPU, its slots, and the command that simulates it."""

from __future__ import annotations

from typing import Any

from ...reports.page.table import Table
from ...sim.config.settings import settings
from ...sim.config.unread import only_read
from ...sim.cost import default_cost
from ...sim.engine.replica import build
from ...sim.spec import gpu
from ...sim.types.errors import SettingError
from ..llama_server.line import LlamaLine, build_of_flags
from ..llama_server.memory import PAD, LlamaServer, llama_server
from ..runs.output import Report
from ..vllm_serve.checks import gib
from .start_answer import print_lists, simulate_command


def print_llama(line: LlamaLine, gpu_name: str, model: str | None, report: Report) -> None:
    """Report the memory of a line on one GPU.

    Raises:
        SettingError: A value is invalid, or the model is not known.
    """
    server = llama_server(line, gpu(gpu_name), model)
    free, layers = server.free, server.model.num_layers + 1
    names = [text.split(" ")[0] for text in line.uncounted]
    subject = f"Without {', '.join(names)}, not counted, it" if names else "It"
    on_gpu = min(server.gpu_layers, layers)
    where = (
        f"{server.model.name} ({line.quantization()}) on 1 x {server.gpu.name}, {on_gpu} of {layers} layers on the GPU"
    )
    kind = "fits" if free.low >= 0 else "does not fit" if free.high < 0 else "depends"
    shared = "share one cache of" if line.kv_unified else "have"
    slots = f"{line.slots} slots {shared} {server.slot_cells:,} cells{'' if line.kv_unified else ' each'}"
    text = {
        "fits": f"{subject} fits: {where}; {slots}.",
        "does not fit": f"{subject} does not fit: {where} lacks {gib(-free.likely)} GiB; llama-server fails to allocate a buffer. {slots}.",
        "depends": f"{subject} may fit: {where} has {gib(free.low)} to {gib(free.high)} GiB left; {slots}.",
    }[kind]
    if line.refused:
        report.print_line(
            f"It does not start: {line.refused[0]}. So says the llama-server of {build_of_flags()}. Leave that out; the rest is the answer without it."
        )
        report.print_line()
    report.print_line(text)
    if line.ctx_size == 0:
        report.print_line(
            f"--ctx-size 0 is the model's length, {server.ctx_size:,} tokens, which --fit does not lower."
        )
    elif line.ctx_size is None:
        report.print_line(
            f"--ctx-size is not given: {server.ctx_size:,} tokens, the model's length or what --fit leaves of it."
        )
    report.print_line()
    report.console.print(_table(server))
    command = _simulate(server, report)
    lists = {"Refused, too": line.refused[1:], "Not counted": line.uncounted, "Of no effect here": line.ignored}
    print_lists(report, lists)
    report.data(_data(server, kind, command))


def _table(server: LlamaServer) -> Table:
    table = Table("of the GPU", "GiB", "interval")
    table.add_row("memory", gib(server.gpu.memory_bytes), "")
    for name, part in (server.parts() | {"free": server.free}).items():
        if any(part):
            table.add_row(
                name, gib(part.likely), f"{gib(part.low)} to {gib(part.high)}" if part.low < part.high else ""
            )
    return table


def _simulate(server: LlamaServer, report: Report) -> str | None:
    """Print the ``simulate`` command; None where the policy does not serve the model."""
    line, shape = server.line, server.model
    try:
        found = settings(
            policy="llama-cpp",
            model=shape.name,
            gpu=server.gpu.setting,
            block_size=PAD,
            num_gpu_blocks_override=server.cells // PAD,
            max_model_len=min(server.slot_cells, shape.max_model_len),
            max_num_seqs=line.slots,
            max_num_batched_tokens=server.batch_size,
            enable_prefix_caching=line.switches.get("cache-prompt", True),
            kv_unified=line.kv_unified,
            cost=default_cost(shape, server.gpu, None),
        )
        found = only_read(found)
        build(found)
    except SettingError as error:
        report.line(f"Not simulated: {error}")
        return None
    command = simulate_command(found)
    report.line(f"As a simulation: {command}")
    return command


def _data(server: LlamaServer, kind: str, command: str | None) -> dict[str, Any]:
    line = server.line
    return {
        "outcome": "does not start" if line.refused else kind,
        "parser_error": line.refused[0] if line.refused else None,
        "model": server.model.name,
        "gpu": server.gpu.name,
        "quantization": line.quantization(),
        "slots": line.slots,
        "kv_unified": line.kv_unified,
        "cells": server.cells,
        "slot_cells": server.slot_cells,
        "gpu_layers": min(server.gpu_layers, server.model.num_layers + 1),
        "bytes": {name: list(part) for name, part in (server.parts() | {"free": server.free}).items()},
        "simulate": command,
        "uncounted": line.uncounted,
        "ignored": line.ignored,
    }
