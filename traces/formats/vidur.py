"""Processed traces of Vidur, Sarathi-Serve and Etalon, CSV: lengths, and in some files times in seconds.

    arrived_at,num_prefill_tokens,num_decode_tokens
    num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio

Source: microsoft/vidur, data/processed_traces.
"""

from ..parsing.form import SECONDS, Form, lengths

VIDUR = Form(
    "Vidur",
    {"arrived_at": SECONDS},
    lengths("num_prefill_tokens", "num_decode_tokens"),
    content={},
)
