"""Pages from templates: one self-contained HTML file each, plotly.js inside, everything from files escaped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from analysis.commands.shared import rate, seconds, share
from analysis.pages import theme
from analysis.pages.theme import Figure


class Figures:
    """The figures of a page in the order in which its template draws them, each with a name."""

    def __init__(self) -> None:
        self.named: list[tuple[str, Figure]] = []

    def add(self, figure: Figure, name: str) -> int:
        """The number of a figure that the template draws now."""
        self.named.append((name, figure))
        return len(self.named) - 1

    def json(self) -> Markup:
        """All of them as JSON that is safe inside a script element."""
        text = json.dumps([figure for _, figure in self.named], separators=(",", ":"), allow_nan=False)
        return Markup(text.replace("<", "\\u003c"))


def signed(value: float | None) -> str:
    """A relative error in percent with its sign; a dash where there is none."""
    return "–" if value is None else f"{value:+z.1%}"


def count(value: int) -> str:
    """A whole number with separators."""
    return f"{value:,}"


def percent(value: float, form: str = "") -> str:
    """A share in percent, without the sign of percent."""
    return f"{value * 100:{form}.1f}"


@cache
def environment() -> Environment:
    """Templates of this package; HTML is escaped, a name that is not there is an error."""
    found = Environment(
        loader=PackageLoader("analysis.pages"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    formats = (rate, seconds, share, signed, count, percent, theme.shown)
    found.filters |= {form.__name__: form for form in formats}
    found.filters |= {"name": theme.name, "title": theme.title}
    return found


def render(template: str, figures: Figures | None = None, **context: Any) -> str:
    """The text of a page; `figures` collects what it draws."""
    from plotly.offline import get_plotlyjs

    drawn = figures or Figures()
    return environment().get_template(template).render(figures=drawn, plotly=lambda: Markup(get_plotlyjs()), **context)


def merged(lines: Sequence[tuple[str, str]], named: int = 4) -> list[tuple[str, str]]:
    """Pairs of a name and a text with each text once, and the names that have it: at most `named`, then their count."""
    where: dict[str, list[str]] = {}
    for name, line in lines:
        where.setdefault(line, []).append(name)
    return [(listed(list(dict.fromkeys(names)), named), line) for line, names in where.items()]


def listed(names: Sequence[str], most: int) -> str:
    """Names in a row, the rest counted."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
