// Tokens as visible texts, colored by their surprise or by another share.

import { element, roving } from "./dom.js";
import { surprise } from "./sampling.js";

export const MOST_BITS = 10;

// White space, control characters and empty texts become visible characters.
export const visible = (text) =>
  text === "" ? "∅" : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·").replace(/\p{Cc}/gu, escaped);
const escaped = (control) => `\\x${control.charCodeAt(0).toString(16).padStart(2, "0")}`;

export const percent = (prob) => {
  const value = 100 * prob;
  if (value !== 0 && value < 0.01) return "< 0.01 %";
  return `${value >= 99.995 && value < 100 ? "> 99.99" : value.toFixed(2)} %`;
};

// The texts of consecutive tokens; a split character appears in the token that completes it.
export function texts(tokens, { idsAlone }) {
  if (idsAlone) return tokens.map((token) => `${token.id} `);
  const decoder = new TextDecoder();
  return tokens.map((token) => decoder.decode(new Uint8Array(token.bytes), { stream: true }));
}

function describe(token, { idsAlone, named }) {
  const name = idsAlone ? `id ${token.id}` : `"${named(token)}", id ${token.id}`;
  if (token.logprob === null) return `${name}: the first token has no prediction`;
  return `${name}: ${percent(Math.exp(token.logprob))}, ${surprise(token.logprob).toFixed(1)} bits, rank ${token.rank}`;
}

// An element for a token, which can be chosen. `share`: strength of its color, from 0 to 1.
export const tokenElement = (tag, title, share, onclick, ...children) =>
  element(tag, { class: "token", role: "button", tabindex: -1, title, "aria-label": title, style: { "--share": share.toFixed(3) }, onclick }, ...children);

// A token of a text, colored by its surprise by default.
export function tokenSpan(token, text, { vocabulary, onclick, share = Math.min(1, surprise(token.logprob ?? 0) / MOST_BITS), note = describe(token, vocabulary) }) {
  return tokenElement("span", note, share, onclick, ...lines(text));
}

// Add the tokens of an event of /generate to a completion { prompt, tokens, promptIds }. `promptIds` is
// set if the sent prompt includes a part of the completion.
export function collect(event, { prompt, tokens, promptIds }) {
  const size = promptIds?.length ?? Infinity;
  for (const token of (event.prompts ?? []).flatMap((other) => other.tokens)) (prompt.length < size ? prompt : tokens).push(token);
  for (const choice of event.choices) tokens.push(...(choice.tokens ?? []));
}

// Draw the tokens of a prompt and its completion. Existing ones stay except the last few, whose split
// characters may be complete now.
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

// Line breaks become visible, but copied text stays the same.
const lines = (text) => text.split(/(\n)/).map((part) => (part === "\n" ? element("span", { class: "newline" }, part) : part));

// A text of tokens with arrow keys.
export function tokenText(label) {
  const text = element("pre", { class: "tokens", role: "group", "aria-label": label });
  roving(text, ".token", () => 10);
  return text;
}

// Mark the chosen token.
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
