"""Service-level objectives and when a request attains them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from confsim.errors import InputError

TOLERANCE = 1 + 1e-9  # budgets fill to the limit exactly and clock differences round


@dataclass(frozen=True)
class Slo:
    """Limits on TTFT and on the time between tokens, and the share of requests that must meet them.

    `rule`: `max_gap` (the largest gap is at most `tbt_s`) or `deadline` (token i is out by
    arrival + TTFT limit + i * tbt_s). `margin` shrinks the TBT that planners aim at, not the verdict.
    """

    ttft_s: float
    tbt_s: float
    attainment: float = 0.95
    rule: str = "max_gap"
    ttft_per_token_s: float = 0.0
    margin: float = 0.0

    def __post_init__(self) -> None:
        for key in ("ttft_s", "tbt_s"):
            if not 0 < getattr(self, key) < float("inf"):
                raise InputError(f"slo.{key}={getattr(self, key)}: use a positive number of seconds")
        if not 0 < self.attainment <= 1:
            raise InputError(f"slo.attainment={self.attainment}: use a share above 0 and up to 1")
        if self.rule not in ("max_gap", "deadline"):
            raise InputError(f"slo.rule={self.rule}: use max_gap or deadline")
        if self.ttft_per_token_s < 0:
            raise InputError(f"slo.ttft_per_token_s={self.ttft_per_token_s}: use 0 or more seconds a token")
        if not 0 <= self.margin < 1:
            raise InputError(f"slo.margin={self.margin}: use a share from 0 to below 1")

    @property
    def given(self) -> bool:
        """Whether there are limits at all."""
        return True

    @property
    def target_s(self) -> float:
        """The longest iteration that planners aim at."""
        return self.tbt_s * (1 - self.margin)

    def ttft_limit_s(self, prompt_tokens: int) -> float:
        """TTFT limit of a request."""
        return max(self.ttft_s, self.ttft_per_token_s * prompt_tokens)

    def attains(self, arrival_s: float, prompt_tokens: int, token_s: npt.NDArray[np.float64]) -> bool:
        """Whether a request with all its `token_s` (ascending, seconds) attains."""
        limit_s = self.ttft_limit_s(prompt_tokens)
        if token_s[0] - arrival_s > limit_s * TOLERANCE:
            return False
        if len(token_s) == 1:
            return True
        if self.rule == "max_gap":
            return bool(np.diff(token_s).max() <= self.tbt_s * TOLERANCE)
        lateness_s = float((token_s - np.arange(len(token_s)) * self.tbt_s).max()) - arrival_s
        return lateness_s <= limit_s * TOLERANCE


@dataclass(frozen=True)
class NoSlo(Slo):
    """No limits: planners are bounded by tokens alone, and a run reports latencies without a verdict."""

    ttft_s: float = field(default=math.inf, init=False)
    tbt_s: float = field(default=math.inf, init=False)
    attainment: float = field(default=0.0, init=False)
    rule: str = field(default="none", init=False)
    ttft_per_token_s: float = field(default=0.0, init=False)
    margin: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        """Nothing can be wrong with limits that do not exist."""

    @property
    def given(self) -> bool:
        """There are none."""
        return False
