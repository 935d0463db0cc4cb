// Compare: the same prompt, settings and seed for two models, the place where their texts diverge, and both
// distributions there.

import { chosenModel, events, get, post, postArray } from "./api.js";
import { bars, Vocabulary } from "./distribution.js";
import { button, choice, element, fill, find, heading, hint, labeled, showProblem } from "./dom.js";
import { ofPrompt, within } from "./interventions.js";
import { drawSeed, entropyBits, ranked, softmax } from "./sampling.js";
import { choose, collect, drawTokens, surpriseLegend, texts, tokenText } from "./tokens.js";

const SHOWN = 10;

// One of the two models, with its tokens.
class Side {
  constructor(letter, onlook) {
    this.letter = letter;
    this.onlook = onlook;
    this.title = heading("");
    this.status = element("p", { class: "hint", role: "status" });
    this.text = tokenText(`Model ${letter}: prompt and completion, token by token`);
    this.place = element("div", {}, this.title, this.status, this.text);
    this.clear();
  }

  async setModel(name, signal) {
    this.model = name;
    const info = await get("/info", signal, name);
    this.vocabulary = new Vocabulary(info.vocabulary === "none", name);
    this.title.textContent = `${this.letter}: ${name}`;
    this.clear();
  }

  clear() {
    this.prompt = [];
    this.tokens = [];
    this.text.replaceChildren();
    this.status.textContent = "";
  }

  async stream(body, signal) {
    this.status.textContent = "…";
    try {
      for await (const event of events("/generate", { ...body, model: this.model, logprobs: 0, prompt_logprobs: 0 }, signal)) {
        collect(event, this);
        if (event.usage) {
          const bits = this.tokens.reduce((sum, { logprob }) => sum - logprob / Math.LN2, 0);
          const per = this.tokens.length ? `, ${(bits / this.tokens.length).toFixed(2)} bits per token` : "";
          const rate = event.timings.tokens_per_second;
          this.status.textContent = `${this.tokens.length} tokens${per}${rate ? `, ${rate.toFixed(0)} tokens/s` : ""}`;
        }
        drawTokens(this.text, this.prompt, this.tokens, { vocabulary: this.vocabulary, onclick: (index, span) => this.onlook(this, index, span) });
      }
    } catch (error) {
      if (error.name === "AbortError") this.status.textContent = `stopped after ${this.tokens.length} tokens`;
      else showProblem(this.status, error);
    }
  }

  // The text before a token: as ids for its own model, and as text for the other one.
  before(index) {
    const all = [...this.prompt, ...this.tokens].slice(0, index);
    const ids = all.map((token) => token.id);
    return { ids, text: this.vocabulary.idsAlone ? ids : texts(all, this.vocabulary).join("") };
  }

  // Mark the first token of the completion that differs, after `same` equal characters. Returns its
  // index.
  mark(same) {
    let end = 0;
    const found = texts(this.tokens, this.vocabulary).findIndex((text) => (end += text.length) > same);
    const at = found < 0 ? this.tokens.length : found;
    const span = this.text.children[this.prompt.length + at];
    if (!span) return at;
    span.classList.add("diverging");
    span.title = `the texts diverge here: ${span.title}`;
    span.setAttribute("aria-label", span.title);
    return at;
  }
}

export class Compare {
  #app;
  #names;
  #running = null; // AbortController of both streams
  #ready = null; // promise of the facts of both models
  #compared = {}; // the form and the seed of the shown texts
  #sides;

  constructor(app, names) {
    this.#app = app;
    this.#names = names;
    this.#sides = ["A", "B"].map((letter) => new Side(letter, (side, index, span) => this.#look(side, index, span)));
    this.#build();
  }

