"""Speculative decoding: what vLLM's ``--speculative-config`` says of it.

A step verifies up to ``num_speculative_tokens`` drafts of every decoding sequence beside its next token. What each method has:

    method        drafts by                            KV of drafts   lookahead   lookahead of hashes   extra slots
    draft_model   a model of its own                   its layers     k           0                     1
    eagle(3)      a layer on the target's hidden state  1 layer        k           1                     0
    mtp           a layer of the checkpoint            1 layer        k           1                     0
    ngram         the prompt                           none           0           0                     0

``lookahead`` are slots that a step reserves past the tokens that it computes, as the drafter writes there; a hash of a block also
covers the token after it, on which the KV of EAGLE and MTP depends; an extra slot of a request counts against
``max_num_batched_tokens``. Source: vLLM 0.33, ``num_lookahead_tokens`` and ``num_hash_lookahead_tokens`` of ``VllmConfig``,
``max_num_new_slots_for_drafting`` of ``SpeculativeConfig``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..types.errors import NotSimulated, SettingError
from ..types.user_files import json_value
from .attention import FULL
from .deployment import Deployment, ExpertRanks
from .matrix import WEIGHT_BITS
from .model import model as model_of
from .shape import ModelSpec
from .weights import layers_bytes, stage_bytes

_FIELD = "speculative_config"
METHODS = ("draft_model", "eagle", "eagle3", "mtp", "ngram")
#: The keys that say how many drafts are accepted, and the one beside which vLLM takes them, with its value.
_RATES = ("synthetic_acceptance_rates", "synthetic_acceptance_length")
_SAMPLER, _SYNTHETIC = "rejection_sample_method", "synthetic"
ACCEPTANCE_KEYS = (_SAMPLER, *_RATES)
#: Keys that are read; those of the n-gram proposer's look-up and of how drafts are sampled, which the acceptance rates stand for; and those
#: that change neither a drafter's memory nor its number of tokens: its kernels and its files.
_KEYS = (
    "method", "model", "num_speculative_tokens", *ACCEPTANCE_KEYS, "prompt_lookup_max", "prompt_lookup_min", "draft_sample_method",
    "moe_backend", "attention_backend", "revision", "code_revision", "draft_load_config", "disable_padded_drafter_batch",
    "use_local_argmax_reduction",
)  # fmt: skip
#: What is to be done where a configuration has no acceptance rates, as those of most servers.
UNKNOWN_RATES = (
    'does not say how many drafts are accepted; add "rejection_sample_method": "synthetic" and either'
    ' "synthetic_acceptance_rates" (for each place, accepted_per_pos / num_drafts of a server) or'
    ' "synthetic_acceptance_length" (mean tokens of a step)'
)
#: Drafts of a step, at most: of a block of the paper's size.
_MOST_DRAFTS = 64
#: Hidden states that the first projection of a drafter takes, beside its own width: the embedding and the target's state, and of
#: EAGLE-3 the states of three of the target's layers, projected before that.
_PROJECTED = {"eagle": 2, "eagle3": 3, "mtp": 2}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """A drafter, and how many of its tokens are accepted.

    Attributes:
        method: One of ``METHODS``.
        num_speculative_tokens: Drafts of a sequence and step.
        model: The drafter as vLLM names it; for draft_model a preset or the path of a ``config.json``.
        acceptance_rates: For each place, the probability that the drafts up to it are all accepted (vLLM's
            ``synthetic_acceptance_rates``; accepted_per_pos / num_drafts in the metrics of a server). Empty if not known.
    """

    method: str
    num_speculative_tokens: int
    model: str | None
    acceptance_rates: tuple[float, ...]

    @property
    def has_layers(self) -> bool:
        """Whether the drafter has layers with weights and KV of their own."""
        return self.method != "ngram"

    @property
    def lookahead_tokens(self) -> int:
        """Slots that a step reserves past the tokens that it computes."""
        return self.num_speculative_tokens if self.has_layers else 0

    @property
    def hash_lookahead_tokens(self) -> int:
        """Tokens after a block that its hash covers."""
        return int(self.method in _PROJECTED)

    @property
    def extra_slots(self) -> int:
        """Slots of the budget that a scheduled sequence takes beside its tokens."""
        return int(self.method == "draft_model")

    def drafter(self, target: ModelSpec) -> ModelSpec | None:
        """The shape of the drafter; None for n-grams. Of EAGLE and MTP it is a layer of the target, with its embedding and head.

        Raises:
            SettingError: A draft model that is not known.
            NotSimulated: A draft model with layers of several kinds; other than MTP beside packed blocks of compressed attention, or of an indexer
                beside states.
        """
        if not self.has_layers:
            return None
        if self.method != "mtp" and (target.compressed or (target.indexer and target.state_layers)):
            kept = "vectors in a number format of their own" if target.compressed else "an indexer beside states"
            raise _uncounted(target, kept, "draft models and EAGLE")
        if self.method != "draft_model":
            return one_layer(target, with_experts=self.method == "mtp")
        assert self.model is not None
        drafter = model_of(self.model)
        _require_one_kind(drafter)
        return drafter

    def quantization(self, drafter: ModelSpec, deployment: Deployment) -> str | None:
        """Number format of the drafter's matrices: its checkpoint's own, and of MTP the target's; EAGLE's have 16 bits."""
        if self.method == "mtp":
            return deployment.quantization
        return drafter.quantization if self.method == "draft_model" else None

    def drafter_bytes(
        self, target: ModelSpec, tensor_parallel: int, deployment: Deployment, expert_ranks: ExpertRanks | None = None
    ) -> int:
        """Bytes of the drafter's weights on each rank. EAGLE and MTP share the target's embedding and head."""
        drafter = self.drafter(target)
        if drafter is None:
            return 0
        if self.method == "draft_model":
            return stage_bytes(drafter, tensor_parallel, 1, self.quantization(drafter, deployment))[0]
        quantization = self.quantization(drafter, deployment)
        projection = _PROJECTED[self.method] * target.hidden_size**2 * WEIGHT_BITS // 8
        return layers_bytes(drafter, range(1), tensor_parallel, quantization, expert_ranks) + projection

    def drafter_slot_bytes(self, target: ModelSpec, tensor_parallel: int, deployment: Deployment) -> int:
        """Bytes that the drafter's layers keep of a token on each rank, in the blocks of the target's."""
        drafter = self.drafter(target)
        return 0 if drafter is None else drafter.slot_bytes(deployment.kv_dtype, tensor_parallel)


def _require_one_kind(shape: ModelSpec) -> None:
    """Raise NotSimulated for a draft model with windows or states."""
    if any(shape.span(layer) != FULL for layer in range(shape.num_layers)):
        raise _uncounted(shape, "layers with windows or states")


def _uncounted(shape: ModelSpec, what: str, drafts: str = "drafts") -> NotSimulated:
    reason = f"has {what}, beside which {drafts} are not simulated"
    return NotSimulated("model", shape.name, reason, "leave out speculative_config")


def one_layer(target: ModelSpec, with_experts: bool) -> ModelSpec:
    """The last layer of a model as a model: with experts if it has some, or with an MLP."""
    experts = target.experts
    width = target.intermediate_size or (experts.used * experts.intermediate_size if experts else 0)
    keeps = with_experts and target.has_experts(target.num_layers - 1)
    return replace(
        target,
        name=f"{target.name} (one layer)",
        num_layers=1,
        intermediate_size=width,
        spans=(),
        mlp_layers=None,
        mlp_sizes=None,
        residual_layers=0,
        mixer=None,
        shared_blocks=None,
        compressed=replace(target.compressed, ratios=(0,)) if target.compressed else None,
        indexer=replace(target.indexer, layers=(0,)) if target.indexer else None,
        experts=replace(experts, layers=(0,)) if experts and keeps else None,
        encoder=None,
    )


def parse_speculative(text: str, needs_rates: bool = True) -> SpeculativeConfig:
    """Read vLLM's JSON.

    Args:
        needs_rates: Whether it has to say how many drafts are accepted, which the memory does not depend on.

    Raises:
        SettingError: It is no object of that kind, or does not say how many drafts are accepted.
    """
    try:
        given = json_value(text)
    except ValueError as error:
        raise SettingError(_FIELD, text, f"is no JSON ({error})") from None
    if not isinstance(given, dict):
        raise SettingError(_FIELD, text, 'must be an object, as {"method": "eagle3", "num_speculative_tokens": 3}')
    unknown = sorted(set(given) - set(_KEYS))
    if unknown:
        raise SettingError(f"{_FIELD}.{unknown[0]}", given[unknown[0]], "is not simulated; leave it out")
    drafts, method = _drafts(given), _method(given)
    name = given.get("model")
    if name is not None and not isinstance(name, str):
        raise SettingError(f"{_FIELD}.model", name, "must be a name")
    if method == "draft_model" and name is None:
        raise SettingError(
            f"{_FIELD}.model", None, "must name the draft model: a preset, or the path of its config.json"
        )
    says_rates = needs_rates or _given_rates(given) or given.get(_SAMPLER) == _SYNTHETIC
    return SpeculativeConfig(method, drafts, name, _rates(given, drafts) if says_rates else ())


def with_acceptance(text: str, rates: Sequence[float]) -> str:
    """vLLM's JSON with acceptance rates by place, where it has none and as many drafts.

    Raises:
        SettingError: As ``parse_speculative``.
    """
    config = parse_speculative(text, needs_rates=False)
    if config.acceptance_rates or len(rates) != config.num_speculative_tokens:
        return text
    return json.dumps(json_value(text) | {_SAMPLER: _SYNTHETIC, _RATES[0]: [*rates]})


def _drafts(given: Mapping[str, Any]) -> int:
    drafts = given.get("num_speculative_tokens")
    if not isinstance(drafts, int) or isinstance(drafts, bool) or not 1 <= drafts <= _MOST_DRAFTS:
        raise SettingError(f"{_FIELD}.num_speculative_tokens", drafts, f"must be a number from 1 to {_MOST_DRAFTS}")
    return drafts


def _method(given: Mapping[str, Any]) -> str:
    """The method; without one it is that of the model, as in vLLM. ``..._mtp`` are older names of mtp."""
    method = given.get("method")
    if method is None:
        method = "ngram" if given.get("model") in ("ngram", "[ngram]") else "draft_model"
    if isinstance(method, str) and method.endswith("_mtp"):
        method = "mtp"
    if method not in METHODS:
        raise SettingError(f"{_FIELD}.method", method, f"must be one of {', '.join(METHODS)}; others are not simulated")
    return str(method)


def _rates(given: Mapping[str, Any], drafts: int) -> tuple[float, ...]:
    """Acceptance rates by place; from a mean length with the smallest variance, as in vLLM."""
    names = _given_rates(given)
    if not names:
        raise SettingError(_FIELD, json.dumps(given), UNKNOWN_RATES)
    if (sampler := given.get(_SAMPLER)) != _SYNTHETIC:
        remedy = f'must be "{_SYNTHETIC}" beside {names[0]}; add "{_SAMPLER}": "{_SYNTHETIC}"'
        raise SettingError(f"{_FIELD}.{_SAMPLER}", sampler, remedy)
    rates, length = (given.get(name) for name in _RATES)
    if length is not None:
        if rates is not None:
            raise SettingError(f"{_FIELD}.{_RATES[1]}", length, f"is given beside {_RATES[0]}; leave out one of them")
        if not _is_number(length) or not 1 <= length <= drafts + 1:
            raise SettingError(f"{_FIELD}.{_RATES[1]}", length, f"must be from 1 to {drafts + 1}")
        full, rest = divmod(length - 1, 1)
        return tuple(([1.0] * int(full) + [float(rest)] + [0.0] * drafts)[:drafts])
    field = f"{_FIELD}.{_RATES[0]}"
    if not isinstance(rates, list) or len(rates) != drafts or not all(map(_is_number, rates)):
        raise SettingError(field, rates, f"must be {drafts} numbers, one for each draft")
    if not all(1 >= rate >= 0 for rate in rates) or rates != sorted(rates, reverse=True):
        raise SettingError(
            field, rates, "must be from 0 to 1 and must not rise, as a draft is accepted after those before it"
        )
    return tuple(map(float, rates))


def _given_rates(given: Mapping[str, Any]) -> list[str]:
    """The keys that say how many drafts are accepted."""
    return [name for name in _RATES if given.get(name) is not None]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
