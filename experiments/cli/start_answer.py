"""The answer whether a ``vllm serve`` line starts, as text and as data."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ...reports.page.table import Column, Table
from ...sim.config.settings import Settings
from ...sim.config.unread import only_read
from ...sim.cost import default_cost
from ...sim.engine.replica import build
from ...sim.spec.gpu import GIB
from ...sim.spec.startup.capacity import KV_CACHE, StageMemory, capacity, longest_model_len, users
from ...sim.spec.startup.estimate import Estimate
from ...sim.spec.startup.launch import Launch
from ...sim.types.errors import SettingError
from ..runs.output import Report
from ..vllm_serve.checks import Change, Outcome, Refusal, gib, undivided
from ..vllm_serve.flags import releases, text_of_release
from ..vllm_serve.log import StartupLog
from ..vllm_serve.remedies import remedies
from ..vllm_serve.start import Started, release_of_unknown_blocks

_PARTS = {
    "weights": "weights",
    "activations": "activations",
    "non_torch": "non-torch",
    "cuda_graphs": "CUDA graphs",
}
#: The names of the likely sizes in ``--json``.
_JSON = {
    "weights": "weight_bytes",
    "activations": "activation_bytes",
    "non_torch": "non_torch_bytes",
    "cuda_graphs": "cuda_graph_bytes",
}


def doubt(judged: Outcome) -> str:
    """What a start depends on."""
    assert judged.kv_cache is not None
    if judged.free is not None and judged.needed_free_bytes is not None:
        low, likely, high = map(gib, judged.free)
        return (
            f"It depends: it starts if {gib(judged.needed_free_bytes)} GiB of a GPU are free at the start, and of eight of ten servers like this"
            f" {low} to {high} GiB are. With the likely {likely} GiB:"
        )
    if judged.profile is not None:
        peak, free = judged.profile.peak, judged.profile.free
        return (
            f"It depends: the profiled step of eight of ten servers like this takes {gib(peak.low)} to {gib(peak.high)} GiB of a GPU where"
            f" {gib(free.low)} to {gib(free.high)} GiB are free. With the likely sizes:"
        )
    if judged.warm_up is not None:
        left, taken = judged.warm_up.left, judged.warm_up.taken
        return (
            f"It depends: after the KV cache is allocated, CUDA graphs and the sampler of eight of ten servers like this take"
            f" {gib(taken.low)} to {gib(taken.high)} GiB of a GPU where {gib(left.low)} to {gib(left.high)} GiB are left."
            f" With the likely sizes:"
        )
    assert judged.open_part is not None and judged.needed_bytes is not None
    low, likely, high = map(gib, judged.kv_cache)
    name, part = judged.open_part
    what = "memory outside of torch" if name == "non_torch" else _PARTS[name]
    later = (
        ""
        if judged.later is None
        else f" A start that finds the compile cache of an earlier one likely gets {gib(judged.later)} GiB."
    )
    return (
        f"It depends: it starts if the KV cache of a GPU gets {gib(judged.needed_bytes)} GiB, and eight of ten servers like this get {low} to"
        f" {high} GiB. Most of the doubt is in {what} ({gib(part.low)} to {gib(part.high)} GiB).{later} With the likely {likely} GiB:"
    )


def facts(answer: Started) -> dict[str, Any]:
    """The server and its flags, for ``--json``."""
    launch = answer.launch
    return {
        "model": launch.model.name,
        "gpu": launch.gpu.name,
        **({"gpus": [card.name for card in launch.gpus]} if launch.gpus else {}),
        "num_gpus": launch.num_gpus * answer.replicas,
        "replicas": answer.replicas,
        "tensor_parallel_size": launch.tensor_parallel,
        "pipeline_parallel_size": launch.deployment.pipeline_parallel,
        "decode_context_parallel_size": launch.deployment.decode_context_parallel,
        "quantization": launch.deployment.quantization,
        "kv_cache_dtype": launch.deployment.kv_dtype,
        "gpu_memory_utilization": launch.gpu_memory_utilization,
        "max_model_len": launch.max_model_len,
        "max_num_seqs": launch.max_num_seqs,
        "max_num_batched_tokens": launch.max_num_batched_tokens,
        "block_size": launch.block_tokens,
        "vllm_since": ".".join(map(str, launch.release.since)),
        "ignored": answer.line.ignored,
        "not_simulated": answer.line.not_simulated,
        "uncounted": answer.line.uncounted,
        "of_other_releases": answer.line.of_other_releases,
    }


def print_start(
    answer: Started, log: StartupLog | None, mean_tokens: int | None, report: Report, is_sure: bool = True
) -> dict[str, Any]:
    """Print the KV cache of a line that starts, its memory and the command that simulates it; the same as data.

    Args:
        is_sure: Whether the line starts with the least memory that is likely; else changes are named with which it does.

    Raises:
        SettingError: ``mean_tokens`` is more than the longest sequence.
    """
    launch = answer.launch
    if mean_tokens is not None and mean_tokens > launch.max_model_len:
        raise SettingError("mean_tokens", mean_tokens, f"is more than max_model_len = {launch.max_model_len}")
    found = capacity(launch)
    lengths = [launch.max_model_len] if mean_tokens is None else [launch.max_model_len, mean_tokens]
    held = {tokens: users(launch, found.num_blocks, tokens) for tokens in lengths}
    settings = answer.settings()
    estimate = "an estimate" if launch.gpu.compute_capability is not None else "an estimate by logs of NVIDIA's cards"
    source = "by vLLM's own log" if log and log.has_kv_cache else f"{estimate}; --startup-log has vLLM's own"
    by_memory = log is not None and log.num_blocks is None and log.memory_bytes is not None
    if log and by_memory and not answer.uncounted and log.disagreeing(launch):
        source = "by the GiB of vLLM's own log, which its tokens or its concurrency contradict"
    if log and log.assumes(launch):
        meaning = "up to 0.20.0" if launch.release.since < (0, 20) else "since 0.20.1"
        source += f"; its tokens are read as {meaning}, unless you add its line with the concurrency or the release"
    fitting = ", ".join(f"{number:,} with {tokens:,} tokens" for tokens, number in held.items())
    if max(held.values()) > launch.max_num_seqs:
        fitting += f"; --max-num-seqs {launch.max_num_seqs} runs no more"
    report.print_line(
        f"{_subject(answer)} starts: {_where(answer)} has a KV cache of {found.num_blocks:,} blocks ({found.num_tokens:,} tokens,"
        f" {source}), which holds {found.max_concurrency:.2f} sequences of {launch.max_model_len:,} tokens."
        f" Sequences that fit at once: {fitting}."
    )
    report.print_line()
    report.console.print(_memory_table(launch, found.stage, log))
    cost = settings.cost or default_cost(launch.model, launch.gpu, launch.deployment.quantization)
    refused: list[str] = []
    try:
        answer.require_simulated()
        simulated = replace(only_read(settings), cost=cost)
        build(simulated)
        report.line(f"As a simulation: {simulate_command(simulated)}")
    except SettingError as error:
        report.line(f"Not simulated: {error}")
        refused.append(str(error))
    # What may start starts for sure with one of these.
    found_remedies = [] if is_sure else _remedies(answer)
    _print_remedies(answer, found_remedies, "The start is sure with each of these alone:", report)
    return {
        "starts": True if is_sure else None,
        "refusal": None,
        "remedies": [_remedy_data(answer, remedy) for remedy in found_remedies],
        "memory": _memory_data(launch, found.stage, log),
        "num_gpu_blocks": found.num_blocks,
        "kv_cache_tokens": found.num_tokens,
        "max_concurrency": found.max_concurrency,
        "users": [{"tokens": tokens, "users": number} for tokens, number in held.items()],
        "settings": settings.as_dict(),
        "not_simulated": [*answer.line.not_simulated, *refused],
    }


def _subject(answer: Started) -> str:
    """The subject of an answer, with the flags that it does not count, or that the parser refuses, and with blocks of another release."""
    names = answer.line.uncounted_names
    texts = [", ".join(names) + ", not counted"] if names else []
    if answer.line.parser_error is not None:
        texts.append("what vLLM's parser refuses")
    clauses = [f"without {' and '.join(texts)}"] if texts else []
    if (release := release_of_unknown_blocks(answer.line, answer.launch.model)) is not None:
        clauses.append(f"with the blocks of 0.33 (those of {release} are not known)")
    subject = " and ".join(clauses)
    return f"{subject[0].upper()}{subject[1:]}, it" if subject else "It"


def _where(answer: Started) -> str:
    launch = answer.launch
    pipeline = launch.deployment.pipeline_parallel
    stages = f" in {pipeline} pipeline stages" if pipeline > 1 else ""
    kind = "engines that share the experts" if launch.deployment.data_parallel > 1 else "replicas"
    each = f" (each of {answer.replicas} {kind})" if answer.replicas > 1 else ""
    return f"{launch.model.name} on {launch.gpu_text}{stages}{each}"


def _memory_table(launch: Launch, stage: StageMemory, log: StartupLog | None) -> Table:
    """Parts of the memory of a GPU beside those of a log."""
    encoder = launch.model.encoder
    uncounted = encoder is not None and not encoder.is_known
    logged = {} if log is None else _logged(log)
    one = f"of the {stage.gpu_name}, with the least KV cache" if launch.gpus else "of the GPU"
    table = Table(
        Column("of each GPU" if launch.num_gpus > 1 and not launch.gpus else one, is_text=True, wraps=True),
        *(("GiB", "8 of 10 servers") if log is None else ("GiB, computed", "8 of 10 servers", "logged")),
    )
    computed = _computed(launch, stage)
    rows: list[tuple[str, str, int, Estimate | None]] = [
        ("total", "memory", stage.total_bytes, None),
        ("requested", f"asked for ({launch.gpu_memory_utilization:g})", stage.requested_bytes, None),
    ]
    for name, part in computed.parts().items():
        missing = ", without those of the vision encoder" if uncounted and name == "weights" else ""
        rows.append((name, _PARTS[name] + missing, part.likely, part))
    rows.append((KV_CACHE, "KV cache", computed.kv_cache.likely, computed.kv_cache))
    if launch.corrections and KV_CACHE not in dict(launch.corrections):
        rows.append(("", "KV cache beside the logged parts", stage.kv_cache.likely, stage.kv_cache))
    for name, what, size, estimate in rows:
        if not size and logged.get(name) is None:
            continue
        is_open = estimate is not None and estimate.low < estimate.high
        interval = f"{gib(estimate.low)} to {gib(estimate.high)}" if estimate and is_open else ""
        table.add_row(what, gib(size), interval, *([] if log is None else [_text(logged.get(name))]))
    return table


def _computed(launch: Launch, stage: StageMemory) -> StageMemory:
    """The memory without the corrections of a log."""
    return capacity(replace(launch, corrections=())).stage if launch.corrections else stage


def _logged(log: StartupLog) -> dict[str, float | None]:
    """Sizes of a log in GiB, by the parts of the memory; without an estimate of CUDA graphs what their capture took."""
    parts = log.parts
    graphs = parts.graphs_captured if parts.graphs_estimated is None else parts.graphs_estimated
    return {
        "total": parts.total,
        "requested": parts.requested,
        "weights": parts.weights,
        "activations": parts.activations,
        "non_torch": parts.non_torch,
        "cuda_graphs": graphs,
        KV_CACHE: None if log.memory_bytes is None else log.memory_bytes / GIB,
    }


def _text(size: float | None) -> str:
    return "" if size is None else f"{size:.2f}"


def _memory_data(launch: Launch, stage: StageMemory, log: StartupLog | None) -> dict[str, Any]:
    computed = _computed(launch, stage)
    parts = computed.parts() | {KV_CACHE: stage.kv_cache}
    return {
        "total_bytes": stage.total_bytes,
        "requested_bytes": stage.requested_bytes,
        **{_JSON[name]: part.likely for name, part in computed.parts().items()},
        "kv_cache_bytes": stage.kv_cache_bytes,
        "block_bytes": stage.block_bytes,
        "correction_bytes": stage.kv_cache.likely - computed.kv_cache.likely,
        "intervals": {name: [part.low, part.high] for name, part in parts.items()},
        "logged_gib": {} if log is None else {name: size for name, size in _logged(log).items() if size is not None},
    }


def simulate_command(settings: Settings) -> str:
    """The ``simulate`` command with these settings."""
    words = ["fragmeter", "simulate"]
    for name, value in settings.given().items():
        flag = name.replace("_", "-")
        words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return shlex.join(words)


def print_refusal(
    answer: Started, refused: Refusal, log: StartupLog | None, report: Report, is_sure: bool = True
) -> dict[str, Any]:
    """Print vLLM's refusal, the memory, and single changes with which the line starts; the same as data."""
    # A change is named that starts with the least memory that is likely.
    found = [] if refused.kind == "log" else _remedies(answer)
    stage = None if undivided(answer.launch) is not None else capacity(answer.launch).stage
    report.print_line(f"{_subject(answer)} does not start: {_where(answer)}. {refused.text}")
    report.print_line()
    if stage is not None:
        report.console.print(_memory_table(answer.launch, stage, log))
    report.print_line()
    if found:
        _print_remedies(answer, found, "Each of these alone would start:", report)
    elif refused.kind == "log":
        report.print_line(
            "The error is that of the log. By its sizes alone the line would start, so that no change is known to help."
        )
    else:
        report.print_line(
            "No single change of ranks, length, number formats or utilisation starts it; take a larger GPU."
        )
    return {
        "starts": False if is_sure else None,
        "refusal": asdict(refused),
        "memory": None if stage is None else _memory_data(answer.launch, stage, log),
        "remedies": [_remedy_data(answer, remedy) for remedy in found],
    }


