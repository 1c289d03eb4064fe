"""Weights of vision encoders and the tensors of their profile, from the ``vision_config`` of a ``config.json``.

vLLM loads the encoder of a multimodal model although no prompt has an image: on the first pipeline stage, in 16 bits. Ranks divide
its matrices (``--mm-encoder-tp-mode weights``, the default), but for the projection of patches and position tables. The encoder of
Gemma 4 is not divided: vLLM runs the one of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..types.errors import SettingError
from .config import Config, count

#: Tokens of the largest image of Qwen3-VL, Qwen3.5 and 3.6 (16,777,216 pixels of their preprocessor_config.json), and of the largest video of
#: GLM-5.3-Flash, from lines "Encoder cache will be initialized with a budget of ... tokens" of public logs.
_QWEN3_TOKENS, _GLM5_NEXT_TOKENS = 16_384, 32_242
#: Of the largest video of Qwen3-VL (25,165,824 pixels), and with the text that releases from 0.11 to 0.12 count beside it.
_QWEN3_VIDEO = (12_288, 153_600)


@dataclass(frozen=True, slots=True)
class Item:
    """The largest image or video of a prompt, with which vLLM profiles the encoder, and the encoder's tensors of it.

    Attributes:
        tokens: Tokens of the text model for it.
        patches: Patches of a token.
        pixels: Elements of a patch's pixels.
        hidden_size: Width of the encoder.
        mlp_width: Elements of the MLP's tensors of a patch, which ranks divide.
        output_size: Elements that the text model gets of a token.
        stacked_size: Of these, the elements that layers before the last compute (DeepStack).
        positions: Whether position embeddings of all patches are kept while the encoder runs.
        video: Tokens of the largest video, and with the text between its frames, for releases that keep outputs for both.
    """

    tokens: int
    patches: int
    pixels: int
    hidden_size: int
    mlp_width: int
    output_size: int
    stacked_size: int = 0
    positions: bool = True
    video: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Encoder:
    """The weights of a vision encoder and of its projection to the text model.

    Attributes:
        divided: Elements that tensor-parallel ranks divide.
        whole: Elements that every rank holds.
        is_known: Whether the encoder is supported; the weights of others are not counted.
        item: What it is profiled with; None is unknown.
        deep_stack: Layers of the text model that take an output of the encoder beside their input.
        layers, width: Its layers, and elements of each; None where the configuration has them by a name of its own.
    """

    divided: int = 0
    whole: int = 0
    is_known: bool = True
    item: Item | None = None
    deep_stack: int = 0
    layers: int | None = None
    width: int | None = None

    def params(self, tensor_parallel: int = 1) -> int:
        """Elements on each rank."""
        return self.divided // tensor_parallel + self.whole


def encoder_of(config: Config, name: str) -> Encoder | None:
    """The encoder that a configuration describes; None without one.

    Raises:
        SettingError: A key of a supported encoder is missing or is no whole number.
    """
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        return None
    # Kimi's own files leave the type out, and those of MiniMax M3 have the one of CLIP.
    kind = vision.get("model_type") or ("kimi_k25_vision" if "vt_hidden_size" in vision else None)
    if "img_token_compression_config" in vision:
        kind = "minimax_m3_vl_vision"
    elif config.get("model_type") in ("step3p5", "step3p7"):
        kind = "step3p5_vision"
    read = _ENCODERS.get(kind) if isinstance(kind, str) else None
    found = Encoder(is_known=False) if read is None else read(vision, config, name)
    layers, width = (_plain(vision, of) for of in ("num_hidden_layers", "hidden_size"))
    return replace(found, layers=layers, width=width)


def _plain(vision: dict[str, Any], key: str) -> int | None:
    """A number by the name that most configurations have, or Kimi's."""
    value = vision.get(key, vision.get(f"vt_{key}"))
    return value if isinstance(value, int) and value > 0 else None


def _block(hidden: int, width: int) -> tuple[int, int]:
    """Elements of the matrices of a transformer layer with their divided biases, and of its other biases."""
    return 4 * hidden * hidden + 2 * hidden * width + 3 * hidden + width, 2 * hidden


def _qwen3(vision: dict[str, Any], config: Config, name: str) -> Encoder:
    """Qwen3-VL, Qwen3.5 and 3.6: ``Qwen3_VisionTransformer`` of ``qwen3_vl.py``."""
    hidden, width = count(vision, name, "hidden_size"), count(vision, name, "intermediate_size")
    depth, output = count(vision, name, "depth"), count(vision, name, "out_hidden_size")
    patch = count(vision, name, "patch_size") ** 2 * count(vision, name, "temporal_patch_size", 2)
    pixels = patch * count(vision, name, "in_channels", 3)
    stacked = vision.get("deepstack_visual_indexes") or []
    if not isinstance(stacked, list):
        raise SettingError("deepstack_visual_indexes", stacked, f"must be a list of layers of the encoder of {name}")
    merged = hidden * count(vision, name, "spatial_merge_size", 2) ** 2
    divided, repeated = _block(hidden, width)
    # Each merger has two matrices, with a bias that ranks divide and one that they do not.
    mergers = 1 + len(stacked)
    whole = pixels * hidden + hidden + count(vision, name, "num_position_embeddings") * hidden
    whole += depth * (repeated + 4 * hidden) + mergers * output + 2 * hidden + 2 * len(stacked) * merged
    item = Item(
        tokens=_QWEN3_TOKENS,
        patches=merged // hidden,
        pixels=pixels,
        hidden_size=hidden,
        mlp_width=2 * width,
        output_size=mergers * output,
        stacked_size=len(stacked) * output,
        video=_QWEN3_VIDEO,
    )
    divided = depth * divided + mergers * (merged * merged + merged + merged * output)
    return Encoder(divided, whole, item=item, deep_stack=len(stacked))


