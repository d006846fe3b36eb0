"""KV memory: blocks of groups, prompts' copies, the prefix cache, and where a decode's blocks come from.

A pool counts in *units*. One unit is a block of `block_tokens` tokens as far as one group holds it while the prompt
is prefilled: the whole block where KV stays in place, one head shard of it where heads are spread over the groups.
A decode's block on its own group takes `units_per_block`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable

from mypy_extensions import mypyc_attr

from confsim.errors import InputError
from confsim.run.ledger import Oracle
from confsim.run.loop import DecodeLoop
from confsim.run.request import Request, RequestState
from confsim.specs import KvConfig


class BlockPool:
    """Units of one group: `held` by requests, `cached` for reuse and evictable, the rest free."""

    __slots__ = ("cached", "capacity", "held")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = 0
        self.cached = 0

    @property
    def free(self) -> int:
        """Units that hold nothing."""
        return self.capacity - self.held - self.cached

    @property
    def available(self) -> int:
        """Units that a request can get, by eviction where needed."""
        return self.capacity - self.held


class PromptCopies:
    """The prompts' KV on `pools` (the same units on each), with an optional LRU prefix cache of trace blocks.

    `entry_units` is the size of one trace block, 0 where prompts share none. A request holds a number of leading trace
    blocks shared with others, and private units for the rest. With `keeps_own` the full blocks of these stay cached for
    the request itself when it is preempted (`release`), behind the trace blocks that it held: vLLM's cache, too, knows
    blocks of any tokens by their content, and frees the last ones first.
    """

    def __init__(
        self, pools: tuple[BlockPool, ...], block_tokens: int, entry_tokens: int = 0, keeps_own: bool = False
    ) -> None:
        if entry_tokens % block_tokens:
            raise InputError(
                f"kv.block_tokens={block_tokens} does not divide the trace's prefix blocks of {entry_tokens} tokens: "
                "use a divisor, or kv.prefix_cache=false"
            )
        self.pools = pools
        self.block_tokens = block_tokens
        self.entry_tokens = entry_tokens
        self.entry_units = entry_tokens // block_tokens
        self.keeps_own = keeps_own
        self.refs: dict[int, int] = {}  # trace block -> requests that hold it
        # Cached and held by none, least recently used first: trace blocks, and as `_own(request)` what it left behind.
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.left: dict[int, tuple[int, int]] = {}  # request -> (first unit, units) of its own that stayed cached
        self.shared: dict[int, int] = {}  # request -> leading trace blocks it holds
        self.private: dict[int, int] = {}  # request -> units of its own

    def units(self, tokens: int) -> int:
        """Units of `tokens` on each pool."""
        return -(-tokens // self.block_tokens)

    def take(self, pool: BlockPool, units: int) -> bool:
        """Hold `units` more of a pool, evicting cached blocks if that suffices."""
        short = units - pool.free
        if short > 0:
            if short > pool.cached:
                return False
            self._evict(short)
        pool.held += units
        return True

    def take_all(self, units: int) -> bool:
        """Hold `units` more on every pool, or on none."""
        for pool in self.pools:
            if units > pool.capacity - pool.held:
                return False
        for pool in self.pools:
            if units > pool.capacity - pool.held - pool.cached:
                self.take(pool, units)
            else:
                pool.held += units
        return True

    def start(self, request: Request, tokens: int) -> bool:
        """Reserve room for the first `tokens` of a request and give it the prefix that is cached already."""
        hits = self._match(request) if self.entry_units else 0
        shared = hits * self.entry_units
        kept = self._take_left(request, shared) if self.left else 0
        own = max(0, -(-tokens // self.block_tokens) - shared - kept)
        self._hold(request, hits)
        if not self.take_all(own):
            self._add(held=-kept)
            self._leave(request, shared, kept)
            self._unhold(request, hits)
            return False
        self.shared[request.id] = hits
        self.private[request.id] = own + kept
        if hits or kept:
            request.find((shared + kept) * self.block_tokens)
        return True

    def cancel(self, request: Request) -> None:
        """Undo `start` before anything was computed."""
        found = request.found
        request.lose()
        self.release(request, found)

    def extend(self, request: Request, tokens: int) -> bool:
        """Reserve room up to `tokens` of a request that has started."""
        more = self.units(tokens) - self.held_by(request)
        if more > 0:
            if not self.take_all(more):
                return False
            self.private[request.id] += more
        return True

    def written(self, request: Request) -> None:
        """Make full prompt blocks visible to others; a block that another wrote meanwhile is shared instead."""
        if not self.entry_units:
            return
        done = min(request.prefilled, request.prompt_tokens) // self.entry_tokens
        for index in range(self.shared[request.id], min(done, len(request.block_ids))):
            block = request.block_ids[index]
            self.private[request.id] -= self.entry_units
            self.shared[request.id] = index + 1
            if block in self.refs:
                self._add(held=-self.entry_units)
                self._hold_block(block)
            else:
                self.refs[block] = 1

    def release(self, request: Request, stored_tokens: int = 0) -> None:
        """Give up a request's copy; its shared blocks stay cached, its own as far as they hold `stored_tokens`."""
        units = self.private.pop(request.id)
        for pool in self.pools:
            pool.held -= units
        hits = self.shared.pop(request.id)
        if self.keeps_own and stored_tokens:
            shared = hits * self.entry_units
            self._leave(request, shared, min(units, stored_tokens // self.block_tokens - shared))
        self._unhold(request, hits)

    def forget(self, request: Request) -> None:
        """A request has ended: nobody will ask for what it left behind."""
        if request.id in self.left:
            self._drop_left(request)

    def held_by(self, request: Request) -> int:
        """Units that a request has on each pool, shared ones included."""
        return self.shared[request.id] * self.entry_units + self.private[request.id]

    def held_units(self) -> int:
        """Units that all copies hold on each pool, counted anew (for audits)."""
        idle = len(self.idle) - len(self.left)
        return sum(self.private.values()) + (len(self.refs) - idle) * self.entry_units

    def cached_units(self) -> int:
        """Units on each pool that are cached and held by none, counted anew (for audits)."""
        own = sum([units for _, units in self.left.values()])
        return own + (len(self.idle) - len(self.left)) * self.entry_units

    def _match(self, request: Request) -> int:
        limit = min(len(request.block_ids), (request.prompt_tokens - 1) // self.entry_tokens)
        for index in range(limit):
            if request.block_ids[index] not in self.refs:
                return index
        return limit

    def _hold(self, request: Request, blocks: int) -> None:
        for block in request.block_ids[:blocks]:
            self._hold_block(block)

    def _hold_block(self, block: int) -> None:
        if self.refs[block] == 0:
            del self.idle[block]
            self._add(held=self.entry_units, cached=-self.entry_units)
        self.refs[block] += 1

    def _unhold(self, request: Request, blocks: int) -> None:
        for block in reversed(request.block_ids[:blocks]):  # a chain's end is evicted before its start
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.idle[block] = None
                self._add(held=-self.entry_units, cached=self.entry_units)

    def _evict(self, units: int) -> None:
        while units > 0:
            block = next(iter(self.idle))
            if block < 0:
                units -= self._evict_left(block, units)
                continue
            del self.idle[block]
            del self.refs[block]
            self._add(cached=-self.entry_units)
            units -= self.entry_units

    # What preempted requests left behind

    def _leave(self, request: Request, first: int, units: int) -> None:
        """Have free units of a request stay cached: `units` of them, the first one its `first`-th."""
        if units > 0:
            self.left[request.id] = first, units
            self.idle[_own(request.id)] = None
            self._add(cached=units)

    def _take_left(self, request: Request, shared: int) -> int:
        """Hold again what a request left behind and can use behind `shared` units; the rest of it is free."""
        if request.id not in self.left:
            return 0
        first, units = self._drop_left(request)
        if first > shared:
            return 0  # the blocks before are gone
        tokens = request.target_tokens - 1  # the last one is computed, since it emits
        kept = max(0, min(first + units, tokens // self.block_tokens) - shared)
        self._add(held=kept)
        return kept

    def _drop_left(self, request: Request) -> tuple[int, int]:
        first, units = self.left.pop(request.id)
        del self.idle[_own(request.id)]
        self._add(cached=-units)
        return first, units

    def _evict_left(self, block: int, units: int) -> int:
        """Evict up to `units` from the end of what a request left behind; returns how many."""
        request_id = -1 - block
        first, kept = self.left[request_id]
        units = min(units, kept)
        if units == kept:
            del self.left[request_id]
            del self.idle[block]
        else:
            self.left[request_id] = first, kept - units
        self._add(cached=-units)
        return units

    def _add(self, held: int = 0, cached: int = 0) -> None:
        for pool in self.pools:
            pool.held += held
            pool.cached += cached


def _own(request_id: int) -> int:
    """The key of what a request left behind, beside those of trace blocks, which are 0 and more."""
    return -1 - request_id


@mypyc_attr(allow_interpreted_subclasses=True)
class KvStore(ABC):
    """KV of one instance as its loop uses it; groups are decode groups, each with a pool.

    A decode's block takes `units_per_block` of its group's pool. `whole_prompt`: a prompt's KV is reserved before its
    first chunk, rather than chunk by chunk. `whole_request`: so is that of its output where KV stays in place, and in
    any case before it decodes (TensorRT-LLM's GUARANTEED_NO_EVICT), so that decodes never grow; the engine's `oracle`
    tells its length.
    """

    def __init__(self, pools: tuple[BlockPool, ...], units_per_block: int, config: KvConfig, entry_tokens: int) -> None:
        self.block_tokens = config.block_tokens
        self.units_per_block = units_per_block
        self.pools = pools
        shared = entry_tokens if config.prefix_cache else 0
        self.copies = PromptCopies(pools, config.block_tokens, shared, config.prefix_cache)
        self.whole_prompt = config.admission != "step"
        self.whole_request = config.admission == "prompt_output"
        self.oracle: Oracle | None = None  # set by the loop that uses this

    @abstractmethod
    def refusal(self, prompt_tokens: int, output_tokens: int) -> str:
        """Why a request could never run here, or an empty string."""

    def start(self, request: Request) -> bool:
        """Reserve what a prompt needs before its first chunk: all of it or, step by step, nothing yet."""
        tokens = request.target_tokens if self.whole_prompt else 0
        return self.copies.start(request, max(tokens, self.whole_tokens(request)) if self.whole_request else tokens)

    def whole_tokens(self, request: Request) -> int:
        """Tokens that a request stores by its end: all but the last one of its output."""
        assert self.oracle is not None
        return request.prompt_tokens + self.oracle.output_tokens(request) - 1

    def first_room(self, request: Request) -> int:
        """Tokens that a request needs room for to decode: one beyond its target, or all that will come."""
        return self.whole_tokens(request) if self.whole_request else request.target_tokens + 1

    def room(self, request: Request, tokens: int) -> int:
        """Tokens that a decode has room for, where that is `tokens` unless all of its output has."""
        return self.whole_tokens(request) if self.whole_request else tokens

    @abstractmethod
    def decode_units(self, request: Request) -> int:
        """Units that `place` takes of a group's pool."""

    @abstractmethod
    def place(self, request: Request, group: int) -> bool:
        """Before the last chunk: reserve the decode blocks (`first_room` tokens) on `group`."""

    @abstractmethod
    def settle(self, request: Request) -> None:
        """The prompt's KV is where it decodes: what is no longer needed elsewhere is given up."""

    def grow(self, group: int, blocks: int) -> bool:
        """Blocks for the next token of running decodes, where they do not have them all."""
        return self.copies.take(self.pools[group], blocks * self.units_per_block)

    def shrink(self, group: int, blocks: int) -> None:
        """Return blocks that `grow` gave."""
        self.pools[group].held -= blocks * self.units_per_block

    @abstractmethod
    def release(self, request: Request, group: int, tokens: int, stored_tokens: int) -> None:
        """A request gives up its KV, with room for `tokens` on `group` (-1: only its prompt copy).

        What it has `stored` stays cached where it may come back for it; 0: it has ended.
        """

    @abstractmethod
    def held_beside(self, request: Request, group: int, tokens: int) -> int:
        """Units of `group` that a request placed there holds beside its prompt's copy, with room for `tokens`."""

    def audit(self, loop: DecodeLoop, holders: Iterable[Request]) -> None:
        """Recount every pool from the requests that hold KV, of which some decode in `loop`.

        Raises:
            AssertionError: if a pool's books do not balance.
        """
        placed = [request for request in holders if request.state in PLACED]
        for group, pool in enumerate(self.pools):
            assert pool.free + pool.held + pool.cached == pool.capacity
            assert pool.free >= 0 and pool.held >= 0 and pool.cached >= 0
            assert pool.cached == self.copies.cached_units()
            units = self.copies.held_units()
            for request in placed:
                units += self.held_beside(request, group, loop.room(request))
            assert units == pool.held, (group, units, pool.held)


PLACED = frozenset({RequestState.TRANSFER, RequestState.LANDED, RequestState.DECODE})  # where decode blocks are held


@mypyc_attr(allow_interpreted_subclasses=True)
class InPlaceKv(KvStore):
    """One pool; a request's KV stays where its prefill put it (uniform TP, or heads spread for both phases)."""

    def __init__(self, capacity_tokens: int, config: KvConfig, entry_tokens: int = 0) -> None:
        super().__init__((BlockPool(capacity_tokens // config.block_tokens),), 1, config, entry_tokens)

    def refusal(self, prompt_tokens: int, output_tokens: int) -> str:
        """Why a request could never run here, or an empty string."""
        need = self.copies.units(prompt_tokens + output_tokens - 1)
        return "" if need <= self.pools[0].capacity else "kv_capacity"

    def decode_units(self, request: Request) -> int:
        """Units for one more token than the prompt has, or for all that will come."""
        return self.copies.units(self.first_room(request)) - self.copies.held_by(request)

    def place(self, request: Request, group: int) -> bool:
        """Before the last chunk: room for one more token, or for all that will come."""
        return self.copies.extend(request, self.first_room(request))

    def settle(self, request: Request) -> None:
        """Nothing moves."""

    def release(self, request: Request, group: int, tokens: int, stored_tokens: int) -> None:
        """A request gives up its KV, with room for `tokens`; what it has stored may stay cached."""
        if group >= 0 and not self.whole_request:
            shared = self.copies.shared[request.id] * self.copies.entry_units
            self.copies.private[request.id] = self.copies.units(tokens) - shared
        self.copies.release(request, stored_tokens)

    def held_beside(self, request: Request, group: int, tokens: int) -> int:
        """Blocks that it grew by: the prompt's copy has the first `target + 1` tokens, or all."""
        return self.copies.units(self.room(request, tokens)) - self.copies.units(self.first_room(request))


@mypyc_attr(allow_interpreted_subclasses=True)
class MigratingKv(KvStore):
    """Prompts spread by head over all groups, moved once to the decode's group (Conflux).

    A shard of a block is one unit on every group, a decode's block `units_per_block` on its own. Both copies count
    until the transfer ends. A request is servable when its longest form, shards and decode copy together, fits on
    one group: otherwise a preempted one could never come back.
    """

    def __init__(
        self, groups: int, units_per_block: int, capacity_tokens: int, config: KvConfig, entry_tokens: int = 0
    ) -> None:
        capacity = capacity_tokens // config.block_tokens * units_per_block
        super().__init__(tuple(BlockPool(capacity) for _ in range(groups)), units_per_block, config, entry_tokens)

    def refusal(self, prompt_tokens: int, output_tokens: int) -> str:
        """Why a request could never run here, or an empty string."""
        blocks = self.copies.units(prompt_tokens + output_tokens - 1)
        need = blocks if output_tokens == 1 else blocks * (1 + self.units_per_block)
        return "" if need <= self.pools[0].capacity else "kv_capacity"

    def decode_units(self, request: Request) -> int:
        """Units of a whole copy and one more token, or all that will come."""
        return self.copies.units(self.first_room(request)) * self.units_per_block

    def place(self, request: Request, group: int) -> bool:
        """Reserve the decode copy on its group."""
        return self.copies.take(self.pools[group], self.decode_units(request))

    def settle(self, request: Request) -> None:
        """The transfer is over: give up the shards (they stay in the prefix cache)."""
        self.copies.release(request, request.target_tokens)

    def release(self, request: Request, group: int, tokens: int, stored_tokens: int) -> None:
        """A request gives up its decode copy, of which nothing can be reused, or the shards of its prompt."""
        if group >= 0:
            self.pools[group].held -= self.copies.units(self.room(request, tokens)) * self.units_per_block
        else:
            self.copies.release(request, stored_tokens)
        if not stored_tokens:
            self.copies.forget(request)

    def held_beside(self, request: Request, group: int, tokens: int) -> int:
        """The decode copy, on its own group."""
        if request.group != group:
            return 0
        return self.copies.units(self.room(request, tokens)) * self.units_per_block
