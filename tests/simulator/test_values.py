"""Values of groups are checked against the dataclass that they make."""

from __future__ import annotations

import pytest

import confsim
from confsim.errors import InputError
from confsim.setup.values import checked
from confsim.specs import KvConfig


def test_switches_may_be_words() -> None:
    assert checked(KvConfig, "kv", {"prefix_cache": "on"}) == {"prefix_cache": True}
    assert checked(KvConfig, "kv", {"prefix_cache": "off", "capacity_tokens": None})["prefix_cache"] is False


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"block_tokens": 1.5}, "kv.block_tokens=1.5: expected a whole number"),
        ({"block_tokens": True}, "kv.block_tokens=True: expected a whole number"),
        ({"utilisation": "high"}, "kv.utilisation=high: expected a number"),
        ({"utilisation": float("nan")}, "kv.utilisation=nan: expected a number"),
        ({"capacity_tokens": "all"}, "kv.capacity_tokens=all: expected a whole number or null"),
        ({"admission": 3}, "kv.admission=3: expected a word"),
    ],
)
def test_other_types_are_refused_by_name(values: dict[str, object], wanted: str) -> None:
    with pytest.raises(InputError, match=f"^{wanted}$"):
        checked(KvConfig, "kv", values)


def test_off_is_off_in_a_run() -> None:
    hits = {}
    for word in ("on", "off", "true", "false"):
        cfg = confsim.compose(["trace=toolagent", "trace.requests=60", f"kv.prefix_cache={word}"])
        hits[word] = confsim.simulate(cfg).summary["prefix_hit_tokens"]
    assert hits["on"] == hits["true"] > 0
    assert hits["off"] == hits["false"] == 0
