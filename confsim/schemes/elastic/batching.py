"""The dynamic programme that groups prompts into prefill batches and gives each a degree of parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from confsim.schemes.elastic.law import PrefillLaw


class Share(NamedTuple):
    """Prompts `[first, last)` on instances `[left, right)`, both in the order that the programme was given."""

    first: int
    last: int
    left: int
    right: int


class _Prompts:
    """Prefix sums of what the law and the objective need of prompts in a row."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.tokens = _sums(lengths)
        self.squares = _sums([length**2 for length in lengths])
        self.inverse = _sums([1.0 / length for length in lengths])


def partition(lengths: Sequence[int], rooms: Sequence[int], law: PrefillLaw, split: bool = True) -> list[Share]:
    """Batches over instances with the least sum of T(k) * sum(1 / len), the input latency a token.

    `lengths` descend; `rooms` are the tokens that each instance can take. best[k][i] is the least cost of the first i
    prompts on the first k instances: the last batch takes the prompts behind some `first` and l instances, and must fit
    their rooms together. The first k with the least best[k][n] is taken. The paper's search is exact, as here; the
    shipped one prunes split points so that the last batch of i prompts has no fewer instances than that of i - 1, and
    one prompt on k instances has all k: it therefore never splits (`split` false: one batch).

    Raises:
        ValueError: where the prompts do not fit together on all instances.
    """
    count, instances = len(lengths), len(rooms)
    prompts = _Prompts(lengths)
    room = _sums(rooms)
    best = [[float("inf")] * (count + 1) for _ in range(instances + 1)]
    choice = [[(0, 0)] * (count + 1) for _ in range(instances + 1)]  # instances and first prompt of the last batch
    best[0][0] = 0.0
    for k in range(1, instances + 1):
        for taken in range(1, k + 1) if split else (k,):
            before = best[k - taken]
            _extend(prompts, law, taken, room[k] - room[k - taken], before, best[k], choice[k])
    k = min(range(1, instances + 1), key=lambda k: best[k][count])
    if best[k][count] == float("inf"):
        raise ValueError("the prompts do not fit on the instances")
    shares = []
    last = count
    while last:
        taken, first = choice[k][last]
        shares.append(Share(first, last, k - taken, k))
        k, last = k - taken, first
    return shares


def _extend(
    prompts: _Prompts,
    law: PrefillLaw,
    taken: int,
    room: float,
    before: list[float],
    best: list[float],
    choice: list[tuple[int, int]],
) -> None:
    """Improve `best` by a last batch on `taken` instances with `room`, behind the batches of `before`."""
    a, b, c = law.coefficients[taken - 1]
    tokens, squares, inverse = prompts.tokens, prompts.squares, prompts.inverse
    starts = [(first, cost) for first, cost in enumerate(before) if cost != float("inf")]
    for last in range(1, len(best)):
        for first, cost in starts:
            if first >= last:
                break
            total = tokens[last] - tokens[first]
            if total > room:
                continue
            seconds = a + b * total + c * (squares[last] - squares[first])
            cost += seconds * (inverse[last] - inverse[first])
            if cost < best[last]:
                best[last] = cost
                choice[last] = (taken, first)


def _sums(values: Sequence[float]) -> list[float]:
    out = [0.0]
    for value in values:
        out.append(out[-1] + value)
    return out
