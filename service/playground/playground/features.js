// Features: the sparse autoencoders of the model, the features of a text, and one feature in detail.

import { get, postArray } from "./api.js";
import { button, choice, element, fill, find, heading, hint, labeled, plainTable } from "./dom.js";
import { choose, texts, tokenSpan, tokenText, visible } from "./tokens.js";

const LISTED = 40;
const ORDERS = [["density", "most frequent"], ["rarest", "rarest"], ["strongest", "strongest"]];

export class Features {
  #app;
  #saes;
  #sae = null;
  #figures = null; // density, strongest, tokens
  #index = null; // the feature in detail

  constructor(app, saes) {
    this.#app = app;
    this.#saes = saes;
  }

  async open() {
    if (this.#figures === null) await this.#chooseSae(this.#sae ?? this.#saes[0]);
    this.update();
  }

  update() {
    if (this.#figures === null) return; // `open` waits for them, or has reported an error
    this.#text();
    this.#detail();
  }

  async #chooseSae(sae) {
    this.#sae = sae;
    this.#figures = this.#index = null;
    await fill(find("feature-fields"), async (signal) => {
      this.#figures = await get(`/features?sae=${encodeURIComponent(sae.name)}`, signal);
      const { figures = {} } = sae.training;
      const facts = [
        `${sae.features.toLocaleString("en")} features of ${sae.stage.replace(/\.sae\..*/, "")}`,
        figures.explained_variance !== undefined && `${(100 * figures.explained_variance).toFixed(1)} % of the variance explained`,
        figures.active !== undefined && `${figures.active.toFixed(1)} active per token`,
        figures.loss_recovered !== undefined && `${(100 * figures.loss_recovered).toFixed(1)} % of the loss recovered`,
      ];
      const list = choice(this.#saes.map(({ name }) => [name, name]), { id: "feature-sae" });
      list.value = sae.name;
      const onchange = async () => {
        await this.#chooseSae(this.#saes.find(({ name }) => name === list.value));
        this.update();
      };
      list.addEventListener("change", onchange);
      return [labeled("autoencoder", list), hint(`${facts.filter(Boolean).join(", ")}.`)];
    });
    if (this.#figures !== null) this.#search();
  }

  // List the features at the chosen token, and color the text by the chosen feature.
  #text() {
    const draw = async ({ prompt, tokens, interventions }, signal) => {
      const body = { prompt, positions: "all", stages: [this.#sae.stage], interventions };
      const { values } = await postArray("/activations", body, signal);
      return this.#render(tokens, values);
    };
    return this.#app.look(find("feature-text"), draw, this.#sae.name, this.#index, this.#app.place);
  }

  #render(tokens, values) {
    const { vocabulary } = this.#app;
    const count = this.#sae.features;
    const place = this.#app.placeIn(tokens);
    const of = (position) => values.subarray(position * count, (position + 1) * count);
    const active = [...of(place).entries()].filter(([, value]) => value > 0).sort(([, a], [, b]) => b - a);
    if (this.#index === null && active.length) this.#pick(active[0][0]);
    const index = this.#index;
    const shades = tokens.map((_, position) => (index === null ? 0 : of(position)[index]));
    const largest = Math.max(...shades, Number.MIN_VALUE);
    const text = tokenText("The text, colored by the chosen feature: choose a token to list its features");
    const written = texts(tokens, vocabulary);
    const spans = tokens.map((token, position) =>
      tokenSpan(token, written[position], {
        vocabulary,
        share: shades[position] / largest,
        note: `${position}: ${vocabulary.named(token)}, ${shades[position].toPrecision(3)}`,
        onclick: () => {
          this.#app.place = position;
          this.#text();
        },
      }),
    );
    text.append(...spans);
    if (spans.length) spans[place].tabIndex = 0;
    choose(text, spans[place]);
    return [
      text,
      hint(`Colored: feature ${index ?? "none"}. Choose a token to list its features, and a feature to color the text by it.`),
      heading(`Active at token ${place}, "${vocabulary.named(tokens[place])}"`),
      this.#table(active.slice(0, LISTED).map(([feature, value]) => [feature, value.toPrecision(3)]), "activation"),
    ];
  }

  // Search all features by the token at which they are strongest, or by number.
  #search() {
    const place = find("feature-list");
    const { density, strongest, tokens } = this.#figures;
    if (density === null) {
      return place.replaceChildren(hint("This autoencoder has no examples; logitd sae train writes them."));
    }
    const field = element("input", { id: "feature-search", placeholder: "a token, or a number" });
    const order = choice(ORDERS, { id: "feature-order" });
    const found = element("div", {});
    const show = () => {
      const wanted = field.value.trim();
      const by = order.value === "strongest" ? strongest : density;
      const sign = order.value === "rarest" ? 1 : -1;
      const all = [...density.keys()].filter((index) => density[index] > 0 && (wanted === "" || `${index}` === wanted || tokens[index]?.includes(wanted)));
      all.sort((a, b) => sign * (by[a] - by[b]));
      const rows = all.slice(0, LISTED).map((index) => [index, `${(100 * density[index]).toPrecision(2)} %`]);
      found.replaceChildren(this.#table(rows, "density"), hint(`${all.length.toLocaleString("en")} features; ${density.filter((share) => share === 0).length.toLocaleString("en")} are dead. Next to the number of a feature: the token at which it is strongest.`));
    };
    const form = element("form", { class: "row", oninput: show, onsubmit: (event) => event.preventDefault() }, labeled("search", field), labeled("order", order));
    place.replaceChildren(heading("All features"), form, found);
    show();
  }

  #table(rows, what) {
    const name = (index) => {
      const token = this.#figures.tokens?.[index];
      return token === null || token === undefined ? `${index}` : `${index}  ${visible(token)}`;
    };
    return element("div", { class: "features" }, plainTable(rows.map(([index, value]) => [button(name(index), () => this.#pick(index, true), { class: "link", title: what }), value])));
  }

  #pick(index, draw = false) {
    this.#index = index;
    this.#detail();
    if (!draw) return;
    this.#text();
    find("feature").scrollTop = 0;
    if (find("feature").getBoundingClientRect().top > innerHeight) find("feature").scrollIntoView(); // on a narrow page it is below the list
  }

  #detail() {
    const index = this.#index;
    if (index === null) return find("feature").replaceChildren(hint("No feature is active here."));
    const path = `/features/${index}?sae=${encodeURIComponent(this.#sae.name)}`;
    const draw = async (signal) => this.#described(await get(path, signal));
    return fill(find("feature"), draw, JSON.stringify([path, this.#app.info.checkpoint]));
  }

  #described(feature) {
    const { density, strongest } = this.#figures;
    const { index, stage, examples, promoted, suppressed } = feature;
    const amount = element("input", { id: "feature-amount", type: "number", step: "any", required: true, value: (strongest?.[index] || 1).toPrecision(3) });
    const add = (change) => this.#app.interventions.add({ stage, units: [index], positions: "all", ...change });
    const made = [
      heading(`Feature ${index}`),
      element(
        "form",
        { class: "row", onsubmit: (event) => event.preventDefault() },
        button("Switch off", () => add({ operation: "zero" }), { id: "feature-off" }),
        labeled("add", amount),
        button("Add", () => amount.reportValidity() && add({ operation: "add", values: [Number(amount.value)] }), { id: "feature-add" }),
      ),
    ];
    if (density !== null) made.push(hint(density[index] === 0 ? "Dead: never active." : `Active at ${(100 * density[index]).toPrecision(2)} % of the tokens, at most ${strongest[index].toPrecision(3)}.`));
    if (promoted !== null) made.push(element("div", { class: "two" }, this.#logits("Promotes", promoted), this.#logits("Suppresses", suppressed)));
    if (examples.length) made.push(heading("Where it is strongest"), ...examples.map((example) => this.#example(example, examples[0].strongest)));
    return made;
  }

  #logits = (title, rows) =>
    element("div", {}, heading(title), plainTable(rows.map((token) => [this.#app.vocabulary.named(token), token.logit.toFixed(2)])));

  #example({ tokens, strongest }, largest) {
    const shown = tokens.map(({ id, text, activation }) =>
      element("span", { class: "shade", title: `${visible(text)}, id ${id}: ${activation.toPrecision(3)}`, style: { "--share": (activation / largest).toFixed(3) } }, text),
    );
    return element("figure", { class: "example" }, element("pre", {}, ...shown), element("figcaption", { class: "hint" }, strongest.toPrecision(3)));
  }
}
