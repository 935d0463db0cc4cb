// Attention: where each head looks. A grid of all heads, one of them in large, its rows in the text.

import { post, postArray } from "./api.js";
import { element, fill, find } from "./dom.js";
import { heatMap, paint } from "./heatmap.js";
import { choose, percent, tokenSpan, tokenText, visible } from "./tokens.js";

export class Attention {
  #app;
  #shown = null; // what the figures are of, so that a tab that is opened again is not computed anew
  #chosen = { layer: 0, head: 0, row: null };

  constructor(app) {
    this.#app = app;
    const { layer, head } = app.restored;
    if (layer !== undefined) this.#chosen = { layer: Number(layer), head: Number(head ?? 0), row: null };
  }

  state = () => ({ layer: this.#chosen.layer, head: this.#chosen.head });

  open() {
    this.update();
  }

  update() {
    const asked = JSON.stringify([this.#app.prompt(), this.#app.interventions.list]);
    if (asked === this.#shown) return null;
    return fill(find("attention"), async (signal) => {
      const body = { prompt: this.#app.prompt(), positions: "all", interventions: this.#app.interventions.list };
      const config = this.#app.info.config;
      const layers = [];
      let tokens = null;
      // Layer by layer: each reply stays within what the server gives at once.
      for (let layer = 0; layer < config.n_layer; layer++) {
        layers.push(await postArray("/attention", { ...body, layers: [layer] }, signal));
        tokens ??= await this.#app.tokensOf(body.prompt, signal);
      }
      this.#shown = asked;
      return this.#render(layers, tokens);
    });
  }

  #render(layers, tokens) {
    const { n_head: heads } = this.#app.info.config;
    const count = tokens.length;
    // npy of one layer: (1, heads, positions, tokens)
    const at = (layer, head) => (row, column) => layers[layer].values[(head * count + row) * count + column];
    const detail = element("div", {});
    const show = (layer, head, row = null) => {
      this.#chosen = { layer: Math.min(layer, layers.length - 1), head: Math.min(head, heads - 1), row };
      for (const button of grid.querySelectorAll("button")) {
        button.setAttribute("aria-pressed", button.dataset.head === `${this.#chosen.layer}.${this.#chosen.head}`);
      }
      detail.replaceChildren(...this.#detail(at(this.#chosen.layer, this.#chosen.head), tokens));
      this.#app.remember();
    };
    const small = (layer, head) => {
      const canvas = element("canvas", { "aria-hidden": "true" });
      paint(canvas, count, count, at(layer, head), 1);
      return element(
        "button",
        { type: "button", class: "head", "data-head": `${layer}.${head}`, "aria-label": `layer ${layer}, head ${head}`, onclick: () => show(layer, head) },
        canvas,
        element("span", {}, `${layer}.${head}`),
      );
    };
    const grid = element("div", { class: "heads", style: { "--heads": heads } });
    for (let layer = 0; layer < layers.length; layer++) {
      for (let head = 0; head < heads; head++) grid.append(small(layer, head));
    }
    show(this.#chosen.layer, this.#chosen.head);
    return [
      element("p", { class: "hint" }, "Every head, layer.head. A row is a token that looks, a column a token that it looks at; each row sums to 1."),
      element("div", { class: "beside" }, grid, detail),
    ];
  }

  // One head: the map, and the text coloured by where the chosen row looks.
  #detail(at, tokens) {
    const { layer, head } = this.#chosen;
    const names = tokens.map((token) => this.#app.vocabulary.idsAlone ? `${token.id}` : visible(token.text));
    const text = tokenText("The text, coloured by where the chosen token looks");
    const title = element("p", { class: "hint" });
    const draw = (row) => {
      this.#chosen.row = row;
      const spans = tokens.map((token, column) => {
        const weight = column <= row ? at(row, column) : 0;
        const note = `${names[row]} looks at ${names[column]}: ${percent(weight)}`;
        const written = this.#app.vocabulary.idsAlone ? `${token.id} ` : token.text;
        return tokenSpan(token, written, { share: weight, note, onclick: () => draw(column) });
      });
      text.replaceChildren(...spans);
      choose(text, spans[row]);
      spans[row].tabIndex = 0;
      title.textContent = `Where token ${row + 1}, "${names[row]}", looks. Choose another token, or a row above.`;
    };
    draw(this.#chosen.row ?? tokens.length - 1);
    const map = heatMap({
      label: `Attention of layer ${layer}, head ${head}`,
      rows: names,
      columns: names,
      at,
      largest: 1,
      say: (row, column) =>
        column > row ? `${names[column]} is after ${names[row]}: no token looks ahead` : `${names[row]} (${row + 1}) looks at ${names[column]} (${column + 1}): ${percent(at(row, column))}`,
      onrow: draw,
      selected: this.#chosen.row,
    });
    return [element("h3", {}, `Layer ${layer}, head ${head}`), map, title, text];
  }
}

// The tokens of a prompt, with what each says.
export async function describeTokens(prompt, vocabulary, signal) {
  if (Array.isArray(prompt)) {
    await vocabulary.name(prompt, signal);
    return prompt.map((id) => ({ id, text: vocabulary.text(id) }));
  }
  const reply = await post("/tokenize", { prompt, special_tokens: "text", pieces: true }, signal);
  return reply.pieces;
}