def _kimi(vision: dict[str, Any], config: Config, name: str) -> Encoder:
    """Kimi K2.5 and 2.6: ``MoonViT3dPretrainedModel`` of ``kimi_k25_vit.py``; every rank holds the projector."""
    if (projector := vision.get("mm_projector_type", "patchmerger")) == "patchmergerv2":
        return _kimi_k3(vision, name)
    if projector != "patchmerger":
        raise SettingError("mm_projector_type", projector, f"is not understood in {name}; patchmerger is")
    hidden, width = count(vision, name, "vt_hidden_size"), count(vision, name, "vt_intermediate_size")
    depth, output = count(vision, name, "vt_num_hidden_layers"), count(vision, name, "text_hidden_size")
    places = count(vision, name, "init_pos_emb_height") * count(vision, name, "init_pos_emb_width")
    divided, repeated = _block(hidden, width)
    merged = 4 * hidden
    whole = 3 * count(vision, name, "patch_size") ** 2 * hidden + hidden + places * hidden
    whole += depth * (repeated + 4 * hidden) + 2 * hidden
    whole += 2 * hidden + merged * merged + merged + merged * output + output
    return Encoder(depth * divided, whole)


def _kimi_k3(vision: dict[str, Any], name: str) -> Encoder:
    """Kimi K3: the same without biases, with RMSNorm and heads of other widths."""
    biased = [key for key in ("attn_bias", "linear_bias", "patch_embed_proj_bias") if vision.get(key, True)]
    if biased or vision.get("norm_type") != "rmsnorm":
        key = biased[0] if biased else "norm_type"
        raise SettingError(
            key, vision.get(key), f"is not understood in {name}; the encoder of Kimi K3 has RMSNorm and no biases"
        )
    hidden, width = count(vision, name, "vt_hidden_size"), count(vision, name, "vt_intermediate_size")
    depth, output = count(vision, name, "vt_num_hidden_layers"), count(vision, name, "text_hidden_size")
    places = count(vision, name, "init_pos_emb_height") * count(vision, name, "init_pos_emb_width")
    merged = 4 * hidden
    whole = 3 * count(vision, name, "patch_size") ** 2 * hidden + places * hidden + (2 * depth + 1) * hidden
    whole += merged * merged + merged * output + output
    attention = 4 * hidden * count(vision, name, "qkv_hidden_size", hidden)
    return Encoder(depth * (attention + 2 * hidden * width), whole)


def _gemma4(vision: dict[str, Any], config: Config, name: str) -> Encoder:
    """Gemma 4: ``Gemma4VisionModel`` of transformers."""
    hidden, width = count(vision, name, "hidden_size"), count(vision, name, "intermediate_size")
    depth, head = count(vision, name, "num_hidden_layers"), count(vision, name, "head_dim")
    heads = count(vision, name, "num_attention_heads")
    kv_heads = count(vision, name, "num_key_value_heads", heads)
    matrices = 2 * hidden * (heads + kv_heads) * head + 3 * hidden * width
    whole = 3 * count(vision, name, "patch_size") ** 2 * hidden
    whole += 2 * count(vision, name, "position_embedding_size") * hidden
    whole += depth * (matrices + 4 * hidden + 2 * head) + hidden * count(config, name, "hidden_size")
    return Encoder(whole=whole)


