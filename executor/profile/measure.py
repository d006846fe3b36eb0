"""Executing the cells of a profile, round by round."""

from __future__ import annotations

from typing import Any

from confsim.run.request import Request
from executor.probe import Probe, even
from executor.profile.plan import WARM_DECODES, WARM_TOKENS, Cell, Grid, Plan
from executor.runtime import ExecutedIteration, Runtime

WARM_UP_ROUNDS = 1

Row = dict[str, Any]


class Measurer:
    """Runs rounds on ranks; every other round goes through the cells backwards, so that a steady drift cancels."""

    def __init__(self, ranks: Runtime, plan: Plan, grid: Grid) -> None:
        assert grid.chunk_tokens
        self.ranks = ranks
        self.plan = plan
        self.probe = Probe(ranks)
        self._chunk_tokens = grid.chunk_tokens
        self._running: dict[int, list[list[Request]]] = {}  # level -> decodes by group
        self._turn = 0
        self._warm: list[list[Request]] = []  # one decode a group

    def set_up(self) -> None:
        """Prefill the decodes of every level, and run the cells once unmeasured."""
        for level, count in self.plan.levels.items():
            self._start_level(level, count)
        self._start_warm()
        for _ in range(WARM_UP_ROUNDS):
            for unit in self.plan.units:
                self._run_unit(unit)

    def round(self, number: int) -> list[Row]:
        """Measure every cell once; one row each."""
        order = self.plan.units if number % 2 == 0 else self.plan.units[::-1]
        self._start_warm()
        rows = [row for unit in order for row in self._run_unit(unit)]
        self.probe.flush()
        return [row | {"round": number, "position": position} for position, row in enumerate(rows)]

    def _start_warm(self) -> None:
        """New requests to decode before cells; the old ones have grown."""
        self.probe.drop(*(request for members in self._warm for request in members))
        groups = self.ranks.layout.groups
        self._warm = [[self.probe.request(WARM_TOKENS)] for _ in range(groups)]
        self.probe.run([(members[0], WARM_TOKENS, group) for group, members in enumerate(self._warm)])

    def _start_level(self, level: int, count: int) -> None:
        groups = self.ranks.layout.groups
        by_group: list[list[Request]] = [[] for _ in range(groups)]
        batch: list[tuple[Request, int, int]] = []
        for number in range(count * groups):
            request = self.probe.request(level)
            by_group[number % groups].append(request)
            while request.remaining_prefill > self._chunk_tokens:
                self.probe.run([(request, self._chunk_tokens, -1)])
            batch.append((request, request.remaining_prefill, number % groups))
            if sum(tokens for _, tokens, _ in batch) + level > self._chunk_tokens:
                self.probe.run(batch)
                batch = []
        if batch:
            self.probe.run(batch)
        self._running[level] = by_group

    def _run_unit(self, unit: tuple[Cell, ...]) -> list[Row]:
        """Measure the cells of a unit: the chunks of the first one's prompts, then the prompts' next chunks."""
        last = unit[-1]
        requests = [
            self._prompt(cached, end + tokens + (not last.last))
            for (_, cached), (tokens, end) in zip(unit[0].chunks, last.chunks, strict=True)
        ]
        rows = [self._run_cell(cell, requests) for cell in unit]
        self.probe.drop(*requests)
        return rows

    def _prompt(self, cached: int, tokens: int) -> Request:
        """A prompt whose first `cached` tokens are computed."""
        request = self.probe.request(tokens)
        while (rest := cached - request.prefilled) > 0:
            self.probe.run([(request, min(rest, self._chunk_tokens), -1)])
        return request

    def _run_cell(self, cell: Cell, requests: list[Request]) -> Row:
        self._turn += 1
        group = self._turn % self.ranks.layout.groups
        decode = [members[: cell.sequences] for members in self._running[cell.level]] if cell.sequences else []
        if cell.alone:
            decode = [members if index == group else [] for index, members in enumerate(decode)]
        sizes = (tokens for tokens, _ in cell.chunks)
        chunks = [(request, tokens, group) for request, tokens in zip(requests, sizes, strict=True)]
        if cell.sequences:
            for _ in range(WARM_DECODES):
                self.probe.run((), [members[: len(own)] for members, own in zip(self._warm, decode, strict=True)])
            self.probe.run((), decode)
        context = max((sum(map(self.probe.context, members)) for members in decode), default=0)
        return self._row(cell, self.probe.run(chunks, decode), context)

    def _row(self, cell: Cell, executed: ExecutedIteration, context: int) -> Row:
        layout = self.ranks.layout
        groups = layout.groups
        tokens = [count for count, _ in cell.chunks]
        return {
            "part": cell.part,
            "cell": cell.name,
            "kind": layout.kind,
            "tp": layout.tp,
            "sp": groups,
            "tokens": tokens,
            "cached": [cached for _, cached in cell.chunks],
            "last": cell.last,
            "shard_tokens": _largest_shard(tokens, groups),
            "sequences": cell.sequences,
            "busy_groups": 1 if cell.alone else groups,
            "context_tokens": context,
            **executed._asdict(),
            "wall_s": executed.wall_s,
            "fastest_rank_s": min(report.duration_s for report in executed.ranks),
            "busy_share": executed.slowest.busy_share,
            "overlap": executed.overlap,
        }


def _largest_shard(tokens: list[int], groups: int) -> int:
    """Tokens of the fullest group; chunks take turns with what does not divide."""
    shards = [even(count, groups, turn) for turn, count in enumerate(tokens)]
    return max((sum(column) for column in zip(*shards, strict=True)), default=0)
