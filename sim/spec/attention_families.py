"""Families of models in which each layer keeps K and V or a latent vector: a function for each converts a ``config.json``.

Defaults are those of the family's configuration class in Hugging Face transformers, as a file leaves out
defaults. Parameters are counted as in the checkpoint. Families with LayerNorm and an MLP of two matrices come first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..types.errors import SettingError
from .attention import FULL, Heads, Indexer, Latent, Span
from .config import Config, count, num_layers, numbers, shape, spans, state_spans
from .config import shape as read_shape
from .shape import Experts, ModelSpec


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


def sliding_windows(
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


def llama(
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


def mistral(config: Config, name: str, **features: Any) -> ModelSpec:
    """Mistral, Llama, Granite and Phi 3: all layers may have a window."""
    return llama(config, name, spans=sliding_windows(config, name), **features)


def mixtral(config: Config, name: str) -> ModelSpec:
    """Mixtral."""
    return mistral(config, name, experts=read_experts(config, name, "num_local_experts", "intermediate_size"))


def _qwen(config: Config, name: str, **features: Any) -> ModelSpec:
    first = count(config, name, "max_window_layers", 28)
    windows = sliding_windows(config, name, lambda layer: layer >= first, 4096, switched_on=False)
    return llama(config, name, spans=windows, **features)


def qwen2(config: Config, name: str) -> ModelSpec:
    """Qwen 2 and 2.5."""
    return _qwen(config, name, qkv_bias=True, output_bias=False, mlp_bias=False)


def qwen3(config: Config, name: str) -> ModelSpec:
    """Qwen 3."""
    return _qwen(config, name, qk_norm=True)


def qwen3_moe(config: Config, name: str) -> ModelSpec:
    """Qwen 3 with experts."""
    dense, step = numbers(config, name, "mlp_only_layers"), count(config, name, "decoder_sparse_step", 1)
    experts = read_experts(
        config,
        name,
        "num_experts",
        "moe_intermediate_size",
        lambda layer: layer not in dense and (layer + 1) % step == 0,
    )
    return _qwen(config, name, qk_norm=True, experts=experts)


def gemma2(config: Config, name: str) -> ModelSpec:
    """Gemma 2."""
    return _gemma(config, name, spans=sliding_windows(config, name, lambda layer: layer % 2 == 0, 4096))


def gemma3(config: Config, name: str) -> ModelSpec:
    """Gemma 3."""
    # transformers renamed the key when it added layer_types.
    every = count(config, name, "sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    windows = sliding_windows(config, name, lambda layer: (layer + 1) % every != 0, 4096)
    defaults = {
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    return _gemma(defaults | dict(config), name, spans=windows, qk_norm=True)


def _gemma(config: Config, name: str, **features: Any) -> ModelSpec:
    tied = bool(config.get("tie_word_embeddings", True))
    # Norms before and after attention, and before and after the MLP.
    return llama(config, name, head_dim=256, tied_embeddings=tied, layer_norms=4, **features)


def gemma4(config: Config, name: str) -> ModelSpec:
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
    return llama(
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


def mimo_v2(config: Config, name: str) -> ModelSpec:
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
    return llama(
        config,
        name,
        output_bias=False,
        spans=tuple(Span("sliding", window) if local else FULL for local in pattern),
        v_head_dim=count(config, name, "v_head_dim", head_dim),
        window_heads=local,
        attention_sinks=bool(config.get("add_swa_attention_sink_bias")),
        experts=read_experts(
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


def nemotron_nas(config: Config, name: str) -> ModelSpec:
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
    return llama(
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


def gpt_oss(config: Config, name: str) -> ModelSpec:
    """gpt-oss."""
    experts = read_experts(config, name, "num_local_experts", "intermediate_size", router_bias=True, bias=True)
    return llama(
        config,
        name,
        spans=sliding_windows(config, name, lambda layer: layer % 2 == 0, 128),
        experts=experts,
        attention_sinks=True,
        qkv_bias=True,
        output_bias=True,
    )


def llama4(config: Config, name: str) -> ModelSpec:
    """Llama 4."""
    layers = num_layers(config, name)
    every = count(config, name, "no_rope_layer_interval", 4)
    # Layers without rotary positions attend to all tokens, other layers to their chunk.
    rotary = numbers(config, name, "no_rope_layers") or [(layer + 1) % every for layer in range(layers)]
    if len(rotary) != layers:
        raise SettingError("no_rope_layers", rotary, f"must have one number for each of the {layers} layers of {name}")
    chunk = count(config, name, "attention_chunk_size", 8192)
    step = count(config, name, "interleave_moe_layer_step", 1)
    routed = numbers(config, name, "moe_layers") or range(step - 1, layers, step)
    experts = read_experts(
        config,
        name,
        "num_local_experts",
        "intermediate_size",
        lambda layer: layer in routed,
        default_used=1,
        shared_size=count(config, name, "intermediate_size"),
    )
    return llama(
        config,
        name,
        intermediate_size=count(config, name, "intermediate_size_mlp"),
        spans=spans(config, name, layers, lambda layer: bool(rotary[layer]), None, chunk),
        experts=experts,
    )


def deepseek(config: Config, name: str) -> ModelSpec:
    """DeepSeek V2 and V3, Kimi K2; the text model of DeepSeek-OCR has K and V."""
    if config.get("use_mla") is False:
        return llama(given(config), name, experts=_deepseek_experts(config, name))
    heads = count(config, name, "num_attention_heads")
    latent = Latent(
        kv_rank=count(config, name, "kv_lora_rank"),
        rope_dim=count(config, name, "qk_rope_head_dim", least=0),
        nope_dim=count(config, name, "qk_nope_head_dim"),
        v_dim=count(config, name, "v_head_dim"),
        q_rank=0 if config.get("q_lora_rank") is None else count(config, name, "q_lora_rank"),
    )
    # The file repeats the number of query heads here, although there are no KV heads.
    heads_alike = {**config, "num_key_value_heads": heads, "head_dim": latent.nope_dim + latent.rope_dim}
    return llama(heads_alike, name, latent=latent, experts=_deepseek_experts(config, name))


def sparse(config: Config, name: str, **features: Any) -> ModelSpec:
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
    return replace(deepseek(config, name), indexer=indexer)


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


def glm_moe_dsa(config: Config, name: str) -> ModelSpec:
    """GLM 5 to 5.3."""
    return sparse({"topk_method": "noaux_tc", **config}, name, fp8_on_b200=True)


def _deepseek_experts(config: Config, name: str) -> Experts | None:
    if config.get("n_routed_experts") is None:
        return None
    dense = count(config, name, "first_k_dense_replace", 0, least=0)
    step, width = count(config, name, "moe_layer_freq", 1), count(config, name, "moe_intermediate_size")
    return read_experts(
        config,
        name,
        "n_routed_experts",
        "moe_intermediate_size",
        lambda layer: layer >= dense and layer % step == 0,
        shared_size=count(config, name, "n_shared_experts", 0, least=0) * width,
        # V3 adds a bias for each expert to the router's scores.
        router_bias=config.get("topk_method") == "noaux_tc",
    )


def glm4_moe(config: Config, name: str) -> ModelSpec:
    """GLM 4.5 to 4.7: grouped heads, and the experts of DeepSeek V3."""
    experts = _deepseek_experts({"topk_method": "noaux_tc", **config}, name)
    biased = bool(config.get("attention_bias"))
    return llama(
        config, name, qk_norm=bool(config.get("use_qk_norm")), output_bias=False, qkv_bias=biased, experts=experts
    )


def glm4_moe_lite(config: Config, name: str) -> ModelSpec:
    """GLM 4.7 Flash: latent attention, and the experts of DeepSeek V3 after the first layer."""
    return deepseek({"topk_method": "noaux_tc", "first_k_dense_replace": 1, **given(config)}, name)


def minimax_m2(config: Config, name: str) -> ModelSpec:
    """MiniMax M2 to M2.7: every layer has full attention."""
    biased = bool(config.get("use_routing_bias"))
    experts = read_experts(config, name, "num_local_experts", "intermediate_size", router_bias=biased)
    return llama(config, name, qk_norm=bool(config.get("use_qk_norm")), experts=experts)


def minimax_m3(config: Config, name: str) -> ModelSpec:
    """MiniMax M3: layers with an indexer attend to the blocks of tokens that it chooses (``vllm/models/minimax_m3``)."""
    layers, width = num_layers(config, name), count(config, name, "intermediate_size")
    sparse = config.get("sparse_attention_config")
    if not isinstance(sparse, dict):
        raise SettingError("sparse_attention_config", sparse, f"must describe the indexer of {name}, as vLLM reads it")
    routed, chosen = numbers(config, name, "moe_layer_freq"), numbers(sparse, name, "sparse_attention_freq")
    for key, listed in (("moe_layer_freq", routed), ("sparse_attention_config.sparse_attention_freq", chosen)):
        if len(listed) != layers:
            raise SettingError(key, listed, f"must have one number for each of the {layers} layers of {name}")
    kv_heads, block = count(config, name, "num_key_value_heads"), count(sparse, name, "sparse_block_size")
    for key, found, value in (
        # vLLM takes the number of KV heads, and the width of an expert, in place of the first two.
        ("sparse_attention_config.sparse_num_index_heads", sparse.get("sparse_num_index_heads"), kv_heads),
        ("shared_intermediate_size", config.get("shared_intermediate_size", width), width),
        ("attention_output_gate", bool(config.get("attention_output_gate")), False),
    ):
        if found != value:
            raise SettingError(key, found, f"is not understood in {name}; MiniMax M3 has {value}")
    experts = read_experts(
        config,
        name,
        "num_local_experts",
        "intermediate_size",
        lambda layer: bool(routed[layer]),
        shared_size=count(config, name, "n_shared_experts", 0, least=0) * width,
        router_bias=bool(config.get("use_routing_bias")),
    )
    indexer = Indexer(
        heads=kv_heads,
        head_dim=count(sparse, name, "sparse_index_dim"),
        top_k=count(sparse, name, "sparse_topk_blocks") * block,
        layers=tuple(layer for layer, is_sparse in enumerate(chosen) if is_sparse),
        block_tokens=block,
    )
    dense = count(config, name, "dense_intermediate_size")
    return llama(config, name, intermediate_size=dense, qk_norm=True, experts=experts, indexer=indexer)


def step(config: Config, name: str) -> ModelSpec:
    """Step 3.5 and 3.7 Flash: layers with a window have more query heads (``step3p5.py`` of vLLM)."""
    layers, other = num_layers(config, name), config.get("attention_other_setting")
    other = other if isinstance(other, dict) else {"num_attention_heads": config.get("num_sliding_attention_heads")}
    # Two generations of names; the kinds of further layers are those of layers for multi-token prediction.
    renamed = {
        "num_key_value_heads": config.get("num_attention_groups"),
        "n_routed_experts": config.get("moe_num_experts", config.get("num_experts")),
        "num_experts_per_tok": config.get("moe_top_k"),
    }
    config = {**config, **given(renamed)}
    kinds, routed = config.get("layer_types"), _step_experts(config, name)
    config["layer_types"] = kinds[:layers] if isinstance(kinds, list) else kinds
    heads, kv_heads = count(config, name, "num_attention_heads"), count(config, name, "num_key_value_heads")
    head_dim = count(config, name, "head_dim")
    experts = read_experts(
        config,
        name,
        "n_routed_experts",
        "moe_intermediate_size",
        lambda layer: layer in routed,
        shared_size=count(config, name, "share_expert_dim"),
        router_bias=bool(config.get("use_moe_router_bias")),
    )
    return llama(
        config,
        name,
        spans=sliding_windows(config, name),
        # vLLM takes the heads of the other layers where the file names none.
        window_heads=Heads(count(other, name, "num_attention_heads", heads), kv_heads, head_dim),
        qk_norm=True,
        output_bias=False,
        head_gates=bool(config.get("use_head_wise_attn_gate")),
        experts=experts,
    )


def _step_experts(config: Config, name: str) -> frozenset[int]:
    """The layers with experts, which the file lists as text, or else all but the first."""
    listed = config.get("moe_layers_enum")
    if listed is None:
        return frozenset(range(count(config, name, "first_k_dense_replace", 1, least=0), num_layers(config, name)))
    try:
        return frozenset(map(int, str(listed).split(",")))
    except ValueError:
        remedy = f"must list the layers with experts of {name}, such as '3,4,5'"
        raise SettingError("moe_layers_enum", listed, remedy) from None


def given(config: Config) -> dict[str, object]:
    """The keys without null values: null counts as absent."""
    return {key: value for key, value in config.items() if value is not None}


def read_experts(
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
