"""`confsim list`: the choices of every group, with a few words on each."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from importlib import resources
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.table import Table
from rich.text import Text

from analysis.commands.shared import make_console
from confsim.errors import InputError
from confsim.setup.configuration import config_text, options
from confsim.setup.registry import REGISTRIES
from traces.registry import Registry, unknown

KINDS = {  # group, or kind of name: heading
    "model": "Models",
    "gpu": "GPUs",
    "scheme": "Schemes",
    "policy": "Policies",
    "order": "Queue orders (policy.order)",
    "dispatch": "Dispatches of prefill over groups (policy.dispatch)",
    "placement": "Placements of decodes (policy.placement)",
    "router": "Routers (cluster.router, scheme.router)",
    "trace": "Traces",
    "format": "Trace formats (trace.format)",
    "arrivals": "Arrival modes",
    "latency": "Latency models",
    "profile": "Latency profiles (fitted to measurements)",
    "source": "Sources of measurements (confsim fit source=...)",
    "layout": "Layouts of the executor (executor.layout.kind)",
}


def command(cfg: DictConfig) -> None:
    """Print the choices of `cfg.groups`, or of all.

    Raises:
        InputError: for a group that is not listed.
    """
    wanted = [str(group) for group in cfg.groups] or list(KINDS)
    for group in wanted:
        if group not in KINDS:
            raise InputError(unknown("list", group, list(KINDS), "not listed"))
    console = make_console()
    for group in wanted:
        console.print(Text(KINDS[group], style="bold"))
        console.print(_table(profiles() if group == "profile" else choices(group)))


def _table(rows: dict[str, str]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, about in rows.items():
        table.add_row(Text(f"  {name}"), Text(about))
    return table


def choices(group: str) -> dict[str, str]:
    """Names of a group's choices, each with what it is."""
    if group in REGISTRIES:
        return {name: _docstring(REGISTRIES[group], name) for name in REGISTRIES[group].names()}
    about = {"model": _model, "gpu": _gpu}.get(group, _remark)
    return {name: about(group, name) for name in options(group)}


def _docstring(registry: Registry, name: str) -> str:
    """The first line of the docstring of a file, which need not be importable here (layouts use torch)."""
    try:
        text = ast.get_docstring(ast.parse(registry.source(name)))
    except (OSError, SyntaxError):
        text = None
    return text.splitlines()[0] if text else ""


def _text(group: str, name: str) -> str:
    return config_text(f"{group}/{name}")


def _tree(group: str, name: str) -> dict[str, Any]:
    tree = OmegaConf.to_container(OmegaConf.create(_text(group, name)))
    return tree if isinstance(tree, dict) else {}  # type: ignore[return-value]


def _model(group: str, name: str) -> str:
    try:
        tree = _tree(group, name)
        heads = f"{tree['num_attention_heads']}/{tree['num_key_value_heads']} heads"
        return f"{tree['num_hidden_layers']} layers, hidden {tree['hidden_size']}, {heads}, {_dtype(tree)}"
    except KeyError:  # a choice that takes its numbers from elsewhere
        return _remark(group, name)


def _dtype(tree: dict[str, Any]) -> str:
    return str(tree.get("gemm_dtype") or tree.get("torch_dtype") or "bfloat16")


def _gpu(group: str, name: str) -> str:
    tree = _tree(group, name)
    memory, bandwidth = float(tree["memory_bytes"]), float(tree["memory_bandwidth"])
    return f"{memory / 2**30:.1f} GiB, {bandwidth / 1e12:.2f} TB/s, {float(tree['flops']) / 1e12:.0f} TFLOP/s (bf16)"


def _remark(group: str, name: str) -> str:
    """The comment on the first line of the file, else on its `order`, else the first line of its class's docstring."""
    lines = _text(group, name).splitlines()
    if lines and lines[0].startswith("#"):
        return lines[0].lstrip("# ")
    remarks: list[Callable[[], str]] = [lambda: _comment(lines, "order"), lambda: _class_docstring(_tree(group, name))]
    return next((text for text in (remark() for remark in remarks) if text), "")


def _comment(lines: list[str], key: str) -> str:
    return next((line.partition("#")[2].strip() for line in lines if line.startswith(f"{key}:")), "")


def _class_docstring(tree: dict[str, Any]) -> str:
    from hydra.utils import get_object

    target = tree.get("_target_")
    text = inspect.getdoc(get_object(target)) if target else None
    return text.splitlines()[0] if text else ""


def profiles() -> dict[str, str]:
    """The packaged latency profiles as gpu/model, each with the source of its measurements."""
    import json

    found = {}
    root = resources.files("confsim.latency").joinpath("profiles")
    for gpu in sorted((entry for entry in root.iterdir() if entry.is_dir()), key=lambda entry: entry.name):
        for file in sorted(gpu.iterdir(), key=lambda entry: entry.name):
            if file.name.endswith(".json"):
                content = json.loads(file.read_text(encoding="utf-8"))
                found[f"{gpu.name}/{file.name.removesuffix('.json')}"] = _profile(content)
    return found


def _profile(content: dict[str, Any]) -> str:
    origin = content["provenance"]
    errors = [part["held_out"]["mean_pct"] for part in content["errors"].values() if "held_out" in part]
    worst = f", held-out error up to {max(errors):.1f}% (mean of a component)" if errors else ""
    return f"{origin.get('package', origin['source'])} {origin.get('package_version', '')}{worst}"
