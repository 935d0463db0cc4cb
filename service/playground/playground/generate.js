// Generate: a streamed completion. Each of its tokens shows its distribution and can be changed.

import { apiKey, events, withModel } from "./api.js";
import { curl, python } from "./code.js";
import { Distribution } from "./distribution.js";
import { copy, find, hint, showProblem } from "./dom.js";
import { ofPrompt, within } from "./interventions.js";
import { drawSeed } from "./sampling.js";
import { Tree } from "./tree.js";
import { choose, collect, drawTokens, surpriseLegend, texts, tokenText } from "./tokens.js";

// One completion: the form at its start, the request's body, and the tokens.
class Run {
  // `begin`: ids of the chosen first tokens of a branch. `promptIds`: the ids of its prompt.
  constructor(form, body, begin, promptIds) {
    Object.assign(this, { form, body, begin, promptIds });
    this.prompt = []; // tokens in the form of /generate
    this.tokens = [];
    this.status = "";
    this.stopped = false; // the last token is a stop token, whose text is not part of the text
  }

  // The request for exactly this completion.
  request() {
    const { begin, body, promptIds } = this;
    if (begin.length === 0) return body;
    const made = { ...body, prompt: [...promptIds, ...begin] };
    if (body.max_tokens) made.max_tokens = Math.max(1, body.max_tokens - begin.length);
    if (body.interventions) made.interventions = within(body.interventions, promptIds.length, made.prompt.length, true);
    return made;
  }

  add(event) {
    collect(event, this);
    this.stopped ||= event.choices.some((choice) => Number.isInteger(choice.stop_reason));
    if (!event.usage) return;
    const { tokens_per_second: rate, ttft_ms: first } = event.timings;
    const count = event.usage.completion_tokens;
    this.status = `${count} token${count === 1 ? "" : "s"}, ${rate ? `${rate.toFixed(0)} tokens/s, ` : ""}the first after ${first.toFixed(1)} ms, seed ${this.body.seed}, step ${event.checkpoint.step.toLocaleString("en")}`;
  }

  all = () => [...this.prompt, ...this.tokens];
  ids = () => this.all().map((token) => token.id);
}

export class Generate {
  #app;
  #running = null; // AbortController of the stream in progress
  #ahead = true; // the distribution after the prompt is shown
  #distribution;
  #tree;
  #text = tokenText("Prompt and completion, token by token");

