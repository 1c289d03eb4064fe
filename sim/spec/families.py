"""One function for each family of models; it converts a ``config.json`` to a ``ModelSpec``.

Defaults are those of the family's configuration class in Hugging Face transformers, as a file leaves out
defaults. Parameters are counted as in the checkpoint.

Families with LayerNorm and an MLP of two matrices come first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from ..types.errors import SettingError
from .attention import FULL, STATE, Heads, Indexer, Latent, Span
from .checkpoint import with_formats
from .config import Config, count, num_layers, numbers, refuse_unread, shape, spans, state_spans
from .config import shape as read_shape
from .encoders import encoder_of
from .shape import Experts, ModelSpec
from .states import GatedDelta, KimiDelta, Mamba, Mamba2


def opt(config: Config, name: str) -> ModelSpec:
    """OPT."""
    shape = read_shape(config, name)
    if config.get("word_embed_proj_dim", shape["hidden_size"]) != shape["hidden_size"]:
        what = f"a projected embedding is not understood in {name}"
        remedy = f"{what}; give an OPT with an embedding as wide as its layers"
        raise SettingError("word_embed_proj_dim", config["word_embed_proj_dim"], remedy)
    # OPT's position table has two more rows than positions: an offset of its training code.
    rows = shape["max_model_len"] + 2
    return _biased(shape, count(config, name, "ffn_dim"), rows)


def gpt2(config: Config, name: str) -> ModelSpec:
    """GPT-2, with its own names of the keys."""
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    renamed = {names.get(key, key): value for key, value in config.items()}
    renamed["max_position_embeddings"] = config.get("n_positions")
    shape = read_shape(renamed, name)
    return _biased(shape, count(config, name, "n_inner", 4 * shape["hidden_size"]), shape["max_model_len"])


def gpt_bigcode(config: Config, name: str) -> ModelSpec:
    """StarCoder: GPT-2 with one KV head."""
    one_head = {"num_key_value_heads": 1} if config.get("multi_query", True) else {}
    return gpt2({**config, **one_head}, name)


def _biased(shape: dict[str, Any], intermediate_size: int, positions: int) -> ModelSpec:
    return ModelSpec(
        **shape,
        intermediate_size=intermediate_size,
        gated_mlp=False,
        tied_embeddings=True,
        learned_positions=positions,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_vectors=2,
    )


def falcon(config: Config, name: str) -> ModelSpec:
    """Falcon: one KV head (7b) or a few (40b, 180b), attention and MLP in parallel."""
    grouped, heads = bool(config.get("new_decoder_architecture")), count(config, name, "num_attention_heads")
    # The file of falcon-7b has num_kv_heads = 71 although multi_query is set; only the new architecture reads it.
    kv_heads = 1 if config.get("multi_query", True) else heads
    if grouped:
        kv_heads = count(config, name, "num_kv_heads", heads)
    shape = read_shape({"max_position_embeddings": 2048, **config, "num_key_value_heads": kv_heads}, name)
    biased, parallel = bool(config.get("bias")), bool(config.get("parallel_attn", True))
    norms = count(config, name, "num_ln_in_parallel_attn", 2 if grouped else 1) if parallel or grouped else 2
    return ModelSpec(
        **shape,
        intermediate_size=count(config, name, "ffn_hidden_size", 4 * shape["hidden_size"]),
        gated_mlp=False,
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased,
        norm_vectors=2,
        layer_norms=norms,
    )


def read_config(config: Config, name: str) -> ModelSpec:
    """The spec of a configuration, named ``name``.

    Raises:
        SettingError: The family, a key or a value is not supported.
    """
    text, outer = config.get("text_config"), config.get("model_type")
    if isinstance(text, dict):
        config = {**config, **text}
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in _REFUSED:
        raise SettingError("model_type", kind, f"{_REFUSED[kind]}, which is not understood in {name}")
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    refuse_unread(config, name, family.reads if family else frozenset())
    if family is None:
        raise SettingError("model_type", kind, f"is not understood in {name}; one of {', '.join(_FAMILIES)}")
    spec = with_formats(family.read(config, name), config)
    return replace(spec, encoder=encoder_of(config, name), model_type=outer if isinstance(outer, str) else None)


def _windows(
    config: Config,
    name: str,
    windowed: Callable[[int], bool] = lambda layer: True,
    default: int | None = None,
    switched_on: bool = True,
) -> tuple[Span, ...]:
    """Sliding windows of the layers that are ``windowed``, if the model has a window."""
    use = config.get("use_sliding_window", switched_on)
    has = use and config.get("sliding_window", default) is not None
    window = count(config, name, "sliding_window", default) if has else None
    return spans(config, name, num_layers(config, name), windowed, window, None)


def _llama(
    config: Config, name: str, head_dim: int | None = None, intermediate_size: int | None = None, **features: Any
) -> ModelSpec:
    """Gated MLP, rotary positions, RMSNorm; ``features`` are fields of the spec that differ."""
    defaults = {
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": bool(config.get("attention_bias")),
        "output_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
    }
    return ModelSpec(
        **shape(config, name, head_dim),
        intermediate_size=intermediate_size or count(config, name, "intermediate_size"),
        gated_mlp=True,
        **defaults | features,
    )


def _mistral(config: Config, name: str, **features: Any) -> ModelSpec:
    return _llama(config, name, spans=_windows(config, name), **features)


def _mixtral(config: Config, name: str) -> ModelSpec:
    return _mistral(config, name, experts=_experts(config, name, "num_local_experts", "intermediate_size"))


def _qwen(config: Config, name: str, **features: Any) -> ModelSpec:
    first = count(config, name, "max_window_layers", 28)
    windows = _windows(config, name, lambda layer: layer >= first, 4096, switched_on=False)
    return _llama(config, name, spans=windows, **features)


def _qwen2(config: Config, name: str) -> ModelSpec:
    return _qwen(config, name, qkv_bias=True, output_bias=False, mlp_bias=False)


def _qwen3(config: Config, name: str) -> ModelSpec:
    return _qwen(config, name, qk_norm=True)


def _qwen3_moe(config: Config, name: str) -> ModelSpec:
    dense, step = numbers(config, name, "mlp_only_layers"), count(config, name, "decoder_sparse_step", 1)
    experts = _experts(
        config,
        name,
        "num_experts",
        "moe_intermediate_size",
        lambda layer: layer not in dense and (layer + 1) % step == 0,
    )
    return _qwen(config, name, qk_norm=True, experts=experts)


def _gemma2(config: Config, name: str) -> ModelSpec:
    return _gemma(config, name, spans=_windows(config, name, lambda layer: layer % 2 == 0, 4096))


def _gemma3(config: Config, name: str) -> ModelSpec:
    # transformers renamed the key when it added layer_types.
    every = count(config, name, "sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    windows = _windows(config, name, lambda layer: (layer + 1) % every != 0, 4096)
    defaults = {"vocab_size": 262_208, "max_position_embeddings": 131_072}
    return _gemma(defaults | dict(config), name, spans=windows, qk_norm=True)


def _gemma(config: Config, name: str, **features: Any) -> ModelSpec:
    tied = bool(config.get("tie_word_embeddings", True))
    # Norms before and after attention, and before and after the MLP.
    return _llama(config, name, head_dim=256, tied_embeddings=tied, layer_norms=4, **features)


def _gemma4(config: Config, name: str) -> ModelSpec:
    """Gemma 4 of 26B and 31B: layers that keep all tokens have heads of their own, and may use K as V.

    The experts stand beside the MLP of each layer, which is then a shared expert.
    """
    for key, default, meaning in (
        ("num_kv_shared_layers", 0, "a KV cache that layers share"),
        ("hidden_size_per_layer_input", 256, "an embedding for each layer"),
        ("use_double_wide_mlp", False, "a wider MLP in some layers"),
    ):
        if value := config.get(key, default):
            raise SettingError(key, value, f"{meaning} is not understood in {name}; Gemma 4 26B and 31B have none")
    layers, width = num_layers(config, name), count(config, name, "intermediate_size")
    window = count(config, name, "sliding_window", 512)
    tied_values = bool(config.get("attention_k_eq_v"))
    kv_heads = count(config, name, "num_key_value_heads", 4)
    full_kv_heads = count(config, name, "num_global_key_value_heads", kv_heads) if tied_values else kv_heads
    heads, head_dim = count(config, name, "num_attention_heads"), count(config, name, "head_dim", 256)
    experts = None
    if config.get("enable_moe_block") or config.get("num_experts") is not None:
        experts = Experts(
            count(config, name, "num_experts"),
            count(config, name, "top_k_experts"),
            count(config, name, "moe_intermediate_size"),
            tuple(range(layers)),
            shared_size=width,
            # A scale for each expert.
            router_bias=True,
        )
    full = {"num_key_value_heads": full_kv_heads, "head_dim": count(config, name, "global_head_dim", 512)}
    return _llama(
        {**config, **full},
        name,
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        qk_norm=True,
        # Beside those of Gemma 3: two of the experts, one of the MLP beside them, and the router's scale of the hidden state.
        layer_norms=8 if experts else 4,
        spans=spans(config, name, layers, lambda layer: (layer + 1) % 6 != 0, window, None),
        window_heads=Heads(heads, kv_heads, head_dim),
        values_are_keys=tied_values,
        experts=experts,
    )


def _mimo_v2(config: Config, name: str) -> ModelSpec:
    """MiMo-V2-Flash: V is narrower than K, and layers with a window have KV heads of their own and sinks."""
    layers = num_layers(config, name)
    pattern, routed = numbers(config, name, "hybrid_layer_pattern"), numbers(config, name, "moe_layer_freq")
    for key, value in (("hybrid_layer_pattern", pattern), ("moe_layer_freq", routed)):
        if len(value) != layers:
            raise SettingError(key, value, f"must have one number for each of the {layers} layers of {name}")
    window = count(config, name, "sliding_window_size")
    head_dim, swa_head_dim = count(config, name, "head_dim"), count(config, name, "swa_head_dim")
    local = Heads(
        count(config, name, "swa_num_attention_heads"),
        count(config, name, "swa_num_key_value_heads"),
        swa_head_dim,
        count(config, name, "swa_v_head_dim", swa_head_dim),
    )
    if local.num_heads != count(config, name, "num_attention_heads") or config.get("add_full_attention_sink_bias"):
        key = (
            "add_full_attention_sink_bias" if config.get("add_full_attention_sink_bias") else "swa_num_attention_heads"
        )
        raise SettingError(key, config[key], f"is not understood in {name}; MiMo-V2-Flash has another value")
    return _llama(
        config,
        name,
        output_bias=False,
        spans=tuple(Span("sliding", window) if local else FULL for local in pattern),
        v_head_dim=count(config, name, "v_head_dim", head_dim),
        window_heads=local,
        attention_sinks=bool(config.get("add_swa_attention_sink_bias")),
        experts=_experts(
            config,
            name,
            "n_routed_experts",
            "moe_intermediate_size",
            lambda layer: bool(routed[layer]),
            shared_size=count(config, name, "n_shared_experts", 0, least=0)
            * count(config, name, "moe_intermediate_size"),
            router_bias=config.get("topk_method") == "noaux_tc",
        ),
    )


def _nemotron_nas(config: Config, name: str) -> ModelSpec:
    """Llama-Nemotron: some layers have no attention, and MLPs differ in width (``nemotron_nas.py`` of vLLM)."""
    layers, blocks = num_layers(config, name), config.get("block_configs")
    heads, hidden = count(config, name, "num_attention_heads"), count(config, name, "hidden_size")
    if not isinstance(blocks, list) or len(blocks) != layers:
        raise SettingError("block_configs", blocks, f"must describe each of the {layers} layers of {name}")
    kinds, sizes, grouped = [], [], set()
    for layer, block in enumerate(blocks):
        attention, mlp = ((block.get(part) if isinstance(block, dict) else None) for part in ("attention", "ffn"))
        if not isinstance(attention, dict) or not isinstance(mlp, dict):
            raise SettingError(f"block_configs.{layer}", block, f"must have attention and ffn in {name}")
        odd = {"attention": attention, "ffn": mlp}
        unread = {"replace_with_linear", "window_length", "num_sink_tokens", "sparsify"}
        for key in (f"{part}.{key}" for part, keys in odd.items() for key in unread & keys.keys() if keys[key]):
            raise SettingError(
                f"block_configs.{layer}.{key}", True, f"is not understood in {name}; vLLM does not read it"
            )
        kinds.append("-" if attention.get("no_op") else "*")
        if not attention.get("no_op"):
            grouped.add(count(attention, name, "n_heads_in_group"))
        sizes.append(0 if mlp.get("no_op") else _nas_width(mlp, hidden, name))
    if len(grouped) != 1:
        raise SettingError("n_heads_in_group", sorted(grouped), f"must be one number for all layers of {name}")
    known = {"num_key_value_heads": heads // grouped.pop(), "intermediate_size": max(sizes)}
    return _llama(
        {**config, **known},
        name,
        spans=state_spans(name, layers, "block_configs", kinds, "* -"),
        mlp_sizes=tuple(sizes),
    )


def _nas_width(mlp: Config, hidden_size: int, name: str) -> int:
    multiple = mlp.get("ffn_mult")
    if not isinstance(multiple, (int, float)) or not 0 < multiple < 100:
        raise SettingError("ffn_mult", multiple, f"must be a number above 0 in {name}")
    return -(-int(2 * multiple * hidden_size / 3) // 256) * 256


def _gpt_oss(config: Config, name: str) -> ModelSpec:
    experts = _experts(config, name, "num_local_experts", "intermediate_size", router_bias=True, bias=True)
    return _llama(
        config,
        name,
        spans=_windows(config, name, lambda layer: layer % 2 == 0, 128),
        experts=experts,
        attention_sinks=True,
        qkv_bias=True,
        output_bias=True,
    )


def _llama4(config: Config, name: str) -> ModelSpec:
    layers = num_layers(config, name)
    every = count(config, name, "no_rope_layer_interval", 4)
    # Layers without rotary positions attend to all tokens, other layers to their chunk.
    rotary = numbers(config, name, "no_rope_layers") or [(layer + 1) % every for layer in range(layers)]
    if len(rotary) != layers:
        raise SettingError("no_rope_layers", rotary, f"must have one number for each of the {layers} layers of {name}")
    chunk = count(config, name, "attention_chunk_size", 8192)
    step = count(config, name, "interleave_moe_layer_step", 1)
    routed = numbers(config, name, "moe_layers") or range(step - 1, layers, step)
    experts = _experts(
        config,
        name,
        "num_local_experts",
        "intermediate_size",
        lambda layer: layer in routed,
        default_used=1,
        shared_size=count(config, name, "intermediate_size"),
    )
    return _llama(
        config,
        name,
        intermediate_size=count(config, name, "intermediate_size_mlp"),
        spans=spans(config, name, layers, lambda layer: bool(rotary[layer]), None, chunk),
        experts=experts,
    )


def _deepseek(config: Config, name: str) -> ModelSpec:
    heads = count(config, name, "num_attention_heads")
    latent = Latent(
        kv_rank=count(config, name, "kv_lora_rank"),
        rope_dim=count(config, name, "qk_rope_head_dim"),
        nope_dim=count(config, name, "qk_nope_head_dim"),
        v_dim=count(config, name, "v_head_dim"),
        q_rank=0 if config.get("q_lora_rank") is None else count(config, name, "q_lora_rank"),
    )
    # The file repeats the number of query heads here, although there are no KV heads.
    heads_alike = {**config, "num_key_value_heads": heads, "head_dim": latent.nope_dim + latent.rope_dim}
    return _llama(heads_alike, name, latent=latent, experts=_deepseek_experts(config, name))


def _sparse(config: Config, name: str, **features: Any) -> ModelSpec:
    """DeepSeek V3.2 and GLM 5: latent attention to the tokens that an indexer chooses."""
    indexer = Indexer(
        heads=count(config, name, "index_n_heads"),
        head_dim=count(config, name, "index_head_dim"),
        top_k=count(config, name, "index_topk"),
        layers=_indexed_layers(config, name),
        **features,
    )
    kinds = config.get("layer_types")
    if kinds is not None and kinds != ["deepseek_sparse_attention"] * num_layers(config, name):
        raise SettingError("layer_types", kinds, f"must name deepseek_sparse_attention for each layer of {name}")
    if config.get("q_lora_rank") is None:
        raise SettingError(
            "q_lora_rank", None, f"must be given in {name}: its indexer reads the latent vector of queries"
        )
    return replace(_deepseek(config, name), indexer=indexer)


def _indexed_layers(config: Config, name: str) -> tuple[int, ...]:
    """The layers with an indexer, as vLLM reads them: a pattern, or every ``index_topk_freq`` layers after the first.

    Files also list them as ``indexer_types``, which vLLM does not read.
    """
    layers, pattern = num_layers(config, name), config.get("index_topk_pattern")
    if pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != layers or pattern[0] == "S":
            raise SettingError(
                "index_topk_pattern", pattern, f"must have a letter for each of the {layers} layers of {name}"
            )
        return tuple(layer for layer, kind in enumerate(pattern) if kind != "S")
    every = count(config, name, "index_topk_freq", 1)
    first = count(config, name, "index_skip_topk_offset", 2, least=0)
    found = tuple(layer for layer in range(layers) if max(layer - first + 1, 0) % every == 0)
    kinds = config.get("indexer_types")
    if kinds is not None and kinds != ["full" if layer in found else "shared" for layer in range(layers)]:
        raise SettingError(
            "indexer_types", kinds, f"must agree with index_topk_freq = {every} in {name}, which vLLM reads"
        )
    return found


def _glm_moe_dsa(config: Config, name: str) -> ModelSpec:
    """GLM 5 to 5.3."""
    return _sparse({"topk_method": "noaux_tc", **config}, name, fp8_on_b200=True)


def _deepseek_experts(config: Config, name: str) -> Experts | None:
    if config.get("n_routed_experts") is None:
        return None
    dense = count(config, name, "first_k_dense_replace", 0, least=0)
    step, width = count(config, name, "moe_layer_freq", 1), count(config, name, "moe_intermediate_size")
    return _experts(
        config,
        name,
        "n_routed_experts",
        "moe_intermediate_size",
        lambda layer: layer >= dense and layer % step == 0,
        shared_size=count(config, name, "n_shared_experts", 0, least=0) * width,
        # V3 adds a bias for each expert to the router's scores.
        router_bias=config.get("topk_method") == "noaux_tc",
    )


def _glm4_moe(config: Config, name: str) -> ModelSpec:
    """GLM 4.5 to 4.7: grouped heads, and the experts of DeepSeek V3."""
    experts = _deepseek_experts({"topk_method": "noaux_tc", **config}, name)
    biased = bool(config.get("attention_bias"))
    return _llama(
        config, name, qk_norm=bool(config.get("use_qk_norm")), output_bias=False, qkv_bias=biased, experts=experts
    )


def _minimax_m2(config: Config, name: str) -> ModelSpec:
    """MiniMax M2 to M2.7: every layer has full attention."""
    biased = bool(config.get("use_routing_bias"))
    experts = _experts(config, name, "num_local_experts", "intermediate_size", router_bias=biased)
    return _llama(config, name, qk_norm=bool(config.get("use_qk_norm")), experts=experts)


def _qwen3_next(config: Config, name: str, experts: bool = True, **features: Any) -> ModelSpec:
    layers = num_layers(config, name)
    every = count(config, name, "full_attention_interval", 4)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    mixer = GatedDelta(
        key_heads=count(config, name, "linear_num_key_heads", 16),
        value_heads=count(config, name, "linear_num_value_heads", 32),
        key_dim=count(config, name, "linear_key_head_dim", 128),
        value_dim=count(config, name, "linear_value_head_dim", 128),
        conv_kernel=count(config, name, "linear_conv_kernel_dim", 4),
        state_dtype=_state_dtype(config, name, "mamba_ssm_dtype"),
    )
    if mixer.value_heads % mixer.key_heads:
        remedy = f"must be a multiple of the {mixer.key_heads} key heads of {name}"
        raise SettingError("linear_num_value_heads", mixer.value_heads, remedy)
    return _llama(
        config,
        name,
        head_dim=256,
        qk_norm=True,
        gated_attention=bool(config.get("attn_output_gate", True)),
        spans=state_spans(name, layers, "layer_types", kinds, "full_attention linear_attention"),
        mixer=mixer,
        experts=_qwen3_next_experts(config, name) if experts else None,
        **features,
    )


def _qwen3_next_experts(config: Config, name: str) -> Experts | None:
    dense, step = numbers(config, name, "mlp_only_layers"), count(config, name, "decoder_sparse_step", 1)
    shared = count(config, name, "shared_expert_intermediate_size", 0, least=0)
    return _experts(
        config,
        name,
        "num_experts",
        "moe_intermediate_size",
        lambda layer: layer not in dense and (layer + 1) % step == 0,
        shared_size=shared,
        shared_gate=shared > 0,
    )


def _qwen3_5(config: Config, name: str) -> ModelSpec:
    return _qwen3_next(config, name, experts=False)


def _qwen3_5_moe(config: Config, name: str) -> ModelSpec:
    # All layers have experts; the file has no MLP width.
    return _qwen3_next(config, name, intermediate_size=count(config, name, "moe_intermediate_size"))


def _mamba2(config: Config, name: str) -> Mamba2:
    """Mamba-2 with the keys of Bamba and Granite; a ``mamba_d_head`` of "auto" is computed."""
    hidden, expand = count(config, name, "hidden_size"), count(config, name, "mamba_expand", 2)
    heads = count(config, name, "mamba_n_heads", 128)
    auto = config.get("mamba_d_head", "auto") == "auto"
    head_dim = expand * hidden // heads if auto else count(config, name, "mamba_d_head")
    if heads * head_dim != expand * hidden:
        remedy = f"must be mamba_expand * hidden_size / mamba_n_heads in {name}, {expand * hidden} / {heads}"
        raise SettingError("mamba_d_head", head_dim, remedy)
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=count(config, name, "mamba_n_groups", 1),
        state_size=count(config, name, "mamba_d_state", 256),
        conv_kernel=count(config, name, "mamba_d_conv", 4),
        chunk=count(config, name, "mamba_chunk_size", 256),
        conv_bias=bool(config.get("mamba_conv_bias", True)),
        proj_bias=bool(config.get("mamba_proj_bias", False)),
    )


def _granite_hybrid(config: Config, name: str) -> ModelSpec:
    layers = num_layers(config, name)
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"] * layers
    shared = count(config, name, "shared_intermediate_size", 1024)
    experts = None
    # Granite's small models have only the shared MLP.
    if count(config, name, "num_local_experts", 8, least=0):
        experts = _experts(config, name, "num_local_experts", "intermediate_size", default_used=2, shared_size=shared)
    return _llama(
        config,
        name,
        intermediate_size=shared,
        spans=state_spans(name, layers, "layer_types", kinds, "attention full_attention mamba linear_attention"),
        mixer=_mamba2(config, name),
        experts=experts,
    )


def _bamba(config: Config, name: str) -> ModelSpec:
    layers, attention = num_layers(config, name), numbers(config, name, "attn_layer_indices")
    beyond = [layer for layer in attention if not 0 <= layer < layers]
    if beyond:
        raise SettingError("attn_layer_indices", beyond[0], f"must be one of the {layers} layers of {name}")
    kinds = ["attention" if layer in attention else "mamba" for layer in range(layers)]
    spans = state_spans(name, layers, "attn_layer_indices", kinds, "attention mamba")
    return _llama(config, name, spans=spans, mixer=_mamba2(config, name))


def _jamba(config: Config, name: str) -> ModelSpec:
    layers, hidden = num_layers(config, name), count(config, name, "hidden_size")
    every, first = count(config, name, "attn_layer_period", 8), count(config, name, "attn_layer_offset", 4, least=0)
    step, offset = count(config, name, "expert_layer_period", 2), count(config, name, "expert_layer_offset", 1, least=0)
    kinds = ["attention" if layer % every == first else "mamba" for layer in range(layers)]
    auto = config.get("mamba_dt_rank", "auto") == "auto"
    mixer = Mamba(
        inner=count(config, name, "mamba_expand", 2) * hidden,
        state_size=count(config, name, "mamba_d_state", 16),
        dt_rank=-(-hidden // 16) if auto else count(config, name, "mamba_dt_rank"),
        conv_kernel=count(config, name, "mamba_d_conv", 4),
        conv_bias=bool(config.get("mamba_conv_bias", True)),
        proj_bias=bool(config.get("mamba_proj_bias", False)),
    )
    experts = None
    if count(config, name, "num_experts", 16) > 1:
        experts = _experts(
            {"num_experts": 16} | _given(config),
            name,
            "num_experts",
            "intermediate_size",
            lambda layer: layer % step == offset,
            default_used=2,
        )
    spans = state_spans(name, layers, "attn_layer_period", kinds, "attention mamba")
    return _llama(config, name, spans=spans, mixer=mixer, experts=experts)


def _nemotron_h(config: Config, name: str) -> ModelSpec:
    key = "hybrid_override_pattern" if config.get("layers_block_type") is None else "layers_block_type"
    kinds = config.get(key)
    words = list(kinds) if isinstance(kinds, (list, str)) else []
    # Files of the first models name the head width attention_head_dim, and some keys as Bamba does.
    renamed = {"head_dim": config.get("attention_head_dim", 128), "num_hidden_layers": len(words)} | _given(config)
    layers = num_layers(renamed, name)
    known = "M * - E" if isinstance(kinds, str) else "mamba linear_attention attention full_attention mlp moe"
    spans = state_spans(name, layers, key, kinds, known)
    routed = tuple(layer for layer, kind in enumerate(words) if kind in ("E", "moe"))
    for theirs, ours in (
        ("mamba_n_groups", "n_groups"),
        ("mamba_d_conv", "conv_kernel"),
        ("mamba_chunk_size", "chunk_size"),
    ):
        renamed.setdefault(ours, config.get(theirs))
    return ModelSpec(
        **shape(renamed, name),
        intermediate_size=count(config, name, "intermediate_size", 21504),
        gated_mlp=False,
        # Neither transformers nor vLLM reads tie_word_embeddings or attention_bias here.
        mlp_bias=bool(config.get("mlp_bias")),
        layer_norms=1,
        spans=spans,
        mixer=Mamba2(
            heads=count(config, name, "mamba_num_heads", 128),
            head_dim=count(config, name, "mamba_head_dim", 64),
            groups=count(renamed, name, "n_groups", 8),
            state_size=count(config, name, "ssm_state_size", 128),
            conv_kernel=count(renamed, name, "conv_kernel", 4),
            chunk=count(renamed, name, "chunk_size", 128),
            conv_bias=bool(config.get("use_conv_bias", config.get("mamba_conv_bias", True))),
            proj_bias=bool(config.get("use_bias", False)),
            # vLLM's NemotronHForCausalLMConfig takes the dtype from the file.
            state_dtype=_state_dtype(config, name, "mamba_ssm_cache_dtype", "float32"),
        ),
        mlp_layers=tuple(layer for layer, kind in enumerate(words) if kind in ("-", "mlp")),
        experts=_nemotron_experts(config, name, routed) if routed else None,
    )


def _nemotron_experts(config: Config, name: str, layers: tuple[int, ...]) -> Experts:
    shared = count(config, name, "moe_shared_expert_intermediate_size", 7688, least=0)
    return Experts(
        count=count(config, name, "n_routed_experts", 8),
        used=count(config, name, "num_experts_per_tok", 2),
        intermediate_size=count(config, name, "moe_intermediate_size", 7688),
        layers=layers,
        shared_size=shared * count(config, name, "n_shared_experts", 1, least=0),
        latent_size=0 if config.get("moe_latent_size") is None else count(config, name, "moe_latent_size"),
        router_bias=True,
    )


def _kimi_linear(config: Config, name: str) -> ModelSpec:
    linear = config.get("linear_attn_config")
    linear = linear if isinstance(linear, dict) else {}
    unknown = {
        key: config.get(key) for key in ("attn_res_block_size", "mla_use_output_gate", "routed_expert_hidden_size")
    }
    for key, value in (unknown | {"use_full_rank_gate": linear.get("use_full_rank_gate")}).items():
        if value:
            raise SettingError(key, value, f"is not understood in {name}; Kimi Linear 48B has none")
    layers = num_layers(config, name)
    # Layer numbers of this file start at 1.
    kimi, full = (numbers(linear, name, key) for key in ("kda_layers", "full_attn_layers"))
    if sorted(kimi + full) != [*range(1, layers + 1)]:
        remedy = f"kda_layers and full_attn_layers must name each of the {layers} layers of {name}, from 1, once"
        raise SettingError("linear_attn_config", config.get("linear_attn_config"), remedy)
    kinds = ["linear_attention" if layer + 1 in kimi else "full_attention" for layer in range(layers)]
    renamed = {
        "n_routed_experts": config.get("num_experts"),
        "num_experts_per_tok": config.get("num_experts_per_token"),
        "n_shared_experts": config.get("num_shared_experts"),
        "max_position_embeddings": config.get("model_max_length"),
        "topk_method": "noaux_tc",
    }
    mixer = KimiDelta(
        heads=count(linear, name, "num_heads"),
        head_dim=count(linear, name, "head_dim"),
        conv_kernel=count(linear, name, "short_conv_kernel_size", 4),
    )
    spans = state_spans(name, layers, "linear_attn_config", kinds, "full_attention linear_attention")
    # Neither transformers nor vLLM reads tie_word_embeddings here.
    deepseek = _deepseek(renamed | _given(config), name)
    return replace(deepseek, spans=spans, mixer=mixer, tied_embeddings=False)


def _mamba2_alone(config: Config, name: str) -> ModelSpec:
    """Mamba-2 without attention. Its file has no context length; vLLM then assumes 2,048 tokens."""
    layers = num_layers(config, name)
    heads, head_dim = count(config, name, "num_heads", 128), count(config, name, "head_dim", 64)
    return ModelSpec(
        name=name,
        num_layers=layers,
        hidden_size=count(config, name, "hidden_size"),
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        intermediate_size=0,
        vocab_size=count(config, name, "vocab_size"),
        max_model_len=count(config, name, "max_position_embeddings", 2048),
        gated_mlp=False,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        layer_norms=1,
        spans=(STATE,) * layers,
        mixer=Mamba2(
            heads=heads,
            head_dim=head_dim,
            groups=count(config, name, "n_groups", 8),
            state_size=count(config, name, "state_size", 128),
            conv_kernel=count(config, name, "conv_kernel", 4),
            chunk=count(config, name, "chunk_size", 256),
            conv_bias=bool(config.get("use_conv_bias", True)),
            proj_bias=bool(config.get("use_bias", False)),
        ),
        mlp_layers=(),
    )


def _given(config: Config) -> dict[str, object]:
    """The keys without null values: null counts as absent."""
    return {key: value for key, value in config.items() if value is not None}


def _state_dtype(config: Config, name: str, key: str, default: str = "auto") -> str:
    """Number format of the state in the file, by fragmeter's name; "auto" if the file has none."""
    known = {"auto": "auto", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    given = default if config.get(key) is None else config[key]
    if not isinstance(given, str) or given not in known:
        raise SettingError(key, given, f"is not understood in {name}; one of {', '.join(known)}")
    return known[given]


def _experts(
    config: Config,
    name: str,
    count_key: str,
    width_key: str,
    routed: Callable[[int], bool] = lambda layer: True,
    default_used: int | None = None,
    **features: Any,
) -> Experts | None:
    """Experts of the layers that are ``routed``; None if no layer is."""
    layers = tuple(layer for layer in range(num_layers(config, name)) if routed(layer))
    experts = count(config, name, count_key)
    used = count(config, name, "num_experts_per_tok", default_used)
    if used > experts:
        raise SettingError("num_experts_per_tok", used, f"must be at most the {experts} experts of {name}")
    return Experts(experts, used, count(config, name, width_key), layers, **features) if layers else None


class _Family(NamedTuple):
    """Reader of a family, and the keys of ``_FEATURES`` and ``_STATES`` that it reads."""

    read: Callable[[Config, str], ModelSpec]
    reads: frozenset[str] = frozenset()


_WINDOWS = frozenset({"sliding_window", "layer_types"})
_GEMMA4 = _WINDOWS | {
    "global_head_dim", "attention_k_eq_v", "num_kv_shared_layers", "hidden_size_per_layer_input", "num_experts",
}  # fmt: skip
_DEEPSEEK = _Family(_deepseek, frozenset({"kv_lora_rank", "n_routed_experts"}))
# Files that newer releases of transformers wrote repeat the number of experts.
_SPARSE = _DEEPSEEK.reads | {"index_topk", "layer_types", "num_experts"}
_QWEN3_NEXT = frozenset({"linear_num_key_heads", "layer_types", "num_experts"})
_LLAMA4 = _Family(_llama4, frozenset({"attention_chunk_size", "layer_types", "num_local_experts"}))

_FAMILIES = {
    "opt": _Family(opt),
    "llama": _Family(_mistral, _WINDOWS),
    "mistral": _Family(_mistral, _WINDOWS),
    "phi3": _Family(_mistral, _WINDOWS),
    "qwen2": _Family(_qwen2, _WINDOWS),
    "qwen3": _Family(_qwen3, _WINDOWS),
    "gpt2": _Family(gpt2),
    "gpt_bigcode": _Family(gpt_bigcode),
    "falcon": _Family(falcon),
    "gemma2": _Family(_gemma2, _WINDOWS),
    "gemma3": _Family(_gemma3, _WINDOWS),
    "gemma3_text": _Family(_gemma3, _WINDOWS),
    "gemma4_text": _Family(_gemma4, _GEMMA4),
    "mixtral": _Family(_mixtral, _WINDOWS | {"num_local_experts"}),
    "qwen3_moe": _Family(_qwen3_moe, _WINDOWS | {"num_experts"}),
    "qwen3_vl_text": _Family(_qwen3, _WINDOWS),
    "qwen3_vl_moe_text": _Family(_qwen3_moe, _WINDOWS | {"num_experts"}),
    "gpt_oss": _Family(_gpt_oss, _WINDOWS | {"num_local_experts"}),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "deepseek_v32": _Family(_sparse, _SPARSE),
    "glm_moe_dsa": _Family(_glm_moe_dsa, _SPARSE),
    "glm4_moe": _Family(_glm4_moe, frozenset({"n_routed_experts"})),
    "mimo": _Family(_qwen2, _WINDOWS),
    "mimo_v2_flash": _Family(
        _mimo_v2, frozenset({"sliding_window", "hybrid_layer_pattern", "n_routed_experts", "attention_chunk_size"})
    ),
    "nemotron-nas": _Family(_nemotron_nas, frozenset({"block_configs"})),
    "minimax_m2": _Family(_minimax_m2, frozenset({"num_local_experts"})),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "qwen3_next": _Family(_qwen3_next, _QWEN3_NEXT),
    "qwen3_5": _Family(_qwen3_5, _QWEN3_NEXT),
    "qwen3_5_text": _Family(_qwen3_5, _QWEN3_NEXT),
    "qwen3_5_moe": _Family(_qwen3_5_moe, _QWEN3_NEXT),
    "qwen3_5_moe_text": _Family(_qwen3_5_moe, _QWEN3_NEXT),
    "nemotron_h": _Family(_nemotron_h, frozenset({"ssm_state_size", "n_routed_experts", "moe_latent_size"})),
    "granitemoehybrid": _Family(_granite_hybrid, frozenset({"mamba_d_state", "layer_types", "num_local_experts"})),
    "bamba": _Family(_bamba, frozenset({"mamba_d_state"})),
    "jamba": _Family(_jamba, frozenset({"mamba_d_state", "num_experts"})),
    "kimi_linear": _Family(_kimi_linear, frozenset({"linear_attn_config", "kv_lora_rank", "num_experts"})),
    "mamba2": _Family(_mamba2_alone, frozenset({"state_size"})),
}

# Known families with states that this package does not support.
_REFUSED = {
    "falcon_h1": "has attention and Mamba side by side in every layer",
    "zamba2": "shares one block of attention among its layers",
    "minimax_m3": "attends to blocks that an index of its own chooses",
    "minimax_m3_vl": "attends to blocks that an index of its own chooses",
    "deepseek_v4": "attends to compressed tokens, in caches of several block sizes",
    "step3p7": "has gates for each head and MLPs of several widths",
    "minimax_text_01": "has lightning attention",
    "minimax": "has lightning attention",
}
