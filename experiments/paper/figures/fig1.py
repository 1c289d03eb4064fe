"""Fig 1, right: decode throughput by batch size, OPT-13B on an A100-40GB.

The paper's step cost, 25.7 ms and 0.42 ms a sequence, is read off this figure. All its values are therefore fitted, and
their errors only show how well a straight line fits. The values of the roofline (data sheets) and of the GPU's profile
(published kernel times) are predicted: neither uses step times of a server. The figure does not give the length of its
sequences; here they are half way through ShareGPT's mean request.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....sim.cost import cost
from ....sim.cost.paper import MS_PER_DECODE
from ....sim.spec import gpu, model
from ....sim.types.ticks import PER_SECOND
from ..comparison import Payload
from ..constants import STEP_LINE
from ..published import paper_figures, usual_length
from ..rows import Row, accuracy, value_row

FIGURE, MODEL, GPU = "fig1", "opt-13b", "a100-40gb"
METRIC = "decode_tokens_per_s"
#: Label of each cost, and whether it is read off this figure.
SERIES = {"paper": ("the paper's step cost", "fitted"), "fitted": ("profile of the GPU", "predicted")} | {
    "roofline": ("roofline", "predicted")
}


def fig1() -> Payload:
    """The figure as a document."""
    rows = list(_rows())
    fitted = [row for row in rows if row["kind"] == "fitted"]
    off = max(abs(row["error"]) / row["published"] for row in fitted)
    return {
        "figure": FIGURE,
        "workload": f"{MODEL} on one {GPU}, steps that only decode, {usual_length()} tokens a sequence",
        "x_is": "sequences in a batch",
        "rows": rows,
        "constants": list(STEP_LINE),
        "findings": [
            accuracy((row for row in rows if row["series"] == name), f"Throughput by the {name}")
            for name, kind in SERIES.values()
            if kind == "predicted"
        ],
        "basis": [
            "Step cost: 25.7 ms + 0.42 ms a sequence, read off this figure; the line is within"
            f" {off:.1%} of all its points."
        ],
        "remarks": [_reading_text()],
    }


def _rows() -> Iterator[Row]:
    published = paper_figures()["fig1_right"]
    points = list(zip(published["batch"], published["tokens_per_s"], strict=True))
    for name, (series, kind) in SERIES.items():
        step_cost = cost(name, model(MODEL), gpu(GPU))
        for batch, tokens_per_s in points:
            found = batch * PER_SECOND / step_cost.step_ticks(batch, batch * usual_length(), 0, 0)
            yield value_row(
                series, METRIC, tokens_per_s, [found], x=batch, how=published["how"], kind=kind, step_1pct=found / 101
            )


def _reading_text() -> str:
    """The figure's slope beside the lower bound of attention."""
    shape, card = model(MODEL), gpu(GPU)
    reading_ms = usual_length() * shape.slot_bytes() / card.memory_bytes_per_s * 1000
    return (
        f"0.42 ms a sequence is {MS_PER_DECODE / reading_ms:.1f} times what the A100's memory takes to read the keys"
        f" and values of {usual_length()} tokens ({reading_ms:.3f} ms): either this kernel ran at"
        f" {reading_ms / MS_PER_DECODE:.0%} of the bandwidth, or the figure's sequences are"
        f" {usual_length() * MS_PER_DECODE / reading_ms:,.0f} tokens long. The other two costs, which assume good"
        " kernels and these lengths, are too fast accordingly, and more so the larger the batch."
    )
