"""How sure a single run's attainment is: the same run with every latency longer and shorter by the profile's error."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from analysis.search.compare import latency_error
from analysis.search.runner import scaled
from confsim import api
from confsim.outcome.result import Result

KNEE_UTILISATION = 0.85  # below it a few percent of latency move no verdict


def attainment_band(cfg: DictConfig, result: Result) -> dict[str, Any] | None:
    """`{latency_error, attainment: [low, high]}`, or None where it would say nothing.

    Times scale together, so a run with all latencies longer by a factor is the same run with SLO and gaps between
    arrivals shorter by it. That holds for open arrivals at a rate and the model backend only.
    """
    error = latency_error(result.summary)
    arrivals = result.summary["provenance"]["arrivals"]
    open_loop = arrivals.get("rate") is not None and arrivals.get("sessions", "open") == "open"
    if not error or not open_loop or cfg.horizon_s is not None or "live" in cfg.backend.get("_target_", ""):
        return None
    if result.summary["utilisation"] < KNEE_UTILISATION:
        return None
    case: Any = OmegaConf.to_container(cfg, resolve=True)
    found = [result.summary["attainment"]]
    trace = api.load_trace(cfg)
    for factor in (1.0 - error, 1.0 + error):
        simulation = api.build(OmegaConf.create(scaled(case, factor)), trace)
        found.append(simulation.run(rate=arrivals["rate"] * factor).summary["attainment"])
    return {"latency_error": error, "attainment": [min(found), max(found)]}
