"""Clients of other projects, run against the bundled checkpoint. Prints a Markdown table.

    .venv/bin/python benchmarks/clients.py PYTHON ...

serves a copy of the bundled checkpoint with a chat template, and lets each PYTHON run the clients
that are installed in its environment. Several environments are needed, because the clients'
requirements conflict with each other and with those of logitd; `service/openai/README.md` says how
to create them. Only the loopback network is used. A check tests whether the client gets the kind of
reply that it requests, not whether the reply is good. Open WebUI itself is not run: this script
sends the calls that Open WebUI would send.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CHECKPOINT = ROOT / "checkpoints" / "python-small"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)
ADDRESS = "LOGITD_CLIENTS_URL"
"""Environment variable that passes the server's address to the processes of the clients."""
URL = os.environ.get(ADDRESS, "")
MODEL = "gpt-4o-mini"
CHAT = [{"role": "user", "content": "What is there?"}]
PROMPT = "import os"
LIMIT = 400
START_SECONDS = 120
Checks = Iterator[tuple[str, Callable[[], Any]]]


def schema_of(pydantic: Any) -> Any:
    """A pydantic model with two fields, like the ones that users write."""
    return pydantic.create_model("Item", name=(str, ...), count=(int, ...))


def openai_client() -> Checks:
    openai = importlib.import_module("openai")
    model = schema_of(importlib.import_module("pydantic"))
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
    asked = {"model": MODEL, "messages": CHAT, "max_tokens": LIMIT}
    tool = {"type": "function", "function": {"name": "f", "parameters": model.model_json_schema()}}
    named = {"type": "function", "function": {"name": "f"}}

    def streamed() -> Any:
        with client.chat.completions.stream(**asked, tools=[tool], tool_choice=named) as stream:
            message = stream.get_final_completion().choices[0].message
        return model.model_validate_json(message.tool_calls[0].function.arguments)

    yield (
        "completions",
        lambda: (
            client.completions.create(
                model=MODEL,
                prompt=PROMPT,
                max_tokens=100_000,
                logprobs=1,
                extra_body={"ignore_eos": True},  # otherwise it may end before the context does
            )
            .choices[0]
            .finish_reason
            == "length"
        ),
    )
    yield (
        "chat.completions.parse",
        lambda: (
            client.chat.completions.parse(**asked, response_format=model).choices[0].message.parsed
        ),
    )
    yield "chat with tools, streamed", streamed
    yield (
        "extra_body structured_outputs",
        lambda: (
            client.chat.completions.create(
                **asked, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
            )
            .choices[0]
            .message.content
            in ("yes", "no")
        ),
    )


def instructor_client() -> Checks:
    instructor, openai = map(importlib.import_module, ("instructor", "openai"))
    model = schema_of(importlib.import_module("pydantic"))

    def ask(mode: str) -> Any:
        client = instructor.from_openai(
            openai.OpenAI(base_url=f"{URL}/v1", api_key="none"), mode=instructor.Mode[mode]
        )
        return client.chat.completions.create(
            model=MODEL, messages=CHAT, response_model=model, max_tokens=LIMIT
        )

    for mode in ("TOOLS", "JSON", "JSON_SCHEMA"):
        yield f"response_model, Mode.{mode}", functools.partial(ask, mode)


def langchain_client() -> Checks:
    langchain = importlib.import_module("langchain_openai")
    model = schema_of(importlib.import_module("pydantic"))
    chat = langchain.ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, max_tokens=LIMIT)
    yield "invoke", lambda: chat.invoke("What is there?").content
    yield "stream", lambda: "".join(chunk.content for chunk in chat.stream("What?"))

    def structured(method: str) -> Any:
        return chat.with_structured_output(model, method=method).invoke("What is there?")

    for method in ("json_schema", "function_calling"):
        yield f"with_structured_output({method})", functools.partial(structured, method)
    yield (
        "bind_tools, tool_choice any",
        lambda: (
            chat.bind_tools([model], tool_choice="any")
            .invoke("What is there?")
            .tool_calls[0]["args"]
        ),
    )


def litellm_client() -> Checks:
    litellm = importlib.import_module("litellm")
    asked = {"api_base": f"{URL}/v1", "api_key": "none", "max_tokens": LIMIT}
    yield (
        "completion",
        lambda: (
            litellm.completion(model=f"openai/{MODEL}", messages=CHAT, **asked)
            .choices[0]
            .message.content
        ),
    )
    yield (
        "completion, stream",
        lambda: "".join(
            chunk.choices[0].delta.content or ""
            for chunk in litellm.completion(
                model=f"openai/{MODEL}", messages=CHAT, stream=True, **asked
            )
        ),
    )
    yield (
        "text_completion",
        lambda: (
            litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt=PROMPT, **asked)
            .choices[0]
            .text
        ),
    )


