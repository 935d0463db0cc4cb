// This server's endpoints: JSON, arrays and streams, with errors as sentences.

const KEY = "logitd-api-key";

// A failed request. `param` is the wrong field of its body, if known.
export class Problem extends Error {
  constructor(status, message, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";

// The key is kept until the tab closes, and sent only to this server.
export function setApiKey(key) {
  if (key === "") sessionStorage.removeItem(KEY);
  else sessionStorage.setItem(KEY, key);
}

// The model for requests that name none; null means the server's first model.
let model = null;
export const chooseModel = (name) => {
  model = name;
};
export const chosenModel = () => model;

const sentences = {
  401: (message) => `This server needs an API key: enter one at the top of the page. (${message})`,
  429: (message, wait) => `The server is too busy: ${message}. Try again in ${wait ?? 1} s.`,
  503: (message) => `The server is not ready: ${message}.`,
};

async function problem(response) {
  const text = await response.text();
  let message = text.slice(0, 300) || response.statusText;
  let param = null;
  try {
    const reply = JSON.parse(text);
    message = reply.error?.message ?? reply.reason ?? reply.status ?? message;
    param = reply.error?.param;
  } catch {
    // A proxy may answer with HTML.
  }
  if (response.status === 401) document.dispatchEvent(new CustomEvent("key-needed"));
  const sentence = sentences[response.status];
  const whole = sentence ? sentence(message, response.headers.get("retry-after")) : message;
  return new Problem(response.status, whole, param);
}

const named = (path, name) => (name === null ? path : `${path}?model=${encodeURIComponent(name)}`);
export const withModel = (body) => (model === null ? body : { model, ...body });

async function ask(path, { body, signal, accept }) {
  const headers = {};
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  if (accept) headers.Accept = accept;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(withModel(body)), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "The server does not answer: it has stopped, or the network is down.");
  }
  if (!response.ok) throw await problem(response);
  return response;
}

export const get = async (path, signal, name = model) => (await ask(named(path, name), { signal })).json();
export const getText = async (path, signal) => (await ask(path, { signal })).text();
export const post = async (path, body, signal) => (await ask(path, { body, signal })).json();

// Yield the events of a stream. A stream without a last event was cut off.
export async function* events(path, body, signal) {
  const response = await ask(path, { body: { ...body, stream: true }, signal });
  let rest = "";
  try {
    for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
      const parts = (rest + text).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part === "data: [DONE]") return;
        if (!part.startsWith("data: ")) continue; // a comment that keeps the connection open
        const event = JSON.parse(part.slice(6));
        if (event.error) throw new Problem(200, event.error.message, event.error.param);
        yield event;
      }
    }
  } catch (error) {
    if (error instanceof Problem || error.name === "AbortError") throw error;
  }
  throw new Problem(0, "The stream was cut off before its end: the server has stopped, or the network is down.");
}

// An array as npy: { shape, values }, values in C order.
export async function postArray(path, body, signal) {
  const accept = "application/x-npy";
  return readNpy(await (await ask(path, { body, signal, accept })).arrayBuffer());
}

// The format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, version 1.
export function readNpy(buffer) {
  const start = 10 + new DataView(buffer).getUint16(8, true);
  const head = new TextDecoder("latin1").decode(new Uint8Array(buffer, 10, start - 10));
  const [, kind] = /'descr': '([^']+)'/.exec(head);
  const [, sizes] = /'shape': \(([^)]*)\)/.exec(head);
  if (kind !== "<f4") throw new Problem(200, `the reply is an array of ${kind}, not of float32`);
  const shape = sizes.split(",").filter((size) => size.trim() !== "").map(Number);
  return { shape, values: new Float32Array(buffer.slice(start)) };
}
