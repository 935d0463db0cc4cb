// Branches: completions that began where another one was changed, as a tree one can walk.

import { element } from "./dom.js";
import { visible } from "./tokens.js";

export class Tree {
  #place;
  #onchoose;
  #nodes = [];
  #current = null;

  constructor(place, onchoose) {
    this.#place = place;
    this.#onchoose = onchoose;
  }

  // A completion; `parent` is the one that was changed, `at` the index of its token that was.
  add(run, parent = null, at = null) {
    const node = { run, parent, at, children: [] };
    if (parent) parent.children.push(node);
    else this.#nodes.push(node);
    this.#current = node;
    this.render();
    return node;
  }

  get current() {
    return this.#current;
  }

  choose(node) {
    this.#current = node;
    this.render();
    this.#onchoose(node);
  }

  // Names change while a completion grows.
  render() {
    const several = this.#nodes.length > 1 || this.#nodes.some((node) => node.children.length > 0);
    this.#place.hidden = !several;
    if (several) this.#place.replaceChildren(element("h3", {}, "Branches"), this.#list(this.#nodes));
  }

  #list(nodes) {
    return element("ul", { class: "tree" }, ...nodes.map((node) => this.#item(node)));
  }

  #item(node) {
    const start = visible(node.run.excerpt()).slice(0, 48);
    const said = node.parent ? `at token ${node.at + 1}: ${start}` : `seed ${node.run.seed ?? "…"}: ${start}`;
    const button = element(
      "button",
      { type: "button", class: "link", "aria-current": node === this.#current ? "true" : null, onclick: () => this.choose(node) },
      said,
    );
    return element("li", {}, button, node.children.length ? this.#list(node.children) : null);
  }
}
