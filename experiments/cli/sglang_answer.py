"""The answer to a line of SGLang's server: whether it starts, its slots, and the command that simulates it."""

from __future__ import annotations

from typing import Any

from ...reports.page.table import Table
from ...sim.config.settings import Settings, settings
from ...sim.config.unread import only_read
from ...sim.engine.replica import build
from ...sim.memory import RadixMemory
from ...sim.policy.sglang import SGLang
from ...sim.runs.replica import Replica
from ...sim.spec import gpu
from ...sim.spec.gpu import GIB, GpuSpec
from ..runs.output import Report
from ..sglang_server.line import SGLangLine, release_of_flags
from .start_answer import print_lists, simulate_command


def print_sglang(line: SGLangLine, gpu_name: str, model: str | None, report: Report) -> None:
    """Report what a line starts with on one kind of GPU, tensor and pipeline ranks as it says.

    Raises:
        SettingError: A value is invalid, or the model is not known or leaves no slots.
    """
    found, replica = _built(line, gpu_name, model)
    ranks = found.tensor_parallel_size * found.pipeline_parallel_size
    card = gpu(found.gpu)
    where = f"{found.model} on {ranks} x {card.name}"
    if line.refused:
        report.print_line(
            f"It does not start: sglang serve: error: {line.refused[0]}. So says the parser of {release_of_flags()}."
            " Leave that out; the rest is the answer without it."
        )
        report.print_line()
    slots = replica.memory.capacity_slots
    names = [text.partition(" (")[0] for text in line.not_simulated]
    subject = f"Without {', '.join(names)}, not counted, it" if names else "It"
    report.print_line(
        f"{subject} has slots: {where}; {slots:,} tokens fit into its KV cache, and"
        f" {replica.policy.limits.max_num_seqs:,} requests run at once."
    )
    report.print_line()
    report.console.print(_table(replica, card))
    command = simulate_command(found)
    report.line(f"As a simulation: {command}")
    lists = {"Refused, too": line.refused[1:], "Not simulated": line.not_simulated, "Of no effect here": line.ignored}
    print_lists(report, lists)
    report.data(_data(line, found, replica, command))


def _built(line: SGLangLine, gpu_name: str, model: str | None) -> tuple[Settings, Replica]:
    """The settings of a line, and a replica of them; ``--max-total-tokens`` lowers the slots that the memory has."""
    given = {name: value for name, value in line.settings.items() if name != "slots"}
    if model is not None:
        given["model"] = model
    found = only_read(settings(policy=SGLang.name, gpu=gpu_name, **given))
    replica = build(found)
    slots = line.settings.get("slots")
    if slots is not None and slots < replica.memory.capacity_slots:
        found = settings(**found.given() | {"num_gpu_blocks_override": slots // replica.block_size})
        found = only_read(found)
        replica = build(found)
    return found, replica


def _rows(replica: Replica) -> dict[str, tuple[str, int]]:
    limits, memory = replica.policy.limits, replica.memory
    windows = memory.windows if isinstance(memory, RadixMemory) else None
    of_windows = {"window_slots": ("swa_max_total_num_tokens", windows.pages * replica.block_size)} if windows else {}
    host = memory.transfers
    on_host = {} if host is None else {"host_slots": ("HiCache, tokens", host.cache.num_blocks * replica.block_size)}
    return {
        "slots": ("max_total_num_tokens", memory.capacity_slots),
        **of_windows,
        **on_host,
        "page_size": ("page_size", replica.block_size),
        "max_running_requests": ("max_running_requests", limits.max_num_seqs),
        "chunked_prefill_size": ("chunked_prefill_size", limits.max_num_batched_tokens),
        "context_length": ("context_length", limits.max_model_len),
    }


def _table(replica: Replica, card: GpuSpec) -> Table:
    table = Table("SGLang's name", "value")
    for name, value in _rows(replica).values():
        table.add_row(name, f"{value:,}")
    table.add_row("memory of a GPU, GiB", f"{card.memory_bytes / GIB:,.1f}")
    return table


def _data(line: SGLangLine, found: Settings, replica: Replica, command: str) -> dict[str, Any]:
    return {
        "outcome": "does not start" if line.refused else "has slots",
        "parser_error": line.refused[0] if line.refused else None,
        "model": found.model,
        "gpu": found.gpu,
        **{name: value for name, (_, value) in _rows(replica).items()},
        "simulate": command,
        "not_simulated": line.not_simulated,
        "ignored": line.ignored,
    }
