"""What a run came to: targets, metrics, summary, result."""
