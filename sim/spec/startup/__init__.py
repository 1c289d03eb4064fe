"""The memory of a GPU as vLLM divides it at its start, one module for each part."""
