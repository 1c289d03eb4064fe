"""A line of either engine, and the line on a GPU with the defaults of its engine filled in.

Commands ask ``read_line`` and ``started`` and know no engine: an SGLang line on a GPU is a ``Started`` as vLLM's is, of which the settings
have SGLang's policy and the memory is by SGLang's rules (``sim.spec.startup.sglang``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ...sim.config.settings import Settings, settings
from ...sim.config.unread import only_read
from ...sim.engine.replica import build, deployment_of
from ...sim.memory import RadixMemory
from ...sim.policy.sglang import SGLang
from ...sim.policy.sglang_options import SGLangOptions
from ...sim.runs.replica import Replica
from ...sim.spec import GpuSpec, gpu, model
from ...sim.spec.gpu import GIB
from ...sim.spec.startup.capacity import Capacity, StageMemory
from ...sim.spec.startup.launch import Launch
from ...sim.spec.startup.sglang import fraction_of, stage_memories
from ...sim.spec.startup.sglang_states import state_bytes
from ...sim.types.errors import NotSimulated, SettingError, UserError
from ...sim.types.optional import not_none
from ..vllm_serve import start as vllm
from ..vllm_serve.checks import Outcome, Refusal
from ..vllm_serve.line import ServeLine, parse_serve, pasted
from ..vllm_serve.log import StartupLog, read_log
from ..vllm_serve.start import Started
from .line import SGLangLine, read_sglang, settings_of_flags

#: Lowers the slots of the memory; all other flags are settings.
_MOST_SLOTS, _FRACTION = "max-total-tokens", "mem-fraction-static"
#: GiB of a GPU that are left at least where ``--mem-fraction-static`` is raised: "5-8 GB is generally a good setting" (SGLang,
#: advanced_features/hyperparameter_tuning.md).
_LEAST_LEFT_GIB = 5
#: Of a log.
_POOL = re.compile(r"\bmax_total_num_tokens=(\d{1,12})\b")


def parse_line(text: str, stated: tuple[int, ...] | None = None) -> ServeLine:
    """Read a command line of SGLang or vLLM.

    Args:
        stated: Release of vLLM, as ``version`` reads it.

    Raises:
        UserError: As ``read_sglang`` and ``parse_serve``; or a release of vLLM is stated for SGLang.
    """
    line = read_sglang(text)
    if line is None:
        return parse_serve(text, stated)
    if stated is not None:
        remedy = f"is of vLLM, and the line starts {line.server}; leave it out"
        raise SettingError("vllm", ".".join(map(str, stated)), remedy)
    return line


def read_line(given: str, stated: tuple[int, ...] | None = None) -> ServeLine:
    """As ``parse_line``, of a line or of the file with it or with its deployment; an error names the file."""
    text = pasted(given)
    try:
        return parse_line(text, stated)
    except UserError as error:
        if text is given:
            raise
        raise UserError(f"{given}: {error}") from None


def read_start_log(line: ServeLine, given: str) -> StartupLog:
    """The size of the KV cache by the start-up log of a line's server, or by the file with it.

    Raises:
        UserError: The log does not have it.
    """
    if not isinstance(line, SGLangLine):
        return read_log(given)
    found = _POOL.findall(pasted(given, "startup_log"))
    if not found:
        raise SettingError("startup_log", given[:60], "has no max_total_num_tokens; give the log of SGLang's start")
    return StartupLog(num_tokens=int(found[-1]))


def started(
    line: ServeLine,
    gpu_name: str | GpuSpec | Sequence[str | GpuSpec],
    model_name: str | None = None,
    log: StartupLog | None = None,
) -> Started:
    """A line with the defaults of its engine on that GPU; see ``vllm_serve.start.started``.

    Raises:
        SettingError: A value is invalid or not understood.
    """
    if not isinstance(line, SGLangLine):
        return vllm.started(line, gpu_name, model_name, log)
    names = [gpu_name] if isinstance(gpu_name, str | GpuSpec) else [*gpu_name]
    if len(names) > 1:
        shown = ",".join(each if isinstance(each, str) else each.name for each in names)
        raise SettingError("gpu", shown, "the line of SGLang is read for one kind of GPU; name one")
    card = names[0] if isinstance(names[0], str) else names[0].setting
    return _on(line, _chosen(line, card, model_name or line.model), log)


@dataclass(frozen=True)
class SGLangStarted(Started):
    """A line of SGLang's server with its defaults. What its start computes of the KV cache is taken as exact.

    Attributes:
        line: The pasted line.
        chosen: Its flags as settings.
        replica: The replica of them; None where SGLang does not start.
        memories: Memory of each pipeline stage; empty where it is not known.
        more_bytes: KV cache of a GPU by the server itself, less the computed one.
        refused: Why it does not start.
    """

    line: SGLangLine
    chosen: Settings = Settings()
    replica: Replica | None = None
    memories: tuple[StageMemory, ...] = ()
    more_bytes: int = 0
    refused: str | None = None

    def refusal(self) -> Refusal | None:
        """Why SGLang does not start; None if it starts."""
        return None if self.refused is None else Refusal("argument", self.refused)

    def outcome(self) -> Outcome:
        """See ``Started``."""
        return Outcome(self.refusal(), True)

    def pool(self, outlook: Literal["low", "likely", "high"] = "likely") -> Capacity:
        """See ``Started``; of layers that keep every token, where windows have slots of their own."""
        replica = not_none(self.replica)
        tokens = most_tokens(replica)
        return Capacity(min(self.memories, key=_pages), replica.num_blocks, tokens / replica.max_model_len, tokens)

    def stages(self) -> list[StageMemory]:
        """See ``Started``."""
        return [*self.memories]

    def remedy(self) -> str:
        """See ``Started``; the refusals themselves name one."""
        return ""

    def changed(self, flags: Mapping[str, str | bool | None]) -> Started:
        """See ``Started``; a pool that the server itself names is as much larger than the computed one as without them."""
        line = self.line.changed(flags)
        return _on(line, _chosen(line, self.launch.gpu.setting, self.launch.model.name), more_bytes=self.more_bytes)

    @property
    def fewest_tokens(self) -> int:
        """See ``Started``; chunks are whole pages."""
        return self.launch.block_size

    def larger_pools(self) -> Iterator[dict[str, str | bool | None]]:
        """See ``Started``: SGLang's default share, and the one that leaves as much of the GPU as its documentation has for the least."""
        fixed: dict[str, str | bool | None] = {_MOST_SLOTS: None} if _MOST_SLOTS in self.line.flags else {}
        if fixed:
            yield fixed
        own, default = (self._fraction(line) for line in (self.line, self.line.changed({_FRACTION: None})))
        total = self.launch.gpu.memory_bytes
        for share in (default, round((total - _LEAST_LEFT_GIB * GIB) / total, 3)):
            if share > own:
                yield {**fixed, _FRACTION: f"{share:g}"}

    def _fraction(self, line: SGLangLine) -> float:
        given = line.flags.get(_FRACTION)
        seqs = int(line.flags.get("max-num-seqs", 0))
        return fraction_of(replace(self.launch, max_num_seqs=seqs)) if given is None else float(given)

    def require_simulated(self) -> None:
        """See ``Started``; what is not simulated is refused as the line is read."""

    def settings(self) -> Settings:
        """The line as settings of ``fragmeter simulate``, with the computed pool."""
        replica = not_none(self.replica)
        resolved = {
            "num_gpu_blocks_override": replica.num_blocks,
            "block_size": replica.block_size,
            "max_model_len": replica.max_model_len,
            "max_num_seqs": replica.policy.limits.max_num_seqs,
            "max_num_batched_tokens": replica.policy.limits.max_num_batched_tokens,
        }
        return only_read(settings(**self.chosen.as_dict() | resolved))


