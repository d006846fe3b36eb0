"""One file per placement; the file's name is its config value."""
