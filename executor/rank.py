"""One rank: its model share, its KV, and the execution of iterations."""

from __future__ import annotations

import torch

from executor.clock import Spent, StageClock
from executor.collectives import Group, Groups
from executor.config import Device, Layout
from executor.exchange import Exchange
from executor.fork import Fork, ThreadFork
from executor.kernels import choose, page_tokens
from executor.kv import UnitPool, page_pool, pool_units
from executor.layouts.base import Parts
from executor.ledger import Ledger
from executor.message import Iteration, RankConfig, Report
from executor.model import EagerLinear, Linear, Reduce, Transformer
from executor.place import Place
from executor.sampling import sample
from executor.upload import upload
from executor.weights import load_weights
from executor.work import Work

LAUNCH_BOUND = 0.9  # launching that takes this share of an iteration holds the device up


class Rank:
    """Executes iterations; all ranks of a layout must execute the same ones in the same order."""

    def __init__(self, config: RankConfig, groups: Groups, device: torch.device) -> None:
        self.config = config
        self.groups = groups
        self.device = device
        self.dtype = getattr(torch, config.device.dtype)
        self.place = Place.of(config.rank, config.layout, config.model)
        weights = load_weights(config.model, self.place, self.dtype, device)
        self.model = Transformer(config.model, self.place, weights, self._reduce(groups.tensor))
        self.second = Transformer(config.model, self.place, weights, self._reduce(groups.tensor_second))
        self.kernels = choose(config.device)
        self.pool = self._make_pool()
        self.ledger = Ledger(self.place, groups, self.pool, config.kv.admission == "prompt")
        self.clock, self.fork = self._clock_and_fork()
        self.runner = config.layout.rules.runner(self._parts())

    @torch.inference_mode()
    def execute(self, iteration: Iteration) -> Report:
        """Run one iteration to its end.

        Raises:
            PlanError, KvExhausted: before anything is computed, on every rank alike.
        """
        self.groups.counts.clear()
        self.clock.start()
        with self.clock.stage("prepare"):
            work = self.ledger.prepare(iteration)
        held = self.pool.held
        tokens, logits = self._compute(work)
        self.ledger.settle(iteration, work, tokens)
        spent = self.clock.stop()
        answers = [] if self.place.position else work.sampled  # one rank of a TP group speaks for all
        keep_logits = iteration.keep_logits and bool(answers)
        both = work.prefill is not None and work.decode is not None and self.config.layout.rules.side_by_side
        return Report(
            number=iteration.number,
            rank=self.config.rank,
            duration_s=spent.duration_s,
            stages=spent.stages,
            moved=dict(self.groups.counts),
            tokens=dict(zip(answers, tokens.tolist() if answers else (), strict=True)),
            kv_units=held,
            overlap=self.fork.name if both else "none",
            overlap_valid=both and self.fork.name != "turn" and self._is_overlap_valid(spent),
            busy_share=spent.busy_share,
            launch_s_per_layer=spent.launch_s / self.config.model.num_hidden_layers,
            logits=dict(zip(answers, logits.float().cpu().numpy(), strict=True)) if keep_logits else {},
        )

    def facts(self) -> dict[str, object]:
        """What results and profiles record about this rank."""
        return {
            "device": str(self.device),
            "dtype": self.config.device.dtype,
            "attention": self.kernels.name,
            "attention_version": self.kernels.version,
            "overlap": self.fork.name,
            "no_graphs": no_graphs(self.config.device, self.config.layout) or None,
            **self.fork.facts,
            "page_tokens": self.pool.page_tokens,
            "kv_units": self.pool.units,
            "torch": torch.__version__,
        }

    def close(self) -> None:
        """Release threads and streams."""
        self.fork.close()

    def _compute(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        empty = torch.zeros(0, dtype=torch.int64, device=self.device)
        logits = torch.zeros(0, self.config.model.vocab_size, device=self.device)
        if work.prefill is not None or work.decode is not None:
            hidden = self.runner.forward(work)
            if len(hidden):
                with self.clock.stage("head"):
                    logits = self._gather(self.model.logits(hidden))
                    empty = self._sample(work, logits)
        if work.handover is not None:
            with self.clock.stage("transfer"):
                work.handover.finish()
        return empty, logits

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        if self.config.layout.tp == 1:
            return part
        parts = torch.cat(self.groups.tensor.all_gather(part), dim=-1)
        self.groups.count("head_gather", parts)
        return parts[:, : self.config.model.vocab_size]

    def _sample(self, work: Work, logits: torch.Tensor) -> torch.Tensor:
        ends = upload([chunk.end for chunk in work.finished], self.device, torch.int64)
        if work.decode is not None:
            ends = torch.cat((ends, work.decode.positions + 1))
        settings = [self.ledger.entries[request].sampling for request in work.sampled]
        return sample(logits, settings, work.sampled, ends)

    def _reduce(self, group: Group) -> Reduce | None:
        if self.config.layout.tp == 1:
            return None

        def reduce(data: torch.Tensor) -> None:
            self.groups.count("all_reduce", data)
            group.all_reduce(data)

        return reduce

    def _make_pool(self) -> UnitPool:
        config = self.config
        heads = self.place.shared.kv_heads if config.layout.groups > 1 else self.place.local.kv_heads
        shards = config.layout.shards_per_block(config.model)
        page_lists = config.device.max_sequences * (1 + shards if config.layout.migrates else 1)
        page = page_tokens(config.device, config.kv.block_tokens)
        pages = page_pool(pool_units(config.kv, shards), page, config.kv.block_tokens, page_lists)
        shape = (config.model.num_hidden_layers, heads, config.model.head_dim)
        return UnitPool(pages, shape, self.dtype, self.device)

    def _clock_and_fork(self) -> tuple[StageClock, Fork]:
        settings = self.config.device
        if settings.kind == "cuda":
            from executor.cuda.streams import make_clock_and_fork

            return make_clock_and_fork(settings, self.device)
        return StageClock(), ThreadFork() if settings.overlap == "threads" else Fork()

    def _linear(self, model: Transformer) -> Linear:
        settings = self.config.device
        if not no_graphs(settings, self.config.layout):
            from executor.cuda.graphs import graphed_linear

            return graphed_linear(model, settings.graph_tokens, self.device, self.groups.counts)
        return EagerLinear(model)

    def _parts(self) -> Parts:
        linear = self._linear(self.model)
        return Parts(
            place=self.place,
            groups=self.groups,
            pool=self.pool,
            kernels=self.kernels,
            clock=self.clock,
            fork=self.fork,
            exchange=Exchange(self.place, self.groups),
            linear=linear,
            second=self._linear(self.second) if self.config.layout.rules.two_passes else linear,
            layers=self.config.model.num_hidden_layers,
            one_kernel=self.config.device.one_kernel,
        )

    def _is_overlap_valid(self, spent: Spent) -> bool:
        """Two streams only overlap if the host launches faster than the device works."""
        return self.device.type != "cuda" or spent.launch_s < LAUNCH_BOUND * spent.duration_s


def no_graphs(device: Device, layout: Layout) -> str:
    """Why linear segments are not CUDA graphs, or nothing where they are."""
    if device.kind == "cpu":
        return "on CPU"
    if not device.graphs:
        return "not asked for"
    if device.launcher == "threads" and layout.tp > 1:
        return "sums between threads wait on the host, which a graph cannot hold"
    return ""
