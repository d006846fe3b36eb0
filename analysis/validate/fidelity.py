"""`python -m analysis.validate.fidelity`: the packaged profiles beside published figures, written to docs/fidelity.md.

Nothing here fits anything: the page shows what the unmodified profiles predict, with the deviations as they are. The
section on measured engines shows docs/silicon.json, which `confsim validate source=silicon` writes (`make fidelity`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.markdown import table
from analysis.pages import html
from analysis.validate.silicon_page import SPLITS
from confsim.latency.base import LatencyModel
from confsim.latency.config import FittedLatency, packaged
from confsim.latency.profile import PACKAGED, Profile
from confsim.run.plan import DecodeBatch, IterationPlan, PrefillChunk
from confsim.run.request import Request
from confsim.schemes.cost import CoBatchCost, in_turn, overlapped
from confsim.setup.configuration import compose
from confsim.specs import GpuSpec, ModelSpec
from traces.files import write_whole

RECORD = Path(__file__).resolve().parents[2] / "docs" / "silicon.json"
GPU = "h100_sxm"
MODEL = "qwen3_14b"
BATCH_TOKENS = 8192  # prefill tokens of a GPU in one iteration, schemes' default cap
DECODES, CONTEXT = 16, 8192
TTFT_S = 2.0
GPUS = (1, 2, 4, 8)
COMPONENTS = ("gemm", "decode_attention", "prefill_attention", "all_to_all", "all_reduce", "all_gather")


@dataclass(frozen=True)
class PublishedFigure:
    """A figure of the paper (None: it gives none) and what the profile predicts, both as numbers in `unit`."""

    what: str
    paper: float | None
    ours: float
    unit: str
    digits: int = 0

    def cells(self) -> list[str]:
        """Cells of the table."""

        def show(value: float) -> str:
            return f"{value:,.{self.digits}f} {self.unit}".strip()

        if self.paper is None:
            return [self.what, "–", show(self.ours), "–"]
        return [self.what, show(self.paper), show(self.ours), f"{self.ours / self.paper - 1:+.0%}"]


class IterationBench:
    """Costs of single iterations of one model on one GPU type, put together as the schemes put them together."""

    def __init__(self, model: ModelSpec, gpu: GpuSpec, source: FittedLatency) -> None:
        self.model, self.gpu, self.source = model, gpu, source
        self._compiled: dict[tuple[int, int], LatencyModel] = {}

    def latency(self, tp: int, sp: int) -> LatencyModel:
        """The latency model of a layout."""
        if (tp, sp) not in self._compiled:
            self._compiled[(tp, sp)] = self.source.compile(self.model, self.gpu, tp, sp)
        return self._compiled[(tp, sp)]

    def iteration_s(
        self,
        tp: int,
        sp: int,
        decodes: int,
        prefill: int = 0,
        cached: int = 0,
        last: bool = False,
        overlap: bool = True,
    ) -> float:
        """One iteration: `decodes` of `CONTEXT` tokens on every group, with a chunk of `prefill` over all groups."""
        cost = CoBatchCost(self.latency(tp, sp), overlapped if overlap else in_turn)
        batches = tuple(DecodeBatch(group, decodes, decodes * CONTEXT) for group in range(sp))
        return cost.timing(IterationPlan(_chunk(prefill, cached, sp, last), batches)).duration_s

    def spread_decode_s(self, sp: int) -> float:
        """One iteration of the decodes spread over `sp` GPUs like a prefill: tokens by sequence, attention by head."""
        cost = CoBatchCost(self.latency(1, sp), in_turn, spread=self.latency(sp, 1))
        return cost.timing(IterationPlan((), (DecodeBatch(0, DECODES, DECODES * CONTEXT),))).duration_s

    def prefill_s(self, tp: int, sp: int, prompt: int) -> float:
        """A lone prompt from its first chunk to its first token, in chunks of at most `BATCH_TOKENS` a group."""
        done, total = 0, 0.0
        while done < prompt:
            chunk = min(BATCH_TOKENS * sp, prompt - done)
            total += self.iteration_s(tp, sp, 0, chunk, done, last=done + chunk == prompt)
            done += chunk
        return total

    def largest_chunk(self, target_s: float, cached: int, overlap: bool) -> int:
        """Prefill tokens that fit beside the decodes of one GPU within `target_s`."""
        low, high = 0, 1 << 15
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.iteration_s(1, 1, DECODES, middle, cached, overlap=overlap) <= target_s
            low, high = (middle, high) if fits else (low, middle)
        return low

    def least_gpus(self, prompt: int) -> int:
        """GPUs, prefilling by sequence, that bring a lone prompt's first token within `TTFT_S`; 0 if 8 do not."""
        return next((gpus for gpus in GPUS if self.prefill_s(1, gpus, prompt) <= TTFT_S), 0)

    def decode_flops(self) -> float:
        """FLOPs of one decode iteration: weights of layers and head, and attention over the context."""
        model = self.model
        weights = model.num_hidden_layers * model.layer_parameters + model.vocab_size * model.hidden_size
        attention = 4.0 * model.head_dim * model.num_attention_heads * CONTEXT * model.num_hidden_layers
        return DECODES * (2.0 * weights + attention)


