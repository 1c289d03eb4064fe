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
from ...sim.config.unread import only_read, reset_unread
from ...sim.engine.replica import build, deployment_of
from ...sim.memory import RadixMemory
from ...sim.policy.sglang import SGLang
from ...sim.policy.sglang_options import SGLangOptions
from ...sim.runs.replica import Replica
from ...sim.spec import GpuSpec, ModelSpec, gpu, model
from ...sim.spec.gpu import GIB
from ...sim.spec.startup.capacity import Capacity, StageMemory
from ...sim.spec.startup.launch import Launch
from ...sim.spec.startup.sglang import fraction_of, page_size, server_defaults, stage_memories
from ...sim.spec.startup.sglang_states import state_bytes, state_rules
from ...sim.types.errors import NotSimulated, SettingError
from ...sim.types.optional import not_none
from ..llama_server.line import read_llama
from ..vllm_serve import start as vllm
from ..vllm_serve.checks import Outcome, Refusal
from ..vllm_serve.line import ServeLine, parse_serve, pasted, read_pasted
from ..vllm_serve.log import StartupLog, read_log
from ..vllm_serve.start import OwnPool, Started
from .line import LINE_ALONE, SGLangLine, read_sglang, setting_value, settings_of_flags

#: Lowers the slots of the memory; and what is read of it.
_MOST_SLOTS, _FRACTION = "max-total-tokens", "mem-fraction-static"
#: What divides the memory between the KV cache and the pool of windows, or of states: shares, and their number.
_OF_WINDOWS, _OF_STATES, _STATES = "swa-full-tokens-ratio", "mamba-full-memory-ratio", "max-mamba-cache-size"
#: Times by which a pool is made larger.
_LARGER, _SMALLER = (2, 4, 8), (0.5, 0.25)
#: GiB of a GPU that are left at least where ``--mem-fraction-static`` is raised: "5-8 GB is generally a good setting" (SGLang,
#: advanced_features/hyperparameter_tuning.md).
_LEAST_LEFT_GIB = 5
#: Of a log: slots of the KV cache, and states.
_POOL = re.compile(r"\bmax_total_num_tokens=(\d{1,12})\b")
_STATES_OF_LOG = re.compile(r"Mamba Cache is allocated\. max_mamba_cache_size: (\d{1,12})\b")


def parse_line(text: str, stated: tuple[int, ...] | None = None) -> ServeLine:
    """Read a command line of SGLang or vLLM.

    Args:
        stated: Release of vLLM, as ``version`` reads it.

    Raises:
        UserError: As ``read_sglang`` and ``parse_serve``; a release of vLLM is stated for SGLang; or the line starts llama-server.
    """
    if read_llama(text) is not None:
        remedy = "starts llama-server, which plan alone reads: whether it fits, and the command that simulates it"
        raise SettingError("serve", " ".join(text.split())[:60], remedy)
    line = read_sglang(text)
    if line is None:
        return parse_serve(text, stated)
    if stated is not None:
        remedy = f"is of vLLM, and the line starts {line.server}; leave it out"
        raise SettingError("vllm", ".".join(map(str, stated)), remedy)
    return line


def read_line(given: str, stated: tuple[int, ...] | None = None) -> ServeLine:
    """As ``parse_line``, of a line or of the file with it or with its deployment; an error names the file."""
    return read_pasted(given, lambda text: parse_line(text, stated))


