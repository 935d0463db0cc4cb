// Film: one prompt at each kept step of the training: its completion, the next token, one head's
// attention and the lens; and the curves of the loss and of the induction heads.

import { get, post, postArray } from "./api.js";
import { lineChart, lossSeries } from "./chart.js";
import { button, choice, element, find, heading, hint, labeled, showProblem } from "./dom.js";
import { heatMap, paint } from "./heatmap.js";
import { ofPrompt } from "./interventions.js";
import { percent, texts } from "./tokens.js";

const FRAME_MS = 700;
const COMPLETION = 32; // maximum number of tokens
const SHOWN = 8; // likeliest tokens
const COLUMNS = 10; // positions of the lens
const RANDOM = 20; // length of the repeated sequence, in tokens
const CURVES = 4; // number of heads with a curve
const FRAME = ["film-text", "film-random", "film-map", "film-lens"]; // elements that change with the step

// Pseudorandom token ids, always the same, from the linear congruential generator of Numerical Recipes.
function randomIds(count, vocabulary) {
  let state = 1;
  const next = () => (state = (1664525 * state + 1013904223) % 2 ** 32);
  return Array.from({ length: count }, () => Math.floor((next() / 2 ** 32) * vocabulary));
}

const nameOf = ({ layer, head }) => `${layer}.${head}`;

export class Film {
  #app;
  #history = null; // the reply of /history
  #stale = true; // the run may have kept more steps since
  #at = 0; // index of the shown step
  #wanted; // the step to show first, as a string
  #head = null; // { layer, head }; null until the scores of the last step are known
  #random; // ids of the repeated sequence
  #prompt = null; // { key, body, room: the number of tokens that fit after the prompt }
  #frames = new Map(); // by step: the results for the prompt
  #scores = new Map(); // by step: induction scores, [layer][head]
  #loading = null; // AbortController of the requests in progress
  #timer = null; // set while the film plays
  #drawn = null; // the frame and head that the page shows

  constructor(app) {
    this.#app = app;
    find("tab-film").hidden = !app.info.history;
    this.#wanted = app.restored.step;
    const { context_length: length } = app.info.limits;
    this.#random = randomIds(Math.min(RANDOM, Math.floor(length / 2)), app.info.config.vocab_size);
  }

