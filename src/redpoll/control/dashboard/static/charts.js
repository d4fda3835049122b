// The overview's charts, drawn by uPlot in the page's colours. One request loads the data of all: every five seconds for
// the last hour, every minute for a day or a week.
(() => {
  "use strict";

  const HOUR_S = 3600;
  const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
  const weekday = new Intl.DateTimeFormat(undefined, { weekday: "short", day: "numeric" });
  const charts = [];

  // Resolves a colour to `rgb(r, g, b)`, because a canvas supports neither var() nor light-dark().
  function colour(name) {
    const probe = document.createElement("i");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    const { color } = getComputedStyle(probe);
    probe.remove();
    return color;
  }

  const faintly = (rgb) => rgb.replace("rgb(", "rgba(").replace(")", ", 0.08)");

  function short(value) {
    if (value === null || value === undefined) return "–";
    if (value >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
    if (value >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
    return `${+value.toPrecision(value < 10 ? 2 : 3)}`;
  }

  function draw(section, data) {
    const names = section.dataset.lines.split(" ");
    const colours = section.dataset.colours.split(" ");
    const box = section.querySelector(".chart-plot");
    const axis = {
      stroke: colour("--faint"),
      font: "11px system-ui, sans-serif",
      grid: { stroke: colour("--grid"), width: 1 },
      ticks: { show: false },
    };
    const options = {
      width: box.clientWidth,
      height: box.clientHeight,
      padding: [8, 6, 0, 0],
      cursor: { points: { size: 6 }, drag: { x: false, y: false } },
      legend: { show: false },
      scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.15, 1)] } },
      axes: [{ ...axis, size: 24, gap: 4, space: 64, incrs: [60, 120, 300, 600, 900, 1800, 3600, 2 * 3600, 4 * 3600, 6 * 3600, 12 * 3600, 86400], values: (_, ticks, __, ___, step) => ticks.map((at) => (step >= 86400 ? weekday : clock).format(at * 1000)) }, { ...axis, size: 46, gap: 4, values: (_, ticks) => ticks.map(short) }],
      series: [
        {},
        ...names.map((name, index) => {
          const stroke = colour(`--chart-${colours[index]}`);
          return { label: name, stroke, width: 1.75, fill: faintly(stroke), points: { show: false }, spanGaps: false };
        }),
      ],
      hooks: { setCursor: [(plot) => say(section, names, plot.data, plot.cursor.idx)] },
    };
    const chart = { section, names, plot: new uPlot(options, pick(names, data), box) };
    charts.push(chart);
    say(section, names, chart.plot.data, null);
  }

  const pick = (names, data) => [data.time, ...names.map((name) => data[name])];

  // Shows the values under the pointer, else the newest.
  function say(section, names, data, index) {
    const at = index ?? data[0].length - 1;
    names.forEach((name, line) => {
      const value = data[line + 1][at];
      const unit = value === null || value === undefined ? "" : section.dataset.unit;
      section.querySelector(`[data-value="${name}"]`).textContent = `${short(value)}${unit && unit !== "/s" ? " " : ""}${unit}`;
    });
  }

  async function load(root) {
    const answer = await fetch(`/dashboard/series?app=${encodeURIComponent(root.dataset.app)}&span=${root.dataset.span}`);
    if (!answer.ok || answer.redirected) return null;
    return answer.json();
  }

  async function turn(root) {
    if (!document.hidden) {
      const data = await load(root).catch(() => null);
      if (data) {
        if (!charts.length) for (const section of root.querySelectorAll(".chart")) draw(section, data);
        else {
          for (const { section, names, plot } of charts) {
            plot.setData(pick(names, data), false);
            if (plot.cursor.idx === null || plot.cursor.idx === undefined) say(section, names, plot.data, null);
          }
        }
        const seconds = Number(root.dataset.seconds);
        const now = Date.now() / 1000;
        const from = Math.min(data.time[0] ?? now, now - seconds / 12);
        for (const { plot } of charts) plot.setScale("x", { min: Math.max(from, now - seconds), max: now });
      }
    }
    setTimeout(turn, Number(root.dataset.seconds) > HOUR_S ? 60000 : 5000, root);
  }

  function again() {
    for (const { plot } of charts.splice(0)) plot.destroy();
  }

  document.addEventListener("DOMContentLoaded", () => {
    const root = document.querySelector("[data-charts]");
    if (!root) return;
    turn(root);
    new ResizeObserver(() => {
      for (const { section, plot } of charts) {
        const box = section.querySelector(".chart-plot");
        plot.setSize({ width: box.clientWidth, height: box.clientHeight });
      }
    }).observe(root);
    // A canvas doesn't follow a change of theme, so the charts are drawn again.
    const redraw = async () => {
      const data = await load(root).catch(() => null);
      if (!data) return;
      again();
      for (const section of root.querySelectorAll(".chart")) draw(section, data);
    };
    document.addEventListener("redpoll:theme", redraw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  });
})();
