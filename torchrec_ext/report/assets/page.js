"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const names = Object.keys(data.tables);
const rowsOf = (name) => data.tables[name].updated.concat(data.tables[name].admitted).reduce((a, b) => a + (b ?? 0), 0);
const select = document.getElementById("table");
const dark = matchMedia("(prefers-color-scheme: dark)");
const coarse = matchMedia("(pointer: coarse)");
const SERIES = ["blue", "orange", "teal", "violet", "red", "green", "pink", "gray"];
// More lines than that nobody can tell apart: those of the tables that change most.
const busiest = [...names].sort((a, b) => rowsOf(b) - rowsOf(a)).slice(0, SERIES.length).sort();

const LEGEND = 4; // more lines than that are named where one points at them, and by the list of tables

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const faint = (name, alpha) => {
  const value = parseInt(color(name).slice(1), 16);
  return `rgba(${value >> 16}, ${(value >> 8) & 255}, ${value & 255}, ${alpha})`;
};
const sum = (columns) => data.labels.map((_, n) => columns.reduce((total, column) => total + (column[n] ?? 0), 0));
const chosen = () => (select.value ? [select.value] : names);
const lines = () => (select.value ? [select.value] : busiest);
const hueOf = (name) => SERIES[Math.max(0, busiest.indexOf(name))];

const shortNames = names.map((name) => name.slice(name.lastIndexOf(".") + 1));
const shown = (name) => {
  const short = name.slice(name.lastIndexOf(".") + 1);
  return shortNames.filter((other) => other === short).length > 1 ? name : short;
};

/** A first dump holds every row: the axis is then for the others, and the first is named at its cut. */
function forTheRest(values, format) {
  const rest = values.slice(1).map((value) => value ?? 0);
  const most = Math.max(0, ...rest);
  if (!most || (values[0] ?? 0) < 4 * most) return {};
  const text = `first: ${format(values[0])}`;
  return {
    top: 1.25 * most,
    annotations: [{ x: 0, y: 1, yref: "paper", yanchor: "top", xanchor: "left", xshift: 12, text, showarrow: false }],
  };
}

function seconds(value) {
  for (const [unit, factor] of [["s", 1], ["ms", 1e3]]) {
    if (value * factor >= 1) return `${Number((value * factor).toPrecision(3))} ${unit}`;
  }
  return `${Number((value * 1e6).toPrecision(3))} µs`;
}

function draw(id, traces, yaxis = {}, extra = {}) {
  const font = { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("muted") };
  const axis = { gridcolor: color("grid"), linecolor: color("line"), zerolinecolor: color("line"), automargin: true };
  const count = traces.filter((trace) => trace.showlegend !== false).length;
  const labelled = count > 1 && count <= LEGEND;
  const layout = {
    font,
    autosize: true,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 44, r: 8, t: labelled ? 30 : extra.annotations?.length ? 20 : 10, b: 40 },
    hovermode: "x unified",
    dragmode: coarse.matches ? false : "zoom", // a finger scrolls the page
    hoverlabel: { bgcolor: color("panel"), bordercolor: color("line"), font: { ...font, color: color("text") } },
    showlegend: labelled,
    legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom" },
    bargap: data.labels.length > 60 ? 0.05 : 0.3,
    xaxis: { ...axis, type: "category", nticks: 8, tickangle: 0, showgrid: false, title: { text: "step", standoff: 4 }, unifiedhovertitle: { text: "step %{x}" } },
    yaxis: { ...axis, rangemode: "tozero", nticks: 6, fixedrange: true, ...yaxis },
    ...extra,
  };
  const plot = document.getElementById(id);
  const drawn = traces.some((trace) => trace.y.some((value) => value !== null && value !== 0));
  plot.classList.toggle("none", !drawn);
  if (!drawn) {
    Plotly.purge(plot);
    plot.textContent = "nothing yet";
    return;
  }
  if (!plot.data) plot.textContent = "";
  Plotly.react(plot, traces.map((trace) => ({ x: data.labels, ...trace })), layout, {
    displayModeBar: false,
    responsive: true,
  });
}

const bars = (name, y, hue, more = {}) => ({
  type: "bar", name, y, marker: { color: color(hue) }, hovertemplate: "%{y:,.4~s}", ...more,
});
const line = (name, y, hue, more = {}) => ({
  type: "scatter", mode: data.labels.length > 60 ? "lines" : "lines+markers", name, y,
  line: { color: color(hue), width: 2 }, marker: { size: 5 }, hovertemplate: "%{y:,.4~g}", ...more,
});

