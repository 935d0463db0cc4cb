// Tokens: how a text splits.

import { element, fill, find } from "./dom.js";
import { visible } from "./tokens.js";

export class Tokens {
  #app;

  constructor(app) {
    this.#app = app;
  }

  open() {
    this.update();
  }

  update() {
    return fill(find("pieces"), async (signal) => {
      const prompt = this.#app.prompt();
      const pieces = await this.#app.tokensOf(prompt, signal);
      const bytes = ({ bytes: values }) => (values ? values.map((byte) => byte.toString(16).padStart(2, "0")).join(" ") : "");
      const box = (piece, index) =>
        element(
          "li",
          { class: index % 2 ? "piece odd" : "piece" },
          element("code", { class: "written" }, this.#app.vocabulary.idsAlone ? `${piece.id}` : visible(piece.text)),
          element("span", {}, `id ${piece.id}`),
          element("code", {}, bytes(piece)),
        );
      const size = typeof prompt === "string" ? new TextEncoder().encode(prompt).length : null;
      const per = size && pieces.length ? `, ${(size / pieces.length).toFixed(2)} bytes a token` : "";
      const context = this.#app.info.limits.context_length;
      return [
        element("p", {}, `${pieces.length} tokens${size === null ? "" : ` of ${size} bytes`}${per}; the context has room for ${context}.`),
        element("ol", { class: "pieces" }, ...pieces.map(box)),
      ];
    });
  }
}
