// Lens: the next token if the model stopped after each layer.

import { post } from "./api.js";
import { element, find, heading, hint, plainTable, roving } from "./dom.js";
import { choose, percent, texts, tokenElement, tokenSpan, tokenText } from "./tokens.js";

const MOST_POSITIONS = 48;

export class Lens {
  #app;
  #first = 0; // first shown position

  constructor(app) {
    this.#app = app;
  }

  // Show the columns around the chosen token.
  async update() {
    await this.#app.look(find("lens"), async ({ prompt, tokens, interventions }, signal) => {
      const from = this.#app.placeIn(tokens) - MOST_POSITIONS / 2;
      this.#first = Math.max(0, Math.min(from, tokens.length - MOST_POSITIONS));
      const positions = [...tokens.keys()].slice(this.#first, this.#first + MOST_POSITIONS);
      const reply = await post("/lens", { prompt, positions: positions.length ? positions : "all", top_k: 6, interventions }, signal);
      return this.#render(reply.prompts[0].positions, tokens);
    }, this.#app.place);
    const cell = find("lens").querySelector("td[aria-pressed=true]");
    if (cell) cell.closest(".scroll").scrollLeft = cell.offsetLeft - cell.closest(".scroll").clientWidth / 2;
  }

  #render(positions, tokens) {
    const { vocabulary } = this.#app;
    const { named } = vocabulary;
    const detail = element("div", { "aria-live": "polite" });
    const cell = ({ position, layers }, layer) => {
      const [best] = layers[layer].top;
      const title = `after ${name(layer)}, at ${named(tokens[position])} (${position}): ${named(best)}, ${percent(best.prob)}`;
      return tokenElement("td", title, best.prob, () => show(position, layer), named(best));
    };
    const show = (position, layer) => {
      this.#app.place = position;
      choose(table, table.querySelectorAll("tbody tr")[depth - 1 - layer].querySelectorAll("td")[position - this.#first]);
      const reading = positions[position - this.#first].layers[layer];
      detail.replaceChildren(
        heading(`After ${name(layer)}, at token ${position}, "${named(tokens[position])}"`),
        plainTable(reading.top.map((token) => [named(token), percent(token.prob)])),
        hint(`Entropy ${(reading.entropy / Math.LN2).toFixed(2)} bits; the model's own prediction diverges from it by ${(reading.divergence / Math.LN2).toFixed(2)} bits.`),
      );
    };
    const depth = positions[0].layers.length;
    const name = (layer) => (layer === 0 ? "embedding" : `block ${layer - 1}`);
    const line = (layer) => element("tr", {}, element("th", { scope: "row" }, name(layer)), ...positions.map((position) => cell(position, layer)));
    // The last layer is at the top, so the model computes upwards.
    const lines = Array.from({ length: depth }, (_, index) => line(depth - 1 - index));
    const head = element("tr", {}, element("th", {}, ""), ...positions.map(({ position }) => element("th", { scope: "col" }, named(tokens[position]))));
    const table = element("table", { class: "lens" }, element("thead", {}, head), element("tbody", {}, ...lines));
    roving(table, "td", () => positions.length);
    table.querySelector("td").tabIndex = 0;
    show(this.#app.placeIn(tokens), depth - 1);
    const how = "The likeliest next token after each layer, with the final norm and the head applied there. A stronger color is a higher probability. Choose a cell for details.";
    return [hint(how), ...this.#whole(tokens), element("div", { class: "scroll" }, table), detail];
  }

  // The text, if it has more tokens than columns, to choose the shown ones.
  #whole(tokens) {
    if (tokens.length <= MOST_POSITIONS) return [];
    const { vocabulary } = this.#app;
    const text = tokenText("The text: choose a token to show the columns around it");
    const written = texts(tokens, vocabulary);
    const spans = tokens.map((token, index) => {
      const share = index >= this.#first && index < this.#first + MOST_POSITIONS ? 0.5 : 0;
      const onclick = () => {
        this.#app.place = index;
        this.update();
      };
      return tokenSpan(token, written[index], { vocabulary, share, note: `${index}: ${vocabulary.named(token)}`, onclick });
    });
    text.append(...spans);
    spans[this.#first].tabIndex = 0;
    return [text, hint(`Colored: the ${MOST_POSITIONS} of ${tokens.length} tokens shown below. Choose another token to show those around it.`)];
  }
}
