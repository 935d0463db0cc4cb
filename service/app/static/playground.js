// The playground: stream a completion, and see the distribution behind every token of it.
// Plain fetch against this server's own endpoints; no library, no build step.

const $ = (id) => document.getElementById(id);
const TOP = 10;
let running = null; // AbortController of the stream in progress
let idsAlone = false; // the model has no vocabulary: prompts and tokens are ids

// Server-sent events of a POST: yields the JSON of each, however the network cuts the bytes.
async function* events(response) {
  let rest = "";
  for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
    const parts = (rest + text).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) throw new Error((await response.json()).error.message);
  return response;
}

function say(text, isError = false) {
  $("status").textContent = text;
  $("status").className = isError ? "error" : "";
}

// A token as a person can see it: white space is shown, an empty text is named.
const visible = (text) => (text === "" ? "∅" : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥"));
const named = (token) => (idsAlone ? `id ${token.id}` : `"${visible(token.text)}"`);

// The prompt as the server takes it: a text, or token ids where the model knows no text.
function prompt() {
  const written = $("prompt").value;
  if (!idsAlone) return written;
  const words = written.split(/[\s,]+/).filter((word) => word !== "");
  if (!words.every((word) => /^[0-9]+$/.test(word))) {
    throw new Error("this model has no vocabulary: write token ids with spaces between them, for example 0 1 2");
  }
  return words.map(Number);
}

function showDistribution(title, tokens, note) {
  $("distribution-title").textContent = title;
  $("distribution-note").textContent = note;
  const rows = tokens.map((token) => {
    const row = document.createElement("tr");
    const bar = document.createElement("div");
    bar.style.width = `${100 * Math.exp(token.logprob)}%`;
    const cells = [token.rank, named(token), bar, `${(100 * Math.exp(token.logprob)).toFixed(2)} %`];
    for (const content of cells) {
      const cell = document.createElement("td");
      cell.append(content);
      if (content === bar) cell.className = "bar";
      row.append(cell);
    }
    return row;
  });
  $("distribution").tBodies[0].replaceChildren(...rows);
}

// One token of the completion; its bytes may be half a character, so a run of such tokens shows as
// what its bytes say once they are whole.
function appendToken(token, decoder) {
  const span = document.createElement("span");
  span.textContent = idsAlone ? `${token.id} ` : decoder.decode(new Uint8Array(token.bytes), { stream: true });
  span.style.setProperty("--p", Math.exp(token.logprob));
  span.title = `${visible(token.text)}  id ${token.id}  ${(100 * Math.exp(token.logprob)).toFixed(2)} %  rank ${token.rank}`;
  span.addEventListener("click", () => {
    document.querySelector("pre .chosen")?.classList.remove("chosen");
    span.classList.add("chosen");
    showDistribution(`In the place of ${named(token)}`, token.top, "before temperature and filters");
  });
  $("completion").append(span);
}

async function showNextToken() {
  const asked = prompt();
  if (asked.length === 0) return;
  const reply = await (await post("/probs", { prompt: asked, top_k: TOP })).json();
  const { tokens, mass, entropy } = reply.prompts[0];
  const note = `${(100 * mass).toFixed(1)} % of the mass; entropy ${entropy.toFixed(3)} nats`;
  showDistribution("Next token after the prompt", tokens, note);
}

function request() {
  const body = { prompt: prompt(), logprobs: TOP, stream: true };
  for (const name of ["temperature", "top_k", "top_p", "max_tokens", "seed"]) {
    if ($(name).value !== "") body[name] = Number($(name).value);
  }
  return body;
}

async function generate() {
  running = new AbortController();
  $("go").disabled = true;
  $("stop").disabled = false;
  $("completion").replaceChildren();
  say("...");
  const decoder = new TextDecoder();
  try {
    await showNextToken();
    for await (const event of events(await post("/generate", request(), running.signal))) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) {
        for (const token of choice.tokens ?? []) appendToken(token, decoder);
      }
      if (event.usage) {
        const rate = event.timings.tokens_per_second.toFixed(0);
        say(`${event.usage.completion_tokens} tokens, ${rate} tokens/s, first after ${event.timings.ttft_ms.toFixed(1)} ms, seed ${event.seed}`);
      }
    }
  } catch (error) {
    say(error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError");
  } finally {
    running = null;
    $("go").disabled = false;
    $("stop").disabled = true;
  }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
$("stop").addEventListener("click", () => running?.abort());
$("prompt").addEventListener("change", () => showNextToken().catch((error) => say(error.message, true)));

async function start() {
  const response = await fetch("/info");
  if (response.status === 503) {
    setTimeout(start, 500);
    return;
  }
  const info = await response.json();
  const loss = info.checkpoint.val_loss === null ? "" : `, validation loss ${info.checkpoint.val_loss.toFixed(3)}`;
  $("model").textContent =
    `${info.model}: ${(info.parameters / 1e6).toFixed(1)} M parameters, step ${info.checkpoint.step}${loss}, ` +
    `context ${info.limits.context_length}, ${info.dtype} on ${info.device}`;
  idsAlone = info.vocabulary === "none";
  if (idsAlone) {
    $("prompt-label").textContent = "Prompt: token ids, because this model has no vocabulary";
    $("prompt").value = "0";
  }
  await showNextToken();
}

start().catch((error) => say(error.message, true));
