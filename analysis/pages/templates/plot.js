"use strict";
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const drawn = new Map();

  // Rows that a legend above the plot takes: plotly gives each entry the width of the longest.
  function legendRows(figure, width) {
    const names = figure.data.filter((trace) => trace.showlegend !== false && trace.type !== "heatmap").map((trace) => trace.name || "");
    if (figure.layout.showlegend === false || names.length < 2) return 0;
    const longest = Math.max(...names.map((name) => name.length));
    return Math.ceil(names.length / Math.max(1, Math.floor(width / (7.2 * longest + 46))));
  }

  function themed(figure, plot) {
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--ink").trim(), line = style.getPropertyValue("--line").trim();
    const narrow = plot.clientWidth < 420, layout = figure.layout;
    const right = narrow ? 14 : layout.margin.r;
    const rows = legendRows(figure, plot.clientWidth - layout.margin.l - right);
    const height = layout.height + 20 * Math.max(0, rows - 1);
    plot.style.height = height + "px";
    const result = Object.assign({}, layout, {
      height: height, margin: Object.assign({}, layout.margin, { r: right, t: layout.margin.t + 20 * rows }),
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: style.getPropertyValue("--soft").trim(), activecolor: ink, orientation: "v" },
      font: { color: ink, family: getComputedStyle(document.body).fontFamily, size: narrow ? 12 : 13 },
    });
    for (const key of Object.keys(layout))
      if (/^[xy]axis\d*$/.test(key))
        result[key] = Object.assign({ gridcolor: line, linecolor: line, zerolinecolor: line, tickcolor: line }, layout[key]);
    return result;
  }

  function draw(plot) {
    if (drawn.has(plot)) return;
    const figure = figures[plot.dataset.figure];
    drawn.set(plot, figure);
    const options = { responsive: true, displaylogo: false, displayModeBar: plot.clientWidth < 420 ? false : "hover", modeBarButtonsToRemove: ["lasso2d", "select2d"] };
    Plotly.newPlot(plot, figure.data, themed(figure, plot), options).then(() => { plot.dataset.drawn = "true"; });
  }

  function redraw() { drawn.forEach((figure, plot) => Plotly.relayout(plot, themed(figure, plot))); }

  for (const plot of document.querySelectorAll(".plot"))
    if (!plot.closest("details:not([open])")) draw(plot);
  for (const box of document.querySelectorAll("details"))
    box.addEventListener("toggle", () => { if (box.open) box.querySelectorAll(".plot").forEach(draw); });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let width = window.innerWidth, waiting;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(redraw, 200);
  });
})();