def _chunk(tokens: int, cached: int, sp: int, last: bool) -> tuple[PrefillChunk, ...]:
    if not tokens:
        return ()
    shares = tuple(tokens // sp + (group < tokens % sp) for group in range(sp))
    return (PrefillChunk(Request(0, 0.0, cached + tokens), cached, shares, last),)


def bench(model: str = MODEL, gpu: str = GPU) -> IterationBench:
    """A bench of a packaged profile under the default configuration."""
    from hydra.utils import instantiate

    cfg = compose([f"model={model}", f"gpu={gpu}"])
    return IterationBench(instantiate(cfg.model), instantiate(cfg.gpu), instantiate(cfg.latency))


def decode_rows(b: IterationBench) -> list[PublishedFigure]:
    """16 decodes of 8K on one GPU, and the prefill that fits beside them."""
    decode_s = b.iteration_s(1, 1, DECODES)
    share = b.decode_flops() / (decode_s * b.gpu.flops)
    rows = [
        PublishedFigure("16 decodes of 8K, one GPU: iteration", 20.0, decode_s * 1e3, "ms", 1),
        PublishedFigure("its compute share (FLOPs over peak)", 16.0, share * 100, "%", 1),
    ]
    for target_s, paper in ((0.050, 1000.0), (0.100, 2200.0)):
        limit = f"{target_s * 1e3:.0f} ms"
        fresh = b.largest_chunk(target_s, 0, True)
        rows.append(PublishedFigure(f"prefill tokens beside them within {limit}", paper, fresh, "tokens"))
        turns = b.largest_chunk(target_s, 0, False)
        rows.append(PublishedFigure(f"… attention paths in turn, {limit}", None, turns, "tokens"))
        deep = b.largest_chunk(target_s, 16_384, True)
        rows.append(PublishedFigure(f"… behind a cached prefix of 16K (derived), {limit}", None, deep, "tokens"))
    return rows


def prompt_rows(b: IterationBench) -> list[PublishedFigure]:
    """GPUs that long prompts need."""
    rows = []
    for prompt, paper in ((32_768, 2.0), (65_536, 4.0)):
        name = f"{prompt // 1024}K prompt"
        rows.append(PublishedFigure(f"{name}: GPUs for a first token within 2 s", paper, b.least_gpus(prompt), "GPUs"))
        for gpus in GPUS:
            plural = "GPUs" if gpus > 1 else "GPU"
            seconds = b.prefill_s(1, gpus, prompt)
            rows.append(PublishedFigure(f"… alone on {gpus} {plural} by sequence", None, seconds, "s", 2))
    return rows


def efficiency_rows(b: IterationBench) -> list[PublishedFigure]:
    """Time on one GPU over eight times the time on eight."""

    def share(one: float, eight: float) -> float:
        return one / (8.0 * eight) * 100

    rows = []
    for prompt in (8192, 32_768, 65_536):
        one = b.prefill_s(1, 1, prompt)
        name = f"prefill of {prompt // 1024}K on 8 GPUs"
        quoted = prompt == 32_768
        sp, tp = share(one, b.prefill_s(1, 8, prompt)), share(one, b.prefill_s(8, 1, prompt))
        rows.append(PublishedFigure(f"{name}: sequence parallel", 93.0 if quoted else None, sp, "%"))
        rows.append(PublishedFigure(f"{name}: tensor parallel", 66.0 if quoted else None, tp, "%"))
    one = b.iteration_s(1, 1, DECODES)
    tp, sp = b.iteration_s(8, 1, DECODES), b.spread_decode_s(8)
    rows.append(PublishedFigure("16 decodes of 8K on 8 GPUs: tensor parallel", 39.0, share(one, tp), "%"))
    rows.append(PublishedFigure("16 decodes of 8K on 8 GPUs: sequence parallel", 16.0, share(one, sp), "%"))
    return rows


def term_rows(b: IterationBench) -> list[list[str]]:
    """Where an iteration's time goes: a decode batch, a chunk beside it on one GPU, and a chunk over four."""
    one, four = b.latency(1, 1), b.latency(1, 4)

    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.2f}"

    def cells(name: str, latency: LatencyModel, shard: int, chunk: int) -> list[str]:
        return [
            name,
            ms(latency.linear_s(shard + DECODES)),
            ms(latency.decode_attention_s(DECODES, DECODES * CONTEXT)),
            ms(latency.prefill_attention_s(chunk, 0)),
            ms(latency.all_to_all_s(shard)),
            ms(latency.head_s(DECODES)),
            ms(latency.overhead_s(DECODES)),
        ]

    return [
        cells("16 decodes of 8K, one GPU", one, 0, 0),
        cells("… and a chunk of 1,024", one, 1024, 1024),
        cells("… and a chunk of 4,096 over four GPUs", four, 1024, 4096),
    ]


