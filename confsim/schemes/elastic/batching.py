"""The dynamic programme that groups prompts into prefill batches and gives each a degree of parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from confsim.schemes.elastic.ring import PrefillLaw


class Share(NamedTuple):
    """Prompts `[first, last)` on instances `[left, right)`, both in the order that the programme was given."""

    first: int
    last: int
    left: int
    right: int


def partition(lengths: Sequence[int], rooms: Sequence[int], law: PrefillLaw) -> list[Share]:
    """Batches over instances with the least sum of T(k) * sum(1 / len), the input latency a token.

    `lengths` descend; `rooms` are the tokens that each instance can take. f[i][k] is the least cost of the first i
    prompts on the first k instances: the last batch takes j prompts and l instances and must fit their rooms together.
    As in the shipped scheduler the split points move monotonically: the last batch is no larger than with one instance
    less, and has no fewer instances than with one prompt less.

    Raises:
        ValueError: where the prompts do not fit together on all instances.
    """
    count, instances = len(lengths), len(rooms)
    tokens = _sums(lengths)
    squares = _sums([length**2 for length in lengths])
    inverse = _sums([1.0 / length for length in lengths])
    room = _sums(rooms)
    infinite = float("inf")
    best = [[infinite] * (instances + 1) for _ in range(count + 1)]
    choice: list[list[tuple[int, int]]] = [[(0, 0)] * (instances + 1) for _ in range(count + 1)]
    best[0][0] = 0.0
    for i in range(1, count + 1):
        for k in range(1, instances + 1):
            largest = choice[i][k - 1][0] or i
            fewest = choice[i - 1][k][1] or 1
            for j in range(1, largest + 1):
                total = tokens[i] - tokens[i - j]
                for taken in range(k, fewest - 1, -1):
                    if total > room[k] - room[k - taken]:
                        break
                    seconds = law.seconds(taken, total, squares[i] - squares[i - j])
                    cost = seconds * (inverse[i] - inverse[i - j]) + best[i - j][k - taken]
                    if cost < best[i][k]:
                        best[i][k] = cost
                        choice[i][k] = (j, taken)
    return _trace(choice, count, min(range(1, instances + 1), key=lambda k: best[count][k]))


def _sums(values: Sequence[float]) -> list[float]:
    out = [0.0]
    for value in values:
        out.append(out[-1] + value)
    return out


def _trace(choice: list[list[tuple[int, int]]], i: int, k: int) -> list[Share]:
    shares = []
    while i > 0:
        j, taken = choice[i][k]
        if not j:
            raise ValueError("the prompts do not fit on the instances")
        shares.append(Share(i - j, i, k - taken, k))
        i, k = i - j, k - taken
    return shares
