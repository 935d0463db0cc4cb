// Branches: completions that began where another one was changed, as a tree one can walk.

import { button, element, heading } from "./dom.js";
import { visible } from "./tokens.js";

export class Tree {
  #place;
  #onchoose;
  #nodes = []; // { run, children }
  current = null; // the run that is shown

  constructor(place, onchoose) {
    this.#place = place;
    this.#onchoose = onchoose;
  }

  // A completion; `parent` is the one that was changed.
  add(run, parent = null) {
    const siblings = parent === null ? this.#nodes : this.#find(parent).children;
    siblings.push({ run, children: [] });
    this.current = run;
    this.render();
  }

  // Names change while a completion grows.
  render() {
    const several = this.#nodes.length > 1 || this.#nodes.some((node) => node.children.length > 0);
    this.#place.hidden = !several;
    if (several) this.#place.replaceChildren(heading("Branches"), this.#list(this.#nodes));
  }

  #find(run, nodes = this.#nodes) {
    for (const node of nodes) {
      const found = node.run === run ? node : this.#find(run, node.children);
      if (found) return found;
    }
    return null;
  }

  #list(nodes) {
    return element("ul", { class: "tree" }, ...nodes.map(({ run, children }) => this.#item(run, children)));
  }

  #item(run, children) {
    const own = Math.max(0, run.begin.length - 1); // what a branch has in common with its parent is left out
    const excerpt = visible(run.tokens.slice(own, own + 48).map((token) => token.text).join("")).slice(0, 48);
    const choose = () => {
      this.current = run;
      this.render();
      this.#onchoose(run);
    };
    const where = run.begin.length ? `at token ${run.prompt.length + own}` : `seed ${run.body.seed}`;
    const link = button(`${where}: ${excerpt}`, choose, { class: "link", "aria-current": run === this.current ? "true" : null });
    return element("li", {}, link, children.length ? this.#list(children) : null);
  }
}
