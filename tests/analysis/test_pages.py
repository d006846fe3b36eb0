"""Templates and theme of all pages: escaping, names of quantities, colours of schemes."""

from __future__ import annotations

import pytest
from markupsafe import Markup

from analysis.pages import html, theme
from confsim.setup.configuration import options


def test_every_scheme_has_a_colour_of_its_own() -> None:
    assert set(theme.SCHEMES) == set(options("scheme"))
    assert len({*theme.COLOURS}) == len(theme.COLOURS)


@pytest.mark.parametrize("others", [[], ["mine"], ["loongserve", "data_parallel"], ["Conflux, adaptive split"]])
def test_a_scheme_has_the_same_colour_beside_any_other(others: list[str]) -> None:
    for names in ([*others, "conflux"], ["conflux", *others]):
        found = theme.palette(names)
        assert found["conflux"] == theme.SCHEMES["conflux"]
        assert list(found) == names and len(set(found.values())) == len(names)


def test_labels_are_known_by_their_scheme() -> None:
    found = theme.palette(["Conflux", "chunked prefill, tuned", "disaggregated 1+3", "disaggregated 1+1"])
    assert found["chunked prefill, tuned"] == theme.SCHEMES["chunked_prefill"]
    assert found["disaggregated 1+3"] == theme.SCHEMES["disaggregated"] != found["disaggregated 1+1"]


def test_names_without_a_scheme_take_colours_in_turn() -> None:
    assert theme.palette(["prefill", "decode"]) == {"prefill": theme.COLOURS[0], "decode": theme.COLOURS[1]}


@pytest.mark.parametrize(
    ("key", "title"),
    [
        ("ttft_s.p95", "TTFT P95, s"),
        ("gap_s.mean", "TBT mean, s"),
        ("ttft_s", "TTFT, s"),
        ("slo.tbt_s", "TBT limit, s"),
        ("goodput_per_gpu", "goodput per GPU, req/s"),
        ("warmup_s", "warmup, s"),
        ("scheme", "scheme"),
        ("cluster.gpus", "GPUs per instance"),
    ],
)
def test_quantities_have_names_and_units(key: str, title: str) -> None:
    assert theme.title(key) == title


def test_axes_of_attainment_start_where_the_data_are() -> None:
    def ends(*values: float | None) -> list[float]:
        return list(theme.attainment_axis(values, 0.95)["yaxis"]["range"])

    assert ends(0.97, None, 1.0) == [0.9, 1.004]
    assert ends(0.33, 1.0)[0] == 0.3
    assert ends() == [0.9, 1.004]
    assert theme.attainment_axis([1.0])["shapes"] == []


def test_text_of_figures_cannot_leave_their_script() -> None:
    figures = html.Figures()
    figures.add(theme.figure([{"name": "</script><b>"}], "x", "y"), "one")
    text = figures.json()
    assert isinstance(text, Markup) and "<" not in text and "\\u003c/script>" in text


def test_templates_escape_and_refuse_what_is_not_there() -> None:
    environment = html.environment()
    template = environment.get_template("macros.html")
    card = template.make_module({"figures": html.Figures()}).card("<1>", "a & b")  # type: ignore[attr-defined]
    assert "<b>&lt;1&gt;</b><span>a &amp; b</span>" in card
    with pytest.raises(Exception, match="sections"):
        html.render("experiments.html", title="a")


def test_lines_are_merged_with_their_names() -> None:
    lines = [("a", "x"), ("b", "y"), ("b", "x"), ("b", "x"), ("c", "x")]
    assert html.merged(lines, 2) == [("a, b and 1 more", "x"), ("b", "y")]
