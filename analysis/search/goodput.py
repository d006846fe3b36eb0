"""The search for goodput: the highest request rate at which a scheme keeps its SLO.

Which rates come next is a function of the probes so far, so results depend neither on how many processes make the
probes of a round nor on which of them finishes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from confsim.errors import InputError


@dataclass(frozen=True)
class SearchSettings:
    """`goodput.*` of the configuration: tolerance as a share, rates in requests per second.

    Raises:
        InputError: if a number makes no search.
    """

    tolerance: float = 0.02
    min_rate: float = 0.001
    max_rate: float = 10_000.0
    start_rate: float = 1.0
    probes_per_round: int = 2
    curve: tuple[float, ...] = ()
    step: float = 4.0  # ratio of neighbouring rates while no bracket is known

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise InputError(f"goodput.tolerance={self.tolerance}: use a share between 0 and 1, such as 0.02")
        if not 0 < self.min_rate <= self.start_rate <= self.max_rate < float("inf"):
            raise InputError(
                f"goodput: min_rate={self.min_rate}, start_rate={self.start_rate}, max_rate={self.max_rate} "
                "must be above 0 and ascend"
            )
        if self.probes_per_round < 1:
            raise InputError(f"goodput.probes_per_round={self.probes_per_round}: use 1 or more")
        if not self.step > 1:
            raise InputError(f"a search needs steps above 1, not {self.step}")
        if any(share <= 0 for share in self.curve):
            raise InputError(f"goodput.curve={list(self.curve)}: use shares of the goodput above 0")

    def around(self, rate: float, step: float) -> SearchSettings:
        """These settings for a goodput that is expected near a rate; no points of a curve."""
        start_rate = min(max(rate, self.min_rate), self.max_rate)
        return replace(self, start_rate=start_rate, step=step, curve=())


@dataclass(frozen=True)
class Probe:
    """One rate that was tried. The two attainments differ where the run ended as soon as its verdict was certain."""

    rate: float
    passed: bool
    attainment_low: float
    attainment_high: float
    decided_early: bool = False
    missed_by: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


class Curve:
    """The probes of one search, in ascending order of rate."""

    def __init__(self, probes: Sequence[Probe] = ()) -> None:
        self._probes = {probe.rate: probe for probe in probes}

    def __len__(self) -> int:
        return len(self._probes)

    def __contains__(self, rate: float) -> bool:
        return rate in self._probes

    def __getitem__(self, rate: float) -> Probe:
        return self._probes[rate]

    def add(self, probe: Probe) -> None:
        """Keep a probe; a full run replaces one of the same rate that was decided early."""
        known = self._probes.get(probe.rate)
        if known is None or known.decided_early:
            self._probes[probe.rate] = probe

    @property
    def probes(self) -> list[Probe]:
        """All probes, by rate."""
        return [self._probes[rate] for rate in sorted(self._probes)]

    @property
    def goodput(self) -> float:
        """The largest rate that passes with every lower probe passing too; 0 if there is none."""
        best = 0.0
        for probe in self.probes:
            if not probe.passed:
                break
            best = probe.rate
        return best

    @property
    def lowest_failure(self) -> float | None:
        """The lowest rate that fails, or None."""
        return next((probe.rate for probe in self.probes if not probe.passed), None)

    @property
    def passes_above_failure(self) -> list[float]:
        """Rates that pass although a lower one fails: a curve that is not monotone."""
        lowest = self.lowest_failure
        return [probe.rate for probe in self.probes if probe.passed and lowest is not None and probe.rate > lowest]


@dataclass(frozen=True)
class Trial:
    """A rate to try with a candidate (by its number); `full` runs to the end although the verdict is certain."""

    candidate: int
    rate: float
    full: bool = False


@dataclass(frozen=True)
class Refusal:
    """Outcome of a trial that cannot run at all, where that is no mistake of the user's: one of several candidates."""

    reason: str


@dataclass
class Candidate:
    """One setting of the parameters that are searched for a scheme, and its curve. `values` maps keys to values.

    `refused` says why it cannot run at all ("" where it can): weights that do not fit a smaller group, say.
    """

    values: dict[str, Any] = field(default_factory=dict)
    curve: Curve = field(default_factory=Curve)
    refused: str = ""


@dataclass
class Candidates:
    """What a search has found out."""

    each: list[Candidate]

    @property
    def runnable(self) -> list[int]:
        """Numbers of the candidates that were not refused."""
        return [number for number, candidate in enumerate(self.each) if not candidate.refused]

    @property
    def best(self) -> int:
        """Number of the candidate with the highest goodput, the first among equals; 0 if none can run."""
        return max(self.runnable, key=lambda number: (self.each[number].curve.goodput, -number), default=0)

    @property
    def curve(self) -> Curve:
        """The curve of the best candidate."""
        return self.each[self.best].curve


