"""Which instances a prefill gets: KV is migrated out of emptier ones, and decodes on others pause."""

from __future__ import annotations

from confsim.schemes.elastic.batch import Batch
from confsim.schemes.elastic.law import Sums
from confsim.schemes.elastic.masters import Masters
from confsim.schemes.elastic.state import State


class Allocation:
    """Takes instances from the decodes of the main strand where the prompts need them or gain more by them."""

    def __init__(self, state: State, masters: Masters) -> None:
        self._state = state
        self._masters = masters
        self.pauses = 0
        self.migrated_tokens = 0

    # Migration

    def compact(self, sums: Sums) -> float:
        """Migrate KV out of the emptiest instances: as many as the prompts need, more where prefill gains by it.

        Returns the seconds that it takes.
        """
        state, slots, used = self._state, self._state.slots, self._state.slots.used
        room = state.limits.room
        least = -(-sum(used) // slots.capacity)  # instances that all KV fits on
        order = slots.fullest_first([index for index in range(state.instances) if used[index]])
        idle, most_idle = state.instances - len(order), state.instances - least
        if idle >= most_idle or sums.tokens > most_idle * room:
            return 0.0
        target = least - 1
        delay_s = 0.0
        while idle < most_idle:
            source = order.pop()
            tokens = slots.pools[source].held
            gain_s = state.law.batch_s(idle, sums) - state.law.batch_s(idle + 1, sums)
            if sums.tokens <= idle * room and gain_s < state.cost.send_s(tokens):
                break
            while left := slots.pools[source].held:
                part = min(left, slots.free(order[target]))
                if part:
                    self._migrate(source, order[target], part)
                else:
                    target -= 1
            self._owner(order[target]).release_empty()
            delay_s += state.cost.send_s(tokens)
            self.migrated_tokens += tokens
            idle += 1
        return delay_s

    def _owner(self, instance: int) -> Batch:
        return next(batch for batch in self._state.main.batches if instance in batch.instances)

    def _migrate(self, source: int, target: int, tokens: int) -> None:
        main = self._state.main
        into, batch = self._owner(target), self._owner(source)
        if into is not batch:
            into.merge(batch)
            main.batches.remove(batch)
        self._state.slots.move(into, main, source, target, tokens)

    # Pauses

    def make_room(self, sums: Sums) -> list[int]:
        """Pause decode batches for the prompts: those whose slots are needed, then those whose instances are worth it.

        Returns the instances for prefill.
        """
        state, main = self._state, self._state.main
        available = state.idle_instances()
        needed = sums.tokens - len(available) * state.limits.room
        spare = sorted(main.batches, key=lambda batch: state.slots.free_on(batch.instances))
        while needed > 0 and spare:
            batch = spare.pop()
            needed -= state.room_on(batch.instances)
            available += batch.instances
            self._park(batch)
        for batch in spare:
            if self._worth_pausing(batch, len(available), sums):
                available += batch.instances
                self._park(batch)
        if main.batches and not self._keep_decoding(available, sums):
            for batch in list(main.batches):
                self._park(batch)
            available = list(range(state.instances))
        if main.batches:
            for batch in state.parked:
                state.slots.detach(batch)
        return available

    def _park(self, batch: Batch) -> None:
        self._state.main.batches.remove(batch)
        self._state.parked.append(batch)
        self.pauses += 1

    def _worth_pausing(self, batch: Batch, available: int, sums: Sums) -> bool:
        """[T(k) - T(k + m)] * sum(1 / len) >= T(k + m) * decodes * (decodes / sum(out))."""
        law = self._state.law
        with_s = law.batch_s(available + len(batch.instances), sums)
        gain_s = law.batch_s(available, sums) - with_s
        emitted = sum([batch.emitted(request) for request in batch.members.values()])
        decodes = len(batch.members)
        return gain_s * sums.inverse >= with_s * decodes * decodes / emitted

    def _keep_decoding(self, available: list[int], sums: Sums) -> bool:
        """Whether the decodes that are left can go on, with idle instances that the prefill can spare."""
        state = self._state
        extra: list[int] = []
        while not self._masters.prepare(state.main, extra):
            idle = [index for index in available if not state.slots.pools[index].held]
            if not idle or state.room_on(available) - state.room(idle[-1]) < sums.tokens:
                available += extra
                return False
            available.remove(idle[-1])
            extra.append(idle[-1])
        available += extra  # those that it did not take
        return True
