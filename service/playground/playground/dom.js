// Making elements, and saying what went wrong where it did.

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

// A field with its name before it. `input` is what is filled in.
export const labelled = (text, input) => element("label", {}, element("span", {}, text), input);

export const choice = (options, attributes = {}) =>
  element("select", attributes, ...options.map(([value, text]) => element("option", { value }, text)));

// Show why something failed where it was asked for; `retry` does it again. A prompt that is refused
// is reported once, below the prompt, whichever parts of the page sent it.
export function showProblem(place, error, retry) {
  const ofPrompt = error.param === "prompt";
  if (ofPrompt) place.replaceChildren();
  const said = element("p", { class: "problem", role: "alert" }, error.message, " ", retry && !ofPrompt ? button("Try again", retry) : "");
  (ofPrompt ? find("prompt-problem") : place).replaceChildren(said);
}

// Fill a place with the result of `make`, or with why it failed; meanwhile the place is marked busy.
// A later call replaces an earlier one. A place that shows the result for `key` already stays as it is.
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

// Call at most once every `milliseconds`, with the last arguments.
export function debounced(milliseconds, act) {
  let timer = null;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...values), milliseconds);
  };
}

// One of several elements in a row or grid can be reached with Tab, the others with arrow keys.
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
  const said = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // Without https and localhost a page may not write to the clipboard: show it to be copied.
    window.prompt("Copy with Ctrl+C", text);
  }
  setTimeout(() => (button.textContent = said), 1500);
}