def _chosen(line: SGLangLine, card: str, model_name: str) -> Settings:
    """The flags of a line as settings.

    Raises:
        SettingError: A value is invalid, or a flag is none of SGLang's that is simulated.
    """
    known = settings_of_flags()
    given = {name.replace("-", "_"): value for name, value in line.flags.items() if name != _MOST_SLOTS}
    for name, value in given.items():
        if name not in known:
            remedy = "is of vLLM, and the line starts SGLang; leave it out, and give SGLang's own flag in the line"
            raise SettingError(name, value, remedy)
    return only_read(settings(policy=SGLang.name, gpu=card, **given | {"model": model_name}))


def _on(line: SGLangLine, chosen: Settings, log: StartupLog | None = None, more_bytes: int = 0) -> SGLangStarted:
    """The line with its defaults, on the card of the settings.

    Args:
        log: Has the pool that the server itself names, in pages or tokens.
        more_bytes: See ``SGLangStarted``; of no effect beside it.
    """
    shape, card, seqs = model(chosen.model), gpu(chosen.gpu), chosen.max_num_seqs
    launch = Launch(
        model=shape,
        gpu=card,
        max_model_len=chosen.max_model_len or shape.max_model_len,
        max_num_seqs=seqs or 0,
        max_num_batched_tokens=chosen.max_num_batched_tokens or SGLang.default_max_num_batched_tokens,
        tensor_parallel=chosen.tensor_parallel_size,
        deployment=deployment_of(chosen, shape, card),
        hybrid=False,
        enable_prefix_caching=chosen.enable_prefix_caching is not False,
    )
    try:
        replica = build(chosen)
        launch = replace(
            launch, block_size=replica.block_size, max_num_batched_tokens=replica.policy.limits.max_num_batched_tokens
        )
        memories = _memories(launch, chosen, replica)
        page_bytes = min(memories, key=_pages).block_bytes
        if log is not None:
            pages = log.num_blocks or not_none(log.num_tokens) // replica.block_size
            more_bytes = (pages - replica.num_blocks) * page_bytes
        blocks = replica.num_blocks + more_bytes // page_bytes
        if (most := line.flags.get(_MOST_SLOTS)) is not None:
            blocks = min(blocks, int(most) // replica.block_size)
        if blocks != replica.num_blocks:
            chosen = only_read(settings(**chosen.given() | {"num_gpu_blocks_override": blocks}))
            replica = build(chosen)
    except NotSimulated:
        raise
    except SettingError as error:
        return SGLangStarted(line, launch, 1, chosen=chosen, refused=str(error))
    launch = replace(
        launch,
        max_model_len=replica.max_model_len,
        max_num_seqs=replica.policy.limits.max_num_seqs,
        num_gpu_blocks_override=replica.num_blocks,
    )
    memories = [replace(each, kv_cache_bytes=each.kv_cache_bytes + more_bytes) for each in memories]
    return SGLangStarted(
        line, launch, 1, chosen=chosen, replica=replica, memories=tuple(memories), more_bytes=more_bytes
    )


def _memories(launch: Launch, chosen: Settings, replica: Replica) -> list[StageMemory]:
    options = chosen.policy_options
    assert isinstance(options, SGLangOptions)
    share = 1 if options.window_of(launch.model) is None else options.swa_full_tokens_ratio
    memory, of_states = replica.memory, 0
    if isinstance(memory, RadixMemory) and memory.states is not None:
        ranks, parts = launch.tensor_parallel, launch.deployment.pipeline_parallel
        of_states = (memory.states.slots + 1) * state_bytes(launch.model, ranks, parts, options.mamba_ssm_dtype)
    return stage_memories(launch, options.mem_fraction_static, share, of_states)


def most_tokens(replica: Replica) -> int:
    """``max_total_num_tokens`` of SGLang."""
    assert isinstance(replica.memory, RadixMemory)
    return replica.memory.most_tokens


def _pages(memory: StageMemory) -> int:
    return memory.num_blocks
