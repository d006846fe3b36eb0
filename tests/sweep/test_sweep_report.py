"""The report of a sweep: its figures as data, and in a real browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sweep_harness import TROUBLE

from analysis.pages.sweep import Choice, figures, write_sweep_report
from analysis.pages.sweep.images import write_images
from analysis.pages.sweep.view import SweepView, goodput_rows, load_view
from analysis.sweep.driver import Sweep
from analysis.sweep.expand import expand
from confsim.cli import main
from confsim.errors import InputError

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
LOAD = ["trace=fixed", "trace.requests=40", "trace.prompt_tokens=4000", "trace.output_tokens=8", "latency=affine"]
LOAD += ["arrivals=poisson", "slo.ttft_s=1"]
GRID = [*LOAD, "rate=2,8,16", "scheme=conflux,chunked_prefill", "seed=0,1,2"]


def sweep(folder: Path, *words: str, command: str = "simulate") -> Path:
    grid = expand(command, [*words, f"hydra.sweep.dir={folder}", f"output.dir={folder.parent}"])
    assert grid is not None
    Sweep(grid).run()
    return folder


@pytest.fixture(scope="module")
def simulations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sweep(tmp_path_factory.mktemp("sim") / "s", *GRID)


@pytest.fixture(scope="module")
def searches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = [*LOAD, "goodput.curve=[]", "goodput.tolerance=0.2", "goodput.band=false", "goodput.zero_load_requests=4"]
    axes = ["cluster.gpus=2,4", "slo.tbt_s=0.06,0.1", "schemes=[conflux,chunked_prefill]"]
    return sweep(tmp_path_factory.mktemp("good") / "g", *words, *axes, command="goodput")


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    axes = ["cluster.instances=3", "cluster.router=round_robin,slo_aware", "rate=6,30"]
    return sweep(tmp_path_factory.mktemp("routed") / "r", *LOAD, *axes)


def drawn(page: Path) -> list[dict[str, Any]]:
    text = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page.read_text(), re.DOTALL)
    assert text is not None
    return list(json.loads(text[1].replace("<\\/", "</")))


def titles(figure: dict[str, Any]) -> tuple[str, str]:
    return figure["layout"]["xaxis"]["title"]["text"], figure["layout"]["yaxis"]["title"]["text"]


def test_curves_have_seed_bands(simulations: Path, tmp_path: Path) -> None:
    page, warnings = write_sweep_report([simulations], tmp_path / "report.html")
    assert warnings == []
    first = drawn(page)[0]
    assert titles(first) == ("request rate, req/s", "attainment")
    lines = [trace for trace in first["data"] if trace.get("mode") == "lines+markers"]
    assert [trace["name"] for trace in lines] == ["conflux", "chunked_prefill"]
    assert all(trace["x"] == [2, 8, 16] for trace in lines)
    rows = [row for row in load_view([simulations]).rows if row["scheme"] == "chunked_prefill" and row["rate"] == 8]
    values = sorted(row["attainment"] for row in rows)
    assert len(values) == 3
    assert lines[1]["y"][1] == pytest.approx(values[1], rel=1e-4)
    low, high = (
        next(t for t in first["data"] if t["name"] == f"chunked_prefill, {part}") for part in ("lowest", "range")
    )
    assert (low["y"][1], high["y"][1]) == (pytest.approx(values[0], rel=1e-4), pytest.approx(values[2], rel=1e-4))
    text = page.read_text()
    assert "18 of 18 planned results are here" in text and "medians over 3 seeds" in text
    assert text.count("plotly.js v") <= 2 and text.count("Plotly.newPlot") == 1  # the library once
    assert page.stat().st_size < 6_000_000


def test_goodput_of_simulations_is_below_the_first_rate_that_misses(simulations: Path) -> None:
    view = load_view([simulations])
    rows = goodput_rows(view)
    assert len(rows) == 6
    for row in rows:
        own = [r for r in view.rows if (r["scheme"], r["seed"]) == (row["scheme"], row["seed"])]
        expected = 0.0
        for run in sorted(own, key=lambda r: r["rate"]):
            if not run["attained"]:
                break
            expected = run["rate"]
        assert row["goodput"] == expected
        assert row["goodput_per_gpu"] == expected / 4


def test_m14_a_later_pass_does_not_count() -> None:
    attainment = {1: 0.99, 2: 0.94, 3: 0.96, 4: 0.96, 5: 0.90}
    rows = [{"rate": r, "attained": a >= 0.95, "attainment": a, "gpus": 2} for r, a in attainment.items()]
    view = SweepView("simulate", {"rate": list(attainment)}, rows, [], 5, 5)
    assert [row["goodput"] for row in goodput_rows(view)] == [1.0]


def test_curves_by_any_two_axes(searches: Path, tmp_path: Path) -> None:
    page, _ = write_sweep_report([searches], tmp_path / "a.html", choice=Choice("slo.tbt_s", "cluster.gpus", "goodput"))
    first = drawn(page)[0]
    assert titles(first) == ("TBT limit, s", "goodput, req/s")
    assert {trace["name"] for trace in first["data"]} == {
        f"GPUs per instance {gpus}, {scheme}" for gpus in (2, 4) for scheme in ("conflux", "chunked_prefill")
    }
    page, _ = write_sweep_report([searches], tmp_path / "b.html", choice=Choice("scheme", "slo.tbt_s"))
    first = drawn(page)[0]
    assert titles(first) == ("scheme", "goodput, req/s")
    assert {trace["type"] for trace in first["data"]} == {"bar"}
    with pytest.raises(InputError, match=r"x=slo.tbt: no such column \(did you mean slo.tbt_s"):
        write_sweep_report([searches], tmp_path / "c.html", choice=Choice("slo.tbt"))
    with pytest.raises(InputError, match="metric=scheme: not a number"):
        write_sweep_report([searches], tmp_path / "c.html", choice=Choice(metric="scheme"))


def test_heat_maps_and_pareto(searches: Path, tmp_path: Path) -> None:
    page, _ = write_sweep_report([searches], tmp_path / "report.html")
    found = drawn(page)
    maps = [figure for figure in found if figure["data"][0]["type"] == "heatmap"]
    assert ("GPUs per instance", "scheme") in {titles(figure) for figure in maps}
    rows = {(r["cluster.gpus"], r["slo.tbt_s"], r["scheme"]): r["goodput"] for r in load_view([searches]).rows}
    gpus = next(figure for figure in maps if titles(figure) == ("GPUs per instance", "scheme"))["data"][0]
    assert (gpus["x"], gpus["y"]) == (["2", "4"], ["conflux", "chunked_prefill"])
    assert gpus["z"][0][1] == pytest.approx(rows[4, 0.06, "conflux"], rel=1e-4)
    pareto = next(figure for figure in found if titles(figure) == ("TBT limit, s", "goodput per GPU, req/s"))
    front = pareto["data"][0]
    assert front["name"] == "not beaten in both"
    points = {(row["slo.tbt_s"], row["goodput_per_gpu"]) for row in load_view([searches]).rows}
    best = max(value for tbt, value in points if tbt == 0.06)
    assert (front["x"][0], front["y"][0]) == (0.06, pytest.approx(best, rel=1e-3))


def test_pareto_front() -> None:
    rows = [
        {"cost": c, "goodput_per_gpu": g, "name": n}
        for c, g, n in [(1, 1.0, "a"), (2, 0.9, "b"), (2, 3.0, "c"), (4, 2.0, "d")]
    ]
    figure = figures.pareto(rows, "cost", True, None, ["name"])
    assert figure is not None
    assert (figure["data"][0]["x"], figure["data"][0]["y"]) == ([1, 2], [1, 3])
    assert figures.pareto(rows[:1], "cost", True, None, ["name"]) is None


def test_slo_by_rate(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", *LOAD, "rate=2,16", "slo.ttft_s=0.5,2")
    page, _ = write_sweep_report([folder], tmp_path / "report.html")
    heat = next(figure for figure in drawn(page) if figure["data"][0]["type"] == "heatmap")
    assert titles(heat) == ("request rate, req/s", "TTFT limit, s")
    assert heat["data"][0]["zmax"] == 1.0


def test_routers_are_compared(routed: Path, tmp_path: Path) -> None:
    page, _ = write_sweep_report([routed], tmp_path / "report.html")
    text = page.read_text()
    assert "Instances and routers" in text and "slo_aware" in text
    bars = [f for f in drawn(page) if f["data"][0]["type"] == "bar" and f["data"][0]["x"][0] == "instance 0"]
    assert [titles(figure)[1] for figure in bars] == ["requests", "attainment", "utilisation"]
    assert len(bars[0]["data"]) == 4 and sum(bars[0]["data"][0]["y"]) == 40
    frame = load_view([routed]).rows
    assert all(row["instances.requests.least"] <= row["instances.requests.most"] for row in frame)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", *TROUBLE, "trace.mode=ok,defect", "seed=0,1")
    shutil.rmtree(next(path for path in (folder / "runs").iterdir() if (path / "run.json").exists()))
    page, _ = write_sweep_report([folder], tmp_path / "report.html")
    text = page.read_text()
    assert "1 of 4 planned results are here, 2 failed, 1 missing" in text
    assert "ZeroDivisionError: a defect" in text


def test_sweeps_of_two_folders_and_other_folders(simulations: Path, searches: Path, tmp_path: Path) -> None:
    other = sweep(tmp_path / "other", *LOAD, "rate=4,8", "scheme=conflux")
    view = load_view([simulations, other])
    assert (view.planned, view.present) == (20, 20) and view.axes["rate"] == [2, 4, 8, 16]
    with pytest.raises(InputError, match="a sweep of goodput, the others are of simulate"):
        load_view([simulations, searches])
    with pytest.raises(InputError, match="no sweep"):
        load_view([simulations, tmp_path])


def test_the_command_line(simulations: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> int:
        with pytest.raises(SystemExit) as left:
            main(["report", *words])
        return int(left.value.code or 0)

    assert run(str(simulations), "metric=ttft_s.p95") == 0
    assert (simulations / "report.html").is_file()
    assert run(str(simulations), "x=nope") == 2
    assert "x=nope: no such column" in capfd.readouterr().err
    single = next((simulations / "runs").iterdir())
    assert run(str(single), "x=rate") == 2
    assert "only reports of sweeps have it" in capfd.readouterr().err


def test_r2_images_are_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from analysis.pages.sweep import images

    figure = [("one", {"data": [], "layout": {"height": 300}})]
    with pytest.raises(InputError, match="images=gif: use png or svg"):
        write_images(figure, tmp_path, "gif")
    monkeypatch.setattr(images.importlib.util, "find_spec", lambda name: None)
    assert "kaleido is not installed" in write_images(figure, tmp_path, "png")[0]
    monkeypatch.setattr(images.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(images, "browser_path", lambda: None)
    assert "no Chrome or Chromium found" in write_images(figure, tmp_path, "png")[0]
    monkeypatch.setattr(images, "browser_path", lambda: "/nowhere/chrome")
    monkeypatch.setattr(sys, "executable", "/bin/sleep")  # given the module's name it fails at once
    assert "no png images" in write_images(figure, tmp_path, "png")[0]
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nsleep 30\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    monkeypatch.setattr(images, "EACH_S", 0.0)
    assert "did not answer in time" in write_images(figure, tmp_path, "png", limit_s=0.3)[0]


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.xdist_group("browser")
def test_a_browser_draws_the_axes(simulations: Path, tmp_path: Path) -> None:
    page, _ = write_sweep_report([simulations], tmp_path / "report.html")
    assert CHROMIUM is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,2400"]
    options.append("--virtual-time-budget=15000")
    words = (CHROMIUM, *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri())
    dom = subprocess.run(words, capture_output=True, text=True, timeout=180, check=True).stdout
    assert dom.count('data-drawn="true"') >= 4
    first = dom[dom.index('data-figure="0"') : dom.index('data-figure="1"')]

    def texts(kind: str) -> list[str]:
        return [html.unescape(text) for text in re.findall(rf'class="{kind}[^"]*"[^>]*>(?:<[^>]+>)*([^<]+)<', first)]

    assert texts("xtitle") == ["request rate, req/s"]
    assert texts("ytitle") == ["attainment"]
    ticks = [float(text) for text in re.findall(r'class="xtick"><text[^>]*>([0-9.]+)<', first)]
    assert ticks[0] >= 1 and ticks[-1] >= 14 and ticks == sorted(ticks)
    assert "100%" in re.findall(r'class="ytick"><text[^>]*>([^<]+)<', first)
    assert {"conflux", "chunked_prefill"} <= set(re.findall(r'class="legendtext"[^>]*>([^<]+)<', first))
