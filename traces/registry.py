"""Names of a configuration and the classes they stand for: one rule for every kind of thing that a user may add.

A name is that of a file in the kind's folder, or of an entry point that an installed package declares in the kind's
group (`[project.entry-points."confsim.orders"]`), or the dotted path of a class, such as `mine.orders.Aging`.
"""

from __future__ import annotations

import difflib
import inspect
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from traces.errors import InputError


@dataclass(frozen=True)
class Registry:
    """One kind: `package` is the folder with a file per name, each of which has `attribute`, usually a class.

    `key` is the configuration key that holds a name, for messages. `beside` are files of the folder that are no names;
    those that open with an underscore are none either. `group` is the group of entry points.
    """

    key: str
    package: str
    attribute: str
    group: str
    beside: tuple[str, ...] = ("base",)

    def names(self) -> list[str]:
        """What there is to choose from by a short name, sorted."""
        return sorted({*_files(self.package) - {*self.beside}, *_entry_points(self.group)})

    def get(self, name: str, key: str = "") -> Any:
        """What a name stands for.

        Raises:
            InputError: for a name that stands for nothing; the message has close matches and every choice.
        """
        key = key or self.key
        if "." in name:
            return by_path(name, key, self.attribute)
        if name in _files(self.package) - {*self.beside}:
            return getattr(import_module(f"{self.package}.{name}"), self.attribute)
        if name in _entry_points(self.group):
            return _entry_points(self.group)[name].load()
        raise InputError(unknown(key, name, self.names()))

    def source(self, name: str) -> str:
        """The text of the file that a name of this kind stands for, which need not be importable here.

        Raises:
            OSError: where there is no such file.
        """
        entry = entry_point_path(self.group, name)
        module = f"{self.package}.{name}" if entry is None else entry.rpartition(".")[0]
        package, _, leaf = module.rpartition(".")
        spec = find_spec(package or module)
        # The folder of the package is asked, since what Python would import may be machine code of the same sources.
        folders = (spec.submodule_search_locations or ()) if spec and package else ()
        files = [Path(folder, f"{leaf}.py") for folder in folders]
        own = Path(str(spec.origin if spec else module))
        return next((file for file in files if file.is_file()), own).read_text(encoding="utf-8")

    def make(self, choice: Any, *arguments: Any, key: str = "") -> Any:
        """An object of the class that a choice names: a name, or a mapping of `name` and options of the class.

        Raises:
            InputError: for a name that stands for nothing, or an option that its class does not take.
        """
        key = key or self.key
        name, options = name_and_options(choice, key)
        return called(self.get(name, key), arguments, options, f"{key}: {name}")


def name_and_options(choice: Any, key: str) -> tuple[str, dict[str, Any]]:
    """The name in a choice, and the options that are given with it.

    Raises:
        InputError: where it is neither a name nor a mapping with one.
    """
    options = {str(option): value for option, value in choice.items()} if isinstance(choice, Mapping) else {}
    name = options.pop("name", None) if isinstance(choice, Mapping) else choice
    if not isinstance(name, str) or not name:
        raise InputError(f"{key}={choice}: expected a name, or {{name: NAME, OPTION: VALUE}}")
    return name, options


def called(made: Any, arguments: Sequence[Any], options: Mapping[str, Any], where: str) -> Any:
    """What a class makes of arguments and options.

    Raises:
        InputError: for an option that it does not take, or a missing one.
    """
    if options:
        taken = inspect.signature(made).parameters
        try:
            inspect.signature(made).bind(*arguments, **options)
        except TypeError as error:
            known = ", ".join(list(taken)[len(arguments) :]) or "nothing"
            raise InputError(f"{where}: {error}; it takes {known}") from None
    return made(*arguments, **options)


def by_path(path: str, key: str, attribute: str = "") -> Any:
    """What a dotted path leads to; `attribute` of it where it is a module.

    Raises:
        InputError: where there is no such module, or no such name in it.
    """
    module = path
    while module and not _is_module(module):
        module = module.rpartition(".")[0]
    if not module:
        raise InputError(f"{key}={path}: there is no module {path.split('.')[0]!r} on Python's path or CONFSIM_PATH")
    found: Any = import_module(module)
    names = path[len(module) + 1 :].split(".") if path != module else [attribute] if attribute else []
    for name in names:
        if not hasattr(found, name):
            known = sorted(n for n, value in vars(found).items() if getattr(value, "__module__", "") == module)
            raise InputError(unknown(key, path, known, f"{module} has no {name}"))
        found = getattr(found, name)
    return found


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def unknown(key: str, name: str, names: Sequence[str], why: str = "unknown") -> str:
    """One line on a name that is none: every choice, and what was probably meant."""
    return f"{key}={name}: {why}, use one of {', '.join(names)}{did_you_mean(name.rpartition('.')[2], names)}"


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """A hint at the names that were probably meant, or nothing."""
    close = difflib.get_close_matches(name, names)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


@cache
def _files(package: str) -> frozenset[str]:
    spec = find_spec(package)
    modules = pkgutil.iter_modules(spec.submodule_search_locations if spec else [])
    return frozenset(module.name for module in modules if not module.name.startswith("_"))


@cache
def _entry_points(group: str) -> Mapping[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=group)}


def entry_point_path(group: str, name: str) -> str | None:
    """The dotted path behind an entry point, or None where there is none of the name."""
    entry = _entry_points(group).get(name)
    return None if entry is None else entry.value.replace(":", ".")


def entry_points(group: str) -> list[str]:
    """Names of the entry points in a group, sorted."""
    return sorted(_entry_points(group))


READERS = Registry("trace.format", "traces.readers", "Reader", "confsim.readers", ("base", "jsonl", "sniff"))
