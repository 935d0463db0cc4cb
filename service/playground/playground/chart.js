// Line charts in SVG.

import { find } from "./dom.js";

const NS = "http://www.w3.org/2000/svg";
const DASHES = ["━━", "━━", "╍╍", "┅┅"]; // each series' line, in the legend

export function shape(tag, attributes, ...children) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// About `count` round numbers from `low` to `high`.
export function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((factor) => factor * power >= rough) ?? 10);
  const made = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) made.push(Number(value.toPrecision(12)));
  return made;
}

// The losses of a run as series; a series without two points is left out.
export function lossSeries({ training, validation }) {
  const points = (list) => list.filter(({ loss }) => loss !== null).map(({ step, loss }) => [step, loss]);
  const all = [{ name: "training", points: points(training) }, { name: "validation", points: points(validation) }];
  return all.filter((line) => line.points.length > 1);
}

// series: [{ name, points: [[x, y], ...] }]. now: x to mark. ends: x values that the chart must include.
// widest: the width, or less on a narrow page, so that the text keeps its size.
export function lineChart({ label, series, x, y, widest = 640, height = 280, now = null, ends = [] }) {
  const width = Math.min(widest, find("page").clientWidth);
  const left = 60, right = 12, top = 28, bottom = 40;
  const all = series.flatMap(({ points }) => points);
  const places = [...all.map(([value]) => value), ...ends];
  const [lowX, highX] = [Math.min(...places), Math.max(...places)];
  const [lowY, highY] = [Math.min(...all.map(([, value]) => value)), Math.max(...all.map(([, value]) => value))];
  const across = (value) => left + ((value - lowX) / (highX - lowX || 1)) * (width - left - right);
  const down = (value) => height - bottom - ((value - lowY) / (highY - lowY || 1)) * (height - top - bottom);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, class: "chart" });
  for (const value of ticks(lowY, highY, 8)) {
    svg.append(
      shape("line", { x1: left, x2: width - right, y1: down(value), y2: down(value), class: "grid" }),
      shape("text", { x: left - 6, y: down(value) + 4, "text-anchor": "end" }, `${value}`),
    );
  }
  for (const value of ticks(lowX, highX, 6)) {
    svg.append(shape("text", { x: across(value), y: height - bottom + 18, "text-anchor": "middle" }, value.toLocaleString("en")));
  }
  svg.append(
    shape("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, x),
    shape("text", { x: 12, y: (height - bottom + top) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${(height - bottom + top) / 2})` }, y),
  );
  if (now !== null) svg.append(shape("line", { x1: across(now), x2: across(now), y1: top, y2: height - bottom, class: "now" }));
  const legend = shape("text", { x: left, y: 16 });
  svg.append(legend);
  for (const [place, { name, points }] of series.entries()) {
    const index = series.length === 1 ? 1 : place; // the second series has the strongest color
    const path = points.map(([px, py], at) => `${at ? "L" : "M"}${across(px).toFixed(1)} ${down(py).toFixed(1)}`).join("");
    svg.append(shape("path", { d: path, class: `line of-${index}` }));
    legend.append(shape("tspan", { class: `key of-${index}`, dx: place ? "1.2em" : 0 }, DASHES[index]), shape("tspan", { dx: ".4em" }, name));
    if (points.length < 40) {
      for (const [px, py] of points) svg.append(shape("circle", { cx: across(px), cy: down(py), r: 2.5, class: `dot of-${index}` }));
    }
  }
  return svg;
}
