// Elements of the page, and errors shown where they occur.

// element("td", { class: "bar", onclick }, "text", child): attributes, handlers and children.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) value && made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, what] of Object.entries(value)) made.style.setProperty(key, what);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export const find = (id) => document.getElementById(id);

export const heading = (text) => element("h3", {}, text);
export const hint = (text) => element("p", { class: "hint" }, text);
export const button = (text, onclick, attributes = {}) => element("button", { type: "button", onclick, ...attributes }, text);

// Rows of a name and a value.
export const plainTable = (rows) =>
  element("table", { class: "plain" }, element("tbody", {}, ...rows.map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, value)))));

// An input with its name before it.
export const labeled = (text, input) => element("label", {}, element("span", {}, text), input);

export const choice = (options, attributes = {}) =>
  element("select", attributes, ...options.map(([value, text]) => element("option", { value }, text)));

// The number in a field. Throws an error that names the field if it is empty or has no number.
export function numberIn(input, name) {
  const number = input.value.trim() === "" ? NaN : Number(input.value);
  if (!Number.isFinite(number)) throw new Error(`${name} has no number: enter one`);
  return number;
}

// Show an error in an element, with a button that runs `retry`. A refused prompt is reported once, below the prompt.
export function showProblem(place, error, retry) {
  const ofPrompt = error.param === "prompt";
  if (ofPrompt) place.replaceChildren();
  const problem = element("p", { class: "problem", role: "alert" }, error.message, " ", retry && !ofPrompt ? button("Try again", retry) : "");
  (ofPrompt ? find("prompt-problem") : place).replaceChildren(problem);
}

// Fill an element with the result of `make`, or with its error; it is marked busy meanwhile. A later
// call replaces an earlier one. An element that already shows the result for `key` stays unchanged.
const turns = new WeakMap();
const filled = new WeakMap();
export async function fill(place, make, key = null) {
  turns.get(place)?.abort();
  place.removeAttribute("aria-busy");
  if (key !== null && filled.get(place) === key) return;
  filled.delete(place);
  const turn = new AbortController();
  turns.set(place, turn);
  place.setAttribute("aria-busy", "true");
  try {
    const made = await make(turn.signal);
    if (turn.signal.aborted) return;
    place.replaceChildren(...[made].flat());
    filled.set(place, key);
  } catch (error) {
    if (!turn.signal.aborted) showProblem(place, error, () => fill(place, make, key));
  } finally {
    if (turns.get(place) === turn) place.removeAttribute("aria-busy");
  }
}

// Call once `milliseconds` have passed without another call, with the last arguments.
export function debounced(milliseconds, act) {
  let timer = null;
  const run = (...values) => {
    timer = null;
    act(...values);
  };
  const later = (...values) => {
    clearTimeout(timer);
    timer = setTimeout(run, milliseconds, ...values);
  };
  later.flush = () => {
    if (timer === null) return;
    clearTimeout(timer);
    run();
  };
  return later;
}

// Make one element of a row or grid reachable with Tab, and the others with arrow keys.
export function roving(container, selector, step) {
  const all = () => [...container.querySelectorAll(selector)];
  container.addEventListener("focusin", (event) => {
    if (!event.target.matches(selector)) return;
    for (const other of container.querySelectorAll(`${selector}[tabindex="0"]`)) other.tabIndex = -1;
    event.target.tabIndex = 0;
  });
  container.addEventListener("keydown", (event) => {
    if (!event.target.matches(selector)) return;
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: step(), ArrowUp: -step(), Home: -Infinity, End: Infinity };
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      event.target.click();
    }
    if (!(event.key in moves)) return;
    event.preventDefault();
    const elements = all();
    const at = elements.indexOf(event.target) + moves[event.key];
    elements[Math.max(0, Math.min(elements.length - 1, at))].focus();
  });
}

export async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // Pages may write to the clipboard only with https or on localhost.
    window.prompt("Copy with Ctrl+C", text);
  }
  setTimeout(() => (button.textContent = label), 1500);
}
