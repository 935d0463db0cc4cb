// The playground: one prompt, and tabs that look at what the model does with it. Plain modules and
// this server's own endpoints: no library, no build step, no request to any other host.

import { apiKey, chooseModel, chosenModel, get, Problem, post, setApiKey } from "./api.js";
import { Attention, describeTokens } from "./attention.js";
import { Compare } from "./compare.js";
import { Vocabulary } from "./distribution.js";
import { debounced, element, find, showProblem } from "./dom.js";
import { Generate } from "./generate.js";
import { Inside, Interventions, listChanges } from "./inside.js";
import { Lens } from "./lens.js";
import { ModelTab } from "./model.js";
import { Tokens } from "./tokenize.js";

const NUMBERS = ["temperature", "top_k", "top_p", "min_p", "max_tokens", "seed"];
const RETRY_MS = 500;
const CHOOSING = "logitd-choosing"; // the page was loaded again by whoever is at the list of models

// What the fields of the form say.
const settings = {
  request() {
    const body = {};
    for (const name of NUMBERS) if (find(name).value !== "") body[name] = Number(find(name).value);
    return body;
  },
  sampling: () => ({ temperature: 1, top_k: 0, top_p: 1, min_p: 0, ...settings.request() }),
};

class App {
  constructor(info, restored) {
    this.info = info;
    this.restored = restored;
    this.settings = settings;
    this.vocabulary = new Vocabulary(info.vocabulary === "none");
    this.interventions = new Interventions(restored.interventions ?? [], () => this.#changed());
    this.remember = debounced(200, () => history.replaceState(null, "", this.link()));
    const models = info.models.filter(({ status }) => status !== "failed").map(({ model }) => model);
    this.tabs = {
      generate: new Generate(this),
      attention: new Attention(this),
      lens: new Lens(this),
      inside: new Inside(this),
      tokens: new Tokens(this),
      compare: new Compare(this, models),
      model: new ModelTab(this),
    };
    find("tab-compare").hidden = models.length < 2;
    this.tab = null;
  }

  // The prompt as the server takes it: a text, or token ids where the model knows no text.
  prompt = () => this.promptOf(find("prompt").value);

  promptOf(written) {
    if (!this.vocabulary.idsAlone) return written;
    const words = written.split(/[\s,]+/).filter((word) => word !== "");
    if (!words.every((word) => /^[0-9]+$/.test(word))) {
      throw new Problem(0, "This model has no vocabulary: write token ids with spaces between them, for example 0 1 2.");
    }
    return words.map(Number);
  }

  setPrompt(text) {
    find("prompt").value = text;
    this.#changed();
  }

  tokensOf = (prompt, signal) => describeTokens(prompt, this.vocabulary, signal);

  // An address that opens the page as it stands.
  link(more = {}) {
    const state = { tab: this.tab, prompt: find("prompt").value, ...settings.request(), ...this.tabs.attention.state(), ...this.tabs.compare.state(), ...more };
    if (chosenModel() !== null) state.model ??= chosenModel();
    if (this.interventions.list.length) state.interventions = JSON.stringify(this.interventions.list);
    const given = Object.entries(state).filter(([, value]) => value !== undefined && value !== null);
    return `${location.origin}${location.pathname}#${new URLSearchParams(given)}`;
  }

  open(name) {
    if (this.tab !== null) this.tabs[this.tab].close?.();
    this.tab = name;
    for (const button of document.querySelectorAll("[role=tab]")) {
      const chosen = button.id === `tab-${name}`;
      button.setAttribute("aria-selected", chosen);
      button.tabIndex = chosen ? 0 : -1;
      find(button.getAttribute("aria-controls")).hidden = !chosen;
    }
    this.remember();
    this.#run(() => this.tabs[name].open());
  }

  #changed() {
    listChanges(find("changes"), this.interventions);
    this.remember();
    this.#run(() => this.tabs[this.tab].update());
  }

