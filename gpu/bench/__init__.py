"""Benchmark of decode attention against torch and FlashInfer."""