  constructor(app) {
    this.#app = app;
    this.#distribution = new Distribution(find("distribution"), app.vocabulary, app.sampling);
    this.#tree = new Tree(find("branches"), (run) => {
      app.restore(run.form); // a token's distribution depends on the settings of its run
      this.#show(run);
    });
    const how = hint("Choose a token to see its distribution, and to continue with another token in its place.");
    find("completion").replaceChildren(this.#text, how, surpriseLegend());
    find("generate-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.start();
    });
    find("stop").addEventListener("click", () => this.#running?.abort());
    find("again").addEventListener("click", () => this.#again());
    find("extend").addEventListener("click", () => this.#extend());
    find("copy-curl").addEventListener("click", (event) => this.#copy(curl, event.target));
    find("copy-python").addEventListener("click", (event) => this.#copy(python, event.target));
    find("copy-link").addEventListener("click", (event) => copy(this.#link(), event.target));
  }

  open() {
    if (this.#ahead) this.#lookAhead();
  }

  // Called when the prompt, the changes inside or (`swapped`) the weights have changed.
  update(swapped) {
    if (this.#running === null && (this.#ahead || !swapped)) this.#lookAhead();
  }

  // Called when the sliders have moved.
  reshape = () => this.#distribution.update();

  // The shown completion; null if there is none for the current prompt.
  shown() {
    const run = this.#tree.current;
    return run && run.form.prompt === find("prompt").value ? run : null;
  }

  // Generate a completion. A branch has a `begin` and a parent run.
  async start({ form = this.#app.form(), begin = [], seed = drawSeed(), parent = null } = {}) {
    this.#running?.abort();
    const running = (this.#running = new AbortController());
    let run = null;
    this.#busy(true);
    this.#ahead = false;
    this.#distribution.clear();
    this.#app.changed.flush(); // later it would remove the message of a refused prompt
    find("prompt-problem").replaceChildren();
    find("status").textContent = "…";
    try {
      const body = { seed, ...this.#app.request(form) };
      const tokens = begin.length ? await this.#app.vocabulary.tokens(body.prompt, running.signal) : null;
      const made = new Run(form, body, begin, tokens?.map((token) => token.id));
      for await (const event of events("/generate", { ...made.request(), logprobs: 0, prompt_logprobs: 0 }, running.signal)) {
        made.add(event);
        if (run === null) {
          run = made; // a refused request leaves no branch
          this.#tree.add(run, parent);
          this.#show(run);
        } else if (this.#tree.current === run) this.#draw(run);
      }
      find("status").textContent = run.status;
    } catch (error) {
      if (this.#running !== running) return; // a later run has begun
      if (error.name === "AbortError") find("status").textContent = `stopped after ${(run?.tokens.length ?? begin.length) - begin.length} tokens`;
      else showProblem(find("status"), error, () => this.start({ form, begin, seed, parent }));
    } finally {
      if (this.#running === running) {
        this.#running = null;
        this.#busy(false);
      }
      this.#tree.render();
      if (this.#app.tab !== "generate") this.#app.refresh(true); // other tabs show the whole text
    }
  }

  // Generate with the same seed and the current form.
  #again() {
    const run = this.#tree.current;
    find("seed").value = run.body.seed;
    this.start(this.shown() ? { begin: run.begin } : {});
  }

  // Generate with another token at index `at` of a completion.
  #branch(run, at, id) {
    const begin = [...run.tokens.slice(0, at).map((token) => token.id), id];
    this.#app.restore({ ...this.#app.form(), prompt: run.form.prompt });
    return this.start({ begin, seed: run.body.seed, parent: run });
  }

  // The shown completion, if the form has not changed since.
  #unchanged() {
    const run = this.#tree.current;
    return run && JSON.stringify(run.form) === JSON.stringify(this.#app.form()) ? run : null;
  }

  #copy(write, button) {
    try {
      const run = this.#unchanged();
      // A branch's prompt ends within the completion: request the whole text.
      const body = run === null ? this.#app.request() : { ...run.request(), ...(run.begin.length ? { echo: true } : {}) };
      copy(write(location.origin, "/generate", withModel(body), apiKey() !== ""), button);
    } catch (error) {
      showProblem(find("status"), error);
    }
  }

  #link() {
    const run = this.#unchanged();
    return this.#app.link({ run: true, ...(run && { seed: run.body.seed, begin: run.begin.join("-") || null }) });
  }

  async #lookAhead() {
    this.#ahead = true;
    try {
      const prompt = this.#app.prompt();
      if (prompt.length === 0) return this.#distribution.clear();
      await this.#distribution.show({
        title: "Next token after the prompt",
        ids: prompt,
        interventions: ofPrompt(this.#app.interventions.list),
        onpick: (id) => this.start({ begin: [id] }),
      });
    } catch (error) {
      showProblem(find("distribution"), error, () => this.#lookAhead());
    }
  }

  // Append the completion to the prompt. As a text, the name of a stop token would not be that token.
  #extend() {
    const run = this.#tree.current;
    const { vocabulary } = this.#app;
    this.#app.setPrompt(vocabulary.idsAlone ? run.ids().join(" ") : texts(run.stopped ? run.all().slice(0, -1) : run.all(), vocabulary).join(""));
  }

  #busy(busy) {
    find("go").disabled = busy;
    find("stop").disabled = !busy;
    for (const id of ["again", "extend"]) find(id).disabled = busy || this.#tree.current === null;
  }

  #show(run) {
    this.#ahead = false;
    this.#app.place = null;
    this.#distribution.clear();
    this.#text.replaceChildren();
    find("status").textContent = run.status;
    this.#draw(run);
  }

  #draw(run) {
    drawTokens(this.#text, run.prompt, run.tokens, { vocabulary: this.#app.vocabulary, onclick: (index, span) => this.#look(run, index, span) });
  }

  // Show the distribution of a token.
  #look(run, index, span) {
    if (index === 0) return; // no distribution predicts the first token
    choose(this.#text, span);
    this.#ahead = false;
    this.#app.place = index;
    const at = index - run.prompt.length;
    const ids = run.ids();
    this.#distribution.show({
      title: `Candidates for token ${index}, "${this.#app.vocabulary.named(run.all()[index])}"`,
      ids: ids.slice(0, index),
      chosen: ids[index],
      interventions: within(run.body.interventions ?? [], run.prompt.length, index),
      onpick: at >= 0 ? (id) => this.#branch(run, at, id) : null,
    });
  }
}