  // A prompt that cannot be read is said beside it.
  #run(act) {
    find("prompt-problem").replaceChildren();
    try {
      this.prompt();
      act();
    } catch (error) {
      showProblem(find("prompt-problem"), error);
    }
  }

  listen() {
    find("prompt").addEventListener("input", debounced(400, () => this.#changed()));
    for (const name of NUMBERS) {
      find(name).addEventListener("input", () => {
        const shown = find(`${name}-value`);
        if (shown) shown.textContent = find(name).value;
        this.remember();
        this.tabs.generate.reshape();
      });
    }
    const tabs = [...document.querySelectorAll("[role=tab]:not([hidden])")];
    for (const [index, button] of tabs.entries()) {
      button.addEventListener("click", () => this.open(button.id.slice(4)));
      button.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        const next = tabs[(index + step + tabs.length) % tabs.length];
        next.focus();
        next.click();
      });
    }
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      if (this.tab === "compare") return find("compare-form").requestSubmit();
      if (this.tab !== "generate") this.open("generate");
      find("generate-form").requestSubmit();
    });
    listChanges(find("changes"), this.interventions);
  }
}

// What the address says: the state of a link, or of the page before it was loaded again.
function restore() {
  const state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  for (const name of [...NUMBERS, "prompt"]) if (state[name] !== undefined) find(name).value = state[name];
  for (const name of NUMBERS) if (find(`${name}-value`)) find(`${name}-value`).textContent = find(name).value;
  try {
    state.interventions = JSON.parse(state.interventions ?? "[]");
  } catch {
    state.interventions = []; // a link that was cut short
  }
  return state;
}

// A beginning that the model itself would write: the first words of a text it makes up.
async function firstPrompt(info) {
  if (info.vocabulary === "none") return "0";
  const { eos_token_id: end } = await get("/tokenizer_info");
  const body = { prompt: end === null ? "\n" : [end], max_tokens: 40, seed: 7, temperature: 0.7, ignore_eos: true };
  let text;
  try {
    text = (await post("/generate", body)).choices[0].text;
  } catch {
    text = (await post("/generate", { ...body, prompt: [0] })).choices[0].text; // no line break in it
  }
  const lines = text.replaceAll("�", "").trimStart().slice(0, 90);
  return lines.includes(" ") ? lines.slice(0, lines.lastIndexOf(" ")) : lines;
}

function describe(info) {
  const loss = info.checkpoint.val_loss === null ? "" : `, validation loss ${info.checkpoint.val_loss.toFixed(3)}`;
  const size = `${(info.parameters / 1e6).toFixed(1)} M parameters`;
  find("model-line").textContent = `${info.model}: ${size}, step ${info.checkpoint.step}${loss}, ${info.dtype} on ${info.device}`;
  if (info.vocabulary === "none") find("prompt-label").textContent = "Prompt: token ids, because this model has no vocabulary";
}

function askForKey() {
  find("key-row").hidden = false;
  find("key").value = apiKey();
  find("key").focus();
}

// The model that the address names, or the first that answers; where there are several, one chooses.
async function lookedAt() {
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

// Another model: the page as it stands, loaded again for it.
function look(app, name) {
  sessionStorage.setItem(CHOOSING, "yes");
  history.replaceState(null, "", app.link({ model: name }));
  location.reload();
}

async function start() {
  find("page-problem").replaceChildren();
  let info;
  try {
    info = await lookedAt();
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
  const restored = restore();
  const app = new App(info, restored);
  try {
    if (restored.prompt === undefined) find("prompt").value = await firstPrompt(info);
  } catch (error) {
    showProblem(find("page-problem"), error, () => location.reload());
  }
  find("page").hidden = false;
  app.listen();
  find("model").addEventListener("change", () => look(app, find("model").value));
  if (sessionStorage.getItem(CHOOSING)) find("model").focus();
  sessionStorage.removeItem(CHOOSING);
  const tab = restored.tab in app.tabs && !find(`tab-${restored.tab}`).hidden ? restored.tab : "generate";
  app.open(tab);
  if (restored.run === "true") app.tabs.generate.start();
}

document.addEventListener("key-needed", askForKey);
find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setApiKey(find("key").value.trim());
  if (find("page").hidden) start();
  else location.reload();
});
start();
