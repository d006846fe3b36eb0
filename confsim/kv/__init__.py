"""KV: pools, stores and what memory they have."""
