// Tokens as people can see them, coloured by how unexpected they are or by any other share.

import { element, roving } from "./dom.js";
import { surprise } from "./sampling.js";

export const MOST_BITS = 10;

// White space is shown, and so is a token without a text.
export const visible = (text) =>
  text === "" ? "∅" : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·");

export const percent = (prob) => {
  const value = 100 * prob;
  if (value !== 0 && value < 0.01) return "< 0.01 %";
  return `${value >= 99.995 && value < 100 ? "> 99.99" : value.toFixed(2)} %`;
};

// The texts of tokens in a row: half characters are shown with the token that completes them.
export function texts(tokens, { idsAlone }) {
  if (idsAlone) return tokens.map((token) => `${token.id} `);
  const decoder = new TextDecoder();
  return tokens.map((token) => decoder.decode(new Uint8Array(token.bytes), { stream: true }));
}

function describe(token, { idsAlone, named }) {
  const name = idsAlone ? `id ${token.id}` : `"${named(token)}", id ${token.id}`;
  if (token.logprob === null) return `${name}: nothing before it predicts it`;
  return `${name}: ${percent(Math.exp(token.logprob))}, ${surprise(token.logprob).toFixed(1)} bits, rank ${token.rank}`;
}

// Something that stands for a token and can be chosen. `share`: how strongly it is coloured, 0 to 1.
export const tokenElement = (tag, title, share, onclick, ...children) =>
  element(tag, { class: "token", role: "button", tabindex: -1, title, "aria-label": title, style: { "--share": share.toFixed(3) }, onclick }, ...children);

// One token of a text. Without a `share` it is coloured by its surprise.
export function tokenSpan(token, text, { vocabulary, onclick, share = Math.min(1, surprise(token.logprob ?? 0) / MOST_BITS), note = describe(token, vocabulary) }) {
  return tokenElement("span", note, share, onclick, ...lines(text));
}

// Add the tokens of an event of /generate to a completion: { prompt, tokens }, and promptIds if the
// prompt that was sent ends in the middle of it.
export function collect(event, { prompt, tokens, promptIds }) {
  const size = promptIds?.length ?? Infinity;
  for (const token of (event.prompts ?? []).flatMap((other) => other.tokens)) (prompt.length < size ? prompt : tokens).push(token);
  for (const choice of event.choices) tokens.push(...(choice.tokens ?? []));
}

// The tokens of a prompt and of what follows it, in a text of them. What is there already stays, but
// for the end: half a character may have been completed.
export function drawTokens(text, prompt, tokens, { vocabulary, onclick }) {
  const all = [...prompt, ...tokens];
  const from = Math.max(0, text.childElementCount - 4);
  while (text.childElementCount > from) text.lastElementChild.remove();
  const written = texts(all, vocabulary);
  const focused = document.activeElement?.closest(".tokens") === text;
  for (let index = from; index < all.length; index++) {
    const span = tokenSpan(all[index], written[index], { vocabulary, onclick: () => onclick(index, span) });
    if (index < prompt.length) span.classList.add("of-prompt");
    text.append(span);
  }
  if (!focused && text.firstElementChild) text.firstElementChild.tabIndex = 0;
}

// A line break is shown, without becoming a part of what is copied.
const lines = (text) => text.split(/(\n)/).map((part) => (part === "\n" ? element("span", { class: "newline" }, part) : part));

// A text of tokens through which arrow keys lead.
export function tokenText(label) {
  const text = element("pre", { class: "tokens", role: "group", "aria-label": label });
  roving(text, ".token", () => 10);
  return text;
}

// Which of its tokens was chosen.
export function choose(container, span) {
  for (const other of container.querySelectorAll(".token[aria-pressed=true]")) other.setAttribute("aria-pressed", "false");
  span?.setAttribute("aria-pressed", "true");
}

export const surpriseLegend = () =>
  element(
    "p",
    { class: "legend" },
    "expected ",
    element("span", { class: "ramp", "aria-hidden": "true" }),
    ` ${MOST_BITS} bits or more: unexpected (one in ${(2 ** MOST_BITS).toLocaleString("en")})`,
  );
