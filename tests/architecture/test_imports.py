"""The rooms' imports point one way, and no modules import each other in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {  # room: the rooms that it may import
    "traces": set(),
    "confsim": {"traces"},
    "analysis": {"traces", "confsim"},
    "executor": {"traces", "confsim", "analysis"},
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the rooms by its dotted name."""
    found = {}
    for room in ALLOWED:
        for file in (ROOT / room).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(node: ast.AST) -> Iterator[str]:
    """Dotted names of what a syntax tree imports anywhere, apart from `if TYPE_CHECKING:` bodies."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from imported(ast.Module(child.orelse, []))
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            for alias in child.names:
                name = f"{child.module}.{alias.name}"
                yield name if name in modules() else str(child.module)
        else:
            yield from imported(child)


def imports_of(source: str) -> set[str]:
    return set(imported(ast.parse(source)))


@cache
def graph() -> dict[str, set[str]]:
    """The rooms' modules that each module imports."""
    known = modules()
    return {name: imports_of(file.read_text("utf-8")) & known.keys() - {name} for name, file in known.items()}


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Names that lead back to the first one, or nothing."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(edges[name]):
            if found := walk(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(edges) if (found := walk(name, []))), [])


def test_circles_are_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_imports_in_functions_count_and_those_for_types_do_not() -> None:
    source = "if TYPE_CHECKING:\n    import a\nelse:\n    import b\ndef f():\n    from confsim import errors\n"
    assert imports_of(source) == {"b", "confsim.errors"}


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert len(modules()) > 100
    assert circle(graph()) == []


@pytest.mark.parametrize("room", ALLOWED)
def test_rooms_import_one_way(room: str) -> None:
    for name in modules():
        if name.split(".")[0] == room:
            rooms = {other.split(".")[0] for other in imports_of(modules()[name].read_text("utf-8"))} & ALLOWED.keys()
            assert rooms <= {room} | ALLOWED[room], name


def test_only_the_executor_imports_torch() -> None:
    for name, file in modules().items():
        if not name.startswith("executor"):
            assert "torch" not in {other.split(".")[0] for other in imports_of(file.read_text("utf-8"))}, name