def _remedies(answer: Started) -> list[Change]:
    """Changes with which the line starts with the least memory that is likely."""
    return list(remedies(replace(answer.launch, outlook="low")))


def _print_remedies(answer: Started, found: list[Change], title: str, report: Report) -> None:
    if found:
        report.print_line(title)
    for remedy in found:
        report.line(f"  {remedy.flag} {remedy.value:<8} {_remedy_text(answer, remedy)}")


def _remedy_data(answer: Started, remedy: Change) -> dict[str, Any]:
    found = capacity(_auto(answer, remedy))
    return {
        "flag": remedy.flag,
        "value": remedy.value,
        "num_gpus": remedy.launch.num_gpus,
        "num_gpu_blocks": found.num_blocks,
        "kv_cache_tokens": found.num_tokens,
        "max_concurrency": found.max_concurrency,
    }


def _auto(answer: Started, remedy: Change) -> Launch:
    """The remedy's launch, with the longest sequence that fits if the line leaves the length to vLLM."""
    launch = replace(remedy.launch, outlook="likely")
    return replace(launch, max_model_len=longest_model_len(launch)) if launch.fits_length else launch


def _remedy_text(answer: Started, remedy: Change) -> str:
    data = _remedy_data(answer, remedy)
    length = _auto(answer, remedy).max_model_len
    gpus = f"on {data['num_gpus']} GPUs, " if data["num_gpus"] != answer.launch.num_gpus else ""
    return f"{gpus}{data['kv_cache_tokens']:,} tokens, {data['max_concurrency']:.2f} sequences of {length:,}"


def print_flags(answer: Started, report: Report) -> None:
    """Print the flags that the answer does not follow."""
    line = answer.line
    refuses = f"Not in vLLM {text_of_release(line.version or releases()[-1])}, which refuses it"
    print_lists(
        report,
        {refuses: line.of_other_releases, "Not simulated": line.not_simulated, "Of no effect here": line.ignored},
    )


def print_lists(report: Report, lists: Mapping[str, Sequence[str]]) -> None:
    """Print a line for each list of flags that is not empty."""
    for label, flags in lists.items():
        if flags:
            report.line(f"{label}: {', '.join(flags)}")
