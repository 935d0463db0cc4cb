// Lens: what the model would say if it stopped after each layer.

import { post } from "./api.js";
import { element, fill, find, roving } from "./dom.js";
import { percent, visible } from "./tokens.js";

const MOST_POSITIONS = 48;

export class Lens {
  #app;
  #shown = null;

  constructor(app) {
    this.#app = app;
  }

  open() {
    this.update();
  }

  update() {
    const asked = JSON.stringify([this.#app.prompt(), this.#app.interventions.list]);
    if (asked === this.#shown) return null;
    return fill(find("lens"), async (signal) => {
      const prompt = this.#app.prompt();
      const tokens = await this.#app.tokensOf(prompt, signal);
      const first = Math.max(0, tokens.length - MOST_POSITIONS);
      const positions = tokens.map((_, index) => index).slice(first);
      const body = { prompt, positions, top_k: 6, interventions: this.#app.interventions.list };
      const reply = await post("/lens", body, signal);
      this.#shown = asked;
      return this.#render(reply.prompts[0].positions, tokens, first);
    });
  }

  #render(positions, tokens, first) {
    const { idsAlone } = this.#app.vocabulary;
    const named = (token) => (idsAlone ? `${token.id}` : visible(token.text));
    const detail = element("div", { "aria-live": "polite" });
    const cell = ({ position, layers }, layer) => {
      const [best] = layers[layer].top;
      const title = `after layer ${layer}, at ${named(tokens[position])}: ${named(best)}, ${percent(best.prob)}`;
      return element(
        "td",
        { class: "token", role: "button", tabindex: -1, title, "aria-label": title, style: { "--share": best.prob.toFixed(3) }, onclick: () => show(position, layer) },
        named(best),
      );
    };
    const show = (position, layer) => {
      const said = positions.find((other) => other.position === position).layers[layer];
      const rows = said.top.map((token) => element("tr", {}, element("th", { scope: "row" }, named(token)), element("td", {}, percent(token.prob))));
      detail.replaceChildren(
        element("h3", {}, `After ${layer === 0 ? "the embeddings" : `block ${layer - 1}`}, at token ${position + 1}, "${named(tokens[position])}"`),
        element("table", { class: "plain" }, element("tbody", {}, ...rows)),
        element("p", { class: "hint" }, `Entropy ${(said.entropy / Math.LN2).toFixed(2)} bits; ${(said.divergence / Math.LN2).toFixed(2)} bits away from what the model says in the end.`),
      );
    };
    const depth = positions[0].layers.length;
    const line = (layer) =>
      element(
        "tr",
        {},
        element("th", { scope: "row" }, layer === 0 ? "embeddings" : `block ${layer - 1}`),
        ...positions.map((position) => cell(position, layer)),
      );
    // The last layer above: what is read from below to the top is what the model does.
    const lines = Array.from({ length: depth }, (_, index) => line(depth - 1 - index));
    const head = element("tr", {}, element("th", {}, ""), ...positions.map(({ position }) => element("th", { scope: "col" }, named(tokens[position]))));
    const table = element("table", { class: "lens" }, element("thead", {}, head), element("tbody", {}, ...lines));
    roving(table, "td", () => positions.length);
    table.querySelector("td").tabIndex = 0;
    const last = positions.at(-1).position;
    show(last, depth - 1);
    return [
      element(
        "p",
        { class: "hint" },
        "The likeliest next token after each layer, the final norm and the head applied there; the stronger the colour, the surer. " +
          (first ? `The last ${MOST_POSITIONS} tokens of ${tokens.length}. ` : ""),
      ),
      element("div", { class: "scroll" }, table),
      detail,
    ];
  }
}
