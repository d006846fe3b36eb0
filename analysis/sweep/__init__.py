"""Sweeps: many runs, on one machine or many, of which none is lost and none is repeated."""
