// Generate: a streamed completion, every token of which can be looked into and changed.

import { apiKey, events, withModel } from "./api.js";
import { curl, python } from "./code.js";
import { Distribution } from "./distribution.js";
import { copy, element, find, showProblem } from "./dom.js";
import { Tree } from "./tree.js";
import { choose, drawTokens, surpriseLegend, texts, tokenText } from "./tokens.js";

// One completion: what was asked for, and the tokens that came.
class Run {
  constructor(promptIds, body, branch = []) {
    this.promptIds = promptIds; // null until the server has said what the prompt's tokens are
    this.body = body;
    this.prompt = []; // tokens, as /generate writes them
    this.tokens = branch; // of the completion; a branch begins with tokens of the other one
    this.seed = body.seed ?? null;
    this.status = "";
  }

  excerpt = () => this.tokens.slice(-200).map((token) => token.text).join("").slice(0, 80);
  ids = () => [...this.prompt, ...this.tokens].map((token) => token.id);
}

export class Generate {
  #app;
  #running = null; // AbortController of the stream in progress
  #distribution;
  #tree;
  #text = tokenText("Prompt and completion, token by token");

  constructor(app) {
    this.#app = app;
    this.#distribution = new Distribution(find("distribution"), app.vocabulary, () => app.settings.sampling());
    this.#tree = new Tree(find("branches"), (node) => this.#show(node.run));
    find("completion").replaceChildren(this.#text, surpriseLegend());
    find("generate-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.start();
    });
    find("stop").addEventListener("click", () => this.#running?.abort());
    find("again").addEventListener("click", () => {
      find("seed").value = this.#tree.current.run.seed;
      this.start();
    });
    find("extend").addEventListener("click", () => this.#extend());
    find("copy-curl").addEventListener("click", (event) => this.#copy(curl, event.target));
    find("copy-python").addEventListener("click", (event) => this.#copy(python, event.target));
    find("copy-link").addEventListener("click", (event) => copy(app.link({ run: true, seed: this.#tree.current?.run.seed }), event.target));
  }

  open() {
    if (this.#tree.current === null) this.#lookAhead();
  }

  // The prompt has changed.
  update() {
    if (this.#running === null) this.#lookAhead();
  }

  // The sliders have moved.
  reshape = () => this.#distribution.update();

  start() {
    return this.#stream(new Run(null, this.#body()));
  }

  #body() {
    const { settings, interventions } = this.#app;
    const body = { prompt: this.#app.prompt(), ...settings.request() };
    if (interventions.list.length) body.interventions = interventions.list;
    return body;
  }

  #copy(write, button) {
    try {
      const seed = this.#tree.current?.run.seed;
      const body = this.#body();
      if (body.seed === undefined && seed !== null && seed !== undefined) body.seed = seed;
      copy(write(location.origin, "/generate", withModel(body), apiKey() !== ""), button);
    } catch (error) {
      showProblem(find("status"), error);
    }
  }

  async #lookAhead() {
    try {
      const prompt = this.#app.prompt();
      if (prompt.length === 0) return this.#distribution.clear();
      await this.#distribution.show({
        title: "Next token after the prompt",
        ids: prompt,
        interventions: this.#app.interventions.list,
        onpick: (id) => this.#beginWith(id),
      });
    } catch (error) {
      showProblem(find("distribution"), error, () => this.#lookAhead());
    }
  }

  // A completion whose first token is chosen, not drawn.
  async #beginWith(id) {
    const body = this.#body();
    await this.#stream(new Run(null, { ...body, max_tokens: 1, allowed_token_ids: [id], temperature: 1 }));
    const { run } = this.#tree.current;
    if (run.tokens.length) await this.#continue(run, body);
  }

  // Another token in the place of the one at `at`: a branch of the completion.
  async #branch(node, at, id) {
    const { run } = node;
    const kept = run.tokens.slice(0, at);
    const ids = [...run.prompt, ...kept].map((token) => token.id);
    const chosen = { ...run.body, prompt: ids, max_tokens: 1, allowed_token_ids: [id], temperature: 1 };
    const branch = new Run(run.prompt, chosen, [...kept]);
    branch.prompt = run.prompt;
    await this.#stream(branch, node, at);
    if (branch.tokens.length > at) await this.#continue(branch, { ...run.body, ...this.#app.settings.request() });
  }

  // Go on from the tokens that are there, as far as max_tokens says.
  async #continue(run, body) {
    const left = (body.max_tokens ?? 80) - run.tokens.length;
    run.body = body;
    if (left > 0) await this.#take(run, { ...body, prompt: run.ids(), max_tokens: left, prompt_logprobs: undefined });
  }

  // The completion becomes a part of the prompt, for every tab to look into.
  #extend() {
    const run = this.#tree.current?.run;
    if (!run) return;
    const ids = run.ids();
    this.#app.setPrompt(this.#app.vocabulary.idsAlone ? ids.join(" ") : texts([...run.prompt, ...run.tokens], false).join(""));
  }

  async #stream(run, parent = null, at = null) {
    this.#tree.add(run, parent, at);
    this.#distribution.clear();
    this.#show(run);
    const wanted = run.prompt.length ? {} : { prompt_logprobs: 0 };
    await this.#take(run, { ...run.body, ...wanted });
  }

  async #take(run, body) {
    this.#running?.abort();
    const running = (this.#running = new AbortController());
    this.#busy(true);
    find("status").textContent = "…";
    const before = run.tokens.length;
    try {
      for await (const event of events("/generate", { ...body, logprobs: 0 }, running.signal)) {
        for (const { tokens } of event.prompts ?? []) this.#append(run, run.prompt, tokens);
        for (const { tokens } of event.choices) this.#append(run, run.tokens, tokens ?? []);
        if (event.usage) {
          run.seed ??= event.seed;
          const { tokens_per_second: rate, ttft_ms: first } = event.timings;
          const count = `${event.usage.completion_tokens} token${event.usage.completion_tokens === 1 ? "" : "s"}`;
          run.status = `${count}, ${rate.toFixed(0)} tokens/s, the first after ${first.toFixed(1)} ms, seed ${run.seed}`;
        }
      }
      find("status").textContent = run.status;
    } catch (error) {
      if (error.name === "AbortError") find("status").textContent = `stopped after ${run.tokens.length - before} tokens`;
      else showProblem(find("status"), error, () => this.#stream(new Run(null, run.body)));
    } finally {
      if (this.#running === running) {
        this.#running = null;
        this.#busy(false);
      }
      this.#tree.render();
    }
  }

  #busy(busy) {
    find("go").disabled = busy;
    find("stop").disabled = !busy;
    for (const id of ["again", "extend"]) find(id).disabled = busy || this.#tree.current === null;
  }

  #append(run, list, tokens) {
    list.push(...tokens);
    if (this.#tree.current?.run === run) this.#draw(run);
  }

  #show(run) {
    this.#text.replaceChildren();
    find("status").textContent = run.status;
    this.#draw(run);
  }

  // Whatever has come and is not there yet.
  #draw(run) {
    const { idsAlone } = this.#app.vocabulary;
    drawTokens(this.#text, run.prompt, run.tokens, { idsAlone, onclick: (index, span) => this.#look(run, index, span) });
  }

  // The distribution that a token was drawn from.
  #look(run, index, span) {
    if (index === 0) return; // nothing predicts it
    choose(this.#text, span);
    const node = this.#tree.current;
    const at = index - run.prompt.length;
    const ids = run.ids();
    this.#distribution.show({
      title: `In the place of token ${index + 1}, "${this.#app.vocabulary.idsAlone ? ids[index] : span.textContent}"`,
      ids: ids.slice(0, index),
      chosen: ids[index],
      interventions: run.body.interventions ?? [],
      onpick: at >= 0 ? (id) => this.#branch(node, at, id) : null,
    });
  }
}
