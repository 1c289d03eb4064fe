"""One pool of pages for layers with a window and layers without: vLLM's hybrid KV cache manager.

A page holds ``block_size`` tokens of the layers of one KV group. All groups have about the same number
of layers, so any group can use any page. Gemma 3 27B, 10 full layers and 52 with a window:

    group    0        1        2        3        4        5        6
    kind     sliding  sliding  sliding  sliding  sliding  sliding  full
    layers   9        9        9        9        8        8        10        page: 10 layers

The pool has ``bytes // (block_size * bytes of a token in one layer * layers of the largest group)`` pages. ``kv_cache`` has
the rule; this module has the models with windows that policies serve.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import cache, lru_cache

from ..types.errors import NotSimulated
from .attention import KvGroup, Span
from .kv_cache import CacheSettings, KvCacheConfig, form_kv_cache, window_blocks
from .kv_layers import attention_layers, cache_layers, owners
from .shape import ModelSpec


@dataclass(frozen=True, slots=True)
class HybridLayout:
    """The KV groups of a model that keeps only the tokens within its windows.

    Attributes:
        groups: Groups of the kind of the first layer first. Groups of one kind take its layers in turns.
        config: Blocks and pages of a model with states: its page sizes do not follow from the layers alone.
    """

    groups: tuple[KvGroup, ...]
    config: KvCacheConfig | None = None

    @property
    def window_tokens(self) -> int:
        """Length of the window; the same in all layers that have one."""
        return max(group.span.tokens for group in self.groups)

    @property
    def num_sliding(self) -> int:
        """Number of groups of layers with a window."""
        return sum(group.span.kind == "sliding" for group in self.groups)

    @property
    def has_block_sizes(self) -> bool:
        """Whether the blocks of its attention groups have several sizes, or their windows several lengths."""
        if self.config is None or self.config.mamba_block_size:
            return False
        groups = self.config.groups
        windows = {group.span.tokens for group in groups if group.kind == "sliding"}
        return len({group.block_size for group in groups}) > 1 or len(windows) > 1

    @property
    def page_layers(self) -> int:
        """Layers whose KV entries share one physical page: as many as the largest group has."""
        return max(group.num_layers for group in self.groups)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the groups: their kind as in ``layer_types`` of a ``config.json``, and a number."""
        kinds = [
            f"{group.span.kind}_attention" if group.span.keeps_tokens else group.span.kind for group in self.groups
        ]
        return tuple(
            f"{kind}.{kinds[:place].count(kind)}" if kinds.count(kind) > 1 else kind for place, kind in enumerate(kinds)
        )

    def full_blocks(self, tokens: int, block_size: int) -> int:
        """Blocks of ``tokens`` in the groups that keep all of them, of a model without states."""
        return (len(self.groups) - self.num_sliding) * -(-tokens // block_size)

    def decode_blocks(self, tokens: int, block_size: int) -> int:
        """Most blocks that a sequence ever holds in a step that decodes, up to ``tokens`` computed tokens, over all groups."""
        if self.config:
            return self.config.decode_blocks(tokens)
        return sum(window_blocks(tokens, group.span.tokens, block_size) for group in self.groups)

    def page_padding(self, place: int) -> float:
        """Share of a page that the group at ``place`` cannot use: padding of states, and missing layers."""
        if self.config:
            return self.config.padding_bytes(self.config.groups[place]) / self.config.bytes_per_block
        return 1 - self.groups[place].num_layers / self.page_layers

    def block_bytes(self, model: ModelSpec, layers: Container[int]) -> int:
        """Bytes of a page on a pipeline stage with these ``layers``, for a model with states."""
        assert self.config
        kept = owners(model)
        places = {place for place, layer in enumerate(kept) if layer in layers}
        if model.num_layers - 1 in layers:
            # A drafter is on the last stage.
            places |= {place for group in self.config.groups for place in group.layers if place >= len(kept)}
        return self.config.on_stage(places).bytes_per_block

    def largest(self, layers: Container[int]) -> KvGroup:
        """The group with most of the ``layers`` of a pipeline stage, restricted to these layers."""
        parts = (KvGroup(g.span, tuple(layer for layer in g.layers if layer in layers)) for g in self.groups)
        return max(parts, key=lambda group: group.num_layers)


def hybrid_layout(model: ModelSpec, max_model_len: int) -> HybridLayout | None:
    """The groups of a model with a window shorter than ``max_model_len``; None if all layers keep every token.

    ``form_kv_cache`` forms the groups. Ranks and number formats change bytes, not groups. Chunks (Llama 4) are kept
    whole, as by default in vLLM, and so are windows of several lengths, which no ``config.json`` has. Models with layers of
    different heads have a ``formed_layout``.
    """
    kinds = model.kv_groups()
    windows = {kind.span.tokens for kind in kinds if kind.span.kind == "sliding"}
    if len(windows) != 1 or len(kinds) > 2 or max(windows) >= max_model_len:
        return None
    return HybridLayout(_formed(model))


@cache
def _formed(model: ModelSpec) -> tuple[KvGroup, ...]:
    """All groups; cached, because the search for the longest sequence that fits calls it often."""
    settings = CacheSettings(max_model_len=model.max_model_len, max_num_batched_tokens=model.max_model_len)
    return tuple(KvGroup(group.span, group.layers) for group in form_kv_cache(attention_layers(model), settings).groups)


@lru_cache(maxsize=1024)
def formed_layout(
    model: ModelSpec,
    settings: CacheSettings,
    kv_dtype: str,
    tensor_parallel: int,
    export_tokens: int = 0,
    drafter: ModelSpec | None = None,
) -> HybridLayout:
    """The groups of a model with pages of several sizes, as ``form_kv_cache`` forms them (``ModelSpec.has_page_sizes``). Cached, as searches for the longest sequence and for remedies ask the same again.

    Args:
        export_tokens: See ``StateLayer``.
        drafter: A model of attention alone; its layers follow those of the model, and count as its last.
    """
    drafts = settings.num_speculative_blocks
    layers = cache_layers(model, kv_dtype, tensor_parallel, export_tokens=export_tokens, drafts=drafts)
    drafted = () if drafter is None else cache_layers(drafter, kv_dtype, tensor_parallel, drafts=drafts)
    config = form_kv_cache((*layers, *drafted), settings)
    kept, groups = (*owners(model), *[model.num_layers - 1] * len(drafted)), []
    for group in config.groups:
        kind = "full" if group.kind == "mla" else group.kind
        own = dict.fromkeys(kept[place] for place in group.layers)
        groups.append(KvGroup(Span(kind, group.span.tokens), tuple(own)))
    return HybridLayout(tuple(groups), config)


def require_block_sizes(model: ModelSpec, layout: HybridLayout, several: bool) -> None:
    """Raise NotSimulated if the blocks of attention groups have other sizes than a policy serves, or chunks.

    Args:
        several: Whether it serves several sizes, of groups without states.
    """
    config = layout.config
    assert config is not None
    if several and not model.mixer and not any(group.kind == "chunked" for group in config.groups):
        return
    for group in config.groups:
        fixed = group.kind in ("state", "ring")
        if group.kind == "chunked" or (not fixed and group.block_size != config.block_size):
            sizes = (
                f"needs blocks of {group.block_size} tokens beside those of {config.block_size}, which is not simulated"
            )
            remedy = "another --tensor-parallel-size may give one size"
            if not model.mixer:
                sizes = f"{sizes} under this policy"
                remedy = (
                    "--policy vllm-v1 serves both, --disable-hybrid-kv-cache-manager gives one size (layers with a window then keep"
                    " all tokens), and so may another --tensor-parallel-size"
                )
            raise NotSimulated("model", model.name, sizes, remedy)
