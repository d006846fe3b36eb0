"""The driver: starts ranks, hands them plans, collects what they measured and produced."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from confsim.errors import InputError
from confsim.run.plan import IterationPlan, IterationTiming, PrefillChunk
from confsim.specs import KvConfig
from executor.clock import STAGES
from executor.config import Device, ExecutorConfig, Layout, ModelConfig, Sampling
from executor.errors import RankError
from executor.message import NewRequest, Ready, Report, resolve
from executor.start import make_team
from executor.team import Team


class ExecutedIteration(IterationTiming):
    """An `IterationTiming` measured on ranks: the stages of the slowest one, so that they belong together.

    Its overhead is what no stage of that rank accounts for (preparing the plan, the interpreter between calls); where
    the attention paths overlapped, stages add up to more than the iteration and only the preparation is counted.
    `ranks` has every rank's report, `tokens` maps a request to the token that it got.
    """

    tokens: Mapping[int, int]
    ranks: tuple[Report, ...]
    number: int
    wall_s: float  # from submit to result, as the driver saw it

    @classmethod
    def of(cls, reports: Sequence[Report], wall_s: float) -> ExecutedIteration:
        """Merge the reports of one iteration."""
        slowest = _slowest(reports)
        stages = {f"{name}_s": slowest.stages[name] for name in STAGES if name != "prepare"}
        rest = slowest.duration_s - sum(stages.values())
        timing = cls(slowest.duration_s, overhead_s=max(rest, slowest.stages["prepare"], 0.0), **stages)
        timing.tokens = {request: token for report in reports for request, token in report.tokens.items()}
        timing.ranks = tuple(sorted(reports, key=lambda report: report.rank))
        timing.number = slowest.number
        timing.wall_s = wall_s
        return timing

    def _replace(self, **changes: Any) -> ExecutedIteration:
        """A copy with other fields, as of any named tuple; what the ranks reported stays with it."""
        copy = super()._replace(**changes)
        copy.__dict__.update(self.__dict__)
        return copy

    @property
    def slowest(self) -> Report:
        """The rank that the iteration waited for."""
        return _slowest(self.ranks)

    @property
    def overlap(self) -> str:
        """How the attention paths ran on every rank that had both: none, turn, threads, streams or partition."""
        names = {report.overlap for report in self.ranks} - {"none"}
        return names.pop() if names else "none"

    @property
    def overlap_valid(self) -> bool:
        """Whether the two paths really could run at the same time, on every rank that had both."""
        return all(report.overlap_valid for report in self.ranks if report.overlap != "none")

    @property
    def moved(self) -> dict[str, int]:
        """Bytes of collective buffers by use, summed over ranks."""
        total: dict[str, int] = {}
        for report in self.ranks:
            for use, count in report.moved.items():
                total[use] = total.get(use, 0) + count
        return total

    @property
    def logits(self) -> dict[int, np.ndarray]:
        """Logits of the rows that were sampled, where they were kept."""
        return {request: row for report in self.ranks for request, row in report.logits.items()}


def _slowest(reports: Sequence[Report]) -> Report:
    return max(reports, key=lambda report: report.duration_s)


class Runtime:
    """Ranks that execute plans; a context manager.

    Under torchrun or Slurm, rank 0 gets past `with Runtime(...)`; the other ranks serve inside it and exit.
    """

    def __init__(
        self,
        model: ModelConfig,
        layout: Layout | None = None,
        device: Device | None = None,
        kv: KvConfig | None = None,
        keep_logits: bool = False,
    ) -> None:
        self.model = model
        self.layout = layout or Layout()
        self.device = device or Device()
        self.kv = kv or KvConfig(capacity_tokens=8192)
        self.keep_logits = keep_logits
        self._check()
        self._team: Team | None = None
        self._failed: RankError | None = None
        self._prompts: dict[int, tuple[np.ndarray, Sampling]] = {}
        self._emitted: dict[int, list[int]] = {}
        self._resident: set[int] = set()
        self._submitted: list[float] = []  # when, by iteration number
        self._collected: list[ExecutedIteration] = []  # results not yet asked for
        self._done = 0  # iterations whose reports are complete
        self._reports: dict[int, list[Report]] = {}
        self.ready: tuple[Ready, ...] = ()

    @classmethod
    def of(cls, config: ExecutorConfig, keep_logits: bool = False) -> Runtime:
        """A runtime of a whole configuration."""
        return cls(config.model, config.layout, config.device, config.kv, keep_logits)

    def __enter__(self) -> Runtime:
        """Start the ranks (or join those that exist) and wait until they are ready."""
        self._team = make_team(self.model, self.layout, self.device, self.kv)
        self._finalizer = weakref.finalize(self, self._team.close, True)
        try:
            self.ready = tuple(self._team.start())
        except BaseException as error:
            self._give_up(error)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Close; at once if an error or Ctrl-C ended the block."""
        self._end(at_once=kind is not None)

    def add(self, request: int, tokens: Sequence[int] | np.ndarray, sampling: Sampling | None = None) -> None:
        """Make a request known: its prompt and how its tokens are drawn.

        Raises:
            InputError: if it is known already, is empty, or has ids outside the vocabulary.
        """
        ids = np.asarray(tokens, dtype=np.int32)
        if request in self._prompts:
            raise InputError(f"request {request} was added before: use another id, or forget it first")
        self.check_ids(ids, f"request {request} has")
        self._prompts[request] = (ids, sampling or Sampling())
        self._emitted.setdefault(request, [])

    def check_ids(self, ids: np.ndarray, who: str = "prompts:") -> None:
        """Refuse token ids that the model cannot prefill.

        Raises:
            InputError: for an empty prompt, or ids outside the vocabulary.
        """
        if not len(ids):
            raise InputError(f"{who} an empty prompt: give it one token or more")
        if ids.min() < 0 or ids.max() >= self.model.vocab_size:
            raise InputError(f"{who} token ids outside 0 to {self.model.vocab_size - 1}")

    def forget(self, request: int) -> None:
        """Drop what the driver keeps of a request that will not be planned again."""
        self._prompts.pop(request, None)
        self._emitted.pop(request, None)

    def drop_prompt(self, request: int) -> None:
        """Drop a prompt that can be added again if the request comes back; its emitted tokens stay known."""
        self._prompts.pop(request, None)

    def submit(self, plan: IterationPlan) -> None:
        """Start an iteration; several may be under way, and run in order.

        Raises:
            RankError: if a rank has failed.
            InputError: if the plan has other groups than the layout.
        """
        team = self._running()
        self._check_plan(plan)
        self._resident.difference_update(plan.released)
        new = tuple(self._new_request(chunk) for chunk in plan.prefill if self._is_new(chunk))
        iteration = resolve(plan, len(self._submitted), new, self.keep_logits)
        self._submitted.append(time.perf_counter())
        self._resident.difference_update(c.request for c in iteration.chunks if c.last and c.group < 0)
        try:
            team.send(iteration)
        except BaseException as error:
            self._give_up(error)
            raise

    def result(self) -> ExecutedIteration:
        """Wait for the oldest iteration whose result was not yet taken.

        Raises:
            RankError: if a rank has failed; the runtime is closed then.
        """
        if self._collected:
            return self._collected.pop(0)
        if self._done == len(self._submitted):
            raise InputError("result() without an iteration under way: submit a plan first")
        self._collect()
        return self._collected.pop(0)

    def run(self, plan: IterationPlan) -> ExecutedIteration:
        """`submit`, then `result`."""
        self.submit(plan)
        return self.result()

    def close(self) -> None:
        """End the ranks; harmless when repeated."""
        self._end(at_once=False)

    def _check(self) -> None:
        self.layout.heads(self.model)
        if self.device.one_kernel and self.layout.kind != "tp":
            raise InputError(
                f"executor.device.one_kernel=true: a {self.layout.kind} layout computes the phases apart, only "
                "executor.layout.kind=tp in one call"
            )
        if self.kv.capacity_tokens is None:
            raise InputError("kv.capacity_tokens is not set: the executor needs the tokens of a group's KV pool")
        if self.kv.prefix_cache:
            raise InputError("kv.prefix_cache=true: the executor shares no KV between requests, use false")
        page = self.device.page_tokens
        if page is not None and page % self.kv.block_tokens:
            raise InputError(
                f"executor.device.page_tokens={page} is not a multiple of kv.block_tokens={self.kv.block_tokens}"
            )
        if self.device.kind == "cuda":
            import torch

            from executor.kernels import choose

            if not torch.cuda.is_available():
                raise InputError(
                    "executor.device.kind=cuda: PyTorch sees no CUDA device here, use executor.device.kind=cpu"
                )
            choose(self.device)

    def _check_plan(self, plan: IterationPlan) -> None:
        groups = self.layout.groups
        for chunk in plan.prefill:
            if len(chunk.shards) != groups:
                raise InputError(f"a chunk has shards for {len(chunk.shards)} groups, the layout has {groups}")
            if chunk.group >= groups:
                raise InputError(f"request {chunk.request.id} is to decode on group {chunk.group} of {groups}")
        if len(plan.decode) > groups:
            raise InputError(f"a plan has {len(plan.decode)} decode batches, the layout has {groups} groups")

    def _is_new(self, chunk: PrefillChunk) -> bool:
        return chunk.tokens > 0 and chunk.request.id not in self._resident and chunk.request.id in self._prompts

    def _new_request(self, chunk: PrefillChunk) -> NewRequest:
        request = chunk.request
        prompt, sampling = self._prompts[request.id]
        extra = request.target_tokens - len(prompt)
        emitted = self._emitted[request.id]
        while len(emitted) < extra and self._done < len(self._submitted):
            self._collect()  # a preempted request recomputes tokens that are still under way
        if not 0 <= extra <= len(emitted):
            raise InputError(
                f"request {request.id} is to prefill {request.target_tokens} tokens, "
                f"but has a prompt of {len(prompt)} and {len(emitted)} emitted tokens"
            )
        self._resident.add(request.id)
        tokens = np.concatenate((prompt, np.array(emitted[:extra], dtype=np.int32)))
        return NewRequest(request.id, tokens, sampling)

    def _collect(self) -> None:
        """Wait for the reports of the next iteration."""
        team, number = self._running(), self._done
        reports = self._reports.setdefault(number, [])
        try:
            while len(reports) < self.layout.ranks:
                report = team.receive()
                self._reports.setdefault(report.number, []).append(report)
        except BaseException as error:
            self._give_up(error)
            raise
        timing = ExecutedIteration.of(self._reports.pop(number), time.perf_counter() - self._submitted[number])
        for request, token in timing.tokens.items():
            self._emitted.setdefault(request, []).append(token)
        self._done += 1
        self._collected.append(timing)

    def _running(self) -> Team:
        if self._failed is not None:
            raise RankError(
                str(self._failed), self._failed.rank, self._failed.cause, self._failed.details
            ) from self._failed
        if self._team is None:
            raise InputError("the runtime is not running: use it inside `with Runtime(...)`")
        return self._team

    def _give_up(self, error: BaseException) -> None:
        if isinstance(error, RankError):
            self._failed = error
        self._end(at_once=True)

    def _end(self, at_once: bool) -> None:
        team, self._team = self._team, None
        if team is not None:
            self._finalizer.detach()
            team.close(at_once)