def llama_index_client() -> Checks:
    like = importlib.import_module("llama_index.llms.openai_like").OpenAILike
    asked = {"api_base": f"{URL}/v1", "api_key": "none", "model": MODEL, "max_tokens": LIMIT}
    plain, chat = like(**asked, is_chat_model=False), like(**asked, is_chat_model=True)
    message = importlib.import_module("llama_index.core.llms").ChatMessage
    yield "complete", lambda: plain.complete(PROMPT).text
    yield "stream_complete", lambda: [part.delta for part in plain.stream_complete(PROMPT)]
    yield "chat", lambda: chat.chat([message(role="user", content="What?")]).message.content


def huggingface_client() -> Checks:
    client = importlib.import_module("huggingface_hub").InferenceClient(base_url=f"{URL}/v1")
    yield (
        "chat_completion",
        lambda: client.chat_completion(CHAT, max_tokens=LIMIT).choices[0].message.content,
    )


def outlines_client() -> Checks:
    outlines, openai = map(importlib.import_module, ("outlines", "openai"))
    model = schema_of(importlib.import_module("pydantic"))
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
    server = outlines.from_vllm(client, MODEL)
    literal = importlib.import_module("typing").Literal["yes", "no"]
    regex = importlib.import_module("outlines.types").Regex
    yield (
        "from_vllm, schema",
        lambda: model.model_validate_json(server("What is there?", model, max_tokens=LIMIT)),
    )
    yield "from_vllm, choice", lambda: server("Well?", literal, max_tokens=9) in ("yes", "no")
    yield "from_vllm, regex", lambda: server("Well?", regex("[a-c]{3}"), max_tokens=9)
    yield (
        "from_openai, schema",
        lambda: model.model_validate_json(
            outlines.from_openai(client, MODEL)("What?", model, max_tokens=LIMIT)
        ),
    )


def guidance_client() -> Checks:
    guidance = importlib.import_module("guidance")
    server = guidance.models.OpenAI(MODEL, base_url=f"{URL}/v1", api_key="none")

    def asked(grammar: Any) -> Any:
        with guidance.user():
            state = server + "What is there?"
        with guidance.assistant():
            state += grammar
        return state["answer"]

    yield "gen", lambda: asked(guidance.gen(name="answer", max_tokens=20))
    yield (
        "json",
        lambda: json.loads(
            asked(
                guidance.json(name="answer", schema=schema_of(importlib.import_module("pydantic")))
            )
        ),
    )


def llm_client() -> Checks:
    models = importlib.import_module("llm.default_plugins.openai_models")

    def made(kind: Any) -> Any:
        model = kind("logitd", model_name=MODEL, api_base=f"{URL}/v1")
        model.key = "none"
        return model

    yield "Completion.prompt", lambda: made(models.Completion).prompt(PROMPT, stream=False).text()
    yield "Chat.prompt, stream", lambda: "".join(made(models.Chat).prompt("What is there?"))


