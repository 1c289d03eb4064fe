"""What a reader of the page may try first: questions that a click on a slider answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .axis import Axis


def questions(axes: Sequence[Axis], policies: Sequence[str], max_model_len: int) -> list[dict[str, Any]]:
    """Those that the axes and policies of a page can answer.

    Each has the ``question``, what to ``look`` at, and the places of sliders ``before`` and ``after`` the click, by name;
    sliders that it does not name go to their start.
    """
    return [*_asked({axis.name: axis for axis in axes}, policies, max_model_len)]


def _asked(axes: dict[str, Axis], policies: Sequence[str], max_model_len: int) -> Iterator[dict[str, Any]]:
    if "max_tokens" in axes and "orca" in policies:
        last = len(axes["max_tokens"].values) - 1
        yield _question(
            "Double max_tokens: what happens to Orca?",
            "Orca keeps room for the longest answer that a client declares. Fewer requests fit, though every answer is as long as"
            " before. vLLM does not read max_tokens: its run is the same.",
            {"max_tokens": 0},
            {"max_tokens": 1},
        )
        if axes["max_tokens"].values[last] == str(max_model_len):
            yield _question(
                "Why does Orca (Max) waste?",
                "Here Orca reserves as much as the model can take, as Orca (Max) does. The orange slots are for words that are never"
                " written, and requests wait outside of a pool that hardly holds tokens.",
                {"max_tokens": 0},
                {"max_tokens": last},
            )
    if "block_size" in axes:
        yield _question(
            "What does a larger block do?",
            "The last block of a request is full only at its end. The larger a block, the more of it waits for tokens, or is never"
            " filled, and the sooner a pool is full.",
            {"block_size": axes["block_size"].start},
            {"block_size": len(axes["block_size"].values) - 1},
        )
    if "request_rate" in axes and any(name.startswith("vllm") for name in policies):
        most: dict[str, int] = {
            name: len(axes[name].values) - 1 for name in ("request_rate", "output_len") if name in axes
        }
        yield _question(
            "When does vLLM preempt?",
            "vLLM admits what fits now, and answers grow. When no block is free, it takes the blocks of the latest request"
            " and computes that request again later.",
            {},
            most,
        )


def _question(question: str, look: str, before: dict[str, int], after: dict[str, int]) -> dict[str, Any]:
    return {"question": question, "look": look, "before": before, "after": after}
