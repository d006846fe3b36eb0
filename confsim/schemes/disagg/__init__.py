"""The two sides of prefill-decode disaggregation."""
