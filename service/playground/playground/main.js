// The playground: one prompt, and tabs with views of the model. Plain modules over this server's
// endpoints: no library, no build step, no requests to other hosts.

import { apiKey, chooseModel, chosenModel, get, Problem, post, setApiKey } from "./api.js";
import { Attention } from "./attention.js";
import { Circuit } from "./circuit.js";
import { Compare } from "./compare.js";
import { Vocabulary } from "./distribution.js";
import { debounced, element, fill, find, roving, showProblem } from "./dom.js";
import { Features } from "./features.js";
import { Film } from "./film.js";
import { Generate } from "./generate.js";
import { Inside } from "./inside.js";
import { Interventions, ofPrompt, within } from "./interventions.js";
import { Lens } from "./lens.js";
import { ModelTab } from "./model.js";
import { Tokens } from "./tokenize.js";

const NUMBERS = ["temperature", "top_k", "top_p", "min_p", "max_tokens", "seed"];
const RETRY_MS = 500;
const SWAP_MS = 2000; // between two checks for new weights
const CHOOSING = "logitd-choosing"; // set while the list of models reloads the page
const LOOKING = ["attention", "lens", "circuit", "inside", "features", "tokens"]; // tabs that show a text

// The numbers that a form contains.
const numbers = (form) => Object.fromEntries(NUMBERS.filter((name) => form[name]).map((name) => [name, Number(form[name])]));

// Show the number of a slider next to its name.
function showNumber(name) {
  const output = find(`${name}-value`);
  if (output) output.textContent = find(name).value;
}

class App {
  place = null; // index of the last chosen token, in the shown text

