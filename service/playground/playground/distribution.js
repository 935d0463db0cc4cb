// The distribution of a token, before and after temperature and filters. The whole row of logits is
// fetched once; the sliders reshape it here.

import { post, postArray } from "./api.js";
import { button, element, fill, heading, hint } from "./dom.js";
import { entropyBits, processed, ranked, softmax } from "./sampling.js";
import { percent, visible } from "./tokens.js";

const SHOWN = 12;

// The texts of token ids, each requested from the server once.
export class Vocabulary {
  #texts = new Map();
  #of;

  // `model`: name of a model other than the page's.
  constructor(idsAlone, model = null) {
    this.idsAlone = idsAlone;
    this.#of = model === null ? {} : { model };
  }

  async name(ids, signal) {
    if (this.idsAlone) return;
    const missing = ids.filter((id) => !this.#texts.has(id));
    if (missing.length === 0) return;
    const reply = await post("/detokenize", { ...this.#of, tokens: missing.map((id) => [id]) }, signal);
    for (const [index, { prompt }] of reply.prompts.entries()) this.#texts.set(missing[index], prompt);
  }

  // The tokens of a prompt, each with its text.
  async tokens(prompt, signal) {
    if (Array.isArray(prompt)) return prompt.map((id) => ({ id, text: this.text(id) }));
    return (await post("/tokenize", { ...this.#of, prompt, special_tokens: "text", pieces: true }, signal)).pieces;
  }

  // A token as shown on the page.
  named = ({ id, text }) => (this.idsAlone ? `${id}` : visible(text));
  text = (id) => (this.idsAlone ? `id ${id}` : (this.#texts.get(id) ?? `id ${id}`));
  shown = (text) => (this.idsAlone ? text : visible(text));
  visible = (id) => this.shown(this.text(id));
}

// Bars of named tokens: rows of { id, before, after }, the likeliest first.
export function bars(rows, vocabulary, { heads = ["model", "sampled from"], chosen = null, onpick = null, none = "dropped" } = {}) {
  const widest = Math.max(...rows.flatMap(({ before, after }) => [before, after]));
  const line = ({ id, before, after }) => {
    const name = vocabulary.visible(id);
    const label = onpick
      ? button(name, () => onpick(id), { class: "link", title: `Continue with "${name}"` })
      : element("span", {}, name);
    const bar = (share, kind) => element("div", { class: `bar ${kind}`, style: { width: `${(100 * share) / widest}%` } });
    return element(
      "tr",
      { class: id === chosen ? "chosen" : after === 0 && none === "dropped" ? "dropped" : null },
      element("th", { scope: "row" }, label, id === chosen ? element("span", { class: "mark" }, " ← here") : null),
      element("td", { class: "bars", "aria-hidden": "true" }, bar(before, "before"), bar(after, "after")),
      element("td", {}, before === 0 ? none : percent(before)),
      element("td", {}, after === 0 ? none : percent(after)),
    );
  };
  const head = element(
    "tr",
    {},
    element("th", { scope: "col" }, "token"),
    element("td", {}, ""),
    ...heads.map((text, index) => element("th", { scope: "col", class: index ? "after" : "before" }, text)),
  );
  return element("table", { class: "distribution" }, element("thead", {}, head), element("tbody", {}, ...rows.map(line)));
}

export class Distribution {
  #place;
  #vocabulary;
  #settings;
  #shown = null; // { title, logits, chosen, onpick }

  // `settings` returns the current temperature, top_k, top_p and min_p.
  constructor(place, vocabulary, settings) {
    this.#place = place;
    this.#vocabulary = vocabulary;
    this.#settings = settings;
  }

  // Show the distribution after `ids`. `chosen` is the token there; `onpick` is called with another choice.
  show({ title, ids, chosen = null, onpick, interventions = [] }) {
    return fill(this.#place, async (signal) => {
      const body = { prompt: ids, interventions };
      const { values } = await postArray("/logits", body, signal);
      this.#shown = { title, logits: values, chosen, onpick };
      const likeliest = [...ranked(values).slice(0, SHOWN)];
      this.#shown.ids = chosen === null || likeliest.includes(chosen) ? likeliest : [...likeliest, chosen];
      await this.#vocabulary.name(this.#shown.ids, signal);
      return this.#render();
    });
  }

  // Called when the sliders have moved.
  update() {
    if (this.#shown) this.#place.replaceChildren(...this.#render());
  }

  clear() {
    this.#shown = null;
    this.#place.replaceChildren();
  }

  #render() {
    const { title, logits, ids, chosen, onpick } = this.#shown;
    const before = softmax(logits);
    const after = processed(logits, this.#settings());
    const kept = after.reduce((count, prob) => count + (prob > 0), 0);
    const rows = ids.map((id) => ({ id, before: before[id], after: after[id] }));
    const of = `${kept.toLocaleString("en")} of ${logits.length.toLocaleString("en")} tokens`;
    return [
      heading(title),
      bars(rows, this.#vocabulary, { chosen, onpick }),
      hint(`Entropy ${entropyBits(before).toFixed(2)} bits; with these settings ${entropyBits(after).toFixed(2)}, and ${of} can be sampled. ${onpick ? "Choose another token to continue with it." : ""}`),
    ];
  }
}
