// Circuit: the parts that carry the difference of two logits, as a graph. A click switches a part or a neuron off.

import { post, postArray } from "./api.js";
import { shape } from "./chart.js";
import { button, element, fill, find, heading, hint, labeled, numberIn, plainTable, roving } from "./dom.js";

const WIDE = 46; // width of a node and its gap, in pixels
const HIGH = 26;
const LEVEL = 58; // distance between two rows of nodes
const LEFT = 76; // width of the names of the rows
const HALF = 60; // half the width of the longest name of the logits
const DRAWN = 200; // number of drawn edges, the strongest; those of the chosen node are drawn too
const LISTED = 8;

export class Circuit {
  #app;
  #off = new Map(); // the switched-off pieces of each node, by its index

  constructor(app) {
    this.#app = app;
    const number = (id, value, limits) => element("input", { id, type: "number", value, ...limits });
    const fields = [
      labeled("token", element("input", { id: "circuit-token", placeholder: "the likeliest", size: 12 })),
      labeled("rather than", element("input", { id: "circuit-minus", placeholder: "the second", size: 12 })),
      labeled("share to explain", number("circuit-share", 0.9, { min: 0.05, max: 0.99, step: 0.05 })),
      labeled("maximum parts", number("circuit-parts", 150, { min: 1, max: 5000, step: 1 })),
    ];
    find("circuit-fields").append(element("div", { class: "row", onchange: () => this.update() }, ...fields));
  }

