"""Synthetic traces from published statistics."""

from traces.synthesis.presets import FixedTrace, SyntheticTrace
from traces.synthesis.tables import PRESETS

__all__ = ["PRESETS", "FixedTrace", "SyntheticTrace"]