def lm_eval_client() -> Checks:
    """Run lm_eval on a task defined here, because its own tasks would be downloaded."""
    model_args = f"base_url={URL}/v1/completions,model={MODEL},tokenizer_backend=remote"
    lines = [{"text": "import", "right": " os", "wrong": " zq"} for _ in range(4)]
    task = {
        "task": "local",
        "dataset_path": "json",
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": ["{{right}}", "{{wrong}}"],
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }

    def run() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder, "data.jsonl")
            data.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
            described = {**task, "dataset_kwargs": {"data_files": {"test": str(data)}}}
            Path(folder, "local.yaml").write_text(json.dumps(described), encoding="utf-8")
            command = [
                *(sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"),
                *("--model_args", f"{model_args},max_length=512", "--tasks", "local"),
                *("--include_path", folder),
            ]
            offline = {**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
            done = subprocess.run(command, env=offline, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
        return "|acc" in done.stdout.replace(" ", "")

    yield "local-completions, multiple choice", run


def open_webui_calls() -> Checks:
    """Send the calls that Open WebUI makes to an OpenAI connection."""

    def send(path: str, body: Any = None) -> str:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": "Bearer none", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{URL}{path}", content, headers)
        with urllib.request.urlopen(request) as reply:
            text: str = reply.read().decode()
        return text

    def streamed() -> bool:
        options = {"include_usage": True}
        body = {"model": MODEL, "messages": CHAT, "stream": True, "stream_options": options}
        return send("/v1/chat/completions", body).endswith("data: [DONE]\n\n")

    yield "GET /v1/models", lambda: json.loads(send("/v1/models"))["data"][0]["id"]
    yield "a chat, streamed", streamed
    yield (
        "a title, with max_completion_tokens",
        lambda: json.loads(
            send(
                "/v1/chat/completions",
                {"model": MODEL, "messages": CHAT, "stream": False, "max_completion_tokens": 1000},
            )
        )["choices"][0]["message"]["content"],
    )


CLIENTS: dict[str, Callable[[], Checks]] = {
    "openai": openai_client,
    "instructor": instructor_client,
    "langchain-openai": langchain_client,
    "litellm": litellm_client,
    "llama-index-llms-openai-like": llama_index_client,
    "huggingface_hub": huggingface_client,
    "outlines": outlines_client,
    "guidance": guidance_client,
    "llm": llm_client,
    "lm_eval": lm_eval_client,
}


BY_HAND = "Open WebUI"
"""The client that is not run: this script sends its calls instead."""


def row(client: str, what: str, check: Callable[[], Any]) -> str:
    """A line of the table: the result of a check, or how it failed."""
    try:
        result = check()
        outcome = "works" if result else f"gave {result!r}"
    except Exception as error:  # the table reports any error of a client
        message = " ".join(str(error).split()).replace("|", "/")
        outcome = f"{type(error).__name__}: {message[:160]}"
    return f"| {client} | {what} | {outcome} |"


def run_clients() -> None:
    """Run the checks of each client that is installed for this Python, and print a row for each
    check."""
    for client, checks in CLIENTS.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(client)
            try:
                for what, check in checks():
                    print(row(f"{client} {version}", what, check), flush=True)
            except Exception as error:  # the client cannot be created
                print(f"| {client} {version} | | {type(error).__name__}: {error} |", flush=True)


def installed(python: str) -> set[str]:
    """The clients that are installed for a Python interpreter."""
    code = (
        "import importlib.metadata as m, json; print(json.dumps("
        "[d.metadata['Name'].lower() for d in m.distributions()]))"
    )
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    names = {name.replace("-", "_") for name in json.loads(said)}
    return {client for client in CLIENTS if client.replace("-", "_") in names}


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Run `logitd serve` with a copy of the bundled checkpoint that has a chat template. Yields its
    address."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(CHECKPOINT, Path(folder, CHECKPOINT.name)))
        config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        config["tokenizer"]["chat_template"] = TEMPLATE
        (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        logitd = Path(sys.executable).with_name("logitd")
        command: list[str | Path] = [logitd, "serve", copy, "--port", str(port), "--any-model-name"]
        url = f"http://127.0.0.1:{port}"
        with subprocess.Popen(command, stdout=sys.stderr) as process:
            try:
                _wait(url, process)
                yield url
            finally:
                process.terminate()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError):
            urllib.request.urlopen(f"{url}/health/ready").close()
            return
        time.sleep(0.2)
    raise SystemExit("the server did not start; its messages are above")


def main() -> None:
    if URL and BY_HAND in sys.argv:
        for what, check in open_webui_calls():
            print(row(f"{BY_HAND}'s calls, by hand", what, check), flush=True)
        return
    if URL:
        run_clients()
        return
    pythons = sys.argv[1:]
    if not pythons:
        raise SystemExit(
            "usage: python benchmarks/clients.py PYTHON ...  (each with clients installed)"
        )
    missing = set(CLIENTS).difference(*map(installed, pythons))
    print("| client | what | result |\n|---|---|---|", flush=True)
    with server() as url:
        # Otherwise litellm would look for prices on its maker's servers.
        variables = {**os.environ, ADDRESS: url, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        printed: set[str] = set()
        commands = [[python, __file__] for python in pythons]
        for command in [*commands, [sys.executable, __file__, BY_HAND]]:
            done = subprocess.run(
                command, env=variables, stdout=subprocess.PIPE, text=True, check=True
            )
            for line in done.stdout.splitlines():  # a client may be in several environments
                if line.startswith("|") and line not in printed:
                    print(line, flush=True)
                    printed.add(line)
    for client in sorted(missing):
        print(f"| {client} | | not installed |")


if __name__ == "__main__":
    main()