  state = () => (this.#history === null ? {} : { step: this.#step(), film_head: nameOf(this.#head) });

  open() {
    this.#stale = true;
    this.update();
  }

  close() {
    this.#pause();
    this.#loading?.abort();
  }

  update(swapped = false) {
    const body = { prompt: this.#app.prompt(), interventions: this.#app.interventions.list };
    const key = JSON.stringify(body);
    if (key !== this.#prompt?.key) {
      this.#prompt = { key, body };
      this.#frames.clear();
    }
    if (swapped) this.#stale = true;
    return this.#load();
  }

  #step = (at = this.#at) => this.#history.steps[at].step;
  #frame = (at = this.#at) => this.#frames.get(this.#step(at));
  #ready = (at) => this.#frame(at)?.maps.has(nameOf(this.#head)) && this.#scores.has(this.#step(at));

  // Request missing frames one at a time: the shown step first, then those after it. A later call
  // replaces an earlier one.
  async #load() {
    this.#loading?.abort();
    const { signal } = (this.#loading = new AbortController());
    try {
      if (this.#stale) await this.#begin(signal);
      const count = this.#history.steps.length;
      for (let next; (next = Array.from({ length: count }, (_, index) => (this.#at + index) % count).find((at) => !this.#ready(at))) !== undefined; ) {
        await this.#fetch(next, signal);
        this.#draw();
      }
    } catch (error) {
      if (signal.aborted) return;
      this.#pause();
      showProblem(find("film-problem") ?? find("film"), error, () => this.#load());
    }
  }

  async #begin(signal) {
    const history = await get("/history", signal);
    if (history.steps.length === 0) throw new Error("The run has not kept a step yet.");
    const last = history.steps.at(-1).step;
    if (!this.#scores.has(last)) this.#scores.set(last, await this.#score(last, signal));
    const known = this.#ranked(last);
    this.#head ??= known.find((head) => nameOf(head) === this.#app.restored.film_head) ?? known[0];
    const wanted = this.#history === null ? this.#wanted : `${this.#step()}`; // it may have moved meanwhile
    const at = history.steps.findIndex(({ step }) => `${step}` === wanted);
    this.#at = at >= 0 ? at : history.steps.length - 1;
    this.#history = history;
    this.#stale = false;
    this.#render(known);
    this.#draw();
  }

  #score = async (step, signal) => (await post("/induction", { prompt: this.#random, step }, signal)).prompts[0].scores;

  // All heads, those with the highest induction score first.
  #ranked(step) {
    const scores = this.#scores.get(step);
    const all = scores.flatMap((heads, layer) => heads.map((score, head) => ({ layer, head, score })));
    return all.sort((first, second) => second.score - first.score);
  }

  async #fetch(at, signal) {
    const step = this.#step(at);
    const prompted = this.#prompt;
    const { body } = prompted;
    const asked = { ...body, interventions: ofPrompt(body.interventions), step };
    if (!this.#scores.has(step)) this.#scores.set(step, await this.#score(step, signal));
    let frame = this.#frames.get(step);
    if (!frame) {
      const { info, vocabulary } = this.#app;
      prompted.room ??= info.limits.context_length - (await vocabulary.tokens(body.prompt, signal)).length;
      const count = Math.max(0, Math.min(COMPLETION, prompted.room));
      const completion = await post("/generate", { ...body, step, max_tokens: count, temperature: 0, logprobs: SHOWN, prompt_logprobs: 0 }, signal);
      const prompt = completion.prompts[0].tokens;
      const positions = [...prompt.keys()].slice(-COLUMNS);
      const lens = await post("/lens", { ...asked, positions, top_k: 1 }, signal);
      frame = { prompt, tokens: completion.choices[0].tokens ?? [], lens: lens.prompts[0].positions, maps: new Map() };
    }
    const { layer, head } = this.#head;
    const chosen = { positions: "all", layers: [layer], heads: [head] };
    const ofText = await postArray("/attention", { ...asked, ...chosen }, signal);
    const ofRandom = await postArray("/attention", { prompt: [...this.#random, ...this.#random], step, ...chosen }, signal);
    frame.maps.set(nameOf({ layer, head }), { ofText: ofText.values, ofRandom: ofRandom.values });
    this.#frames.set(step, frame);
  }

  // The fixed parts of the view.
  #render(heads) {
    const { steps } = this.#history;
    const slider = element("input", { id: "film-step", type: "range", min: 0, max: steps.length - 1, step: 1, oninput: () => this.#go(Number(slider.value)) });
    const options = heads.map((head) => [nameOf(head), `${nameOf(head)}, score ${head.score.toFixed(2)}`]);
    const select = choice(options, { id: "film-head", onchange: () => this.#choose(select.value) });
    select.value = nameOf(this.#head);
    find("film").replaceChildren(
      element("div", { class: "film-row" }, button(this.#timer === null ? "Play" : "Pause", () => this.#play(), { id: "film-play", class: "main" }), labeled("Step of the training", slider)),
      element("p", { id: "film-line", class: "film-line", role: "status" }),
      element("div", { id: "film-problem" }),
      element("div", { class: "two" }, element("div", { id: "film-text" }), element("div", { id: "film-curves" })),
      labeled("Head (layer.head), sorted by induction score at the last step", select),
      element("div", { class: "film-heads" }, element("div", { id: "film-random" }), element("div", { id: "film-map" })),
      element("div", { id: "film-lens" }),
    );
    this.#drawn = null;
  }

  #draw() {
    const { steps } = this.#history;
    const slider = find("film-step");
    slider.value = this.#at;
    slider.setAttribute("aria-valuetext", `step ${this.#step()}`);
    find("film-problem").replaceChildren();
    const missing = steps.filter((_, at) => !this.#ready(at)).length;
    find("film-line").textContent = `Step ${this.#step().toLocaleString("en")} of ${this.#step(steps.length - 1).toLocaleString("en")}${this.#lossAt()}${missing ? `; ${missing} of ${steps.length} steps to load …` : ""}`;
    find("film-curves").replaceChildren(...this.#curves());
    const frame = this.#ready(this.#at) ? this.#frame() : null;
    for (const id of FRAME) find(id).setAttribute("aria-busy", frame === null);
    const shown = frame && frame.maps.get(nameOf(this.#head));
    if (frame === null || shown === this.#drawn) return; // keep the elements under the pointer and the focus
    this.#drawn = shown;
    find("film-text").replaceChildren(...this.#text(frame));
    find("film-random").replaceChildren(...this.#repeated(shown.ofRandom));
    find("film-map").replaceChildren(...this.#map(frame, shown.ofText));
    find("film-lens").replaceChildren(...this.#lens(frame));
  }

  // The last losses reported up to the shown step.
  #lossAt() {
    const { training, validation } = this.#history.curve;
    const loss = training.findLast(({ step }) => step <= this.#step())?.loss;
    const held = validation.findLast(({ step }) => step <= this.#step())?.loss;
    return `${loss === undefined ? "" : `; training loss ${loss.toFixed(2)}`}${held === undefined ? "" : `; validation loss ${held.toFixed(2)}`}`;
  }

  #curves() {
    const { curve, steps } = this.#history;
    const losses = lossSeries(curve);
    const others = this.#ranked(this.#step(steps.length - 1)).filter((head) => nameOf(head) !== nameOf(this.#head)).slice(0, CURVES - 1);
    const heads = [...others.slice(0, 1), this.#head, ...others.slice(1)];
    const scored = steps.filter(({ step }) => this.#scores.has(step));
    const series = heads.map(({ layer, head }) => ({
      name: nameOf({ layer, head }),
      points: scored.map(({ step }) => [step, this.#scores.get(step)[layer][head]]),
    }));
    const end = Math.max(this.#step(steps.length - 1), ...curve.training.map(({ step }) => step));
    const common = { x: "step", widest: 560, height: 210, now: this.#step(), ends: [0, end] };
    return [
      heading("Loss"),
      losses.length ? lineChart({ label: "Loss by step", series: losses, y: "nats per token", ...common }) : hint("The run has no log of its loss."),
      heading("Induction score"),
      lineChart({ label: "Induction score of heads by step", series, y: "score", ...common }),
    ];
  }

  #text({ prompt, tokens }) {
    const { vocabulary } = this.#app;
    const written = texts([...prompt, ...tokens], vocabulary);
    const spans = [...prompt, ...tokens].map((token, index) => {
      const own = index >= prompt.length;
      const share = own ? Math.exp(token.logprob) : 0;
      const title = own ? `${vocabulary.named(token)}: ${percent(share)}` : null;
      return element("span", { class: own ? "token sure" : "token of-prompt", title, style: { "--share": (0.6 * share).toFixed(3) } }, written[index]);
    });
    const top = tokens.length ? tokens[0].top : [];
    const line = (token) => {
      const prob = Math.exp(token.logprob);
      const bar = element("div", { class: "bar after", style: { width: `${100 * prob}%` } });
      return element("tr", {}, element("th", { scope: "row" }, vocabulary.named(token)), element("td", { class: "bars", "aria-hidden": "true" }, bar), element("td", {}, percent(prob)));
    };
    return [
      heading("Likeliest continuation"),
      element("pre", { class: "tokens film-text" }, ...spans),
      heading("Next token after the prompt"),
      element("table", { class: "distribution" }, element("tbody", {}, ...top.map(line))),
    ];
  }

  #repeated(values) {
    const count = 2 * this.#random.length;
    const label = `Attention of head ${nameOf(this.#head)} in ${this.#random.length} random tokens, twice in a row`;
    const canvas = element("canvas", { class: "film-random", role: "img", "aria-label": label });
    paint(canvas, count, count, (row, column) => values[row * count + column], 1);
    const score = this.#scores.get(this.#step())[this.#head.layer][this.#head.head];
    return [
      heading(`Head ${nameOf(this.#head)}: ${this.#random.length} random tokens, twice`),
      canvas,
      hint(`Induction score ${score.toFixed(2)}: the mean attention weight on the token that followed the same place in the first copy. An induction head shows a stripe below the diagonal.`),
    ];
  }

  #map({ prompt }, values) {
    const { vocabulary } = this.#app;
    const names = prompt.map(vocabulary.named);
    const count = names.length;
    const at = (row, column) => values[row * count + column];
    const say = (row, column) => `${names[row]} (${row}) attends to ${names[column]} (${column}): ${percent(column > row ? 0 : at(row, column))}`;
    return [heading(`Head ${nameOf(this.#head)}: the prompt`), heatMap({ label: `Attention of head ${nameOf(this.#head)}`, rows: names, columns: names, at, largest: 1, say })];
  }

  #lens({ prompt, lens }) {
    const { named } = this.#app.vocabulary;
    const depth = lens[0].layers.length;
    const cell = ({ layers }, layer) => {
      const [best] = layers[layer].top;
      return element("td", { class: "token", title: `${named(best)}: ${percent(best.prob)}`, style: { "--share": best.prob.toFixed(3) } }, named(best));
    };
    const name = (layer) => (layer === 0 ? "embedding" : `block ${layer - 1}`);
    const line = (layer) => element("tr", {}, element("th", { scope: "row" }, name(layer)), ...lens.map((position) => cell(position, layer)));
    const head = element("tr", {}, element("th", {}, ""), ...lens.map(({ position }) => element("th", { scope: "col" }, named(prompt[position]))));
    const lines = Array.from({ length: depth }, (_, index) => line(depth - 1 - index));
    return [heading("Lens: the next token if the model stopped after each layer"), element("div", { class: "scroll" }, element("table", { class: "lens" }, element("thead", {}, head), element("tbody", {}, ...lines)))];
  }

  // Show another step.
  #go(at) {
    this.#at = at;
    this.#app.remember();
    this.#draw();
    if (!this.#ready(at)) this.#load();
  }

  #choose(name) {
    const [layer, head] = name.split(".").map(Number);
    this.#head = { layer, head };
    this.#app.remember();
    this.#draw();
    this.#load();
  }

  #play() {
    if (this.#timer !== null) return this.#pause();
    if (this.#at === this.#history.steps.length - 1) this.#go(0);
    find("film-play").textContent = "Pause";
    this.#timer = setTimeout(() => this.#advance(), FRAME_MS);
  }

  // Show the next frame once it is loaded.
  #advance() {
    const last = this.#history.steps.length - 1;
    if (this.#ready(this.#at + 1)) this.#go(this.#at + 1);
    if (this.#at === last) return this.#pause();
    this.#timer = setTimeout(() => this.#advance(), FRAME_MS);
  }

  #pause() {
    clearTimeout(this.#timer);
    this.#timer = null;
    if (find("film-play")) find("film-play").textContent = "Play";
  }
}
