"""The installed vLLM without a device: its engine core, and a memory that reads its block pool."""
