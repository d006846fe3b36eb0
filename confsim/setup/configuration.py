"""Configurations: composed by Hydra from the `conf` package, checked, and with mistakes said in one line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import TYPE_CHECKING, Any

from confsim.errors import InputError
from confsim.setup.registry import GROUPS
from confsim.setup.search_path import folders
from confsim.setup.values import SWITCH
from traces.registry import did_you_mean as did_you_mean
from traces.registry import entry_points, unknown

if TYPE_CHECKING:
    from omegaconf import DictConfig

PACKAGE = "conf"
SEARCHES = ("goodput", "advise")  # commands that compare several schemes
OVERRIDE = re.compile(r"^(?P<sign>\+\+|\+|~)?(?P<key>[^=\[\](){}'\"]+)(?:=(?P<value>.*))?$", re.DOTALL)


def compose(overrides: Sequence[str] = (), command: str = "simulate") -> DictConfig:
    """The configuration of a subcommand with `overrides` in Hydra's grammar applied.

    Raises:
        InputError: if a key, a value or a choice of a group does not exist, or a number is not one.
    """
    overrides = rewrite(list(overrides), command)
    try:
        cfg = _compose(overrides, command)
    except config_errors() as error:
        raise InputError(explain(error, overrides, command)) from error
    check(cfg, overrides, command)
    return cfg


def _compose(overrides: Sequence[str], command: str) -> DictConfig:
    import hydra

    with fresh_hydra(command):
        return hydra.compose(config_name=command, overrides=list(overrides))


@contextmanager
def fresh_hydra(command: str) -> Iterator[None]:
    """A Hydra of our own, whether or not one is running (in a job of the command line, in a notebook)."""
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    from confsim.setup.config_source import register

    register()
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(PACKAGE, job_name=command, version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


def config_errors() -> tuple[type[Exception], ...]:
    """What Hydra and OmegaConf raise for a configuration that cannot be."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    return HydraException, OmegaConfBaseException


