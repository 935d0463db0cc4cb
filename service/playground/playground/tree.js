// Branches: completions that continue a changed one, as a tree.

import { button, element, heading } from "./dom.js";
import { visible } from "./tokens.js";

export class Tree {
  #place;
  #onchoose;
  #nodes = []; // { run, parent: the changed run, or null }
  current = null; // the shown run

  constructor(place, onchoose) {
    this.#place = place;
    this.#onchoose = onchoose;
  }

  add(run, parent) {
    this.#nodes.push({ run, parent });
    this.current = run;
    this.render();
  }

  // Called when a completion grows, because that changes names.
  render() {
    this.#place.hidden = this.#nodes.length < 2;
    this.#place.replaceChildren(heading("Branches"), this.#list(null) ?? "");
  }

  // The branches of a run, each with its own below it.
  #list(parent) {
    const runs = this.#nodes.filter((node) => node.parent === parent).map(({ run }) => run);
    return runs.length ? element("ul", { class: "tree" }, ...runs.map((run) => element("li", {}, this.#link(run), this.#list(run)))) : null;
  }

  #link(run) {
    const own = Math.max(0, run.begin.length - 1); // without the tokens of its parent
    const excerpt = visible(run.tokens.slice(own, own + 48).map((token) => token.text).join("")).slice(0, 48);
    const choose = () => {
      this.current = run;
      this.render();
      this.#onchoose(run);
    };
    const where = run.begin.length ? `at token ${run.prompt.length + own}` : `seed ${run.body.seed}`;
    return button(`${where}: ${excerpt}`, choose, { class: "link", "aria-current": run === this.current ? "true" : null });
  }
}
