"""One file per order; the file's name is its config value."""