function drawRows() {
  const tables = chosen().map((name) => data.tables[name]);
  const of = (what) => sum(tables.map((table) => table[what]));
  const below = (name, what, hue) => {
    const counts = of(what);
    const template = "%{customdata:,}";
    return bars(name, counts.map((count) => -count), hue, { customdata: counts, hovertemplate: template });
  };
  const above = { hovertemplate: "%{y:,}" };
  const traces = [
    bars("updated", of("updated"), "blue", above),
    bars("of new ids", of("admitted"), "teal", above),
    below("evicted", "evicted", "red"),
    below("other deletes", "deleted", "orange"),
  ];
  const up = sum([of("updated"), of("admitted")]);
  const down = sum([of("evicted"), of("deleted")]);
  const { top, annotations } = forTheRest(up, (rows) => `${rows.toLocaleString("en")} rows`);
  const range = top === undefined ? {} : { range: [Math.min(-1.1 * Math.max(...down), -0.02 * top), top] };
  const yaxis = { rangemode: "normal", tickformat: "~s", ...range };
  draw("rows", traces.filter((trace) => trace.y.some(Boolean)), yaxis, { barmode: "relative", annotations });
}

/** One table: its median, where most values lie, and the largest. All: their medians. */
function drawSpread(id, what) {
  if (names.length > 1 && !select.value) {
    const traces = lines().map((name) => line(shown(name), data.tables[name][what].p50, hueOf(name)));
    draw(id, traces, { title: { text: "median", standoff: 4 } });
    return;
  }
  const spread = data.tables[chosen()[0]][what];
  const edge = { mode: "lines", line: { width: 0 }, showlegend: false };
  draw(id, [
    line("10th percentile", spread.p10, "blue", edge),
    line("10 to 90 %", spread.p90, "blue", { ...edge, showlegend: true, fill: "tonexty", fillcolor: faint("blue", 0.18) }),
    line("median", spread.p50, "blue"),
    line("largest", spread.max, "orange", { mode: "lines", line: { color: color("orange"), width: 1.5, dash: "dot" } }),
  ]);
}

function drawOccupancy() {
  const traces = lines().map((name) => {
    const table = data.tables[name];
    const share = table.held.map((held, n) => (held === null ? null : held / table.num_embeddings[n]));
    return line(shown(name), share, hueOf(name), {
      customdata: table.held, hovertemplate: "%{y:.1%} (%{customdata:,} rows)",
    });
  });
  draw("occupancy", traces, { tickformat: ".0%", range: [0, 1.05] });
}

function drawCosts() {
  const time = { ticksuffix: "s", tickformat: "~s" };
  const template = { hovertemplate: "%{y:.3~s}s" };
  const cost = (id, trace, axis, format, extra = {}, more = []) => {
    const { top, annotations = [] } = forTheRest(more[0]?.y ?? trace.y, format);
    const range = top === undefined ? {} : { range: [0, top] };
    const above = annotations.map((note) => ({ ...note, yanchor: "bottom", xshift: -6 }));
    draw(id, [trace, ...more], { ...axis, ...range }, { ...extra, annotations: [...above, ...(extra.annotations ?? [])] });
  };
  cost("stall", bars("stood still", data.stall, "violet", template), time, seconds);
  cost("bytes", bars("written", data.bytes, "teal", { hovertemplate: "%{y:,} bytes" }), { tickformat: "~s", ticksuffix: "B" },
    (bytes) => `${bytes.toLocaleString("en")} bytes`);
  const at = data.published;
  const mark = at === null ? {} : {
    shapes: [{ type: "line", x0: at, x1: at, y0: 0, y1: 1, yref: "paper", line: { color: color("teal"), width: 2, dash: "dot" } }],
    annotations: [{ x: at, y: 1, yref: "paper", text: "published", showarrow: false, xanchor: "right", xshift: -5, font: { color: color("teal") } }],
  };
  const publications = data.published_lag.some((lag) => lag !== null)
    ? [line("step to published", data.published_lag, "teal", template)] : [];
  cost("lag", line("step to commit", data.lag, "blue", template), time, seconds, mark, publications);
}

function drawTables() {
  for (const row of document.querySelectorAll("tr[data-table]")) {
    const name = row.dataset.table;
    row.setAttribute("aria-selected", String(name === select.value));
    row.style.setProperty("--swatch", busiest.includes(name) ? `var(--${hueOf(name)})` : "transparent");
  }
  drawRows();
  drawOccupancy();
  drawSpread("moves", "moves");
  drawSpread("norms", "norms");
}

function drawAll() {
  drawTables();
  drawCosts();
}

/** Shows one table, or all (""); the address then names it, so that a link to this page can. */
function choose(name) {
  select.value = name;
  history.replaceState(null, "", name ? `#${encodeURIComponent(name)}` : "#");
  drawTables();
}

select.addEventListener("change", () => choose(select.value));
document.querySelector("tbody").addEventListener("click", (event) => {
  const name = event.target.closest("tr").dataset.table;
  if (String(getSelection())) return; // a name that was marked is to be copied
  choose(select.value === name ? "" : name);
});
dark.addEventListener("change", drawAll);
const named = decodeURIComponent(location.hash.slice(1));
if (names.includes(named)) select.value = named;
drawAll();
document.documentElement.dataset.drawn = "yes";
