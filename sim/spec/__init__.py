"""Shapes of models and GPUs."""
