"""Simulation against measurement: other people's engines (`source=silicon`), and our own executor."""
