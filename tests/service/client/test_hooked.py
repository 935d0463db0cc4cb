"""HookedCalls of both clients, compared with HookedGPT on the same weights."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from logitd import AsyncClient, Client
from logitd.model.hooked.model import HookedGPT
from logitd.model.hooked.points import HookPoint
from logitd.model.text.tokenizer import END_OF_TEXT, SPLIT_PATTERN, Tokenizer
from logitd.model.transformer.gpt import GPT
from tests.model.factories import (
    FAMILIES,
    byte_tokenizer,
    save_tiny_checkpoint,
    tiny_config,
    tiny_gpt,
)
from tests.service.serving import TEST_TIMEOUT, Serving, serving

TEXT = "The cat sat"


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[Client]:
    with httpx.Client(trust_env=False) as http:
        yield Client(server.url, http=http, timeout=TEST_TIMEOUT)


def check_cache(client: Client, gpt: GPT) -> None:
    """Compare all stages from the server with the stages computed in process."""
    model = HookedGPT(gpt, byte_tokenizer(), "tiny")
    logits, cache = client.run_with_cache([TEXT, TEXT[::-1]])
    with torch.no_grad():
        expected_logits, expected = model.run_with_cache([TEXT, TEXT[::-1]])
    np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=3e-4)
    assert len(cache) > 12 * gpt.config.n_layer
    for name, array in cache.items():
        if name in expected:  # TransformerLens has no middle of a parallel block
            np.testing.assert_allclose(array, expected[name], rtol=0, atol=3e-4, err_msg=name)
    assert set(cache) - set(expected) <= {
        f"blocks.{layer}.hook_resid_mid" for layer in range(gpt.config.n_layer)
    }


def test_cache_has_the_names_and_values_of_the_one_in_process(client: Client, gpt: GPT) -> None:
    check_cache(client, gpt)


def test_cache_of_partly_rotated_heads_has_their_order(tmp_path: Path) -> None:
    gpt = tiny_gpt(tiny_config(**FAMILIES["neox"]))
    save_tiny_checkpoint(tmp_path / "neox", gpt)
    with serving(tmp_path / "neox") as running, httpx.Client(trust_env=False) as http:
        check_cache(Client(running.url, http=http, timeout=TEST_TIMEOUT), gpt)


def test_filter_and_short_names_choose_stages(client: Client) -> None:
    chosen = client.run_with_cache(TEXT, lambda name: "pattern" in name, remove_batch_dim=True)[1]
    assert list(chosen) == [f"blocks.{n}.attn.hook_pattern" for n in range(3)]
    assert chosen["pattern", -1] is chosen["blocks.2.attn.hook_pattern"]
    tokens = len(TEXT) + 1
    assert chosen["pattern", 0].shape == (4, tokens, tokens)
    with pytest.raises(KeyError):
        chosen["z", 0]
    with pytest.raises(ValueError, match=r"blocks\.9"):
        client.run_with_cache(TEXT, "blocks.9.hook_mlp_out")
    with pytest.raises(ValueError, match=r"\[2, 4\] tokens"):
        client.run_with_cache(["a", "abc"], [])


def test_change_acts_as_a_function_in_process(client: Client, gpt: GPT) -> None:
    model = HookedGPT(gpt, byte_tokenizer(), "tiny")
    row = np.linspace(-1, 1, 32).tolist()

    def zero_head(value: torch.Tensor, *, hook: HookPoint) -> torch.Tensor:
        return value.index_fill(2, torch.tensor([2]), 0.0)

    def add_row(value: torch.Tensor, *, hook: HookPoint) -> torch.Tensor:
        return value + torch.tensor(row)

    cases: list[tuple[str, dict[str, Any], Any]] = [
        ("blocks.1.attn.hook_z", {"operation": "zero", "heads": [2]}, zero_head),
        ("blocks.2.hook_resid_pre", {"operation": "add", "values": row}, add_row),
        ("blocks.0.hook_mlp_out", {"operation": "scale", "factor": 3.0}, lambda v, hook: 3 * v),
    ]
    for name, change, function in cases:
        logits = client.run_with_hooks(TEXT, fwd_hooks=[(name, change)])
        with torch.no_grad():
            expected = model.run_with_hooks(TEXT, fwd_hooks=[(name, function)])
        np.testing.assert_allclose(logits, expected, rtol=0, atol=3e-4, err_msg=name)


def test_texts_in_changes_are_encoded_as_the_input(client: Client) -> None:
    source = {"prompt": TEXT}
    expected = client.run_with_hooks(TEXT)
    for change in (
        {"operation": "set", "from": source},
        {"operation": "add", "from": source, "minus": source},
    ):
        logits = client.run_with_hooks(TEXT, fwd_hooks=[("blocks.1.hook_resid_post", change)])
        np.testing.assert_allclose(logits, expected, rtol=0, atol=3e-4)


def test_changes_join_the_field_interventions(client: Client) -> None:
    name, change = "blocks.1.hook_mlp_out", {"operation": "zero"}
    expected = client.run_with_hooks(TEXT, fwd_hooks=[(name, change), (name, change)])
    other = {"stage": "blocks.2.mlp.out", **change}
    for more, equal in (([], True), ([other], False)):
        logits = client.run_with_hooks(TEXT, fwd_hooks=[(name, change)], interventions=more)
        assert np.allclose(logits, expected, atol=1e-5) == equal


def test_call_may_name_another_model(tmp_path: Path) -> None:
    other = tiny_gpt(tiny_config(n_layer=1, vocab_size=258))
    merging = Tokenizer(
        ranks={**{bytes([byte]): byte for byte in range(256)}, b"Th": 256},
        pattern=SPLIT_PATTERN,
        special_tokens={END_OF_TEXT: 257},
    )
    paths = {
        "one": save_tiny_checkpoint(tmp_path / "one").path,
        "two": save_tiny_checkpoint(tmp_path / "two", other, tokenizer=merging).path,
    }
    with serving(paths) as running, httpx.Client(trust_env=False) as http:
        first = Client(running.url, http=http, timeout=TEST_TIMEOUT)
        second = Client(running.url, http=http, timeout=TEST_TIMEOUT, model="two")
        logits, cache = first.run_with_cache(TEXT, model="two")
        expected, own = second.run_with_cache(TEXT)
        np.testing.assert_array_equal(logits, expected)
        assert set(cache) == set(own)
        assert len(set(first.run_with_cache(TEXT)[1])) > len(own)


def test_asynchronous_client_has_the_same_calls(server: Serving, client: Client) -> None:
    changes = [("blocks.1.attn.hook_z", {"operation": "zero", "heads": [2]})]

    async def both() -> tuple[Any, Any]:
        async with httpx.AsyncClient(trust_env=False) as http:
            other = AsyncClient(server.url, http=http, timeout=TEST_TIMEOUT)
            return await asyncio.gather(
                other.run_with_cache(TEXT, "blocks.1.hook_mlp_out", fwd_hooks=changes),
                other.run_with_hooks(TEXT, fwd_hooks=changes),
            )

    (logits, cache), hooked = asyncio.run(both())
    expected, own = client.run_with_cache(TEXT, "blocks.1.hook_mlp_out", fwd_hooks=changes)
    np.testing.assert_array_equal(logits, expected)
    np.testing.assert_array_equal(hooked, expected)
    np.testing.assert_array_equal(cache["mlp_out", 1], own["mlp_out", 1])


def test_function_is_refused_with_the_reason(client: Client) -> None:
    hook: Any = lambda value, hook: value  # noqa: E731
    with pytest.raises(TypeError, match=r"fwd_hooks\[0\].*does not run.*LLM"):
        client.run_with_hooks(TEXT, fwd_hooks=[("blocks.0.hook_mlp_out", hook)])