  constructor(info, saes, restored) {
    this.info = info;
    this.restored = restored;
    this.vocabulary = new Vocabulary(info.vocabulary === "none");
    this.interventions = new Interventions(find("changes"), () => this.#changed());
    find("max_tokens").value = Math.min(find("max_tokens").value, Math.ceil(info.limits.context_length / 2));
    this.restore(restored);
    this.remember = debounced(200, () => this.keep("replaceState"));
    const models = info.models.filter(({ status }) => status !== "failed").map(({ model }) => model);
    this.tabs = {
      generate: new Generate(this),
      attention: new Attention(this),
      lens: new Lens(this),
      circuit: new Circuit(this),
      film: new Film(this),
      inside: new Inside(this),
      features: new Features(this, saes),
      tokens: new Tokens(this),
      compare: new Compare(this, models),
      model: new ModelTab(this),
    };
    find("tab-compare").hidden = models.length < 2;
    find("tab-features").hidden = saes.length === 0;
    const byCode = info.config.kind === "code"; // an owner's code returns neither attention weights nor circuits
    for (const name of ["attention", "circuit"]) find(`tab-${name}`).hidden = byCode;
    find("tab-lens").hidden = byCode && !info.config.lens;
    this.tab = null;
  }

  // The form with the changes inside, for links and completions.
  form() {
    const { list } = this.interventions;
    const fields = ["prompt", ...NUMBERS].map((name) => [name, find(name).value]);
    return { ...Object.fromEntries(fields), ...(list.length && { interventions: JSON.stringify(list) }) };
  }

  // Fill in the form. Fields without a value stay unchanged; changes inside are replaced.
  restore(form) {
    for (const name of ["prompt", ...NUMBERS]) {
      find(name).value = form[name] ?? find(name).value;
      showNumber(name);
    }
    this.interventions.restore(form.interventions);
  }

  // The request body of a form.
  request(form = this.form()) {
    const wrong = find("generate-form").querySelector("input:invalid");
    if (wrong) throw new Problem(0, `${wrong.id}: ${wrong.validationMessage}`);
    const interventions = form.interventions && { interventions: JSON.parse(form.interventions) };
    return { prompt: this.promptOf(form.prompt), ...numbers(form), ...interventions };
  }

  sampling = () => ({ temperature: 1, top_k: 0, top_p: 1, min_p: 0, ...numbers(this.form()) });

  // The prompt for the server: a text, or token ids for a model without a vocabulary.
  prompt = () => this.promptOf(find("prompt").value);

  promptOf(written) {
    if (!this.vocabulary.idsAlone) return written;
    const words = written.split(/[\s,]+/).filter((word) => word !== "");
    if (!words.every((word) => /^[0-9]+$/.test(word))) {
      throw new Problem(0, "This model has no vocabulary: write token ids separated by spaces, for example 0 1 2.", "prompt");
    }
    return words.map(Number);
  }

  setPrompt(text) {
    find("prompt").value = text;
    this.#changed();
  }

  // Fill an element with a view of the shown text: the completion with its prompt, or only the prompt. `more` has other
  // values that the view depends on.
  look(place, make, ...more) {
    const run = find("alone").checked ? null : this.tabs.generate.shown();
    find("scope").hidden = !LOOKING.includes(this.tab) || this.tabs.generate.shown() === null;
    const { list } = this.interventions;
    const prompt = run ? run.ids() : this.prompt();
    const interventions = run ? within(list, run.prompt.length, prompt.length) : ofPrompt(list);
    const draw = async (signal) => make({ prompt, interventions, tokens: run ? run.all() : await this.vocabulary.tokens(prompt, signal) }, signal);
    return fill(place, draw, JSON.stringify([prompt, list, this.info.checkpoint, more]));
  }

  // The chosen token, or the last one.
  placeIn = (tokens) => Math.min(this.place ?? Infinity, tokens.length - 1);

  // An address that opens the page in its current state.
  link(more = {}) {
    const state = { model: chosenModel(), tab: this.tab, ...this.form(), ...this.tabs.attention.state(), ...this.tabs.film.state(), ...this.tabs.compare.state(), ...more };
    if (find("alone").checked) state.alone = true;
    const given = Object.entries(state).filter(([name, value]) => value !== null && (name !== "seed" || value !== ""));
    return `${location.origin}${location.pathname}#${new URLSearchParams(given)}`;
  }

  // Put the state of the page into the address. The time marks entries of the history that this page has made.
  keep = (how) => history[how](performance.timeOrigin, "", this.link());

  // Open a tab. The button Back of the browser returns to the earlier tab unless `back`.
  open(name, back = false) {
    const earlier = this.tab;
    const added = earlier !== null && !back; // to the history of the browser
    if (added) this.keep("replaceState");
    if (earlier !== null) this.tabs[earlier].close?.();
    this.tab = name;
    if (added) this.keep("pushState");
    for (const button of document.querySelectorAll("[role=tab]")) {
      const chosen = button.id === `tab-${name}`;
      button.setAttribute("aria-selected", chosen);
      button.tabIndex = chosen ? 0 : -1; // arrow keys reach the others
      if (chosen) button.scrollIntoView({ block: "nearest", inline: "nearest" });
      find(button.getAttribute("aria-controls")).hidden = !chosen;
    }
    find("scope").hidden = true;
    this.remember();
    this.#run(() => (this.tabs[name].open ? this.tabs[name].open() : this.tabs[name].update()));
  }

  // Called a moment after the prompt was edited.
  changed = debounced(400, () => this.#changed());

  #changed() {
    this.place = null;
    this.remember();
    this.refresh();
  }

  // Draw the tab again. `swapped`: the server has new weights.
  refresh = (swapped = false) => this.#run(() => this.tabs[this.tab].update(swapped));

  // Report an unreadable prompt below it.
  #run(act) {
    find("prompt-problem").replaceChildren();
    try {
      this.prompt();
      act();
    } catch (error) {
      showProblem(find("prompt-problem"), error);
    }
  }

  // Check for new weights, which the server may load at any time.
  async follow() {
    if (!document.hidden) {
      let info = this.info;
      try {
        info = await get("/info");
      } catch (error) {
        if (error.status === 401) return; // the next request reports it
      }
      const kept = ({ model, vocabulary, config, training }) => JSON.stringify([model, vocabulary, config, training.data]);
      if (kept(info) !== kept(this.info)) return location.reload(); // another model
      if (info.checkpoint.weights_sha256 !== this.info.checkpoint.weights_sha256) {
        this.info = info;
        describe(info);
        this.refresh(true);
      }
    }
    setTimeout(() => this.follow(), SWAP_MS);
  }

