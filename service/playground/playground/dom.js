// Making elements, and saying what went wrong where it did.

// element("td", { class: "bar", onclick }, "text", child): attributes, handlers and children.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, what] of Object.entries(value)) made.style.setProperty(key, what);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export const find = (id) => document.getElementById(id);

// A field with its name before it. `input` is what is filled in.
export const labelled = (text, input) => element("label", {}, element("span", {}, text), input);

export const choice = (options, attributes = {}) =>
  element("select", attributes, ...options.map(([value, text]) => element("option", { value }, text)));

// What failed, in a sentence, in the place where it was asked for; `retry` does it again.
export function showProblem(place, error, retry) {
  const again = element("button", { type: "button", onclick: retry }, "Try again");
  place.replaceChildren(element("p", { class: "problem", role: "alert" }, error.message, " ", retry ? again : ""));
}

// Do something in a place that says that it is busy, and then shows the result or what went wrong.
// A later call in the same place takes the place of an earlier one.
const turns = new WeakMap();
export async function fill(place, make) {
  turns.get(place)?.abort();
  const turn = new AbortController();
  turns.set(place, turn);
  place.setAttribute("aria-busy", "true");
  try {
    const made = await make(turn.signal);
    if (!turn.signal.aborted) place.replaceChildren(...[made].flat());
  } catch (error) {
    if (!turn.signal.aborted) showProblem(place, error, () => fill(place, make));
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