def read_start_log(line: ServeLine, given: str) -> StartupLog:
    """The size of the KV cache by the start-up log of a line's server, or by the file with it.

    Raises:
        UserError: The log does not have it.
    """
    if not isinstance(line, SGLangLine):
        return read_log(given)
    text = pasted(given, "startup_log")
    found, states = _POOL.findall(text), _STATES_OF_LOG.findall(text)
    if not found:
        raise SettingError("startup_log", given[:60], "has no max_total_num_tokens; give the log of SGLang's start")
    return StartupLog(num_tokens=int(found[-1]), num_states=int(states[-1]) if states else None)


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
        num_states: States by the server itself.
        refused: Why it does not start.
    """

    line: SGLangLine
    chosen: Settings = Settings()
    replica: Replica | None = None
    memories: tuple[StageMemory, ...] = ()
    more_bytes: int = 0
    num_states: int | None = None
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
        chosen = _chosen(line, self.launch.gpu.setting, self.launch.model.name)
        return _on(
            line, chosen, None, self.more_bytes, None if {_OF_STATES, _STATES} & flags.keys() else self.num_states
        )

    @property
    def fewest_tokens(self) -> int:
        """See ``Started``; chunks are whole pages."""
        return self.launch.block_size

    def fitting(self, tokens: int, prompt: int) -> int:
        """See ``Started``; by the tokens, beside which windows are few."""
        size = not_none(self.replica).block_size
        return self.pool().num_tokens // (-(-tokens // size) * size)

    def most_seqs(self) -> int | None:
        """See ``Started``."""
        own = self.own_pool()
        return own.slots // own.of_request if own is not None and own.of_request else None

    def own_pool(self) -> OwnPool | None:
        """See ``Started``."""
        replica = not_none(self.replica)
        memory, size, options = replica.memory, replica.block_size, replica.policy.options
        if not isinstance(memory, RadixMemory) or not isinstance(options, SGLangOptions):
            return None
        if memory.windows is not None:
            return OwnPool("windows", memory.windows.pages * size)
        if memory.states is None:
            return None
        flags = options.mamba_radix_cache_strategy, options.mamba_track_interval
        rules = state_rules(self.launch.model, size, *flags, keeps=memory.keeps, overlaps=options.schedules_ahead)
        return OwnPool("states", memory.states.slots, rules.of_request)

    def larger_own_pools(self) -> Iterator[dict[str, str | bool | None]]:
        """See ``Started``: two, four and eight times the flag that sizes it, and SGLang's default, as far as they start and have more slots."""
        yield from (change for _, change in sorted(self._divided(_LARGER).items()))

    def _divided(self, factors: Sequence[float]) -> dict[int, dict[str, str | bool | None]]:
        """Changes by which the own pool gets more slots, or fewer with factors below 1, by how many it has then."""
        own, options = self.own_pool(), self.chosen.policy_options
        assert isinstance(options, SGLangOptions)
        found: dict[int, dict[str, str | bool | None]] = {}
        if own is None:
            return found
        name = _OF_WINDOWS if own.kind == "windows" else _STATES if _STATES in self.line.flags else _OF_STATES
        now = getattr(options, name.replace("-", "_"))
        values = [f"{factor * now:g}" if isinstance(now, float) else str(round(factor * now)) for factor in factors]
        for value in (*([None] if name in self.line.flags else []), *values):
            try:
                other = self.changed({name: value})
            except SettingError:
                continue
            slots = 0 if other.refusal() else not_none(other.own_pool()).slots
            if slots and slots != own.slots and (slots > own.slots) == (factors[0] > 1):
                found[slots] = {name: value}
        return found

    def admits_all(self) -> bool:
        """See ``Started``: SGLang never admits a request that asks for nearly all windows, beside those of its prefix that it locks."""
        memory = not_none(self.replica).memory
        windows = memory.windows if isinstance(memory, RadixMemory) else None
        if windows is None:
            return True
        asked = min(self.launch.max_num_batched_tokens, self.launch.max_model_len)
        return windows.pages * self.launch.block_size > asked + 2 * windows.tokens

    def larger_pools(self) -> Iterator[dict[str, str | bool | None]]:
        """See ``Started``: SGLang's default share, and the one that leaves as much of the GPU as its documentation has for the least; or a
        smaller pool of windows or states."""
        yield from (change for _, change in sorted(self._divided(_SMALLER).items(), reverse=True))
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


def _page_size(line: SGLangLine, shape: ModelSpec, card: GpuSpec) -> int:
    """Tokens of a page."""
    backend, strategy = (line.flags.get(name) for name in ("attention-kernels", "mamba-radix-cache-strategy"))
    return page_size(
        card,
        shape,
        None if backend is None else str(backend),
        line.whole("block-size"),
        keeps=line.flags.get("enable-prefix-caching") is not False,
        strategy=str(strategy or "auto"),
    )


def _chosen(line: SGLangLine, card: str, model_name: str) -> Settings:
    """The flags of a line as settings, those without an effect, too.

    Raises:
        SettingError: A value is invalid, or a flag is none of SGLang's that is simulated.
    """
    known = settings_of_flags()
    named = {name.replace("-", "_"): value for name, value in line.flags.items() if name not in LINE_ALONE}
    given = {name: setting_value(name, value) for name, value in named.items()}
    if {"attention-kernels", "block-size"} & line.flags.keys():
        given["block_size"] = _page_size(line, model(model_name), gpu(card))
    for name, value in given.items():
        if name not in known:
            remedy = "is of vLLM, and the line starts SGLang; leave it out, and give SGLang's own flag in the line"
            raise SettingError(name, value, remedy)
    return settings(policy=SGLang.name, gpu=card, **given | {"model": model_name})


