"""`confsim fetch`: public traces into the user's cache."""

from __future__ import annotations

from omegaconf import DictConfig

from confsim.errors import InputError
from confsim.setup.configuration import did_you_mean
from traces.catalog import CATALOG, fetch, fetch_with_bar


def command(cfg: DictConfig) -> None:
    """Fetch every trace in `cfg.names`, and say where each lies and how to replay it.

    Raises:
        InputError: for an unknown name, or if it cannot be had.
    """
    if not cfg.names:
        raise InputError(f"names=[]: name at least one of {', '.join(CATALOG)}")
    unknown = [str(name) for name in cfg.names if name not in CATALOG]
    if unknown:
        raise InputError(
            f"{', '.join(unknown)}: unknown, use {', '.join(CATALOG)}{did_you_mean(unknown[0], [*CATALOG])}"
        )
    for name in cfg.names:
        if cfg.quiet:
            fetch(str(name), base_url=cfg.url)
            continue
        found = fetch_with_bar(str(name), cfg.url)
        state = "already there" if found.cached else "fetched"
        print(f"{name}: {state}, {found.records:,} requests, {found.path}")
        if not found.known:
            print(f"warning: {name} is not the file that was published when this version was made (sha256 differs)")
        print(f"  {found.usage}")
