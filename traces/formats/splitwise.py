"""Traces of Splitwise's simulator, CSV; times are seconds.

    request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size

Source: Mutinifni/splitwise-sim, simulator/trace.py and traces/.
"""

from ..parsing.form import SECONDS, Form, lengths

SPLITWISE = Form(
    "Splitwise",
    {"arrival_timestamp": SECONDS},
    lengths("prompt_size", "token_size"),
    content={},
)
