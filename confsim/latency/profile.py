"""Latency profiles: small JSON files of monotone tables with their provenance, checked at load."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from confsim.errors import InputError
from confsim.latency.compiled import CompiledLatency, DecodeRow, Dense
from confsim.latency.curve import Curve, Floats, check_curve, check_numbers, rounded
from confsim.latency.mixed import MixedAttention
from confsim.specs import GpuSpec, ModelSpec
from traces.files import write_whole

FORMAT = 1
MICRO = 1e-6
PACKAGED = Path(__file__).parent / "profiles"
# The fields of a model that its profile depends on.
MODEL_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "torch_dtype",
    "qk_norm",
    "gemm_dtype",
    "kv_cache_dtype",
)
DENSE_TOKENS = 65536  # a prefill chunk over all groups
STACKED_TOKENS = 32768  # tokens stacked on one group
HEAD_TOKENS = 4096  # tokens that need logits
TRANSFER_STEP = 64
COLLECTIVE = "all_reduce"  # the term of `linear` and `once` that is communication


@dataclass(frozen=True)
class DecodeTable:
    """Decode attention of a layer: `seconds[i][j]` for `sequences[i]` decodes of `context[j]` tokens each.

    Rises with the context and, at the same context each, with the sequences. Entry j of row i was measured where
    `context[j] <= measured[i]`; beyond it the row follows its last slope.
    """

    sequences: tuple[int, ...]
    context: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    measured: tuple[int, ...]


@dataclass(frozen=True)
class PrefillTable:
    """Prefill attention of a layer: `own` at `tokens` (no cached prefix) and `cached` seconds a cached token.

    `split` is `cached` for kernels that split a tile's keys over SMs. Both are derived unless the source measured
    chunks behind a prefix; then they are the same.
    """

    own: Curve
    cached: Curve
    split: Curve


@dataclass(frozen=True)
class Profile:
    """Times of one model on one GPU type at every layout that its heads allow.

    Tables are of one layer (`linear`, attention, `exchange`, `transfer`) or of one pass (`head`, `once`), in seconds.
    Keys: `linear`, `head`, `once` and `decode` by tp; `prefill` by tp * sp; `exchange` and `transfer` by (tp, sp).
    Named terms of `linear`, `head` and `exchange` add up. `decode_slowdown` and `prefill_slowdown` are set only where
    they were measured; `mixed` only where the ranks compute both phases in one attention call.
    """

    model: dict[str, Any]
    gpu: str
    linear: dict[int, dict[str, Curve]]
    once: dict[int, dict[str, Curve]]
    head: dict[int, dict[str, Curve]]
    decode: dict[int, DecodeTable]
    prefill: dict[int, PrefillTable]
    exchange: dict[tuple[int, int], dict[str, Curve]]
    transfer: dict[tuple[int, int], Curve]
    iteration_overhead_s: float
    sequence_overhead_s: float
    mixed_overhead_s: float = 0.0
    prefill_slowdown: float | None = None
    decode_slowdown: float | None = None
    mixed: MixedAttention | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The model's name, for messages."""
        return str(self.model.get("name", "?"))

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read and check a profile.

        Raises:
            InputError: where the file is missing, not a profile, or holds a time that is negative, infinite, not a
                number or decreasing; the message names file and entry.
        """
        return profile_from_json(_read(Path(path)), str(path))

    def save(self, path: str | Path) -> None:
        """Write readable JSON (times in microseconds), whole or not at all.

        Raises:
            InputError: as `load`; a profile that could not be read back is not written.
        """
        path = Path(path)
        profile_from_json(profile_to_json(self), str(path))
        write_whole(path, profile_to_text(self), durable=True)

    @property
    def profile_hash(self) -> str:
        """Sixteen hex digits over everything that the profile holds."""
        return hashlib.sha256(profile_to_text(self).encode()).hexdigest()[:16]

    def check_fits(self, model: ModelSpec, gpu: GpuSpec) -> None:
        """Refuse a model or GPU that this profile was not fitted for.

        Raises:
            InputError: naming the field that differs.
        """
        if gpu.name != self.gpu:
            raise InputError(
                f"the profile of {self.name} was fitted for gpu={self.gpu}, not {gpu.name}: fit one for it"
            )
        for key in MODEL_FIELDS:
            mine, theirs = self.model.get(key), getattr(model, key)
            if mine != theirs:
                raise InputError(
                    f"the profile of {self.name} was fitted for model.{key}={mine}, not {theirs}: "
                    f"run `confsim fit gpu={gpu.name} model={model.name}` and set latency.profile to the file"
                )

    def compile(
        self,
        model: ModelSpec,
        gpu: GpuSpec,
        tp: int,
        sp: int,
        prefill_slowdown: float = 1.0,
        decode_slowdown: float = 1.0,
        iteration_overhead_s: float | None = None,
        sequence_overhead_s: float | None = None,
        split_kv: bool = True,
    ) -> CompiledLatency:
        """Tables of all layers for `sp` groups of `tp` GPUs; slowdowns that the profile measured win over those given.

        `split_kv`: prefill attention behind a prefix by kernels that split keys over SMs.

        Raises:
            InputError: for a model, GPU or layout that the profile does not cover.
        """
        self.check_fits(model, gpu)
        model.split_heads(tp, sp)
        self._check_layout(tp, sp)
        layers = model.num_hidden_layers
        prefill = self.prefill[tp * sp]
        own, cached = _prefill_lists(prefill, layers, split_kv)
        exchange = self.exchange.get((tp, sp), {})
        transfer = self.transfer.get((tp, sp), Curve((1e9,), (0.0,)))  # one group: nothing moves
        measured = int(prefill.own.x[-1])
        linear = _dense(self.linear[tp], STACKED_TOKENS, layers, self.once.get(tp, {}))
        return CompiledLatency(
            tp=tp,
            sp=sp,
            prefill_slowdown=prefill_slowdown if self.prefill_slowdown is None else self.prefill_slowdown,
            decode_slowdown=decode_slowdown if self.decode_slowdown is None else self.decode_slowdown,
            linear=linear,
            prefill_own=own,
            prefill_cached=cached,
            exchange=_dense(exchange, STACKED_TOKENS, layers),
            head=_dense(self.head[tp], HEAD_TOKENS, 1),
            transfer=_dense({"send": transfer}, 4096, layers, step=TRANSFER_STEP),
            iteration_overhead_s=self.iteration_overhead_s if iteration_overhead_s is None else iteration_overhead_s,
            sequence_overhead_s=self.sequence_overhead_s if sequence_overhead_s is None else sequence_overhead_s,
            decode_row=_DecodeRows(self.decode[tp], layers),
            decode_limit=self.decode[tp].sequences[-1],
            prefill_square=own.slope / (2.0 * DENSE_TOKENS),
            prefill_limit=min(measured, DENSE_TOKENS),
            linear_limit=_limit(self.linear[tp], STACKED_TOKENS),
            exchange_limit=_limit(exchange, STACKED_TOKENS),
            head_limit=_limit(self.head[tp], HEAD_TOKENS),
            transfer_limit=int(transfer.x[-1]),
            transfer_step=TRANSFER_STEP,
            mixed_overhead_s=self.mixed_overhead_s,
            collective=_dense(
                _only(self.linear[tp], COLLECTIVE), STACKED_TOKENS, layers, _only(self.once.get(tp, {}), COLLECTIVE)
            ),
        )

    def _check_layout(self, tp: int, sp: int) -> None:
        missing = tp not in self.linear or tp not in self.decode or tp not in self.head or tp * sp not in self.prefill
        if missing or (sp > 1 and (tp, sp) not in self.exchange):
            known = sorted({(a, 1) for a in self.linear} | set(self.exchange))
            layouts = ", ".join(f"{groups} groups of {size}" for size, groups in known)
            raise InputError(
                f"the profile of {self.name} on {self.gpu} has no layout of {sp} groups of {tp} GPUs "
                f"(cluster.gpus, cluster.tp): it has {layouts}"
            )


def _only(terms: Mapping[str, Curve], name: str) -> dict[str, Curve]:
    return {name: terms[name]} if name in terms else {}


def _limit(terms: Mapping[str, Curve], default: int) -> int:
    return min((int(curve.x[-1]) for curve in terms.values()), default=default)


def _dense(
    terms: Mapping[str, Curve], last: int, layers: int, once: Mapping[str, Curve] | None = None, step: int = 1
) -> Dense:
    """Seconds of a pass at 0, step, 2 * step, ...: the terms of a layer times the layers, plus terms paid once."""
    work = np.arange(last + 1, dtype=np.float64) * step
    ends = np.array([work[-1], work[-1] + 1.0])
    total, slope = np.zeros(last + 1), 0.0
    for group, times in ((terms, layers), (once or {}, 1)):
        for curve in group.values():
            total += curve(work) * times
            slope += float(np.diff(curve(ends))[0]) * times
    total[0] = 0.0
    return Dense(total.tolist(), max(slope, 0.0))


def _prefill_lists(table: PrefillTable, layers: int, split_kv: bool) -> tuple[Dense, Dense]:
    """Dense own and per-cached-token attention; beyond the last measured chunk at its last efficiency.

    Own attention is n * n / 2 pairs: between measurements it is interpolated on log scales (a straight line would
    overstate a square), and past the last one it grows with the square of the tokens. A chunk's cost a cached token
    grows with its tokens.
    """
    n = np.arange(DENSE_TOKENS + 1, dtype=np.float64)
    last = table.own.x[-1]
    inside = n[1:] <= last
    own, cached = np.zeros(DENSE_TOKENS + 1), np.zeros(DENSE_TOKENS + 1)
    own[1:] = _log_interp(n[1:], table.own)
    square = _last_square(table.own)
    own[1:] = np.where(inside, own[1:], table.own.y[-1] + square * (n[1:] ** 2 - last**2))
    cached[1:] = (table.split if split_kv else table.cached)(n[1:])
    own_slope = square * 2.0 * DENSE_TOKENS * layers
    cached_slope = float(cached[-1] - cached[-2]) * layers
    return Dense((own * layers).tolist(), own_slope), Dense((cached * layers).tolist(), max(cached_slope, 0.0))


def _last_square(own: Curve) -> float:
    """Seconds a squared token over the last octave of the table."""
    x, y = np.asarray(own.x), np.asarray(own.y)
    first = min(int(np.searchsorted(x, x[-1] / 2.0)), len(x) - 2) if len(x) > 1 else 0
    if len(x) == 1:
        return float(y[0] / x[0] ** 2)
    return float((y[-1] - y[first]) / (x[-1] ** 2 - x[first] ** 2))


def _log_interp(at: Floats, curve: Curve) -> Floats:
    y = np.maximum(np.asarray(curve.y), 1e-30)
    return np.asarray(np.exp(np.interp(np.log(at), np.log(np.asarray(curve.x)), np.log(y))), dtype=np.float64)


class _DecodeRows:
    """Builds the row of any number of sequences: linear in the sequences at the same context each."""

    def __init__(self, table: DecodeTable, layers: int) -> None:
        self.table = table
        self.seconds = np.asarray(table.seconds) * layers
        self.context = np.asarray(table.context, dtype=np.float64)

    def __call__(self, sequences: int) -> DecodeRow:
        grid = self.table.sequences
        upper = min(max(int(np.searchsorted(grid, sequences)), 1), len(grid) - 1) if len(grid) > 1 else 0
        lower = max(upper - 1, 0)
        low, high = self.seconds[lower], self.seconds[upper]
        width = grid[upper] - grid[lower]
        weight = (sequences - grid[lower]) / width if width else 0.0
        times = np.maximum.accumulate(low + max(weight, 0.0) * (high - low))
        near = lower if weight < 1.0 else upper
        return _row(sequences, self.context * sequences, times, float(self.table.measured[near] * sequences))


def _row(sequences: int, totals: Floats, times: Floats, limit: float) -> DecodeRow:
    """Pieces between the knots; flat below the first one, the last slope beyond the last one."""
    slope = np.diff(times) / np.diff(totals) if len(totals) > 1 else np.zeros(1)
    knots = [0, *(int(value) for value in totals[: len(slope)])]
    return DecodeRow(knots, [float(times[0]), *times[: len(slope)].tolist()], [0.0, *slope.tolist()], limit)


# JSON ----------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"latency profile {path} cannot be read ({error}): check latency.profile") from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"latency profile {path}:{error.lineno} is not JSON: {error.msg}") from None
    if not isinstance(data, dict) or data.get("kind") != "latency_profile":
        raise InputError(f'latency profile {path} is not one: it needs "kind": "latency_profile"')
    if data.get("format") != FORMAT:
        raise InputError(
            f"latency profile {path} has format {data.get('format')}, this version reads {FORMAT}: refit it"
        )
    return data


def _curve_json(curve: Curve) -> dict[str, list[float]]:
    return {"x": [_number(x) for x in curve.x], "us": [rounded(y / MICRO) for y in curve.y]}


def _number(value: float) -> float:
    return int(value) if float(value).is_integer() else value


def _terms_json(terms: Mapping[str, Curve]) -> dict[str, Any]:
    return {name: _curve_json(curve) for name, curve in terms.items()}


def _decode_json(table: DecodeTable) -> dict[str, Any]:
    return {
        "sequences": list(table.sequences),
        "context_each": list(table.context),
        "measured_context_each": list(table.measured),
        "us": [[rounded(value / MICRO) for value in row] for row in table.seconds],
    }


def profile_to_json(profile: Profile) -> dict[str, Any]:
    """Plain data; times in microseconds of one layer (`once`, `head`: of one pass)."""
    return {
        "kind": "latency_profile",
        "format": FORMAT,
        "model": profile.model,
        "gpu": profile.gpu,
        "provenance": profile.provenance,
        "errors": profile.errors,
        "overhead": {
            "iteration_s": profile.iteration_overhead_s,
            "sequence_s": profile.sequence_overhead_s,
            **({"mixed_s": profile.mixed_overhead_s} if profile.mixed_overhead_s else {}),
        },
        "slowdown": {"prefill": profile.prefill_slowdown, "decode": profile.decode_slowdown},
        "linear": {f"tp{tp}": _terms_json(terms) for tp, terms in profile.linear.items()},
        "once": {f"tp{tp}": _terms_json(terms) for tp, terms in profile.once.items()},
        "head": {f"tp{tp}": _terms_json(terms) for tp, terms in profile.head.items()},
        "decode_attention": {f"tp{tp}": _decode_json(table) for tp, table in profile.decode.items()},
        "prefill_attention": {
            f"degree{degree}": {
                "own": _curve_json(table.own),
                "cached_token": _curve_json(table.cached),
                "cached_token_split_kv": _curve_json(table.split),
            }
            for degree, table in profile.prefill.items()
        },
        "exchange": {f"tp{tp}sp{sp}": _terms_json(terms) for (tp, sp), terms in profile.exchange.items()},
        "transfer": {f"tp{tp}sp{sp}": _curve_json(curve) for (tp, sp), curve in profile.transfer.items()},
        **({} if profile.mixed is None else {"mixed_attention": dict(profile.mixed.data)}),
    }


def profile_to_text(profile: Profile) -> str:
    """The JSON text: objects over lines, each list of numbers on one line."""
    return _pretty(profile_to_json(profile), 0) + "\n"


def _pretty(value: Any, depth: int) -> str:
    pad = "  " * (depth + 1)
    if isinstance(value, dict) and value:
        items = [f"{pad}{json.dumps(str(key))}: {_pretty(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + "\n" + "  " * depth + "}"
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        return "[\n" + ",\n".join(pad + _pretty(item, depth + 1) for item in value) + "\n" + "  " * depth + "]"
    return json.dumps(value, separators=(",", ":") if isinstance(value, list) else None)


class _Reader:
    """Turns plain data back into tables, with the path of an entry in every message."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def section(self, name: str) -> Mapping[str, Any]:
        value = self.data.get(name)
        if not isinstance(value, dict):
            raise InputError(f"latency profile {self.where} has no section {name!r}: refit it")
        return value

    def numbers(self, value: Any, name: str, least: float = 0.0) -> list[float]:
        if not isinstance(value, list):
            raise InputError(f"latency profile {self.where}: {name} is not a list of numbers")
        check_numbers(value, f"latency profile {self.where}: {name}", least)
        return value

    def curve(self, value: Any, name: str) -> Curve:
        if not isinstance(value, dict):
            raise InputError(f"latency profile {self.where}: {name} is not a table with x and us")
        x = self.numbers(value.get("x"), f"{name}.x")
        us = self.numbers(value.get("us"), f"{name}.us")
        curve = Curve(tuple(float(item) for item in x), tuple(item * MICRO for item in us))
        check_curve(curve, f"latency profile {self.where}: {name}")
        return curve

    def terms(self, value: Any, name: str) -> dict[str, Curve]:
        if not isinstance(value, dict):
            raise InputError(f"latency profile {self.where}: {name} is not an object of tables")
        return {key: self.curve(item, f"{name}.{key}") for key, item in value.items()}

    def keyed(self, name: str) -> dict[int, dict[str, Curve]]:
        return {_digits(key)[0]: self.terms(item, f"{name}.{key}") for key, item in self.section(name).items()}

    def number(self, section: str, key: str, least: float = 0.0) -> float:
        value = self.section(section).get(key)
        check_numbers([value], f"latency profile {self.where}: {section}.{key}", least)  # type: ignore[list-item]
        return float(value)  # type: ignore[arg-type]

    def optional(self, section: str, key: str, least: float) -> float | None:
        return None if self.section(section).get(key) is None else self.number(section, key, least)

    def mixed(self) -> MixedAttention | None:
        if "mixed_attention" not in self.data:
            return None
        return MixedAttention(self.section("mixed_attention"), f"latency profile {self.where}: mixed_attention")

    def decode(self, value: Mapping[str, Any], name: str) -> DecodeTable:
        keys = ("sequences", "context_each", "measured_context_each")
        sequences, context, measured = (self.numbers(value.get(key), f"{name}.{key}", 1.0) for key in keys)
        rows = value.get("us")
        if not isinstance(rows, list) or len(rows) != len(sequences) or len(measured) != len(sequences):
            raise InputError(f"latency profile {self.where}: {name}.us needs one row for each of its sequences")
        x = tuple(float(item) for item in context)
        for index, row in enumerate(rows):
            us = self.numbers(row, f"{name}.us[{index}]")
            check_curve(Curve(x, tuple(us)), f"latency profile {self.where}: {name}.us[{index}]")
        for before, after in pairwise(rows):
            if any(b > a for b, a in zip(before, after, strict=True)):
                raise InputError(f"latency profile {self.where}: {name}.us falls with the number of sequences")
        seconds = tuple(tuple(item * MICRO for item in row) for row in rows)
        return DecodeTable(_ints(sequences), _ints(context), seconds, _ints(measured))


