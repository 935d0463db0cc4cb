// Model: facts about it, its training, and the current load of the server.

import { get, getText } from "./api.js";
import { lineChart, lossSeries } from "./chart.js";
import { element, fill, find, heading, hint, plainTable } from "./dom.js";

const EVERY_MS = 2000;
const TRAINING_MS = 5000;
const KEPT = 60;

// The samples of a model in Prometheus' text format: those with the label `model` and no other.
export function readMetrics(text, model) {
  const values = new Map();
  const escaped = model.replaceAll("\\", "\\\\").replaceAll('"', '\\"');
  for (const [, name, of, value] of text.matchAll(/^([a-z_]+)\{model="((?:[^"\\]|\\.)*)"\} ([0-9.eE+-]+)$/gm)) {
    if (of === escaped) values.set(name, Number(value));
  }
  return values;
}

// Seconds as 1:02:03 or 2:03.
export function clock(seconds) {
  const whole = Math.floor(seconds);
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  const two = (number) => String(number).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

export class ModelTab {
  #app;
  #timer = null;
  #trainingTimer = null;
  #before = null; // { time, tokens, prompt }
  #rates = [];
  #going = false; // the training was running at the last reply

  constructor(app) {
    this.#app = app;
  }

  open() {
    this.update();
    this.#before = null;
    this.#watch();
  }

  close() {
    clearTimeout(this.#timer);
    clearTimeout(this.#trainingTimer);
  }

  update() {
    const key = JSON.stringify(this.#app.info);
    fill(find("facts"), () => this.#facts(), key);
    this.#follow(key);
  }

  // Draw the training, repeatedly while it is running.
  async #follow(key = null) {
    clearTimeout(this.#trainingTimer);
    await fill(find("training"), async (signal) => {
      const { progress, ...rest } = await get("/card", signal);
      this.#going = progress !== null && progress.done < 1;
      return this.#training(progress, rest);
    }, key);
    if (this.#going && !find("panel-model").hidden) this.#trainingTimer = setTimeout(() => this.#follow(), TRAINING_MS);
  }

  #facts() {
    const { info } = this.#app;
    const { config, checkpoint } = info;
    const heads = config.n_kv_head && config.n_kv_head !== config.n_head ? `${counted(config.n_head, "head")}, ${config.n_kv_head} for keys and values` : counted(config.n_head, "head");
    const shape = config.kind === "code" ? `computed by its owner's code, ${checkpoint.code}` : `${counted(config.n_layer, "layer")}, ${heads}, width ${config.d_model}`;
    const loss = checkpoint.val_loss === null ? "unknown" : `${checkpoint.val_loss.toFixed(4)} nats per token`;
    return [
      heading(info.model),
      plainTable([
        ["parameters", info.parameters.toLocaleString("en")],
        ["shape", shape],
        ["context", `${info.limits.context_length} tokens`],
        ["vocabulary", `${config.vocab_size.toLocaleString("en")} tokens (${info.vocabulary})`],
        ["step", checkpoint.step.toLocaleString("en")],
        ["validation loss", loss],
        ["weights (sha256)", element("code", {}, checkpoint.weights_sha256)],
        ["computed on", `${info.device}, ${info.dtype}, ${info.decoding}, ${info.threads} thread${info.threads === 1 ? "" : "s"}`],
      ]),
    ];
  }

  #training(progress, { card, curve }) {
    const made = [];
    const series = lossSeries(curve);
    if (series.length) made.push(heading("Training"), lineChart({ label: "Loss by step", series, x: "step", y: "nats per token" }));
    if (progress !== null) made.push(...this.#progress(progress, made.length > 0));
    const open = find("training").querySelector("details")?.open ?? false; // stays open when the curve changes
    if (card !== null) made.push(element("details", { open }, element("summary", {}, "Model card"), element("pre", { class: "card" }, card)));
    if (!made.length) made.push(hint("This checkpoint has no card and no log of its run."));
    return made;
  }

  #progress({ step, done, loss, tokens_per_second, seconds_left, idle_seconds, sampled_at, samples }, headed) {
    const left = Math.max(0, seconds_left - idle_seconds);
    const rows = [
      ["step", `${step.toLocaleString("en")}, ${(100 * done).toFixed(0)} % of the run`],
      ["training loss", `${loss.toFixed(4)} nats per token`],
      ["speed", `${tokens_per_second.toLocaleString("en", { maximumFractionDigits: 0 })} tokens/s`],
    ];
    if (done < 1) rows.push(["time left", clock(left)], ["last report", `${clock(idle_seconds)} ago`]);
    const texts = samples.map((text) => element("pre", { class: "card" }, text));
    const sampled = texts.length ? [element("h4", {}, `Samples at step ${sampled_at.toLocaleString("en")}`), ...texts] : [];
    return [...(headed ? [] : [heading("Training")]), plainTable(rows), ...sampled];
  }

  async #watch() {
    clearTimeout(this.#timer);
    await fill(find("live"), async (signal) => this.#live(readMetrics(await getText("/metrics", signal), this.#app.info.model)));
    if (!find("panel-model").hidden) this.#timer = setTimeout(() => this.#watch(), EVERY_MS);
  }

  #live(metrics) {
    const now = performance.now();
    const value = (name) => metrics.get(name) ?? 0;
    const tokens = value("logitd_generation_tokens_total");
    const prompt = value("logitd_prefill_tokens_total");
    if (this.#before) {
      const seconds = (now - this.#before.time) / 1000;
      this.#rates.push({ time: now, generated: (tokens - this.#before.tokens) / seconds, prompt: (prompt - this.#before.prompt) / seconds });
      this.#rates = this.#rates.slice(-KEPT);
    }
    this.#before = { time: now, tokens, prompt };
    const last = this.#rates.at(-1) ?? { generated: 0, prompt: 0 };
    const made = [
      heading("Now"),
      plainTable([
        ["generated", `${last.generated.toFixed(0)} tokens/s`],
        ["prompts", `${last.prompt.toFixed(0)} tokens/s`],
        ["slots", `${value("logitd_kv_slots_used")} of ${value("logitd_kv_slots")} in use`],
        ["waiting", `${value("logitd_num_sequences_waiting")} sequences`],
      ]),
    ];
    if (this.#rates.length > 1) {
      const points = this.#rates.map(({ time, generated }) => [(time - now) / 1000, generated]);
      made.push(lineChart({ label: "Generated tokens per second", series: [{ name: "generated", points }], x: "seconds", y: "tokens/s", height: 180 }));
    }
    return made;
  }
}
