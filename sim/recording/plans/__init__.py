"""Recorded plans: the block tables of a run step by step, for a replay on real memory."""

from __future__ import annotations

from .recorded import SCHEMA_VERSION, Plan, PlanStep, load
from .recording import PlanRecording, record

__all__ = ["SCHEMA_VERSION", "Plan", "PlanRecording", "PlanStep", "load", "record"]
