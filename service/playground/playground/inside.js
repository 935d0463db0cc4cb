// Inside: changes of the forward pass, their effect on the next token, and a view of any stage.

import { get, postArray } from "./api.js";
import { bars } from "./distribution.js";
import { button, choice, element, fill, find, heading, hint, labeled, numberIn, showProblem } from "./dom.js";
import { heatMap } from "./heatmap.js";
import { divergenceBits, ranked, softmax } from "./sampling.js";

const SHOWN = 12;
const MOST_COLUMNS = 512;

const WAYS = [["zero", "switch off"], ["scale", "scale"], ["steer", "add a direction"], ["patch", "patch from another prompt"]];

const PLACES = [["all", "all"], ["last", "last token"], ["prompt", "prompt"], ["generated", "completion"]];

// The numbers in one of a stage's names, which have N in the stage's own name: "0", or "0.3" for blocks.0.heads.3; "" if it
// has none.
function numbersIn(stage, name) {
  const parts = stage.name.split(".");
  return name.split(".").filter((part, at) => part !== parts[at]).join(".");
}

// The stage's name with these numbers, or with * in their place.
function nameOf(stage, numbers) {
  if (numbers === "*") return stage.name.split(".").map((part) => (part === "N" ? "*" : part)).join(".");
  return stage.names.find((name) => numbersIn(stage, name) === numbers);
}

// Fill a list with the numbers of a stage. The chosen one is kept if the stage has it.
function listNumbers(select, stage, more = []) {
  const { value } = select;
  const numbers = stage.names.map((name) => numbersIn(stage, name));
  select.replaceChildren(...choice([...more, ...numbers.map((each) => [each, each])]).children);
  select.value = numbers.includes(value) || more.some(([each]) => each === value) ? value : numbers[0];
  select.parentElement.hidden = numbers[0] === "";
}

export class Inside {
  #app;
  #stages = null;

  constructor(app) {
    this.#app = app;
  }

  async open() {
    if (this.#stages === null) {
      await fill(find("change"), async (signal) => {
        const byName = new Map(); // submodules of an owner's code with one name may differ in shape
        for (const stage of (await get("/stages", signal)).stages) {
          const known = byName.get(stage.name);
          if (known) known.names.push(...stage.names);
          else byName.set(stage.name, stage);
        }
        this.#stages = [...byName.values()];
        this.#listViews();
        return this.#changeForm();
      });
    }
    this.update();
  }

  update() {
    if (this.#stages === null) return; // `open` waits for the stages
    this.#effect();
    this.#view();
  }

  #stage = (select) => this.#stages.find(({ name }) => name === find(select).value);

  #changeForm() {
    const changeable = this.#stages.filter((stage) => stage.changeable);
    const labels = {
      way: labeled("change", choice(WAYS, { id: "change-way" })),
      stage: labeled("stage", choice(changeable.map(({ name }) => [name, name]), { id: "change-stage" })),
      layer: labeled("layer", choice([["0", "0"]], { id: "change-layer" })),
      heads: labeled("heads", element("input", { id: "change-heads", placeholder: "all, or 0, 3", size: 10 })),
      units: labeled("units", element("input", { id: "change-units", placeholder: "all, or 17, 300", size: 10 })),
      positions: labeled("positions", choice(PLACES, { id: "change-positions" })),
      factor: labeled("factor", element("input", { id: "change-factor", type: "number", step: "any", value: 2 })),
      from: labeled("from the prompt", element("input", { id: "change-from", placeholder: "another prompt" })),
      minus: labeled("minus the prompt", element("input", { id: "change-minus", placeholder: "nothing" })),
    };
    const { way, stage, layer, heads } = Object.fromEntries(Object.entries(labels).map(([name, label]) => [name, label.control]));
    const hasHeads = ({ axes }) => axes.some((axis) => axis.endsWith("head"));
    const best = changeable.find(({ name }) => name === "blocks.N.attention.heads") ?? changeable[0];
    stage.value = best.name;
    heads.value = hasHeads(best) ? "0" : "";
    const onchange = () => {
      const chosen = changeable.find(({ name }) => name === stage.value);
      listNumbers(layer, chosen, [["*", "all"]]);
      labels.heads.hidden = !hasHeads(chosen);
      labels.factor.hidden = !["scale", "steer"].includes(way.value);
      labels.from.hidden = !["steer", "patch"].includes(way.value);
      labels.minus.hidden = way.value !== "steer";
    };
    const problem = element("div", {});
    const onsubmit = (event) => {
      event.preventDefault();
      problem.replaceChildren();
      try {
        this.#app.interventions.add(this.#change(labels));
      } catch (error) {
        showProblem(problem, error);
      }
    };
    onchange();
    return [element("form", { class: "row", onsubmit, onchange }, ...Object.values(labels), button("Change", null, { type: "submit" })), problem];
  }