  update() {
    const fields = ["token", "minus", "share", "parts"].map((name) => find(`circuit-${name}`));
    const draw = async ({ prompt, tokens }, signal) => {
      const position = this.#app.placeIn(tokens);
      const reply = await post("/circuit", { prompt, position, max_edges: 5000, ...this.#settings(...fields) }, signal);
      this.#off.clear();
      return this.#render(reply.prompts[0], tokens);
    };
    const drawn = this.#app.look(find("circuit"), draw, this.#app.place, ...fields.map(({ value }) => value));
    return drawn.then(() => find("circuit").querySelector(".scroll")?.scrollTo({ left: 1e6 })); // to the last token
  }

  // The part of the request that the fields describe.
  #settings(token, minus, share, parts) {
    const chosen = { share: numberIn(share, "share to explain"), max_parts: numberIn(parts, "maximum parts") };
    for (const [name, input, title] of [["token", token, "token"], ["minus", minus, "rather than"]]) {
      if (input.value === "") continue;
      if (this.#app.vocabulary.idsAlone) chosen[`${name}_id`] = numberIn(input, title);
      else chosen[name] = input.value;
    }
    return chosen;
  }

  #render(circuit, tokens) {
    const { vocabulary } = this.#app;
    const { nodes, edges, verification, position } = circuit;
    const [token, minus] = [circuit.token, circuit.minus].map(vocabulary.named);
    const places = tokens.map((each, index) => `${vocabulary.named(each)} (${index})`);
    const named = ({ stage, head, position: at }) => `${words(stage, head)} at ${places[at]}`;
    const detail = element("div", { "aria-live": "polite" });
    const effect = element("p", { class: "readout", role: "status" }, "Choose a part to see its details and to switch it off.");
    const graph = new Graph(circuit, vocabulary.named, tokens);
    const show = (index) => {
      graph.mark(index);
      detail.replaceChildren(...this.#detail(index, nodes, edges, named, (neuron) => toggle(index, [neuron])));
    };
    const toggle = (index, pieces) => {
      const off = this.#off.get(index) ?? new Set();
      const back = pieces.every((piece) => off.has(piece));
      for (const piece of pieces) back ? off.delete(piece) : off.add(piece);
      off.size ? this.#off.set(index, off) : this.#off.delete(index);
      graph.draw(this.#off);
      show(index);
      if (this.#off.size === 0) return fill(effect, () => `Nothing is switched off: the difference is ${signed(circuit.difference)}.`);
      return fill(effect, async (signal) => {
        const now = await difference(circuit, this.#off, signal);
        return `With ${this.#named(nodes, named)} switched off, the difference is ${signed(now)} instead of ${signed(circuit.difference)}.`;
      });
    };
    graph.listen(show, toggle, named);
    if (nodes.length) show(nodes.length - 1);
    const whole = `After token ${position}, the logit of "${token}" is ${signed(circuit.difference)} above that of "${minus}".`;
    const found = `${count(nodes)} explain ${share(circuit.share)} of it, with attention weights, norms and gates frozen.`;
    const alone = verification.circuit_alone_share;
    const tested = `With nothing frozen, the difference is ${signed(verification.circuit_alone)} with these parts alone and ${signed(verification.without_circuit)} without them: ${share(alone)} and ${share(verification.without_circuit_share)} of the way from ${signed(verification.without_all)}, the difference without any part, to ${signed(circuit.difference)}.`;
    const doubt = alone !== null && Math.abs(alone - 1) > 0.5 ? [element("p", { class: "problem" }, "These parts alone do not produce the difference, so the graph does not explain it. Allow more parts or a larger share, or choose two tokens whose logits differ more.")] : [];
    const ignored = this.#app.interventions.list.length ? [hint("The changes made in Inside and Features do not apply to this tab.")] : [];
    return [
      hint(`${whole} ${found} ${tested}`),
      ...doubt,
      ...ignored,
      hint("Layers upward, tokens across. A head has its layer and number, an MLP its number of neurons. Blue carries towards the first token, orange towards the second. Dashed edges decide where a head looks. A part that is switched off has its mean over the positions; click on a neuron below to switch off that one."),
      effect,
      element("div", { class: "scroll" }, graph.element),
      detail,
    ];
  }

  // The switched-off parts, in words.
  #named(nodes, named) {
    const [[index, off]] = this.#off;
    const [node, alone] = [nodes[index], this.#off.size === 1];
    if (alone && off.size === piecesOf(node).length) return named(node);
    if (alone && off.size === 1) return named(node).replace("neurons", `neuron ${[...off][0]}`);
    return `${[...this.#off.values()].reduce((sum, { size }) => sum + size, 0)} parts`;
  }

  #detail(index, nodes, edges, named, toggle) {
    const node = nodes[index];
    const line = ({ reads, weight }, other) => [other === null ? "the logits" : `${named(nodes[other])}, ${reads}`, signed(weight)];
    const strongest = (list) => list.sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight)).slice(0, LISTED);
    const into = strongest(edges.filter(({ target }) => target === index)).map((edge) => line(edge, edge.source));
    const from = strongest(edges.filter(({ source }) => source === index)).map((edge) => line(edge, edge.target));
    const pressed = (neuron) => this.#off.get(index)?.has(neuron) ?? false;
    const press = (neuron) => {
      toggle(neuron);
      find("circuit").querySelector(`[data-neuron="${neuron}"]`)?.focus();
    };
    const neurons = node.neurons.slice(0, LISTED).map((each) => [
      button(`neuron ${each.index}`, () => press(each.index), { "aria-pressed": `${pressed(each.index)}`, "data-neuron": each.index }),
      signed(carried(each)),
    ]);
    const list = (title, rows) => (rows.length ? [element("div", {}, heading(title), plainTable(rows))] : []);
    const more = node.neurons.length > LISTED ? `, the strongest of ${node.neurons.length}` : "";
    return [
      heading(named(node)),
      hint(`Carries ${signed(node.values)} through values and ${signed(node.attention)} through attention weights.`),
      element("div", { class: "two" }, ...list("Reads", into), ...list("Is read by", from), ...list(`Neurons${more}`, neurons)),
    ];
  }
}

// The drawing: edges in SVG, with a button for each node on top.
class Graph {
  #circuit;
  #buttons = [];
  #at = []; // center of each node
  #edges = [];
  #end; // end of the edges to the logits

  constructor(circuit, name, tokens) {
    this.#circuit = circuit;
    const { nodes, position } = circuit;
    const rows = [...new Set(nodes.map(({ stage }) => stage))]; // in the order of the forward pass
    const columns = [...new Set([...nodes.map(({ position: at }) => at), position])].sort((a, b) => a - b);
    const cell = (node) => `${node.position} ${node.stage}`;
    const cells = grouped(nodes, cell);
    let left = LEFT;
    const lefts = new Map();
    for (const column of columns) {
      lefts.set(column, left);
      left += WIDE * Math.max(1, ...[...cells.values()].filter(([first]) => first.position === column).map((list) => list.length)) + 12;
    }
    const height = LEVEL * (rows.length + 1) + 2 * HIGH;
    const middle = (row) => height - 2 * HIGH - LEVEL * row;
    this.#at = nodes.map((node) => ({ x: lefts.get(node.position) + WIDE * (cells.get(cell(node)).indexOf(node) + 0.5), y: middle(rows.indexOf(node.stage)) }));
    this.#end = { x: lefts.get(position) + WIDE / 2, y: middle(rows.length) };
    const svg = shape("svg", { width: left, height, viewBox: `0 0 ${left} ${height}`, "aria-hidden": "true" });
    for (const [row, stage] of rows.entries()) svg.append(shape("text", { x: 0, y: middle(row) + 4 }, level(stage)));
    for (const column of columns) svg.append(shape("text", { x: lefts.get(column) + WIDE / 2, y: height - 8, "text-anchor": "middle" }, `${column}`));
    svg.append(shape("text", { x: Math.min(this.#end.x, left - HALF), y: this.#end.y - 6, "text-anchor": "middle" }, `${clip(name(circuit.token))} − ${clip(name(circuit.minus))}`));
    this.lines = shape("g", {});
    svg.append(this.lines);
    const largest = Math.max(...nodes.map((node) => Math.abs(carried(node))), 1e-9);
    this.#buttons = nodes.map((node, index) => {
      const { x, y } = this.#at[index];
      const strength = Math.round(6 + 34 * (Math.abs(carried(node)) / largest));
      const made = button(node.stage === "embedding" ? clip(name(tokens[node.position])) : label(node), null, { class: `part ${carried(node) < 0 ? "less" : "more"}`, "aria-pressed": "false", tabindex: -1, "data-index": index });
      for (const [key, value] of [["left", `${x - WIDE / 2 + 2}px`], ["top", `${y - HIGH / 2}px`], ["--strength", `${strength}%`]]) made.style.setProperty(key, value);
      return made;
    });
    // From the top row down, so that arrow keys follow the drawing.
    const order = [...this.#buttons.keys()].sort((a, b) => this.#at[a].y - this.#at[b].y || this.#at[a].x - this.#at[b].x);
    this.element = element("div", { class: "circuit", role: "group", "aria-label": "Circuit. Arrow keys move between parts, Enter switches one off." }, svg, ...order.map((index) => this.#buttons[index]));
    this.element.style.setProperty("width", `${left}px`);
    if (order.length) this.#buttons[order[0]].tabIndex = 0;
    const widths = circuit.edges.map(({ weight }) => Math.abs(weight));
    this.#edges = circuit.edges.map((edge) => this.#edge(edge, Math.max(...widths)));
    this.draw(new Map());
  }

  listen(show, toggle, named) {
    const sameRow = () => this.#at.filter(({ y }) => y === this.#at[document.activeElement.dataset.index].y).length;
    roving(this.element, ".part", sameRow);
    for (const [index, made] of this.#buttons.entries()) {
      made.addEventListener("focus", () => show(index));
      made.addEventListener("click", () => toggle(index, piecesOf(this.#circuit.nodes[index])));
      made.title = named(this.#circuit.nodes[index]);
      made.setAttribute("aria-label", `${made.title}: ${signed(carried(this.#circuit.nodes[index]))}`);
    }
  }

  // Draw the edges between nodes that are not switched off.
  draw(off) {
    const whole = (index) => off.get(index)?.size === piecesOf(this.#circuit.nodes[index]).length;
    for (const [index, made] of this.#buttons.entries()) made.setAttribute("aria-pressed", whole(index) || (off.has(index) ? "mixed" : false));
    const cut = ({ source, target }) => whole(source) || (target !== null && whole(target));
    for (const { edge, path } of this.#edges) path.classList.toggle("cut", cut(edge));
  }

  // Emphasize the edges of a node.
  mark(index) {
    const shown = this.#edges.filter(({ edge }, rank) => rank < DRAWN || edge.source === index || edge.target === index);
    for (const { edge, path } of this.#edges) path.classList.toggle("marked", edge.source === index || edge.target === index);
    this.lines.replaceChildren(...shown.map(({ path }) => path));
    for (const [at, made] of this.#buttons.entries()) made.classList.toggle("chosen", at === index);
  }

  #edge(edge, widest) {
    const from = this.#at[edge.source];
    const to = edge.target === null ? this.#end : this.#at[edge.target];
    const [low, high] = [from.y - HIGH / 2, to.y + (edge.target === null ? 0 : HIGH / 2)];
    const bend = Math.max(12, (low - high) / 2);
    const d = `M${from.x} ${low}C${from.x} ${low - bend} ${to.x} ${high + bend} ${to.x} ${high}`;
    const kind = edge.reads === "query" || edge.reads === "key" ? "looks" : "";
    const path = shape("path", { d, class: `edge ${kind} ${edge.weight < 0 ? "less" : "more"}`, "stroke-width": (0.5 + 5.5 * Math.abs(edge.weight) / widest).toFixed(2) });
    return { edge, path };
  }
}

// The pieces of a node that can be switched off: its neurons, or the whole head or token.
const piecesOf = ({ neurons }) => (neurons.length ? neurons.map(({ index }) => index) : [null]);
const carried = ({ values, attention }) => values + attention;
const signed = (value) => `${value < 0 ? "−" : ""}${Math.abs(value).toFixed(Math.abs(value) < 0.1 ? 3 : 2)}`;
const share = (value) => (value === null ? "nothing" : `${signed(100 * value).split(".")[0]} %`);
const clip = (text) => (text.length > 6 ? `${text.slice(0, 5)}…` : text);
const layerOf = (stage) => stage.split(".")[1];
const label = ({ stage, head, neurons }) => (head !== null ? `${layerOf(stage)}.${head}` : `${neurons.length}`);
const level = (stage) => (stage === "embedding" ? "tokens" : `${stage.endsWith("heads") ? "heads" : "neurons"} ${layerOf(stage)}`);
const words = (stage, head) => (head !== null ? `head ${layerOf(stage)}.${head}` : stage === "embedding" ? "the token" : `neurons of MLP ${layerOf(stage)}`);

// The items of a list, by key.
function grouped(list, key) {
  const groups = new Map();
  for (const each of list) groups.set(key(each), [...(groups.get(key(each)) ?? []), each]);
  return groups;
}

// The numbers of tokens, heads and neurons, in words.
function count(nodes) {
  const heads = nodes.filter(({ head }) => head !== null).length;
  const neurons = nodes.reduce((sum, node) => sum + node.neurons.length, 0);
  const tokens = nodes.filter(({ stage }) => stage === "embedding").length;
  return `${tokens} tokens, ${heads} heads and ${neurons} neurons`;
}

// The difference while pieces of some nodes have their means over the positions.
async function difference({ token_ids, position, token, minus, nodes }, off, signal) {
  const prompt = token_ids.slice(0, position + 1);
  const interventions = [];
  for (const [stage, indices] of grouped([...off.keys()], (index) => nodes[index].stage)) {
    const { shape, values } = await postArray("/activations", { prompt, positions: "all", stages: [stage] }, signal);
    const width = values.length / prompt.length;
    const mean = Array.from({ length: width }, (_, column) => prompt.reduce((sum, _, row) => sum + values[row * width + column], 0) / prompt.length);
    interventions.push(...indices.map((index) => switchedOff(nodes[index], off.get(index), mean, shape.at(-1))));
  }
  const row = await postArray("/logits", { prompt, token_ids: [token.id, minus.id], interventions }, signal);
  return row.values[0] - row.values[1];
}

// An intervention that sets a head, a token, or neurons to their means.
function switchedOff({ stage, head, position, neurons }, pieces, mean, width) {
  const change = { stage, positions: [position], operation: "set" };
  if (head !== null) return { ...change, heads: [head], values: [mean.slice(head * width, (head + 1) * width)] };
  if (neurons.length === 0) return { ...change, values: mean };
  const units = [...pieces].sort((a, b) => a - b);
  return { ...change, units, values: units.map((unit) => mean[unit]) };
}
