// Attention: the weights of each head, as a grid of all heads, a large map of one, and its rows in the text.

import { postArray } from "./api.js";
import { button, element, find, heading, hint } from "./dom.js";
import { heatMap, paint } from "./heatmap.js";
import { choose, percent, texts, tokenSpan, tokenText } from "./tokens.js";

export class Attention {
  #app;
  #chosen = { layer: 0, head: 0 };

  constructor(app) {
    this.#app = app;
    const { layer, head } = app.restored;
    if (layer !== undefined) this.#chosen = { layer: Number(layer), head: Number(head ?? 0) };
  }

  state = () => this.#chosen;

  update() {
    return this.#app.look(find("attention"), async ({ prompt, tokens, interventions }, signal) => {
      const layers = [];
      // One layer per request stays within the limits of a reply.
      for (let layer = 0; layer < this.#app.info.config.n_layer; layer++) {
        layers.push(await postArray("/attention", { prompt, positions: "all", layers: [layer], interventions }, signal));
      }
      return this.#render(layers, tokens);
    });
  }

  #render(layers, tokens) {
    const { n_head: heads } = this.#app.info.config;
    const count = tokens.length;
    // npy of one layer: (1, heads, positions, tokens)
    const at = (layer, head) => (row, column) => layers[layer].values[(head * count + row) * count + column];
    const detail = element("div", {});
    const show = (layer, head) => {
      this.#chosen = { layer: Math.min(layer, layers.length - 1), head: Math.min(head, heads - 1) };
      for (const other of grid.children) other.setAttribute("aria-pressed", other.dataset.head === `${this.#chosen.layer}.${this.#chosen.head}`);
      detail.replaceChildren(...this.#detail(at(this.#chosen.layer, this.#chosen.head), tokens));
      this.#app.remember();
    };
    const small = (layer, head) => {
      const canvas = element("canvas", { "aria-hidden": "true" });
      paint(canvas, count, count, at(layer, head), 1);
      const made = button(canvas, () => show(layer, head), { class: "head", "data-head": `${layer}.${head}`, "aria-label": `layer ${layer}, head ${head}` });
      made.append(element("span", {}, `${layer}.${head}`));
      return made;
    };
    const grid = element("div", { class: "heads", style: { "--heads": heads } });
    for (let layer = 0; layer < layers.length; layer++) {
      for (let head = 0; head < heads; head++) grid.append(small(layer, head));
    }
    show(this.#chosen.layer, this.#chosen.head);
    return [
      hint("All heads, as layer.head. A row is the token that attends, a column the token that it attends to; each row sums to 1."),
      element("div", { class: "side-by-side" }, grid, detail),
    ];
  }

  // One head: its map, and the text colored by the weights of the chosen row.
  #detail(at, tokens) {
    const { layer, head } = this.#chosen;
    const { vocabulary } = this.#app;
    const names = tokens.map(vocabulary.named);
    const written = texts(tokens, vocabulary);
    const text = tokenText("The text, colored by the attention of the chosen token");
    const title = hint("");
    const draw = (row) => {
      this.#app.place = row;
      const spans = tokens.map((token, column) => {
        const weight = column <= row ? at(row, column) : 0;
        const note = `${names[row]} attends to ${names[column]}: ${percent(weight)}`;
        return tokenSpan(token, written[column], { vocabulary, share: weight, note, onclick: () => draw(column) });
      });
      text.replaceChildren(...spans);
      choose(text, spans[row]);
      spans[row].tabIndex = 0;
      title.textContent = `Attention of token ${row}, "${names[row]}". Choose another token, or a row above.`;
    };
    const chosen = this.#app.placeIn(tokens);
    draw(chosen);
    const map = heatMap({
      label: `Attention of layer ${layer}, head ${head}`,
      rows: names,
      columns: names,
      at,
      largest: 1,
      say: (row, column) =>
        column > row ? `${names[column]} is after ${names[row]}: tokens attend to earlier ones` : `${names[row]} (${row}) attends to ${names[column]} (${column}): ${percent(at(row, column))}`,
      onrow: draw,
      selected: chosen,
    });
    return [heading(`Layer ${layer}, head ${head}`), map, title, text];
  }
}
