"""A real server running models that need their owners' code: it returns the same numbers as the
models' classes."""

import io
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load as load_safetensors
from torch import nn

from logitd.model.checkpoint.checkpoint import CheckpointError, read_checkpoint
from logitd.model.inference.engine.events import TokenEvent
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.sampling.params import SamplingParams
from logitd.service.engine.build import build
from tests.model.owner_code.classes import VOCABULARY, made
from tests.model.owner_code.imported import LETTERS, imported, written
from tests.service.serving import (
    Serving,
    engine_of,
    error_of,
    events,
    serve_settings,
    serving,
)

pytestmark = pytest.mark.slow

NAMES = ("ResidualAttention", "Mixture", "Remembering", "Noisy")
PROMPT = "the cat"
IDS = [LETTERS.index(letter) for letter in PROMPT]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("by-code")
    lens = {"Mixture": ("norm", "head")}
    checkpoints = {name: imported(name, folder, lens.get(name)) for name in NAMES}
    with serving(checkpoints, run_code=True, slots=4) as server:
        yield server


def logits_of(model: nn.Module, ids: Sequence[int]) -> Any:
    """Logits (T, V) of the class itself, as a NumPy array."""
    with torch.no_grad():
        out = model(torch.tensor([list(ids)]))
    return (out[0] if isinstance(out, tuple) else out)[0].numpy()


def greedy(model: nn.Module, ids: Sequence[int], count: int) -> list[int]:
    """Greedy generation in a plain loop over the class."""
    text = list(ids)
    for _ in range(count):
        text.append(int(logits_of(model, text)[-1].argmax()))
    return text[len(ids) :]


@pytest.mark.parametrize("name", ["ResidualAttention", "Mixture", "Remembering"])
def test_greedy_generation_equals_a_loop_over_the_class(name: str, server: Serving) -> None:
    fields = {"model": name, "max_tokens": 20, "temperature": 0, "logprobs": 2}
    reply = server.generate(PROMPT, **fields)
    (choice,) = reply["choices"]
    model = made(name)
    assert choice["token_ids"] == greedy(model, IDS, 20)
    assert reply["checkpoint"]["code"] == f"owner.py:{name}"
    rows = torch.tensor(logits_of(model, [*IDS, *choice["token_ids"]])).log_softmax(-1)
    for position, token in enumerate(choice["tokens"], start=len(IDS) - 1):
        assert token["logprob"] == pytest.approx(float(rows[position, token["id"]]), abs=1e-5)
        assert [top["id"] for top in token["top"]] == rows[position].topk(2).indices.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_seeds_repeat_alone_and_in_company(name: str, server: Serving) -> None:
    fields = {"model": name, "max_tokens": 12, "seed": 5, "n": 3}
    first = server.generate(PROMPT, **fields)["choices"]
    assert len({tuple(choice["token_ids"]) for choice in first}) == 3
    both = server.generate([PROMPT, "a dog ran. "], **fields)["choices"]
    assert [c["token_ids"] for c in both[:3]] == [c["token_ids"] for c in first]
    (alone,) = server.generate(PROMPT, **{**fields, "n": 1})["choices"]
    assert alone["token_ids"] == first[0]["token_ids"]


@pytest.mark.parametrize("name", ["ResidualAttention", "Mixture", "Remembering"])
def test_logits_probs_and_scores_equal_the_class(name: str, server: Serving) -> None:
    expected = logits_of(made(name), IDS)
    body = {"model": name, "prompt": PROMPT, "positions": "all"}
    reply = server.client.post("/logits", json=body, headers={"Accept": "application/x-npy"})
    np.testing.assert_allclose(np.load(io.BytesIO(reply.content)), expected, atol=1e-5)
    probs = server.json("/probs", {"model": name, "prompt": PROMPT, "top_k": VOCABULARY})
    logprobs = torch.tensor(expected).log_softmax(-1).numpy()
    for token in probs["prompts"][0]["tokens"]:
        assert token["logprob"] == pytest.approx(logprobs[-1, token["id"]], abs=1e-5)
    score = server.json("/score", {"model": name, "prompt": PROMPT})
    total = sum(logprobs[i, token_id] for i, token_id in enumerate(IDS[1:]))
    assert score["prompts"][0]["score"]["logprob"] == pytest.approx(total, abs=1e-4)


