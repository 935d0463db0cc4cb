// The request of the page as a curl command and as a Python program, to copy.

// In single quotes of a POSIX shell.
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

export function curl(origin, path, body, hasKey) {
  const key = hasKey ? ` \\\n  -H "Authorization: Bearer $LOGITD_API_KEY"` : "";
  return `curl ${origin}${path} -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(JSON.stringify(body))}\n`;
}

// A literal of Python. JSON's strings are Python's as well, except beyond the first plane.
function literal(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, item]) => `${literal(name)}: ${literal(item)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}

export function python(origin, path, body, hasKey) {
  const fields = Object.entries(body).map(([name, value]) => `    ${JSON.stringify(name)}: ${literal(value)},`);
  const headers = hasKey ? `headers = {"Authorization": "Bearer " + os.environ["LOGITD_API_KEY"]}\n` : "";
  const send = hasKey ? ", headers=headers" : "";
  return (
    `${hasKey ? "import os\n\n" : ""}import httpx\n\nbody = {\n${fields.join("\n")}\n}\n${headers}` +
    `reply = httpx.post(${literal(origin + path)}, json=body${send}, timeout=60)\n` +
    `reply.raise_for_status()\nprint(reply.json()["choices"][0]["text"])\n`
  );
}
