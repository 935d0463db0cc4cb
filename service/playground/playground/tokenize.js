// Tokens: the tokens of a text, with ids and bytes.

import { element, find } from "./dom.js";

export class Tokens {
  #app;

  constructor(app) {
    this.#app = app;
  }

  update() {
    return this.#app.look(find("pieces"), ({ tokens }) => {
      const { info, vocabulary } = this.#app;
      const box = (token, index) =>
        element(
          "li",
          { class: index % 2 ? "piece odd" : "piece" },
          element("code", { class: "written" }, vocabulary.named(token)),
          element("span", {}, `${index}: id ${token.id}`),
          element("code", {}, (token.bytes ?? []).map((byte) => byte.toString(16).padStart(2, "0")).join(" ")),
        );
      const size = tokens.reduce((sum, { bytes }) => sum + (bytes?.length ?? 0), 0);
      const per = size ? ` of ${size} bytes, ${(size / tokens.length).toFixed(2)} bytes per token` : "";
      return [
        element("p", {}, `${tokens.length} tokens${per}; the context holds ${info.limits.context_length}.`),
        element("ol", { class: "pieces" }, ...tokens.map(box)),
      ];
    });
  }
}
