"""One module a subcommand: `command(cfg)` runs it in the folder that Hydra made for it."""
