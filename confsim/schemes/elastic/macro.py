"""Macro-iterations: prefills beside the decodes that go on, until the first prefills have ended."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import simpy

from confsim.schemes.elastic.batch import Strand
from confsim.schemes.elastic.decoding import Decodes
from confsim.schemes.elastic.dispatch import Dispatcher
from confsim.schemes.elastic.masters import Masters
from confsim.schemes.elastic.prefilling import Prefill, Prefills, longest_s
from confsim.schemes.elastic.state import State

POLL_S = 0.010  # idle instances look for prompts this often during a macro-iteration


class MacroIteration:
    """One macro-iteration as coroutines: one for the decodes that go on, and one for each prefill batch."""

    def __init__(
        self,
        state: State,
        dispatcher: Dispatcher,
        masters: Masters,
        prefilling: Prefills,
        decoding: Decodes,
        prefills: list[Prefill],
    ) -> None:
        self._state = state
        self._dispatcher = dispatcher
        self._masters = masters
        self._prefilling = prefilling
        self._decoding = decoding
        self._start_s = state.env.now
        self._end_s = self._start_s + longest_s(prefills)
        self._planned_s = max([prefill.predicted_s for prefill in prefills])
        self._running = len(prefills)  # first prefills that have not ended
        self._coroutines = [self._decode_on()] if state.main.batches else []
        for strand, prefill in zip(state.side, prefills, strict=False):
            self._coroutines.append(self._prefill_first(strand, prefill))

    def run(self) -> Generator[simpy.Event, Any, None]:
        """Run all coroutines to their end."""
        env = self._state.env
        processes = [env.process(coroutine) for coroutine in self._coroutines]
        yield processes[0] if len(processes) == 1 else env.all_of(processes)

    def close(self) -> None:
        """End the coroutines."""
        for coroutine in self._coroutines:
            coroutine.close()

    def _decode_on(self) -> Generator[simpy.Event, Any, None]:
        yield from self._work(self._state.main, [])

    def _prefill_first(self, strand: Strand, prefill: Prefill) -> Generator[simpy.Event, Any, None]:
        released = yield from self._prefilling.run(strand, [prefill])
        self._running -= 1
        yield from self._work(strand, released)

    def _work(self, strand: Strand, released: list[int]) -> Generator[simpy.Event, Any, None]:
        """Decode on, or prefill more on instances that are released, until the first prefills have ended."""
        while True:
            while strand.batches:
                if self._running == 0 or not self._masters.prepare(strand, []):
                    return
                for batch in strand.batches:
                    self._state.slots.attach(batch, strand, self._state.ledger.oracle)
                released += yield from self._decoding.run(strand, self._end_s, 1 << 30)
            prefills = yield from self._next_prefills(released)
            if not prefills:
                return
            released = yield from self._prefilling.run(strand, prefills)

    def _next_prefills(self, instances: list[int]) -> Generator[simpy.Event, Any, list[Prefill]]:
        """Instances without work look for prompts whose prefill fits the time left."""
        state = self._state
        while self._running > 0:
            left_s = self._planned_s - (state.env.now - self._start_s)
            if left_s <= 0:
                return []
            if len(state.queue):
                free = [state.slots.free(index) for index in instances]
                chosen, rest = self._dispatcher.choose_within(state.pop, free, left_s)
                state.push(rest)
                if chosen:
                    return self._prefilling.batch(chosen, instances)
            yield state.env.timeout(POLL_S)
        return []
