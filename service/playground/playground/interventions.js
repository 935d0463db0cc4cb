// The changes inside, which apply in all tabs but Circuit, and their list below the prompt.

import { button, element } from "./dom.js";

export class Interventions {
  #place;
  #onchange;
  list = [];

  constructor(place, onchange) {
    this.#place = place;
    this.#onchange = onchange;
  }

  add = (change) => this.#change([...this.list, change]);

  // Restore the changes in a link, as JSON; none if it is damaged.
  restore(written = "[]") {
    try {
      this.list = [JSON.parse(written)].flat();
    } catch {
      this.list = [];
    }
    this.#draw();
  }

  #change(list) {
    this.list = list;
    this.#draw();
    this.#onchange();
  }

  // Describe each change, with a button that removes it.
  #draw() {
    const remove = (change) => this.#change(this.list.filter((other) => other !== change));
    const chip = (change) => element("li", { class: "chip" }, inWords(change), button("×", () => remove(change), { "aria-label": `remove: ${inWords(change)}` }));
    this.#place.hidden = this.list.length === 0;
    this.#place.replaceChildren(element("span", {}, "Changed inside:"), element("ul", {}, ...this.list.map(chip)));
  }
}

function inWords({ stage, operation, heads, units, positions, factor, values, from, minus }) {
  const where = [units ? `unit ${units.join(", ")} of ` : "", heads ? `head ${heads.join(", ")} of ` : "", stage, positions === undefined || positions === "all" ? "" : ` (${positions})`].join("");
  if (operation === "zero") return `switch off ${where}`;
  if (operation === "scale") return `scale ${where} by ${factor}`;
  if (operation === "add" && values) return `add ${values.join(", ")} to ${where}`;
  if (operation === "set") return `patch ${where} from "${from.prompt}"`;
  return `add ${factor ?? 1} × ("${from.prompt}"${minus ? ` − "${minus.prompt}"` : ""}) to ${where}`;
}

// The changes for a request without a completion.
export const ofPrompt = (list) => list.filter(({ positions }) => positions !== "generated");

// The changes for a request whose prompt is the first `length` tokens of a text: the `prompt` tokens of the page's
// prompt, then its completion. `generates`: the request continues the text.
export function within(list, prompt, length, generates = false) {
  const spans = { prompt: [0, prompt], last: [prompt - 1, prompt], generated: [prompt, length] };
  return list.flatMap((change) => {
    if (!(change.positions in spans)) return [change];
    const [from, to] = spans[change.positions];
    const placed = from < Math.min(to, length) ? [placedAt(change, { from, to: Math.min(to, length) })] : [];
    return change.positions === "generated" && generates ? [...placed, change] : placed;
  });
}

// A change with its positions as numbers. The positions in its other prompts stay the same.
function placedAt(change, positions) {
  const source = ({ positions: own = change.positions === "last" ? "last" : "all", ...rest }) => ({ ...rest, positions: own });
  const { from, minus } = change;
  return { ...change, positions, ...(from && { from: source(from) }), ...(minus && { minus: source(minus) }) };
}