Prober = Callable[[Sequence[Trial]], Sequence[Probe | Refusal]]  # outcomes in the order of the trials


def search(probe: Prober, settings: SearchSettings, values: Sequence[dict[str, Any]] = ()) -> Candidates:
    """Search the candidates with these values (none: one without any), asking `probe` for every round of trials.

    The first candidate is searched to the end. Another one is searched only if it passes at a rate that would beat the
    best by the tolerance, which takes one probe of each that cannot.
    """
    found = Candidates([Candidate(dict(own)) for own in values] or [Candidate()])

    def take(*trials: Trial) -> None:
        for trial, outcome in zip(trials, probe(trials), strict=True):
            candidate = found.each[trial.candidate]
            if isinstance(outcome, Refusal):
                candidate.refused = outcome.reason
            else:
                candidate.curve.add(outcome)

    _compete(found, settings, take)
    rates = curve_rates(found.curve, settings)
    if rates:
        take(*(Trial(found.best, rate, full=True) for rate in rates))
    while True:  # a point of the curve below the goodput may have failed
        _compete(found, settings, take)
        best, rates = found.best, next_rates(found.curve, settings) if found.runnable else []
        if not rates:
            return found
        take(*(Trial(best, rate) for rate in rates))


def _compete(found: Candidates, settings: SearchSettings, take: Callable[..., None]) -> None:
    """Search the first candidate that can run, then every other one that may be better than the best so far."""
    best = None
    for number, candidate in enumerate(found.each):
        if best is None:
            while not candidate.refused and (rates := next_rates(candidate.curve, settings)):
                take(*(Trial(number, rate) for rate in rates))
            best = None if candidate.refused else candidate
            continue
        bar = max(best.curve.goodput * (1 + settings.tolerance), settings.min_rate)
        if bar > settings.max_rate:
            return
        if not (candidate.refused or len(candidate.curve)):  # one probe of all at once
            untried = [other for other in found.runnable if other >= number and not len(found.each[other].curve)]
            take(*(Trial(other, bar) for other in untried))
        while not candidate.refused and (rates := _duel(candidate.curve, bar, settings)):
            take(*(Trial(number, rate) for rate in rates))
        if not candidate.refused and candidate.curve.goodput > best.curve.goodput:
            best = candidate


def _duel(curve: Curve, bar: float, settings: SearchSettings) -> list[float]:
    """Rates for a challenger: at the bar first, then a whole search if it passes there."""
    failure = curve.lowest_failure
    if failure is not None and failure <= bar:
        return []
    if curve.goodput < bar and bar not in curve:
        return [bar]
    return next_rates(curve, settings)


def next_rates(curve: Curve, settings: SearchSettings) -> list[float]:
    """The rates of the next round of a search; empty when the goodput is known to the tolerance."""
    low, high = curve.goodput, curve.lowest_failure
    count = settings.probes_per_round
    if not len(curve):
        return _steps(settings.start_rate, range(count), settings)
    if high is None:
        return [] if low >= settings.max_rate else _steps(low, range(1, count + 1), settings)
    if low == 0.0:
        return [] if high <= settings.min_rate else _steps(high, range(-1, -count - 1, -1), settings)
    if high <= low * (1 + settings.tolerance):
        return []
    ratio = (high / low) ** (1 / (count + 1))
    return [low * ratio ** (step + 1) for step in range(count)]


def _steps(rate: float, steps: range, settings: SearchSettings) -> list[float]:
    """Rates so many steps above (below 0: below) a rate, within the bounds."""
    rates = [rate * settings.step**step if step >= 0 else rate / settings.step**-step for step in steps]
    return sorted({min(max(rate, settings.min_rate), settings.max_rate) for rate in rates})


def curve_rates(curve: Curve, settings: SearchSettings) -> list[float]:
    """Rates around the goodput that are run in full, so that the attainment curve has exact points."""
    rates = [share * curve.goodput for share in settings.curve]
    return [rate for rate in rates if settings.min_rate <= rate <= settings.max_rate and rate not in curve]


def curve_warnings(curve: Curve, settings: SearchSettings) -> list[str]:
    """What a reader must know before trusting the goodput of this curve."""
    found = []
    above = curve.passes_above_failure
    if above:
        rates = ", ".join(f"{rate:.4g}" for rate in above)
        found.append(
            f"attainment is not monotone in the rate: {curve.lowest_failure:.4g} req/s fails but {rates} req/s pass; "
            "the goodput is the largest rate below the first failure"
        )
    if curve.lowest_failure is None and curve.goodput >= settings.max_rate:
        found.append(f"the search reached goodput.max_rate={settings.max_rate:g} req/s: the goodput is at least that")
    if len(curve) and curve.goodput == 0.0:
        found.append(f"the SLO is missed at every rate down to goodput.min_rate={settings.min_rate:g} req/s")
    return found