  // The intervention that the form describes.
  #change(labels) {
    const given = (name) => (labels[name].hidden ? "" : labels[name].control.value);
    const operation = { zero: "zero", scale: "scale", steer: "add", patch: "set" }[given("way")];
    const made = { stage: nameOf(this.#stage("change-stage"), given("layer")), operation, positions: given("positions") };
    for (const name of ["heads", "units"]) {
      const written = given(name).trim();
      if (written === "" || written === "all") continue;
      const indices = written.split(/[\s,]+/);
      made[name] = indices.map(Number);
      if (!indices.every((index) => /^\d+$/.test(index))) throw new Error(`${name} are "${written}": enter numbers from 0 separated by commas, or leave it empty for all`);
    }
    if (!labels.factor.hidden) made.factor = numberIn(labels.factor.control, "factor");
    if (!labels.from.hidden) {
      if (given("from") === "") throw new Error("enter the other prompt, from which values are added or patched");
      made.from = { prompt: this.#app.promptOf(given("from")) };
    }
    if (given("minus") !== "") made.minus = { prompt: this.#app.promptOf(given("minus")) };
    return made;
  }

  // Show the next token without the changes and with them.
  #effect() {
    const { list } = this.#app.interventions;
    return this.#app.look(find("effect"), async ({ prompt, interventions }, signal) => {
      const plain = await postArray("/logits", { prompt }, signal);
      const changed = interventions.length ? await postArray("/logits", { prompt, interventions }, signal) : plain;
      const [before, after] = [softmax(plain.values), softmax(changed.values)];
      const ids = [...new Set([...ranked(before).slice(0, SHOWN), ...ranked(after).slice(0, list.length ? SHOWN / 2 : 0)])];
      await this.#app.vocabulary.name(ids, signal);
      const rows = ids.map((id) => ({ id, before: before[id], after: after[id] }));
      const moved = divergenceBits(before, after);
      return [
        heading("Next token"),
        bars(rows, this.#app.vocabulary, { heads: ["unchanged", "changed"] }),
        hint(
          list.length
            ? `The changes move the distribution by ${moved.toFixed(3)} bits. They apply in all tabs but Circuit until you remove them.`
            : "No changes yet: make one to see its effect.",
        ),
      ];
    });
  }

  #listViews() {
    const shown = this.#stages.filter(({ name }) => name !== "logits");
    const stage = choice(shown.map(({ name }) => [name, name]), { id: "view-stage" });
    stage.value = shown.some(({ name }) => name === "blocks.N.mlp.hidden") ? "blocks.N.mlp.hidden" : shown[0].name;
    const layer = choice([["0", "0"]], { id: "view-layer" });
    const head = choice(Array.from({ length: this.#app.info.config.n_head }, (_, index) => [`${index}`, `${index}`]), { id: "view-head" });
    const fields = element("div", { class: "row", onchange: () => this.#view() }, labeled("stage", stage), labeled("layer", layer), labeled("head", head));
    find("view-fields").replaceChildren(fields);
  }

  #view() {
    const stage = this.#stage("view-stage");
    const headAxis = stage.axes.find((axis) => axis === "n_head" || axis === "n_kv_head");
    listNumbers(find("view-layer"), stage);
    find("view-head").parentElement.hidden = headAxis === undefined;
    const stages = [nameOf(stage, find("view-layer").value)];
    const heads = headAxis && [Math.min(Number(find("view-head").value), stage.shape[1] - 1)];
    const draw = async ({ prompt, tokens, interventions }, signal) => {
      const { shape, values } = await postArray("/activations", { prompt, positions: "all", stages, heads, interventions }, signal);
      const width = shape.at(-1);
      const columns = Math.min(width, MOST_COLUMNS);
      const names = tokens.map(this.#app.vocabulary.named);
      const of = stage.axes.at(-1) === "T" ? names : Array.from({ length: columns }, (_, index) => `${index}`);
      const at = (row, column) => values[row * width + column];
      const sizes = values.filter(Number.isFinite).map(Math.abs).sort();
      const largest = sizes.length ? sizes[Math.floor(0.99 * (sizes.length - 1))] : 1;
      return [
        hint(`${stage.meaning}. ${columns < width ? `The first ${columns} of ${width} values. ` : ""}Full color at ${largest.toPrecision(3)}, above 99 % of the values.`),
        heatMap({
          label: stages[0],
          rows: names,
          columns: of.slice(0, columns),
          at,
          largest,
          say: (row, column) => `${names[row]} (${row}), ${stage.axes.at(-1)} ${of[column]}: ${at(row, column).toPrecision(4)}`,
        }),
      ];
    };
    return this.#app.look(find("view"), draw, stages, heads);
  }
}