def _ints(values: list[float]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _digits(key: str) -> tuple[int, ...]:
    text = "".join(letter if letter.isdigit() else " " for letter in key)
    return tuple(int(part) for part in text.split())


def _pair(key: str) -> tuple[int, int]:
    tp, sp = _digits(key)
    return tp, sp


def profile_from_json(data: Mapping[str, Any], where: str) -> Profile:
    """Check plain data and build the profile; `where` names the file in messages."""
    reader = _Reader(data, where)
    prefill = {}
    for key, item in reader.section("prefill_attention").items():
        tables = reader.terms(item, f"prefill_attention.{key}")
        prefill[_digits(key)[0]] = PrefillTable(tables["own"], tables["cached_token"], tables["cached_token_split_kv"])
    decode = reader.section("decode_attention").items()
    exchange = reader.section("exchange").items()
    transfer = reader.section("transfer").items()
    return Profile(
        model=dict(reader.section("model")),
        gpu=str(data.get("gpu")),
        linear=reader.keyed("linear"),
        once=reader.keyed("once"),
        head=reader.keyed("head"),
        decode={_digits(key)[0]: reader.decode(item, f"decode_attention.{key}") for key, item in decode},
        prefill=prefill,
        exchange={_pair(key): reader.terms(item, f"exchange.{key}") for key, item in exchange},
        transfer={_pair(key): reader.curve(item, f"transfer.{key}") for key, item in transfer},
        iteration_overhead_s=reader.number("overhead", "iteration_s"),
        sequence_overhead_s=reader.number("overhead", "sequence_s"),
        mixed_overhead_s=reader.optional("overhead", "mixed_s", 0.0) or 0.0,
        prefill_slowdown=reader.optional("slowdown", "prefill", 1.0),
        decode_slowdown=reader.optional("slowdown", "decode", 1.0),
        mixed=reader.mixed(),
        provenance=dict(reader.section("provenance")),
        errors=dict(reader.section("errors")),
    )
