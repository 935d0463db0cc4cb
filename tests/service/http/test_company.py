"""Requests that look inside a model, sent at the same time as seeded generations: each returns the
same bits as when it is sent alone."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from logitd.service.settings.model_source import ModelSource
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt
from tests.model.sae.dictionaries import write_random_autoencoder
from tests.service.http.asking import BY_NAME, PROMPT, SMALLEST
from tests.service.serving import Serving, serving

FEATURES = "blocks.1.output.sae.mine"
STEERED = {"stage": FEATURES, "units": [3], "operation": "add", "values": [4.0]}
LOOKING: list[tuple[str, dict[str, Any]]] = [
    *((each.path, dict(SMALLEST[name])) for name, each in BY_NAME.items() if name != "generate"),
    ("/activations", {"prompt": PROMPT, "stages": [FEATURES, "blocks.2.mlp.hidden"]}),
    ("/logits", {"prompt": PROMPT, "interventions": [STEERED]}),
    ("/attributions", {"prompt": PROMPT, "stages": ["blocks.1.output", "blocks.0.mlp.hidden"]}),
    ("/circuit", {"prompt": PROMPT[:20], "share": 0.8}),
]
CHANGES: list[dict[str, Any]] = [{}, {}, {"interventions": [STEERED]}, {"temperature": 0.5}]
TEXTS = [
    (
        "/generate",
        {"prompt": PROMPT[seed:], "max_tokens": 24, "seed": seed, "logprobs": 2, **change},
    )
    for seed, change in enumerate(CHANGES)
]
VARYING = ("id", "created", "usage", "timings")
"""Members of a reply that belong to the request, not to its results."""


@pytest.fixture(scope="module")
def featured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder: Path = tmp_path_factory.mktemp("company")
    info = save_tiny_checkpoint(folder / "tiny", gpt=tiny_gpt(tiny_config()))
    write_random_autoencoder(
        folder / "mine",
        hook="blocks.1.hook_resid_post",
        width=32,
        features=24,
        sha256=info.weights_sha256,
    )
    with serving(info.path, sae=(ModelSource(folder / "mine", "mine"),)) as server:
        yield server


def results(server: Serving, path: str, body: dict[str, Any]) -> str:
    """The results of a request, as JSON with all digits of the numbers."""
    reply = server.json(path, body)
    return json.dumps({key: value for key, value in reply.items() if key not in VARYING})


def test_looking_inside_and_seeded_texts_keep_their_bits_together(featured: Serving) -> None:
    asked = [*LOOKING, *TEXTS]
    alone = [results(featured, path, body) for path, body in asked]
    order = [*range(len(LOOKING), len(asked)), *range(len(asked))]  # texts first, and last
    with ThreadPoolExecutor(len(order)) as pool:
        together = list(pool.map(lambda index: results(featured, *asked[index]), order))
    for index, found in zip(order, together, strict=True):
        assert found == alone[index], asked[index]