def error_rows() -> list[list[str]]:
    """Held-out error of each component of each packaged profile."""
    rows = []
    for name in packaged():
        profile = Profile.load(PACKAGED / f"{name}.json")
        for component in COMPONENTS:
            errors = profile.errors.get(component)
            if errors is not None:
                rows.append([name, component.replace("_", " "), *_error_cells(errors)])
    return rows


def _error_cells(errors: dict[str, Any]) -> list[str]:
    held = errors["held_out"]
    apart = errors["replicates"]["mean_pct"]
    floor = "–" if apart is None else f"{apart / 2**0.5:.1f}"
    values = [f"{held[key]:.1f}" for key in ("mean_pct", "median_pct", "p95_pct")]
    return [*values, f"{held['rows']:,}", "–" if apart is None else f"{apart:.1f}", floor]


def kind_rows() -> list[list[str]]:
    """Held-out error of the linear layers' GEMMs by the kind of batch, one line per GPU and dtype."""
    rows, seen = [], set()
    for name in packaged():
        profile = Profile.load(PACKAGED / f"{name}.json")
        key = (profile.gpu, profile.model.get("gemm_dtype") or "bfloat16")
        if key in seen:
            continue
        seen.add(key)
        kinds = [profile.errors["gemm"][kind] for kind in ("decode_batches", "mixed_batches", "prefill_batches")]
        rows.append([*key, *(f"{kind['mean_pct']:.1f} / {kind['p95_pct']:.1f}" for kind in kinds)])
    return rows


def law_rows() -> list[list[str]]:
    """Error of the law that prefixes are derived from, on head counts it was not fitted to, without a prefix."""
    rows = []
    for name in packaged():
        law = Profile.load(PACKAGED / f"{name}.json").errors["prefill_attention"]["law"]
        rows.append([name, *(f"{law[key]:.1f}" for key in ("mean_pct", "median_pct", "p95_pct")), str(law["rows"])])
    return rows


def page() -> str:
    """The whole page, in Markdown."""
    b = bench()
    profile, slow = b.source.load(b.model, b.gpu), b.latency(1, 4)
    return html.render(
        "fidelity.md",
        hash=profile.profile_hash,
        package=f"{profile.provenance['package']} {profile.provenance['package_version']}",
        g_p=f"{slow.prefill_slowdown:.2f}",
        g_d=f"{slow.decode_slowdown:.2f}",
        share=f"{b.source.decode_sm_share:.0%}",
        decode=[row.cells() for row in decode_rows(b)],
        prompts=[row.cells() for row in prompt_rows(b)],
        efficiency=[row.cells() for row in efficiency_rows(b)],
        terms=term_rows(b),
        errors=error_rows(),
        kinds=kind_rows(),
        law=law_rows(),
        record=json.loads(RECORD.read_text(encoding="utf-8")),
        splits=SPLITS,
        table=table,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description="Write docs/fidelity.md from the packaged profiles.")
    parser.add_argument("--output", type=Path, default=Path("docs/fidelity.md"))
    options = parser.parse_args(arguments)
    print(write_whole(options.output, page()))


if __name__ == "__main__":
    main()
