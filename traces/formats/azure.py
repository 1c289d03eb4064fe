"""Azure's LLM inference traces of 2023 and 2024, CSV.

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:15:46.6805900,374,44
    2024-05-10 00:00:00.009930+00:00,2162,5

The multimodal trace of 2025 also has the column NumImages. It is not read, because ContextTokens includes the images.

Source: Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md and AzureLLMInferenceDataset2024.md.
"""

from ..parsing.form import SECONDS, Form, lengths

AZURE = Form(
    "Azure LLM inference",
    {"TIMESTAMP": SECONDS},
    lengths("ContextTokens", "GeneratedTokens"),
    content={},
)
