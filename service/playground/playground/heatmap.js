// A heat map on a canvas: named rows and columns, the value at the pointer, selectable rows.

import { element } from "./dom.js";

// Paint (rows, columns) values into a canvas, one pixel each; CSS enlarges it. `largest` and its negative
// have the full color, smaller values are more transparent.
export function paint(canvas, rows, columns, at, largest) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  const style = getComputedStyle(document.documentElement);
  const [more, less] = ["--map-more", "--map-less"].map((name) => style.getPropertyValue(name).trim().split(/\s+/));
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const value = at(row, column);
      const share = Number.isFinite(value) ? Math.min(1, Math.abs(value) / (largest || 1)) : 0;
      image.data.set([...(value < 0 ? less : more), 255 * share], 4 * (row * columns + column));
    }
  }
  context.putImageData(image, 0, 0);
}

const MOST_LABELS = 48; // names of rows or columns that fit

// rows, columns: names. at(row, column): the value. largest: value of the full color.
// say(row, column): the value in words. onrow(row): called with a chosen row.
export function heatMap({ label, rows, columns, at, largest, say, onrow, selected = null }) {
  const canvas = element("canvas", { "aria-hidden": "true" });
  paint(canvas, rows.length, columns.length, at, largest);
  const readout = element("p", { class: "readout", "aria-live": "polite" }, "Point at a cell, or use the arrow keys.");
  const cross = element("div", { class: "cell" });
  const map = element(
    "div",
    { class: "map", role: "application", tabindex: 0, "aria-label": `${label}. Arrow keys move between cells, Enter chooses a row.` },
    canvas,
    cross,
  );
  const place = { row: selected ?? rows.length - 1, column: 0 };
  const show = () => {
    cross.style.left = `${(100 * place.column) / columns.length}%`;
    cross.style.top = `${(100 * place.row) / rows.length}%`;
    cross.style.width = `${100 / columns.length}%`;
    cross.style.height = `${100 / rows.length}%`;
    readout.textContent = say(place.row, place.column);
  };
  const move = (row, column) => {
    place.row = Math.max(0, Math.min(rows.length - 1, row));
    place.column = Math.max(0, Math.min(columns.length - 1, column));
    show();
  };
  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    move(Math.floor(((event.clientY - box.top) / box.height) * rows.length), Math.floor(((event.clientX - box.left) / box.width) * columns.length));
  };
  map.addEventListener("pointermove", point);
  map.addEventListener("click", (event) => {
    point(event);
    onrow?.(place.row);
  });
  map.addEventListener("focus", show);
  map.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.key === "Enter") onrow?.(place.row);
    if (!(event.key in moves)) return;
    event.preventDefault();
    move(place.row + moves[event.key][0], place.column + moves[event.key][1]);
  });
  const names = (list, kind) =>
    element("div", { class: `names ${kind}`, "aria-hidden": "true" }, ...(list.length > MOST_LABELS ? [] : list.map((name) => element("span", {}, name))));
  const wide = Math.max(3, Math.min(24, Math.floor(560 / columns.length)));
  const high = rows.length === columns.length ? wide : Math.max(3, Math.min(16, Math.floor(560 / rows.length)));
  return element(
    "figure",
    { class: "heat", style: { "--columns": columns.length, "--rows": rows.length, "--wide": `${wide}px`, "--high": `${high}px` } },
    names(columns, "of-columns"),
    element("div", { class: "with-rows" }, names(rows, "of-rows"), map),
    readout,
  );
}
