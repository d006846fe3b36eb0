"""The section of docs/fidelity.md on measured engines, from the record that `confsim validate` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.markdown import table

RECORD = Path(__file__).resolve().parents[2] / "docs" / "silicon.json"
SPLIT_NAMES = {"fit": "fit", "held_out": "held out", "kv_limited": "TTFT above 5 s"}


def section(path: Path = RECORD) -> str:
    """Markdown of the record at `path`; of a checkout's own one unless another is given."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return SECTION.format(
        sample=content["sample"]["source"],
        errors=table(ERRORS, [_error_cells(entry, content["estimator"]) for entry in content["families"]]),
        by_tp=table(BY_TP, [_tp_cells(entry) for entry in content["by_tp"]]),
        constants=table(CONSTANTS, [_constant_cells(name, found) for name, found in content["constants"].items()]),
        engines="\n".join(f"- {name}: {text}." for name, text in content["engines"].items()),
        left_out="\n".join(f"- {count} rows: {why}." for why, count in content["left_out"].items()),
    )


ERRORS = (
    "model, GPU, engine", "rows", "number", "TPOT mean %", "TPOT median %", "TTFT mean %", "TTFT median %",
    "estimator TPOT / TTFT %",
)  # fmt: skip
BY_TP = ("model, GPU, engine", "TP", "rows", "number", "TPOT mean %", "TPOT bias %", "TTFT mean %", "TTFT bias %")
CONSTANTS = ("chosen on", "rows", "iteration, ms", "sequence, µs", "prefill factor")


def _setting(entry: Mapping[str, Any]) -> str:
    return f"{entry['model']}, {entry['system']}, {entry['engine']}"


def _percent(value: float, sign: str = "") -> str:
    return f"{value * 100:{sign}.1f}"


def _error_cells(entry: Mapping[str, Any], estimator: Mapping[str, Mapping[str, float]]) -> Sequence[str]:
    numbers = [_percent(entry[key]) for key in ("tpot_mape", "tpot_median", "ttft_mape", "ttft_median")]
    known = estimator[entry["family"]]
    theirs = f"{_percent(known['tpot_mape'])} / {_percent(known['ttft_mape'])}"
    return [_setting(entry), SPLIT_NAMES[entry["split"]], str(entry["rows"]), *numbers, theirs]


def _tp_cells(entry: Mapping[str, Any]) -> Sequence[str]:
    errors = [_percent(entry["tpot_mape"]), _percent(entry["tpot_bias"], "+")]
    errors += [_percent(entry["ttft_mape"]), _percent(entry["ttft_bias"], "+")]
    return [_setting(entry), str(entry["tp"]), SPLIT_NAMES[entry["split"]], str(entry["rows"]), *errors]


def _constant_cells(name: str, found: Mapping[str, Any]) -> Sequence[str]:
    values = [f"{found['iteration_s'] * 1e3:.3f}", f"{found['sequence_s'] * 1e6:.1f}", f"{found['prefill_factor']:.3f}"]
    return [name, str(found["rows"]), *values]


SECTION = """## Engines that others measured

`make fidelity` replays closed loops (measured means of the time to first token, TTFT, and of the time per output token,
TPOT) with `scheme=chunked_prefill` on the packaged kernels; the sample is {sample}.
The protocol: three constants an engine (exposed host time of an iteration and of a running sequence, and a factor on
what prefill adds to an iteration) are chosen on the rows of TP 4; rows of other degrees are only ever reported, and
Llama-3.1-70B on the H200 takes the H100's constants. Rows with a TTFT above 5 s, where KV or a whole wave of other
requests is waited for, are reported apart. Errors are |predicted / measured - 1|.

{errors}

The last column is what aiconfigurator's own estimator reaches on all rows of a family, as it was given when this
comparison was set up; it is not computed here.

{by_tp}

{constants}

Three facts that public configurations leave open were also decided on rows of TP 4, by the loss of the fit: SGLang's
prefill batches (whole prompts up to `max_prefill_tokens`, not chunks of 8,192 tokens), KV in bfloat16 for Llama-3.1-70B
on the H100, and how the benchmark's client spreads requests. The last two came after all rows had been scored once, so
those rows are held out from the choice but were not unseen. Held-out errors (TPOT / TTFT) on the way:

- KV in fp8 on both GPUs, requests sent at once: Qwen3-32B vLLM 2.2 / 17.7%, SGLang 3.3 / 9.8%, Llama H100 3.3 / 6.5%,
  H200 7.7 / 11.2%.
- KV in bfloat16 on both: H100 3.3 / 6.1%, H200 6.3 / 32.8%, the latter from rows that then lack KV. So the H200, which
  has no rows to decide on, was left with the fp8 of its public script; in this respect its rows are not blind.
- With the client: as above.

What was replayed:

{engines}

What remains, as far as it can be told:

- TTFT of vLLM in closed loops depends on which requests are prefilled in one iteration. Requests of one size finish
  together and stay together, so that whether two of them are batched is decided by milliseconds of the client, of
  tokenisation and of HTTP, for which only a crude law is simulated. At TP 2, prompts of 1,024 tokens wait up to a third
  less than predicted; at TP 8, prompts of 4,096 tokens wait 14 to 19% longer at up to 32 in flight.
- Long outputs under SGLang have a lower TTFT and a higher TPOT than predicted at the same throughput: real waves of
  requests drift apart, simulated ones of one size do not.
- At the edge of KV capacity a row is either limited or not: a few percent of memory (graphs, communicators, fragments)
  decide, and TTFT jumps by an order of magnitude.
- On the H200 every degree has a TTFT 10 to 15% below the measured one, and the TPOT of small batches is 7 to 10% above
  it: its kernel tables, or the H100's constants, do not fit. Nothing was chosen on its rows.

Left out of the sample's rows of these models:

{left_out}
"""
