"""Set-up: configuration, caches, the compiled build, provenance."""
