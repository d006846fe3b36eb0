"""What a sweep can run: a simulation or a goodput search, given as a resolved configuration, into a folder."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from confsim.setup.cache import LatencyTables
from confsim.setup.provenance import digest
from traces.trace import Trace

KEPT_TRACES = 4  # of a worker, so that sweeps over traces stay small

Note = dict[str, Any]  # a result in a few numbers, for progress


class Shared:
    """What the runs of one worker share: traces and latency tables."""

    def __init__(self) -> None:
        self._traces: OrderedDict[str, Trace] = OrderedDict()
        self._tables: dict[str, LatencyTables] = {}

    def trace(self, config: Mapping[str, Any]) -> Trace:
        """The trace of a configuration."""
        from omegaconf import OmegaConf

        from confsim import api

        wanted = [config["trace"], config["seed"], config["kv"]["prefix_cache"], config["cluster"]["router"]]
        key = digest(wanted)
        if key not in self._traces:
            self._traces[key] = api.load_trace(OmegaConf.create(dict(config)))
            if len(self._traces) > KEPT_TRACES:
                self._traces.popitem(last=False)
        self._traces.move_to_end(key)
        return self._traces[key]

    def tables(self, config: Mapping[str, Any]) -> LatencyTables:
        """Latency tables that earlier runs or processes compiled for this configuration; counters start at 0."""
        key = digest([config["latency"], config["model"], config["gpu"]])
        if key not in self._tables:
            self._tables[key] = LatencyTables.of(config)
        return self._tables[key]


def simulate(config: Mapping[str, Any], folder: Path, shared: Shared) -> Note:
    """One replay."""
    from omegaconf import OmegaConf

    from analysis.pages.timeline import write_timeline
    from analysis.search.knee import attainment_band
    from confsim import api

    cfg = OmegaConf.create(dict(config))
    simulation = api.build(cfg, shared.trace(config))
    if config.get("cache", True):
        tables = shared.tables(config)
        simulation = replace(simulation, compiled=tables.fresh())
        result = simulation.run()
        tables.absorb(simulation.compiled)
    else:
        result = simulation.run()
    if config["output"].get("band") is True:
        result = replace(result, summary={**result.summary, "band": attainment_band(cfg, result)})
    result.write(folder)
    if config["output"]["timeline"] is True:
        write_timeline(folder / "timeline.json.gz", result, config["output"]["timeline_iterations"])
    summary = result.summary
    ttft = summary.get("ttft_s") or {}
    return {
        "attainment": summary["attainment"],
        "attained": summary["attained"],
        "rate": summary["offered_rate"],
        "ttft_p95_s": ttft.get("p95"),
    }


def goodput(config: Mapping[str, Any], folder: Path, shared: Shared) -> Note:
    """One search; it takes a single process, since the sweep's workers share the machine."""
    from omegaconf import OmegaConf

    from analysis.search.compare import compare

    own = copy.deepcopy(dict(config))
    own["goodput"]["workers"] = 1
    content = compare(OmegaConf.create(own), folder)
    return {"goodput": {name: entry["goodput"] for name, entry in content["schemes"].items()}}


RUN: dict[str, Callable[[Mapping[str, Any], Path, Shared], Note]] = {"simulate": simulate, "goodput": goodput}
