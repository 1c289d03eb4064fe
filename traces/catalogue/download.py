"""Public traces, downloaded from their publishers.

The catalogue stores a SHA-256 of the lengths and arrivals of each trace's requests, as in ``Workload.sha256``. The hash
does not depend on the file format, and it verifies that the downloaded requests are the published ones. A trace without
a hash is marked as unverified.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from ...sim.types.errors import MissingExtra, SettingError, UserError, install
from ...sim.workload.workload import Workload
from ..readers.readers import read
from ..types.trace import Trace

_RAW = "https://raw.githubusercontent.com"
_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class Public:
    """A published trace.

    Attributes:
        name: Its name for ``get``.
        description: Its contents in a few words.
        urls: URLs of its files: first the trace, then the files that belong beside it.
        licence: Licence of the data.
        requests_sha256: Hash of its requests; None if the trace is unverified.
    """

    name: str
    description: str
    urls: tuple[str, ...]
    licence: str
    requests_sha256: str | None = None


_AZURE = f"{_RAW}/Azure/AzurePublicDataset/790921015d50dd6aae7f7e47f39ba0e235ad6b08/data"
_AZURE_2024 = "https://github.com/Azure/AzurePublicDataset/releases/download/dataset-llm-2024"
_BAILIAN = f"{_RAW}/alibaba-edu/qwen-bailian-usagetraces-anon/0b4273a1d8a83935b9d9356e78f95c31f2ac64cf"
_BURSTGPT = "https://github.com/HPMLL/BurstGPT/releases/download/v1.1"
_MOONCAKE = f"{_RAW}/kvcache-ai/Mooncake/a2a4b18ac537fd798d50e6e9f57031ce86419a37/FAST25-release/traces"
_RAGPULSE = f"{_RAW}/flashserve/RAGPulse/99a62769a91d5ebd17a2d4ddbbc88c1d16edc0e8/data"
_VIDUR = f"{_RAW}/microsoft/vidur/6d98aa8f71696520acc603d87439e77cc78160a7/data/processed_traces"
PUBLIC = (
    Public(
        "azure2023-conv",
        "One hour of conversations with a service of Azure, 2023; cite Splitwise (ISCA'24)",
        (f"{_AZURE}/AzureLLMInferenceTrace_conv.csv",),
        "CC-BY-4.0",
        "766241eb9391092e8e4352761ce2654ecd090bfe979e5e194bb55440d8432c58",
    ),
    Public(
        "azure2023-code",
        "One hour of a coding service of Azure, 2023, very bursty; cite Splitwise (ISCA'24)",
        (f"{_AZURE}/AzureLLMInferenceTrace_code.csv",),
        "CC-BY-4.0",
        "22688c802eed36aed1ab4bd1d53cc9dc2675e6bc6d02bc12b5d0a3f516a7a1a9",
    ),
    Public(
        "azure2024-conv",
        "A week of conversations, 2024, 27 million requests; cite DynamoLLM",
        (f"{_AZURE_2024}/AzureLLMInferenceTrace_conv_1week.csv",),
        "CC-BY-4.0",
    ),
    Public(
        "azure2024-code",
        "A week of a coding service, 2024, 17 million requests; cite DynamoLLM",
        (f"{_AZURE_2024}/AzureLLMInferenceTrace_code_1week.csv",),
        "CC-BY-4.0",
    ),
    Public(
        "burstgpt",
        "Two months of requests to ChatGPT and GPT-4 through Azure, 1.4 million, failures among them",
        (f"{_BURSTGPT}/BurstGPT_1.csv",),
        "see HPMLL/BurstGPT",
    ),
    Public(
        "mooncake-conversation",
        "An hour of Kimi's conversations, with hash ids of 512 tokens; FAST'25",
        (f"{_MOONCAKE}/conversation_trace.jsonl",),
        "Apache-2.0",
        "125d8a2a6058a18b52fb28fa8d172f7abea2bd9f22c8d89213e2147eafa2979d",
    ),
    Public(
        "bailian-thinking",
        "Requests to a thinking Qwen on Bailian, with hash ids of 16 tokens",
        (f"{_BAILIAN}/qwen_thinking_blksz_16.jsonl",),
        "Apache-2.0",
    ),
    Public(
        "bailian-coder",
        "Requests to a coding Qwen on Bailian, with hash ids of 16 tokens",
        (f"{_BAILIAN}/qwen_coder_blksz_16.jsonl",),
        "Apache-2.0",
    ),
    Public(
        "ragpulse",
        "A week of retrieval-augmented questions at a university, with their chunks",
        tuple(
            f"{_RAGPULSE}/{name}.jsonl"
            for name in ("0_trace", "1_sys_prompt", "2_passages", "3_history", "4_user_input", "5_web_search")
        ),
        "MIT",
        "d9dd46080458ff2631758624b33aafa7d73fbb8f6112f9f3179ee5bf2c95bd3c",
    ),
    Public(
        "vidur-arxiv",
        "Lengths of summaries of arXiv papers: long prompts, short outputs",
        (f"{_VIDUR}/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",),
        "MIT",
        "d0658ec214df80f57d71210ec8e9b8763a9834071a188389861a4f16e3a5965d",
    ),
)


def public(name: str) -> Public:
    """The public trace with this name.

    Raises:
        SettingError: No trace has this name.
    """
    for entry in PUBLIC:
        if entry.name == name:
            return entry
    raise SettingError("name", name, f"choose one of {', '.join(entry.name for entry in PUBLIC)}")


def requests_sha256(trace: Trace) -> str:
    """Hash of the lengths and arrivals of a trace; without times, all arrivals count as 0."""
    arrivals = np.zeros(len(trace), dtype=np.int64) if trace.arrival_ticks is None else trace.arrival_ticks
    return Workload(trace.name, arrivals, trace.prompt_tokens, trace.output_tokens).sha256()


def fetch(entry: Public, folder: str | PathLike[str]) -> Path:
    """Download a public trace into a folder, unless the folder already has it, and verify its hash, if it has one.

    Returns:
        Path of the trace.

    Raises:
        MissingExtra: The package ``pooch`` is not installed.
        UserError: The network is unreachable, the server does not have the file, or the file has other requests.
    """
    first, *beside = [_file(url, Path(folder)) for url in entry.urls]
    if entry.requests_sha256 is None:
        return first
    found = requests_sha256(read(first))
    if found != entry.requests_sha256:
        remedy = f"not {entry.requests_sha256}; delete it, and fetch it again"
        raise UserError(f"{first}: its requests have the SHA-256 {found}, {remedy}")
    return first


def _file(url: str, folder: Path) -> Path:
    try:
        import pooch
        import requests
    except ImportError:
        text = f"traces get needs the package pooch: {install('traces')}, or fetch the file by hand from"
        raise MissingExtra(f"{text} {url}") from None
    # At its default level pooch logs each download to standard error, with a checksum to paste into the code.
    pooch.get_logger().setLevel("ERROR")
    name, downloader = url.rpartition("/")[2], pooch.HTTPDownloader(timeout=_TIMEOUT_S)
    try:
        return Path(pooch.retrieve(url, known_hash=None, fname=name, path=folder, downloader=downloader))
    except requests.HTTPError as error:
        status = None if error.response is None else error.response.status_code
        raise UserError(f"{url}: the origin answers {status}; look there for where it has gone") from None
    except (requests.RequestException, OSError) as error:
        kind = type(error).__name__
        remedy = "is there a network here? Fetch it elsewhere, and give the file to --trace"
        raise UserError(f"{url}: cannot be fetched ({kind}); {remedy}") from None
