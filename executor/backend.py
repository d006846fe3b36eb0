"""Real ranks as the clock of a simulation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from confsim.run.backend import Stepwise
from confsim.run.plan import DecodeBatch, IterationPlan
from executor.config import Sampling
from executor.runtime import ExecutedIteration, Runtime


def derive_tokens(request: int, count: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """Prompt of a trace's request, whose text is not known: `count` ids that depend on request and seed alone."""
    return np.random.default_rng((seed, request)).integers(0, vocab_size, count, dtype=np.int32)


class LiveBackend(Stepwise):
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
        self._known: set[int] = set()  # prompts that the runtime holds
        self._seen: set[int] = set()

    def submit(self, plan: IterationPlan) -> None:
        """Start an iteration; requests that are new to the ranks get their prompts first, and only they keep them."""
        for released in plan.released:
            self._known.discard(released)
            self.runtime.drop_prompt(released)
        for chunk in plan.prefill:
            request = chunk.request
            if request.id not in self._known:
                self._known.add(request.id)
                self._seen.add(request.id)
                self.runtime.add(request.id, self._prompts(request.id, request.prompt_tokens), self.sampling)
        layout = self.runtime.layout
        self.runtime.submit(layout.rules.arranged(plan, layout.groups))

    def result(self) -> ExecutedIteration:
        """Wait for the iteration submitted first among those not yet taken."""
        self.last = self.runtime.result()
        self.iterations += 1
        return self.last

    def forget(self) -> None:
        """Free what ranks and driver keep of every request, as if none had ever come."""
        batches = tuple(DecodeBatch(group) for group in range(self.runtime.layout.groups))
        self.runtime.run(IterationPlan((), batches, tuple(sorted(self._known))))
        for request in self._seen:
            self.runtime.forget(request)
        self._known.clear()
        self._seen.clear()

    def close(self) -> None:
        """End the ranks; harmless when repeated."""
        self.runtime.close()
