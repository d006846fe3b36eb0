"""Small random cases that press on everything at once: tied arrivals, tiny pools, odd blocks, tight targets."""

from __future__ import annotations

from random import Random

from simulator_harness import Case, Rows

from confsim.latency.affine import AffineLatencyConfig
from confsim.outcome.slo import Slo


def random_case(seed: int, scheme: str, order: str, prefix_cache: bool) -> Case:
    """The case of a seed."""
    rng = Random(seed)
    rows = _rows(rng)
    block = rng.choice([1, 4, 16])
    entry = block * rng.choice([1, 2, 3]) if prefix_cache else 0
    if prefix_cache:
        rows = _with_prefixes(rng, rows, entry)
    longest = max(row[1] + row[2] for row in rows)
    gpus, tp = rng.choice([(1, 1), (2, 1), (4, 1), (4, 1), (4, 2), (2, 2), (8, 2)])
    return Case(
        rows,
        scheme,
        order,
        gpus=gpus,
        tp=tp,
        kv_heads=rng.choice([1, 2, 4, 8]),
        block_tokens=block,
        capacity_tokens=rng.randint(max(block, longest // 2), max(block, 4 * longest)),
        admission=rng.choice(["prompt", "step", "prompt_output"]),
        prefix_cache=prefix_cache,
        trace_block_tokens=entry,
        latency=_latency(rng),
        slo=Slo(rng.uniform(0.005, 0.3), rng.uniform(0.004, 0.05), margin=rng.choice([0.0, 0.2])),
        chunk_tokens=rng.choice(["auto", "auto", rng.randint(1, 64)]),
        max_batched_tokens=rng.choice([8, 64, 8192]),
        max_partial_prefills=rng.choice([1, 2, 4]),
        async_schedule=rng.random() < 0.5,
        placement_threshold=rng.choice([0.0, 0.3, 0.8]),
        max_running=rng.choice([None, None, 1, 2, 3]),
    )


def _rows(rng: Random) -> Rows:
    at, rows = 0.0, []
    gap, prompt, output = rng.choice([0.01, 0.05, 0.1]), rng.choice([5, 40, 120]), rng.choice([3, 14, 40])
    for _ in range(rng.randint(1, 12)):
        at += 0.0 if rng.random() < 0.4 else rng.uniform(0.0, gap)
        rows.append((at, rng.randint(1, prompt), rng.randint(1, output)))
    return rows


def _with_prefixes(rng: Random, rows: Rows, entry: int) -> Rows:
    """Prompts of three families that begin alike: block ids by family and position."""
    out: Rows = []
    for at, prompt, output in rows:
        family, whole = rng.randint(0, 2), -(-prompt // entry)
        common = rng.randint(0, whole)
        own = 10_000 * (1 + len(out))
        out.append((at, prompt, output, [family * 1000 + i if i < common else own + i for i in range(whole)]))
    return out


def _latency(rng: Random) -> AffineLatencyConfig:
    def some(most: float, zero: float = 0.3) -> float:
        return 0.0 if rng.random() < zero else rng.uniform(0.0, most)

    return AffineLatencyConfig(
        linear_base_s=rng.uniform(1e-3, 1e-2),
        linear_token_s=rng.uniform(1e-5, 4e-4),
        decode_base_s=some(1e-3),
        decode_sequence_s=some(5e-4),
        decode_token_s=some(2e-5),
        prefill_base_s=some(1e-3),
        prefill_pair_s=some(1e-5),
        all_to_all_base_s=some(2e-3),
        all_to_all_token_s=some(1e-4),
        head_base_s=some(1e-3),
        head_token_s=some(2e-4),
        iteration_overhead_s=some(4e-3),
        sequence_overhead_s=some(5e-4),
        mixed_overhead_s=some(2e-3, 0.6),
        transfer_base_s=some(2e-2, 0.6),
        transfer_token_s=some(3e-4, 0.5),
        prefill_slowdown=rng.uniform(1.0, 2.0),
        decode_slowdown=rng.uniform(1.0, 2.0),
    )
