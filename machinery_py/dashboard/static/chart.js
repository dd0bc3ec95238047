/** The chart of tasks that ended in the last hour, and the small one of a queue. */

import uPlot from "./vendor/uPlot.esm.js";
import { html, useEffect, useRef, useState } from "./preact.js";
import { clock, now, number } from "./format.js";

const HOUR = 3600; // seconds
const HEIGHT = 180; // pixels

/** Add the counts of all queues, or of one; return [moments, succeeded, failed] of the hour. */
export function series(counts, step, queue = "") {
  const last = Math.floor(now() / 1000 / step) * step;
  const moments = Array.from({ length: HOUR / step }, (_, i) => last - HOUR + (i + 1) * step);
  const [succeeded, failed] = [moments.map(() => 0), moments.map(() => 0)];
  for (const one of counts) {
    const at = moments.length - 1 - Math.round((last - Date.parse(one.at) / 1000) / step);
    if (!moments[at] || (queue && one.queue !== queue)) continue;
    succeeded[at] += one.succeeded;
    failed[at] += one.failed;
  }
  return [moments, succeeded, failed];
}

/** Return what a colour of the style sheet is now; a canvas cannot follow it by itself. */
function colour(name, element) {
  element.style.color = `var(--${name})`;
  const found = getComputedStyle(element).color;
  element.style.color = "";
  return found;
}

function options(element, width, step, tell) {
  const [line, ink] = [colour("border", element), colour("muted", element)];
  const bars = uPlot.paths.bars({ size: [0.8, 14], align: 1 });
  const grid = { stroke: line, width: 1 };
  const axis = { stroke: ink, grid, ticks: { show: false }, font: "12px system-ui" };
  const look = { paths: bars, points: { show: false }, width: 0 };
  const bar = (name) => ({ ...look, fill: colour(name, element) });
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { drag: { setScale: false }, y: false, points: { show: false } },
    scales: {
      x: { range: (_, first, last) => [first, last + step] },
      y: { range: (_, __, top) => [0, Math.max(4, top * 1.1)] },
    },
    axes: [
      { ...axis, grid: { show: false }, values: (_, at) => at.map(clock), space: 70, size: 28 },
      { ...axis, values: (_, ticks) => ticks.map((one) => (one % 1 ? "" : number(one))), size: 54 },
    ],
    // All of them below, the failed ones drawn over their foot: a stack.
    series: [{}, bar("chart-done"), bar("chart-failed")],
    hooks: { setCursor: [(plot) => tell(plot.cursor.idx)] },
  };
}

export function Chart({ counts, queue, step }) {
  const box = useRef(null);
  const plot = useRef(null);
  const [index, tell] = useState(null);
  const [moments, succeeded, failed] = series(counts, step, queue);
  const all = succeeded.map((value, i) => value + failed[i]);
  const figures = [moments, all, failed];

  useEffect(() => {
    const draw = () => {
      plot.current?.destroy();
      const width = Math.max(200, box.current.clientWidth);
      plot.current = new uPlot(options(box.current, width, step, tell), figures, box.current);
    };
    draw();
    const resized = new ResizeObserver(() => {
      plot.current.setSize({ width: Math.max(200, box.current.clientWidth), height: HEIGHT });
    });
    resized.observe(box.current);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", draw);
    addEventListener("machinery-theme", draw);
    return () => {
      resized.disconnect();
      scheme.removeEventListener("change", draw);
      removeEventListener("machinery-theme", draw);
      plot.current.destroy();
    };
  }, []);
  useEffect(() => plot.current.setData(figures), [counts, queue, moments[0]]);

  const total = (values) => number(values.reduce((a, b) => a + b, 0));
  const words = `${total(succeeded)} tasks succeeded and ${total(failed)} failed in the last hour.`;
  const at = index === null ? undefined : moments[index];
  const value = (values) => (at ? number(values[index]) : total(values));
  return html`<div class="chart">
    <p class="legend">
      <span class="key done">${value(succeeded)} succeeded</span>
      <span class="key failed">${value(failed)} failed</span>
      <span class="muted">${at ? `${clock(at)} to ${clock(at + step)}` : "in the last hour"}</span>
    </p>
    <div ref=${box} role="img" aria-label=${words}></div>
  </div>`;
}

/** The rate of one queue over the hour, without axes; its figures stand beside it. */
export function Spark({ values }) {
  const top = Math.max(1, ...values);
  const step = 100 / Math.max(1, values.length - 1);
  const points = values.map((one, i) => `${i * step},${20 - (one / top) * 18}`);
  return html`<svg class="spark" viewBox="0 0 100 21" preserveAspectRatio="none" aria-hidden="true">
    <polyline points=${points.join(" ")} />
  </svg>`;
}
