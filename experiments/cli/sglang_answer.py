"""The answer to a line of SGLang's server: whether it starts, its slots, and the command that simulates it."""

from __future__ import annotations

from ...reports.page.table import Table
from ...sim.memory import RadixMemory
from ...sim.runs.replica import Replica
from ...sim.spec.gpu import GIB, GpuSpec
from ..runs.output import Report
from ..sglang_server.start import SGLangStarted
from .start_answer import print_lists, simulate_command


def print_sglang(answer: SGLangStarted, report: Report) -> None:
    """Report what a line starts with on one kind of GPU, tensor and pipeline ranks as it says."""
    line, chosen, replica = answer.line, answer.chosen, answer.replica
    several = answer.replicas > 1
    where = f"{chosen.model} on {answer.launch.gpu_text}" + f" (each of {answer.replicas} replicas)" * several
    names = line.uncounted_names
    subject = f"Without {', '.join(names)}, not counted, it" if names else "It"
    data = {
        "outcome": answer.outcome().kind,
        "starts": replica is not None,
        "model": chosen.model,
        "gpu": chosen.gpu,
        "replicas": answer.replicas,
        "not_simulated": line.not_simulated,
        "ignored": line.ignored,
        "without_effect": answer.without_effect,
    }
    if replica is None:
        report.print_line(f"{subject} does not start: {where}; {answer.refused}")
        data["refusal"] = answer.refused
    else:
        # Their requests are dispatched in turn, as by SGLang (``handle_load_balance_method``).
        command = simulate_command(chosen) + f" --num-replicas {answer.replicas}" * several
        report.print_line(
            f"{subject} starts: {where}; {replica.memory.capacity_slots:,} tokens fit into its KV cache, and"
            f" {replica.policy.limits.max_num_seqs:,} requests run at once."
        )
        report.print_line()
        report.console.print(_table(replica, answer.launch.gpu))
        report.line(f"As a simulation: {command}")
        data |= {name: value for name, (_, value) in _rows(replica).items()} | {"simulate": command}
    lists = {
        "Not simulated": line.not_simulated,
        "Has no effect": answer.without_effect,
        "Of no effect here": line.ignored,
    }
    print_lists(report, lists)
    report.data(data)


def _rows(replica: Replica) -> dict[str, tuple[str, int]]:
    limits, memory = replica.policy.limits, replica.memory
    beside: dict[str, tuple[str, int]] = {}
    if isinstance(memory, RadixMemory) and memory.windows is not None:
        beside["window_slots"] = "swa_max_total_num_tokens", memory.windows.pages * replica.block_size
    if isinstance(memory, RadixMemory) and memory.states is not None:
        beside["states"] = "max_mamba_cache_size", memory.states.slots
    if memory.transfers is not None:
        beside["host_slots"] = "HiCache, tokens", memory.transfers.cache.num_blocks * replica.block_size
    return {
        "slots": ("max_total_num_tokens", memory.capacity_slots),
        **beside,
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