def test_long_prompts_of_several_callers_are_computed_in_parts(server: Serving) -> None:
    """Five prompts of 40 tokens share the steps of four slots."""
    prompts = [(LETTERS[shift:] + LETTERS)[:40] for shift in range(5)]
    body = {"model": "Mixture", "prompt": prompts, "positions": "all"}
    reply = server.client.post(
        "/logits", json=body, headers={"Accept": "application/vnd.safetensors"}
    )
    arrays = load_safetensors(reply.content)
    for index, prompt in enumerate(prompts):
        ids = [LETTERS.index(letter) for letter in prompt]
        (found,) = [array for key, array in arrays.items() if f"{index}" in key and array.ndim == 2]
        np.testing.assert_allclose(found, logits_of(made("Mixture"), ids), atol=1e-5)


def test_stream_stop_text_and_constraint(server: Serving) -> None:
    plain = server.generate(PROMPT, model="Mixture", max_tokens=20, temperature=0)
    text = plain["choices"][0]["text"]
    stopped = server.generate(PROMPT, model="Mixture", max_tokens=20, temperature=0, stop=text[5:7])
    assert stopped["choices"][0]["text"] == text[: text.index(text[5:7])]
    body = {"model": "Mixture", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    reply = server.post("/generate", {**body, "stream": True})
    parts = [choice["text"] for event in events(reply.content) if isinstance(event, dict)
             for choice in event.get("choices", [])]  # fmt: skip
    assert "".join(parts) == text
    forced = server.generate(PROMPT, model="Mixture", regex="(dog|cow)[.]", seed=1, max_tokens=9)
    assert forced["choices"][0]["text"] in ("dog.", "cow.")


def test_openai_endpoints_and_tokenize(server: Serving) -> None:
    body = {"model": "Remembering", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    reply = server.json("/v1/completions", body)
    ids = greedy(made("Remembering"), IDS, 6)
    assert reply["choices"][0]["text"] == "".join(LETTERS[token_id] for token_id in ids)
    assert server.json("/tokenize", {"model": "Mixture", "prompt": PROMPT})["tokens"]


def test_activations_equal_a_forward_hook(server: Serving) -> None:
    model, found = made("Mixture"), dict[str, Any]()
    for name in ("h.0.mlp", "h.1", "h.1.attn"):

        def keep(module: Any, arguments: Any, output: Any, name: str = name) -> None:
            found[name] = (output[0] if isinstance(output, tuple) else output)[0].numpy()

        model.get_submodule(name).register_forward_hook(keep)
    expected = logits_of(model, IDS)
    body = {"model": "Mixture", "prompt": PROMPT, "stages": [*found, "logits"], "positions": "all"}
    stages = server.json("/activations", body)["prompts"][0]["stages"]
    for name, value in found.items():
        np.testing.assert_allclose(stages[name], value, atol=1e-5)
    np.testing.assert_allclose(stages["logits"], expected, atol=1e-5)
    listed = server.client.get("/stages", params={"model": "Mixture"}).json()["stages"]
    by_name = {stage["name"]: stage for stage in listed}
    assert by_name["h.N.mlp"]["names"] == ["h.0.mlp", "h.1.mlp"]
    assert by_name["h.N.mlp"]["shape"] == [None, 16]


def changed_logits(kind: str, name: str, change: Any) -> Any:
    """The last logits of a class while a hook changes the output (1, T, d) of a submodule."""
    model = made(kind)

    def hook(module: Any, arguments: Any, output: Any) -> Any:
        whole = isinstance(output, tuple)
        value = change((output[0] if whole else output).clone())
        return (value, *output[1:]) if whole else value

    model.get_submodule(name).register_forward_hook(hook)
    return logits_of(model, IDS)[-1]


def _add(value: Any) -> Any:
    value[:, 2] += 2.0
    return value


@pytest.mark.parametrize(
    ("name", "intervention", "change"),
    [
        ("h.0.attn", {"operation": "zero"}, lambda value: value * 0),
        ("h.1.mlp", {"operation": "scale", "factor": -3}, lambda value: value * -3),
        ("h.0", {"operation": "add", "values": [2.0] * 16, "positions": [2]}, _add),
    ],
)
def test_interventions_equal_a_hook_that_changes_the_value(
    name: str, intervention: dict[str, Any], change: Any, server: Serving
) -> None:
    changes = [{"stage": name, **intervention}]
    body = {"model": "Mixture", "prompt": PROMPT, "interventions": changes}
    reply = server.json("/logits", body)["prompts"][0]["logits"]
    np.testing.assert_allclose(reply[0], changed_logits("Mixture", name, change), atol=1e-5)
    # While it generates, each pass computes the changed sequence.
    fields = {"model": "Mixture", "max_tokens": 1, "temperature": 0, "interventions": changes}
    (choice,) = server.generate(PROMPT, **fields)["choices"]
    assert choice["token_ids"] == [int(changed_logits("Mixture", name, change).argmax())]


def test_patching_sets_the_values_of_another_prompt(server: Serving) -> None:
    other = "a dog ."
    model, taken = made("Mixture"), list[Any]()
    model.get_submodule("h.0").register_forward_hook(lambda m, a, output: taken.append(output))
    logits_of(model, [LETTERS.index(letter) for letter in other])
    expected = changed_logits("Mixture", "h.0", lambda value: taken[0])
    patch = {"stage": "h.0", "operation": "set", "from": {"prompt": other}}
    body = {"model": "Mixture", "prompt": PROMPT, "interventions": [patch]}
    reply = server.json("/logits", body)["prompts"][0]["logits"]
    np.testing.assert_allclose(reply[0], expected, atol=1e-5)
    grid = server.json(
        "/sweep",
        {
            "model": "Mixture", "prompt": PROMPT, "token_id": 3, "over": ["layers"],
            "vary": {"stage": "h.*.attn", "operation": "zero"},
        },
    )  # fmt: skip
    for layer, value in enumerate(grid["grid"]):
        zeroed = changed_logits("Mixture", f"h.{layer}.attn", lambda value: value * 0)
        assert value == pytest.approx(zeroed[3], abs=1e-5)


def test_lens_reads_the_named_norm_and_head(server: Serving) -> None:
    reply = server.json("/lens", {"model": "Mixture", "prompt": PROMPT, "top_k": 1})
    layers = reply["prompts"][0]["positions"][0]["layers"]
    assert [layer["layer"] for layer in layers] == [0, 1, 2]
    model, streams = made("Mixture"), list[Any]()
    for block in model.get_submodule("h").children():
        block.register_forward_hook(lambda module, arguments, output: streams.append(output))
    logits_of(model, IDS)
    for layer, stream in zip(layers[1:], streams, strict=True):
        with torch.no_grad():
            row = model.head(model.norm(stream))[0, -1].log_softmax(-1)
        assert layer["top"][0]["id"] == int(row.argmax())
        assert layer["top"][0]["logprob"] == pytest.approx(float(row.max()), abs=1e-5)
    assert layers[-1]["divergence"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/hidden_states", "hidden states"),
        ("/attention", "attention weights"),
        ("/attributions", "attributions"),
        ("/circuit", "circuits"),
    ],
)
def test_unsupported_output_of_the_code_is_refused(path: str, what: str, server: Serving) -> None:
    error = server.refused(path, {"model": "Mixture", "prompt": PROMPT})
    assert f"owner's code (owner.py:Mixture), which cannot return {what}" in error.message
    lens = server.refused("/lens", {"model": "Remembering", "prompt": PROMPT})
    assert "--lens-norm and --lens-head" in lens.message
    stage = {"model": "Mixture", "prompt": PROMPT, "stages": ["blocks.0.attention.q"]}
    assert "the stages are the submodules embed" in server.refused("/activations", stage).message


def test_info_reports_running_code(server: Serving) -> None:
    info = server.client.get("/info", params={"model": "Noisy"}).json()
    assert info["checkpoint"]["code"] == "owner.py:Noisy"
    assert info["config"]["kind"] == "code"
    assert not info["config"]["deterministic"]
    assert "each token computes the sequence again: 48 tokens " in info["decoding"]


def test_deadline_ends_a_generation(server: Serving) -> None:
    body = {"model": "ResidualAttention", "prompt": PROMPT, "max_tokens": 40, "timeout": 1e-3}
    response = server.post("/generate", body)
    assert response.status_code == 504, response.text


def test_crash_and_hang_end_only_the_requests_of_their_step(
    tmp_path: Path, logged_errors: list[str]
) -> None:
    """The server keeps answering while the model's process hangs, and restarts that process."""
    expected = greedy(made("Fragile"), IDS, 4)
    with serving(imported("Fragile", tmp_path), run_code=True) as server:
        engine_of(server)._runner.model.network.seconds = 2.0
        for bad, sentence in ((7, "ended with status 3"), (9, "did not answer within 2 seconds")):
            with ThreadPoolExecutor(1) as pool:
                failing = pool.submit(server.post, "/generate", {"prompt": [bad] * 3})
                while not failing.done():
                    began = time.monotonic()
                    assert server.client.get("/health").status_code == 200
                    assert time.monotonic() - began < 1
            assert error_of(failing.result(), 500).code == "engine"
            (line,) = logged_errors
            assert f"owner.py:Fragile {sentence}" in line
            logged_errors.clear()
            (choice,) = server.generate(PROMPT, max_tokens=4, temperature=0)["choices"]
            assert choice["token_ids"] == expected


def test_server_refuses_code_without_the_flag(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="add --run-code"):
        build(serve_settings(written(tmp_path)))


def test_weights_of_the_same_class_can_be_reloaded(tmp_path: Path) -> None:
    first, second = (imported("Recurrent", tmp_path, seed=seed) for seed in (1, 2))
    built = build(serve_settings(first, run_code=True))
    engine = built.engine
    try:
        loaded = built.load_weights(second, read_checkpoint(second).weights_sha256)
        engine.swap_weights(engine.prepare_weights(loaded))
        params = SamplingParams(max_tokens=6, temperature=0, seed=0)
        engine.add(GenerationRequest(request_id="after", token_ids=tuple(IDS), params=params))
        tokens = []
        while engine.has_work():
            tokens += [e.token_id for e in engine.step().events if isinstance(e, TokenEvent)]
        assert tokens == greedy(made("Recurrent", seed=2), IDS, 6)
        assert tokens != greedy(made("Recurrent"), IDS, 6)
    finally:
        engine.close()


def test_batched_rows_agree_up_to_rounding(tmp_path: Path) -> None:
    path = imported("ResidualAttention", tmp_path)
    with serving(path, run_code=True, batch_code=True) as server:
        fields = {"max_tokens": 10, "temperature": 0}
        choices = server.generate([PROMPT, "a", "dogs, "], **fields)["choices"]
        model = made("ResidualAttention")
        for prompt, choice in zip([PROMPT, "a", "dogs, "], choices, strict=True):
            ids = [LETTERS.index(letter) for letter in prompt]
            assert choice["token_ids"] == greedy(model, ids, 10)
        assert "bits may differ" in server.client.get("/info").json()["decoding"]
