"""Real ranks as the clock of a simulation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from confsim.run.plan import DecodeBatch, IterationPlan, PrefillChunk
from executor.config import Layout, Sampling
from executor.runtime import ExecutedIteration, Runtime

LAYOUT_OF_SCHEME = {"conflux": "xp", "chunked_prefill": "tp", "uniform_sp": "sp"}


def derive_tokens(request: int, count: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """Prompt of a trace's request, whose text is not known: `count` ids that depend on request and seed alone."""
    return np.random.default_rng((seed, request)).integers(0, vocab_size, count, dtype=np.int32)


class LiveBackend:
    """`confsim.run.backend.Backend` over a running `Runtime`; closing it closes the runtime.

    Prompts come from `prompts(request id, tokens)`, by default derived from the request's id. `iterations` counts
    what ran; `last` is the newest result with all that the ranks reported.
    """

    def __init__(
        self,
        runtime: Runtime,
        prompts: Callable[[int, int], np.ndarray] | None = None,
        sampling: Sampling | None = None,
        seed: int = 0,
    ) -> None:
        self.runtime = runtime
        self.sampling = sampling or Sampling()
        self.iterations = 0
        self.last: ExecutedIteration | None = None
        vocab_size = runtime.model.vocab_size
        self._prompts = prompts or (lambda request, count: derive_tokens(request, count, vocab_size, seed))
        self._known: set[int] = set()

    def submit(self, plan: IterationPlan) -> None:
        """Start an iteration; requests that are new to the ranks get their prompts first, and only they keep them."""
        for released in plan.released:
            self._known.discard(released)
            self.runtime.drop_prompt(released)
        for chunk in plan.prefill:
            request = chunk.request
            if request.id not in self._known:
                self._known.add(request.id)
                self.runtime.add(request.id, self._prompts(request.id, request.prompt_tokens), self.sampling)
        self.runtime.submit(spread_plan(plan, self.runtime.layout))

    def result(self) -> ExecutedIteration:
        """Wait for the iteration submitted first among those not yet taken."""
        self.last = self.runtime.result()
        self.iterations += 1
        return self.last

    def close(self) -> None:
        """End the ranks; harmless when repeated."""
        self.runtime.close()


def spread_plan(plan: IterationPlan, layout: Layout) -> IterationPlan:
    """A plan that counts all groups as one (a scheme that spreads everything evenly), shared out over the groups.

    A chunk is cut evenly; a request's decode tokens are computed by group `id % groups`. Other plans stay as they are.
    """
    groups = layout.groups
    if layout.kind != "sp" or groups == 1 or len(plan.decode) > 1:
        return plan
    batches = tuple(DecodeBatch(group) for group in range(groups))
    for batch in plan.decode:
        for request in batch.members.values():
            batches[request.id % groups].members[request.id] = request
    return IterationPlan(tuple(_spread_chunk(chunk, groups) for chunk in plan.prefill), batches, plan.released)


def _spread_chunk(chunk: PrefillChunk, groups: int) -> PrefillChunk:
    share, rest = divmod(chunk.tokens, groups)
    shards = tuple(share + (group < rest) for group in range(groups))
    return chunk._replace(shards=shards, group=chunk.request.id % groups if chunk.group >= 0 else -1)
