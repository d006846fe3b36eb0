"""The experiments of `docs/experiments.md`: one module each, with the cells it runs and the section it writes."""
