"""Starting the ranks that a configuration asks for."""

from __future__ import annotations

import tempfile
from pathlib import Path

from confsim.specs import KvConfig
from executor.config import Device, Layout, ModelConfig
from executor.joined import joined_team
from executor.message import RankConfig
from executor.team import ProcessTeam, Team, ThreadTeam


def make_team(model: ModelConfig, layout: Layout, device: Device, kv: KvConfig) -> Team:
    """The ranks that a device configuration asks for."""
    if device.launcher == "auto":
        team = joined_team(model, layout, device, kv)
        if team is not None:
            return team
    if device.launcher == "threads":
        return ThreadTeam([RankConfig(rank, model, layout, device, kv, "") for rank in range(layout.ranks)])
    folder = tempfile.mkdtemp(prefix="confsim-ranks-")
    store = str(Path(folder) / "store")
    configs = [RankConfig(rank, model, layout, device, kv, store) for rank in range(layout.ranks)]
    return ProcessTeam(configs, folder, device.start_timeout_s)