  // This tab's part of a link.
  state() {
    if (this.#names.length < 2) return {};
    const { form, seed } = this.#compared;
    const same = this.#app.tab === "compare" && form === JSON.stringify(this.#app.form());
    return { left: find("left").value, right: find("right").value, ...(same && { seed }) };
  }

  open() {
    this.#ready ??= this.#choose();
    this.#describeSettings();
    if (this.#sides.every((side) => side.tokens.length === 0)) this.update();
  }

  close() {
    this.#running?.abort();
  }

  // Called when the prompt or the changes inside have changed. A swap of weights keeps the texts.
  update(swapped) {
    if (this.#running === null && !swapped) this.#afterPrompt();
  }

  #build() {
    const { restored } = this.#app;
    const options = this.#names.map((name) => [name, name]);
    const onchange = () => {
      this.#running?.abort();
      this.#app.remember();
      this.#ready = this.#choose();
      this.#describeSettings();
      this.#afterPrompt();
    };
    const onsubmit = (event) => {
      event.preventDefault();
      this.start();
    };
    const left = choice(options, { id: "left", onchange });
    const right = choice(options, { id: "right", onchange });
    const known = (name, other) => (this.#names.includes(name) ? name : other);
    left.value = known(restored.left, chosenModel() ?? this.#names[0]);
    right.value = known(restored.right, this.#names.find((name) => name !== left.value) ?? left.value);
    find("compare").replaceChildren(
      element(
        "form",
        { class: "row", id: "compare-form", onsubmit },
        labeled("Model A", left),
        labeled("Model B", right),
        button("Generate both", null, { type: "submit", class: "main", id: "compare-go", title: "Ctrl+Enter" }),
        button("Stop", () => this.#running?.abort(), { id: "compare-stop", disabled: true }),
      ),
      element("p", { class: "hint", id: "compare-settings" }),
      element("div", { class: "two" }, ...this.#sides.map((side) => side.place)),
      hint("Choose a token to compare both distributions there."),
      surpriseLegend(),
      element("p", { id: "divergence", role: "status" }),
      element("div", { id: "both", "aria-live": "polite" }),
    );
  }

  // Load the facts of both chosen models.
  async #choose() {
    find("divergence").textContent = "";
    const names = [find("left").value, find("right").value];
    await Promise.all(this.#sides.map((side, index) => side.setModel(names[index])));
  }

  #describeSettings() {
    const { temperature, top_k, top_p, min_p, max_tokens, seed } = this.#app.sampling();
    const filters = [`temperature ${temperature}`];
    if (top_k) filters.push(`top-k ${top_k}`);
    if (top_p < 1) filters.push(`top-p ${top_p}`);
    if (min_p) filters.push(`min-p ${min_p}`);
    const seeded = seed === undefined ? "a random seed" : `seed ${seed}`;
    find("compare-settings").textContent = `Settings of Generate: ${filters.join(", ")}, ${max_tokens ?? "as many as fit"} tokens, ${seeded}, the same for both.`;
  }

  async start() {
    this.#running?.abort();
    const running = (this.#running = new AbortController());
    this.#busy(true);
    find("divergence").textContent = "";
    fill(find("both"), () => []); // it may show the texts of an earlier run
    try {
      await this.#ready;
      const form = this.#app.form();
      const body = { seed: drawSeed(), ...this.#app.request(form) };
      this.#compared = { form: JSON.stringify(form), seed: body.seed };
      this.#app.remember();
      for (const side of this.#sides) side.clear();
      await Promise.all(this.#sides.map((side) => side.stream(body, running.signal)));
      if (this.#running === running) await this.#diverge(body.seed);
    } catch (error) {
      showProblem(find("divergence"), error, () => this.start());
    } finally {
      if (this.#running === running) {
        this.#running = null;
        this.#busy(false);
      }
    }
  }

  #busy(busy) {
    find("compare-go").disabled = busy;
    find("compare-stop").disabled = !busy;
  }

  // Show the place where the two texts diverge, and both distributions there.
  async #diverge(seed) {
    const [first] = this.#sides;
    const [a, b] = this.#sides.map(({ tokens, vocabulary }) => texts(tokens, vocabulary).join(""));
    if (!a.length || !b.length) return;
    if (a === b) {
      find("divergence").textContent = `With seed ${seed} both texts are equal.`;
      return this.#show("Next token after the prompt", first.before(first.prompt.length), first);
    }
    let same = 0;
    while (same < Math.min(a.length, b.length) && a[same] === b[same]) same++;
    if (/[\uD800-\uDBFF]$/.test(a.slice(0, same))) same--; // half of a character
    const [at] = this.#sides.map((side) => side.mark(same));
    const ended = [a, b].findIndex((text) => text.length === same);
    const [count, unit] = first.vocabulary.idsAlone ? [at, "token"] : [[...a.slice(0, same)].length, "character"];
    const after = count === 0 ? "immediately" : `after ${count} ${unit}${count === 1 ? "" : "s"}`;
    const what = ended < 0 ? "the texts diverge" : `the text of ${this.#sides[ended].letter} ends, and the other continues,`;
    find("divergence").textContent = `With seed ${seed} ${what} ${after}.`;
    await this.#show("Where the texts diverge", first.before(first.prompt.length + at), first);
  }

  // Show both distributions after the prompt.
  async #afterPrompt() {
    this.#compared = {};
    try {
      await this.#ready;
      const prompt = this.#app.prompt();
      for (const side of this.#sides) side.clear();
      find("divergence").textContent = "";
      if (prompt.length === 0) return fill(find("both"), () => []);
      await this.#show("Next token after the prompt", { ids: prompt, text: prompt }, null);
    } catch (error) {
      showProblem(find("both"), error, () => this.#afterPrompt());
    }
  }

  // Show both distributions at the place of a chosen token.
  #look(side, index, span) {
    if (index === 0) return; // no distribution predicts the first token
    for (const other of this.#sides) choose(other.text, other === side ? span : null);
    this.#show(`Candidates for token ${index} of ${side.letter}, "${side.vocabulary.shown(span.textContent)}"`, side.before(index), side);
  }

  // Show both distributions after a text, which is the prompt if `own` is null, or else begins with it; `ids` are
  // tokens of the side `own`.
  #show(title, { ids, text }, own) {
    return fill(find("both"), async (signal) => {
      if (this.#sides[0].vocabulary.idsAlone !== this.#sides[1].vocabulary.idsAlone) {
        return element("p", { class: "problem" }, "One of these models has a vocabulary and the other has none, so they have no prompt in common.");
      }
      const { list } = this.#app.interventions;
      const probs = await Promise.all(
        this.#sides.map(async (side) => {
          const prompt = side === own ? ids : text;
          let interventions = ofPrompt(list);
          if (own !== null && list.length) {
            const { length } = await side.vocabulary.tokens(prompt, signal);
            interventions = within(list, side.prompt.length, length);
          }
          return softmax((await postArray("/logits", { model: side.model, prompt, interventions }, signal)).values);
        }),
      );
      const rows = await this.#rows(probs, signal);
      const names = this.#sides.map((side) => `${side.letter}: ${side.model}`);
      const [first, second] = probs.map((row) => entropyBits(row).toFixed(2));
      return [
        heading(title),
        bars(rows, { visible: (name) => name }, { heads: names, none: "no token" }),
        hint(`Entropy: ${first} bits for A, ${second} for B. Tokens are compared by text; no token: the model's vocabulary has no token with this text.`),
      ];
    });
  }

  // The likeliest tokens of both by text: { id: the text, before: prob of A, after: prob of B }. Incomplete characters
  // are listed separately for each model.
  async #rows(probs, signal) {
    const found = new Map();
    for (const [index, side] of this.#sides.entries()) {
      const ids = [...ranked(probs[index]).slice(0, SHOWN)];
      await side.vocabulary.name(ids, signal);
      for (const id of ids) {
        const text = side.vocabulary.text(id);
        const key = text.includes("�") ? `${side.letter} ${id}` : text;
        const entry = found.get(key) ?? { text, whole: key === text, ids: [null, null] };
        entry.ids[index] ??= id;
        found.set(key, entry);
      }
    }
    const entries = [...found.values()];
    for (const [index, side] of this.#sides.entries()) {
      const missing = entries.filter(({ whole, ids }) => whole && ids[index] === null);
      if (side.vocabulary.idsAlone) for (const { ids } of missing) ids[index] = ids[1 - index];
      else if (missing.length) await identify(side, index, missing, signal);
    }
    const prob = (id, index) => (id === null ? 0 : (probs[index][id] ?? 0));
    const rows = entries.map(({ text, ids: [a, b] }) => ({ text, before: prob(a, 0), after: prob(b, 1) }));
    rows.sort((one, other) => other.before + other.after - one.before - one.after);
    const shown = (text) => this.#sides[0].vocabulary.shown(text);
    return rows.slice(0, SHOWN + 4).map(({ text, before, after }) => ({ id: shown(text), before, after }));
  }
}

// Find the ids of texts that are one token of a side's vocabulary.
async function identify(side, index, missing, signal) {
  const body = { model: side.model, prompt: missing.map(({ text }) => text), special_tokens: "text", pieces: false };
  const { prompts } = await post("/tokenize", body, signal);
  for (const [place, { tokens }] of prompts.entries()) {
    if (tokens.length === 1) missing[place].ids[index] = tokens[0];
  }
}