def options(group: str) -> list[str]:
    """Names that a config group offers, sorted."""
    found = set(entry_points(GROUPS[group])) if group in GROUPS else set()
    for root in _roots():
        folder = root.joinpath(*group.split("/"))
        if folder.is_dir():
            found |= {file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")}
    return sorted(found)


def groups() -> list[str]:
    """Names of the config groups, sorted."""
    entries = {entry.name for entry in resources.files(PACKAGE).iterdir() if entry.is_dir()}
    return sorted(name for name in entries if options(name))


def is_choice(group: str, name: str) -> bool:
    """Whether a group offers a name; where classes can be chosen, any dotted path may be one."""
    return name in options(group) or (group in GROUPS and "." in name)


def config_text(path: str) -> str:
    """The YAML of a configuration such as `base` or `scheme/conflux`.

    Raises:
        InputError: where there is none.
    """
    for root in _roots():
        file = root.joinpath(*f"{path}.yaml".split("/"))
        if file.is_file():
            return str(file.read_text(encoding="utf-8"))
    from omegaconf import OmegaConf

    from confsim.setup.config_source import class_config

    group, _, name = path.rpartition("/")
    if not is_choice(group, name):
        raise InputError(unknown_choice(group, name))
    return OmegaConf.to_yaml(OmegaConf.create(class_config(group, name)))


def _roots() -> list[Any]:
    """Where configurations are: the package, and the user's folders."""
    return [resources.files(PACKAGE), *folders()]


# --- overrides -------------------------------------------------------------------------------------------------------


def rewrite(overrides: list[str], command: str, sweep: bool = False) -> list[str]:
    """Overrides of `goodput` that mean several schemes, in the keys that its configuration has.

    `scheme=a,b` names schemes; `scheme.K=V` is a wish for every scheme that has K (`per_scheme.all.K`).
    """
    if command not in SEARCHES:
        return overrides
    return [_rewrite_goodput(override, sweep) for override in overrides]


def _rewrite_goodput(override: str, sweep: bool) -> str:
    match = OVERRIDE.match(override)
    if match is None or match["value"] is None or match["sign"] == "~":
        return override
    key, value = match["key"], match["value"]
    if key == "scheme":
        names = value.split(",")
        return "schemes=" + (",".join(f"[{name}]" for name in names) if sweep else f"[{value}]")
    if key == "schemes" and "[" not in value:
        return f"schemes=[{value}]"
    if key.startswith("scheme."):
        return f"++per_scheme.all.{key.removeprefix('scheme.')}={value}"
    if key.startswith("per_scheme."):
        return f"++{key}={value}"
    return override


# --- checks ----------------------------------------------------------------------------------------------------------


def check(cfg: DictConfig, overrides: Sequence[str] = (), command: str = "simulate") -> None:
    """Refuse top-level numbers that cannot be, and words where the defaults have a number.

    Raises:
        InputError: naming the key.
    """
    _check_positive(cfg, "rate", "requests per second, or null for the trace's own rate")
    _check_positive(cfg, "horizon_s", "simulated seconds, or null to run to the end")
    for key in ("warmup_s", "cooldown_s"):
        _check_positive(cfg, key, "seconds of arrivals that are not counted", least=0)
    seed = cfg.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise InputError(f"seed={seed}: expected a whole number, 0 or more")
    _check_words(cfg, overrides, command)


def _check_positive(cfg: DictConfig, key: str, meaning: str, least: float | None = None) -> None:
    """A number above 0, or from `least` on."""
    value = cfg.get(key)
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or (value <= 0 if least is None else value < least):
        wanted = "above 0" if least is None else f"of {least:g} or more"
        raise InputError(f"{key}={value}: expected a number {wanted} ({meaning})")


def _check_words(cfg: DictConfig, overrides: Sequence[str], command: str) -> None:
    """Compare words that were given with the type of the default; composes the defaults only if there are any.

    Keys of groups that make dataclasses are checked against these as well, when they are made (`confsim.setup.values`).
    """
    from omegaconf import OmegaConf

    suspects = {}
    for key in map(override_key, overrides):
        value = OmegaConf.select(cfg, key, throw_on_missing=False) if key and key not in groups() else None
        if isinstance(value, str):
            suspects[key] = value
    if not suspects:
        return
    known = groups()
    defaults = _compose([item for item in overrides if override_key(item) in known], command)
    for key, value in suspects.items():
        default = OmegaConf.select(defaults, key, throw_on_missing=False)
        is_number = isinstance(default, (int, float)) and not isinstance(default, bool)
        if is_number and not (command in SEARCHES and value == "tuned"):
            raise InputError(f"{key}={value}: expected a number (the default is {default})")
        if isinstance(default, bool) and value not in SWITCH:
            raise InputError(f"{key}={value}: expected true or false (the default is {str(default).lower()})")


def override_key(override: str) -> str:
    """The key of an override, or "" where it has none."""
    match = OVERRIDE.match(override)
    return match["key"].split("@")[0] if match else ""


# --- mistakes in one line --------------------------------------------------------------------------------------------


def input_error(error: BaseException | None) -> InputError | None:
    """The user's mistake behind an exception (Hydra wraps what a constructor raises), or None."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, InputError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def explain(error: BaseException, overrides: Sequence[str] = (), command: str = "simulate") -> str:
    """Hydra's or OmegaConf's complaint as one line: what is wrong, where, and which values exist."""
    known = input_error(error)
    if known is not None:
        return one_line(str(known))
    text = str(error)
    missing = re.search(r"Could not find '(?P<group>[^']+)/(?P<name>[^'/]+)'", text)
    if missing:
        return unknown_choice(missing["group"], missing["name"])
    key = re.search(
        r"Could not (?:override|append to config\. Could not override|delete from config\.) '(?P<key>[^']+)'", text
    )
    if key:
        return _unknown_key(key["key"].split("@")[0], overrides, command)
    missing_value = re.search(r"Missing mandatory value: (?P<key>\S+)", text)
    if missing_value:
        return f"{missing_value['key']} is not set: add {missing_value['key']}=..."
    if "Ambiguous value for argument" in text:
        where = re.search(r"argument '([^']+)'", text)
        return (
            f"{where[1] if where else 'an override'}: several values need -m (a sweep), or [a,b] where a list is meant"
        )
    if type(error).__name__ == "OverrideParseException":
        return f"{getattr(error, 'override', None) or one_line(text)}: an override is written key=value"
    return one_line(text.split("\nSee ")[0])


def one_line(text: str) -> str:
    """Text with its line breaks and runs of blanks folded to single spaces."""
    return " ".join(text.split())


def unknown_choice(group: str, name: str) -> str:
    """What to say of a choice that a group does not offer."""
    names = options(group)
    if not names:
        return f"{group}={name}: there is no group '{group}'; groups are {', '.join(groups())}"
    return unknown(group, name, names)


def _unknown_key(key: str, overrides: Sequence[str], command: str) -> str:
    from omegaconf import DictConfig, OmegaConf

    choices = [item for item in overrides if override_key(item) in groups()]
    try:
        cfg = _compose(choices, command)
    except config_errors():
        return f"{key}: no such key"
    parent = key
    while "." in parent:
        parent, _, leaf = parent.rpartition(".")
        node: Any = OmegaConf.select(cfg, parent, throw_on_missing=False)
        if isinstance(node, DictConfig):
            names = sorted(str(name) for name in node if name != "_target_")
            hint = did_you_mean(leaf, names)
            return f"{key}: no such key; {parent} has {', '.join(names) or 'no keys'}{hint}"
    names = sorted({str(name) for name in cfg})
    return f"{key}: no such key; keys are {', '.join(names)}{did_you_mean(key.split('.')[0], names)}"