def _siglip(vision: dict[str, Any], config: Config, name: str) -> Encoder:
    """Gemma 3: ``SiglipVisionModel`` without a head, and a projection that every rank holds (``gemma3_mm.py``)."""
    if config.get("model_type") != "gemma3_text" or vision.get("vision_use_head"):
        return Encoder(is_known=False)
    hidden, width = count(vision, name, "hidden_size"), count(vision, name, "intermediate_size")
    depth, patch = count(vision, name, "num_hidden_layers"), count(vision, name, "patch_size")
    divided, repeated = _block(hidden, width)
    places = (count(vision, name, "image_size") // patch) ** 2
    whole = (3 * patch**2 + 1 + places) * hidden + depth * (repeated + 4 * hidden) + 2 * hidden
    return Encoder(depth * divided, whole + hidden + hidden * count(config, name, "hidden_size"))


def _pixtral(vision: dict[str, Any], config: Config, name: str) -> Encoder:
    """Mistral Small 3.1 and 3.2: ``PixtralHFVisionModel`` of ``pixtral.py``, and the projector of ``mistral3.py``, of which every rank holds the merger of
    patches."""
    # Pixtral 12B has no such merger.
    if "spatial_merge_size" not in config:
        return Encoder(is_known=False)
    hidden, width = count(vision, name, "hidden_size"), count(vision, name, "intermediate_size")
    depth, output = count(vision, name, "num_hidden_layers"), count(config, name, "hidden_size")
    merged = hidden * count(config, name, "spatial_merge_size", 2) ** 2
    divided = depth * (4 * hidden * hidden + 3 * hidden * width) + hidden * output + output * output
    whole = (3 * count(vision, name, "patch_size") ** 2 + 1 + 2 * depth) * hidden
    return Encoder(divided, whole + hidden + merged * hidden)


def _minimax_m3(vision: dict[str, Any], config: Config, name: str) -> Encoder:
    """MiniMax M3: ``vision_tower.py`` in ``vllm/models/minimax_m3/common``."""
    hidden, width = count(vision, name, "hidden_size"), count(vision, name, "intermediate_size")
    depth, output = count(vision, name, "num_hidden_layers"), count(config, name, "hidden_size")
    projected, compression = count(config, name, "projector_hidden_size"), vision["img_token_compression_config"]
    compression = compression if isinstance(compression, dict) else {}
    pixels = count(vision, name, "num_channels", 3) * count(compression, name, "temporal_patch_size")
    merged = output * count(compression, name, "spatial_merge_size") ** 2
    divided, repeated = _block(hidden, width)
    # Two MLPs of two matrices, before and after patches are merged; the bias of the second is not divided.
    mlps = (hidden + merged) * projected + 2 * projected + 2 * projected * output
    whole = pixels * count(vision, name, "patch_size") ** 2 * hidden + 2 * hidden
    return Encoder(depth * divided + mlps, whole + depth * (repeated + 4 * hidden) + 2 * output)


def _step(vision: dict[str, Any], config: Config, name: str) -> Encoder:
    """Step 3.7: ``PerceptionEncoder`` of ``step_vl.py``, and a projector of 4 patches that ranks divide."""
    hidden, ratio = count(vision, name, "width"), vision.get("mlp_ratio")
    if not isinstance(ratio, (int, float)) or not 0 < ratio < 100:
        raise SettingError("mlp_ratio", ratio, f"must be a number above 0 in the encoder of {name}")
    depth, patch = count(vision, name, "layers"), count(vision, name, "patch_size")
    divided, repeated = _block(hidden, int(hidden * ratio))
    places = (count(vision, name, "image_size") // patch) ** 2
    # Patches, two convolutions of 3 x 3 that double the width, and of each layer two norms and two scales.
    whole = (3 * patch**2 + places) * hidden + 2 * hidden + 9 * (2 + 8) * hidden * hidden + 6 * hidden
    projector = 4 * hidden * count(config, name, "hidden_size")
    return Encoder(depth * divided + projector, whole + depth * (repeated + 6 * hidden))


def _glm5_next(vision: dict[str, Any], config: Config, name: str) -> Encoder:
    """GLM-5.3-Flash: ``Glm5NextVisionTransformer`` of ``vllm/models/glm5next/common/multimodal.py``, with gated MLPs and RMSNorm."""
    hidden, width = count(vision, name, "hidden_size"), count(vision, name, "intermediate_size")
    depth, output = count(vision, name, "depth"), count(vision, name, "out_hidden_size")
    pixels = count(vision, name, "patch_size") ** 2 * count(vision, name, "temporal_patch_size", 2) * 3
    merged = hidden * count(vision, name, "spatial_merge_size", 2) ** 2
    # Biases of Q, K and V, and of gate and up, are divided with the matrices.
    divided = depth * (4 * hidden * hidden + 3 * hidden * width + 3 * hidden + 2 * width)
    divided += output * output + 3 * output * count(vision, name, "projection_intermediate_size")
    norms = 2 * hidden + 2 * (hidden // count(vision, name, "num_heads"))
    whole = pixels * hidden + hidden + depth * (norms + 2 * hidden) + hidden + (merged + 1) * output + 2 * output
    item = Item(
        tokens=_GLM5_NEXT_TOKENS,
        patches=merged // hidden,
        pixels=pixels,
        hidden_size=hidden,
        mlp_width=3 * width,
        output_size=output,
        positions=False,
    )
    return Encoder(divided, whole, item=item)


_ENCODERS: dict[str, Callable[[dict[str, Any], Config, str], Encoder]] = {
    "qwen3_vl": _qwen3,
    "qwen3_vl_vision": _qwen3,
    "qwen3_vl_moe": _qwen3,
    "qwen3_vl_moe_vision": _qwen3,
    "qwen3_5": _qwen3,
    "qwen3_5_vision": _qwen3,
    "qwen3_5_moe": _qwen3,
    "qwen3_5_moe_vision": _qwen3,
    "kimi_k25_vision": _kimi,
    "minimax_m3_vl_vision": _minimax_m3,
    "step3p5_vision": _step,
    "glm5_next_vision": _glm5_next,
    "gemma4_vision": _gemma4,
    "siglip_vision_model": _siglip,
    "pixtral": _pixtral,
}
