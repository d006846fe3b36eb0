"""One file per dispatch; the file's name is its config value."""