def _on(
    line: SGLangLine,
    given: Settings,
    log: StartupLog | None = None,
    more_bytes: int = 0,
    num_states: int | None = None,
) -> SGLangStarted:
    """The line with its defaults, on the card of the settings.

    Args:
        log: Has the pool that the server itself names, in pages or tokens, and its states.
        more_bytes, num_states: See ``SGLangStarted``; of no effect beside it.
    """
    chosen, unread = reset_unread(given)
    without_effect = tuple(f"{line.flag_name(name)} ({why.partition(';')[0]})" for name, why in unread.items())
    replicas, launch = line.whole("dp-size", 1), _launch(line, chosen)
    if log is not None:
        num_states = log.num_states
    if num_states is not None:
        chosen = only_read(settings(**chosen.given() | {"max_mamba_cache_size": num_states}))
    try:
        replica = _computed(chosen, named=log is not None or bool(more_bytes))
        memories = _memories(launch, chosen, replica)
        least = min(memories, key=_pages)
        computed = least.kv_cache_bytes // least.block_bytes if replica is None else replica.num_blocks
        if log is not None:
            pages = log.num_blocks or not_none(log.num_tokens) // launch.block_size
            more_bytes = (pages - computed) * least.block_bytes
        blocks = computed + more_bytes // least.block_bytes
        if (most := line.flags.get(_MOST_SLOTS)) is not None:
            blocks = min(blocks, int(most) // launch.block_size)
        if replica is None or blocks != replica.num_blocks:
            chosen = only_read(settings(**chosen.given() | {"num_gpu_blocks_override": blocks}))
            replica = build(chosen)
    except NotSimulated:
        raise
    except SettingError as error:
        return SGLangStarted(line, launch, replicas, without_effect=without_effect, chosen=chosen, refused=str(error))
    launch = replace(
        launch,
        max_model_len=replica.max_model_len,
        max_num_seqs=replica.policy.limits.max_num_seqs,
        num_gpu_blocks_override=replica.num_blocks,
    )
    memories = [replace(each, kv_cache_bytes=each.kv_cache_bytes + more_bytes) for each in memories]
    return SGLangStarted(
        line,
        launch,
        replicas,
        without_effect=without_effect,
        chosen=chosen,
        replica=replica,
        memories=tuple(memories),
        more_bytes=more_bytes,
        num_states=num_states,
    )


def _launch(line: SGLangLine, chosen: Settings) -> Launch:
    """What the line starts, as far as the pool does not decide it."""
    shape, card = model(chosen.model), gpu(chosen.gpu)
    defaults = server_defaults(card.memory_bytes / (1 << 20), chosen.tensor_parallel_size)
    return Launch(
        model=shape,
        gpu=card,
        max_model_len=chosen.max_model_len or shape.max_model_len,
        max_num_seqs=chosen.max_num_seqs or 0,
        max_num_batched_tokens=chosen.max_num_batched_tokens or defaults.chunked_prefill_size,
        tensor_parallel=chosen.tensor_parallel_size,
        deployment=deployment_of(chosen, shape, card),
        block_size=chosen.block_size or _page_size(line, shape, card),
        hybrid=False,
        enable_prefix_caching=chosen.enable_prefix_caching is not False,
    )


def _computed(chosen: Settings, named: bool) -> Replica | None:
    """The replica with the computed pool; None where it has no room for one that the server itself ``named``.

    Raises:
        SettingError: There is none, and no other pool is named.
    """
    try:
        return build(chosen)
    except NotSimulated:
        raise
    except SettingError:
        if not named:
            raise
        return None


def _memories(launch: Launch, chosen: Settings, replica: Replica | None) -> list[StageMemory]:
    options = chosen.policy_options
    assert isinstance(options, SGLangOptions)
    share = 1 if options.window_of(launch.model) is None else options.swa_full_tokens_ratio
    states = options.max_mamba_cache_size
    if replica is not None and isinstance(replica.memory, RadixMemory) and replica.memory.states is not None:
        states = replica.memory.states.slots
    of_states = 0
    if launch.model.mixer is not None and states is not None:
        ranks, parts = launch.tensor_parallel, launch.deployment.pipeline_parallel
        of_states = (states + 1) * state_bytes(launch.model, ranks, parts, options.mamba_ssm_dtype)
    return stage_memories(launch, options.mem_fraction_static, share, of_states)


def most_tokens(replica: Replica) -> int:
    """``max_total_num_tokens`` of SGLang."""
    assert isinstance(replica.memory, RadixMemory)
    return replica.memory.most_tokens


def _pages(memory: StageMemory) -> float:
    return memory.kv_cache_bytes / memory.block_bytes
