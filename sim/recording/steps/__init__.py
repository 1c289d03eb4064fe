"""Recorded steps of a small run: every table, slot and queue in each step."""

from __future__ import annotations

from .recording import Computed, Held, Step, StepRecording, record

__all__ = ["Computed", "Held", "Step", "StepRecording", "record"]
