"""CSV files of single traces whose columns need new names, and little more.

Azure's LLM inference traces of 2023 and 2024 (Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md and 2024.md):

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:15:46.6805900,374,44
    2024-05-10 00:00:00.009930+00:00,2162,5

The multimodal trace of 2025 also has the column NumImages. It is not read, because ContextTokens includes the images.

BurstGPT (HPMLL/BurstGPT, README.md). ``Timestamp`` is in seconds from the first midnight. ``Response tokens`` of 0 marks a failed
request, which is left out. Requests with the same ``Session ID`` are turns of one session:

    Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
    Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type

Processed traces of Vidur, Sarathi-Serve and Etalon (microsoft/vidur, data/processed_traces); some have times, in seconds:

    arrived_at,num_prefill_tokens,num_decode_tokens
    num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio

Traces of Splitwise's simulator (Mutinifni/splitwise-sim, simulator/trace.py and traces/); times are seconds:

    request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size
"""

from __future__ import annotations

from ..parsing.form import SECONDS, SESSION, ZERO, Form, lengths
from ..parsing.jsonl_format import sessions
from ..parsing.table import Table

_SESSION = "Session ID"


def _renamed(table: Table) -> Table:
    session = table.columns.get(_SESSION)
    return table if session is None else table.having(**{SESSION: session})


_FORMS = (
    Form("Azure LLM inference", {"TIMESTAMP": SECONDS}, lengths("ContextTokens", "GeneratedTokens"), content={}),
    Form(
        "BurstGPT",
        {"Timestamp": SECONDS},
        lengths("Request tokens", "Response tokens"),
        content={_SESSION: sessions},
        preparer=lambda: _renamed,
        failures=ZERO,
    ),
    Form("Vidur", {"arrived_at": SECONDS}, lengths("num_prefill_tokens", "num_decode_tokens"), content={}),
    Form("Splitwise", {"arrival_timestamp": SECONDS}, lengths("prompt_size", "token_size"), content={}),
)
#: By their titles, which signatures name (``sim.types.signatures``).
TABLES = {form.title: form for form in _FORMS}