  listen() {
    find("prompt").addEventListener("input", this.changed);
    find("alone").addEventListener("change", () => this.#changed());
    for (const name of NUMBERS) {
      find(name).addEventListener("input", () => {
        showNumber(name);
        find("prompt-problem").replaceChildren();
        this.remember();
        this.tabs.generate.reshape();
      });
    }
    const list = document.querySelector("[role=tablist]");
    const opened = ({ target }) => target.matches("[role=tab]:not([aria-selected=true])") && this.open(target.id.slice(4));
    for (const kind of ["click", "focusin"]) list.addEventListener(kind, opened);
    roving(list, "[role=tab]:not([hidden])", () => 1);
    window.addEventListener("popstate", ({ state }) => {
      if (state !== performance.timeOrigin) return location.reload(); // another address, such as a link that was pasted
      this.open(new URLSearchParams(location.hash.slice(1)).get("tab"), true);
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      if (this.tab === "compare") return find("compare-form").requestSubmit();
      if (this.tab !== "generate") this.open("generate");
      find("generate-form").requestSubmit();
    });
  }
}

// A prompt that suits the model: the first words of a text that it generates. Half of the context is left for completions.
async function firstPrompt(info) {
  if (info.vocabulary === "none") return "0";
  const { eos_token_id: end } = await get("/tokenizer_info");
  const count = Math.min(40, Math.floor(info.limits.context_length / 2));
  const body = { prompt: [end ?? 0], max_tokens: count, seed: 7, temperature: 0.7, ignore_eos: true };
  const { text } = (await post("/generate", body)).choices[0];
  const lines = text.replaceAll("�", "").trimStart().slice(0, 90);
  return lines.includes(" ") ? lines.slice(0, lines.lastIndexOf(" ")) : lines;
}

function describe(info) {
  const loss = info.checkpoint.val_loss === null ? "" : `, validation loss ${info.checkpoint.val_loss.toFixed(3)}`;
  const size = `${(info.parameters / 1e6).toFixed(1)} M parameters`;
  find("model-line").textContent = `${info.model}: ${size}, step ${info.checkpoint.step.toLocaleString("en")}${loss}, ${info.dtype} on ${info.device}`;
  if (info.vocabulary === "none") find("prompt-label").textContent = "Prompt: token ids, because this model has no vocabulary";
}

// The info of the model in the address, or of the first one that is loaded.
async function chosenInfo() {
  const info = await get("/info", undefined, null);
  if (info.models.length < 2) return info;
  const wanted = new URLSearchParams(location.hash.slice(1)).get("model");
  const answers = info.models.filter(({ status }) => status !== "failed").map(({ model }) => model);
  const name = answers.includes(wanted) ? wanted : info.model;
  chooseModel(name);
  const option = ({ model, status, reason }) =>
    element("option", { value: model, disabled: status === "failed", title: reason }, status === "failed" ? `${model} (not loaded)` : model);
  find("model").replaceChildren(...info.models.map(option));
  find("model").value = name;
  find("model-row").hidden = false;
  return name === info.model ? info : get("/info");
}

async function start() {
  find("page-problem").replaceChildren();
  let info;
  let saes;
  try {
    info = await chosenInfo();
    ({ saes } = await get("/features"));
  } catch (error) {
    if (error.status === 503) {
      find("model-line").textContent = "loading the checkpoint …";
      setTimeout(start, RETRY_MS);
      return;
    }
    find("model-line").textContent = "";
    showProblem(find("page-problem"), error, start);
    return;
  }
  find("key-row").hidden = !info.api_keys;
  describe(info);
  const restored = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  find("alone").checked = restored.alone === "true";
  const app = new App(info, saes, restored);
  try {
    if (restored.prompt === undefined) find("prompt").value = await firstPrompt(info);
  } catch (error) {
    showProblem(find("page-problem"), error, () => location.reload());
  }
  find("page").hidden = false;
  app.listen();
  find("model").addEventListener("change", () => {
    sessionStorage.setItem(CHOOSING, "yes");
    history.replaceState(null, "", app.link({ model: find("model").value }));
    location.reload();
  });
  if (sessionStorage.getItem(CHOOSING)) find("model").focus();
  sessionStorage.removeItem(CHOOSING);
  const tab = restored.tab in app.tabs && !find(`tab-${restored.tab}`).hidden ? restored.tab : "generate";
  app.open(tab);
  if (restored.run === "true") app.tabs.generate.start({ begin: (restored.begin ?? "").split("-").filter(Boolean).map(Number) });
  app.follow();
}

document.addEventListener("key-needed", () => {
  find("key-row").hidden = false;
  find("key").value = apiKey();
  find("key").focus();
});
find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setApiKey(find("key").value.trim());
  if (find("page").hidden) start();
  else location.reload();
});
start();
