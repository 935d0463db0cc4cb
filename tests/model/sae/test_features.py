"""Features as stages of the engine: they are read and changed, alone and alongside other requests,
and compared with `tests/model/plain_stages.py`."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from logitd.model.inference.engine.cost import split_activations, step_cost
from logitd.model.inference.engine.requests import Activations, Logits, Request
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.interventions import Intervention
from logitd.model.inference.selection import resolve_stages
from logitd.model.transformer.autoencoder import Autoencoder
from logitd.model.transformer.features import Features, with_features
from logitd.model.transformer.stages import match_stages, stages_of
from tests.model.factories import tiny_config, tiny_gpt
from tests.model.inference.engine.harness import (
    Driven,
    Outcome,
    generation,
    outputs_request,
    random_prompt,
)
from tests.model.plain_stages import plain_stages
from tests.model.sae.dictionaries import features_by_hand, random_autoencoder

LENGTH, WIDTH, COUNT = 75, 32, 24
PROMPT = random_prompt(random.Random(0), LENGTH, 257)
HOST, STAGE = "blocks.1.output", "blocks.1.output.sae.mine"
MINE = Features("mine", 1, "output", COUNT, WIDTH)
UNITS = Features("units", 0, "mlp.hidden", 40, 4 * WIDTH)
GPT = tiny_gpt(tiny_config())
AUTOENCODERS = {
    UNITS: random_autoencoder(4 * WIDTH, 40, k=None, threshold=0.3, seed=1),
    MINE: random_autoencoder(WIDTH, COUNT),
}
TOP_K = AUTOENCODERS[MINE]


def recorded(*stages: str, interventions: tuple[Intervention, ...] = (), **config: Any) -> Any:
    driven = Driven(GPT, autoencoders=AUTOENCODERS, **config)
    output = Activations(stages=stages)
    driven.add(outputs_request("a", PROMPT, None, output=output, interventions=interventions))
    rows = driven.drain()["a", 0].values
    return split_activations(rows, output, driven.engine.model_config, LENGTH)


def changed_by_hand(feature: int, change: Any) -> dict[str, Tensor]:
    """Every stage of a forward pass in which `change` is applied to one feature of MINE. The other
    features and the error stay the same."""

    def hook(name: str, value: Tensor) -> Tensor:
        if name != HOST:
            return value
        before = features_by_hand(TOP_K, value)[:, feature]
        return value + ((change(before) - before)[:, None] * TOP_K.decoder[feature]).float()

    return plain_stages(GPT, PROMPT, hook)


def test_features_are_stages_after_the_stage_that_they_read() -> None:
    config = with_features(GPT.config, tuple(AUTOENCODERS))
    names = [stage.name for stage in stages_of(config)]
    assert names.index(STAGE) == names.index(HOST) + 1
    (stage,) = match_stages([STAGE], config)
    assert stage.transformer_lens == "blocks.1.hook_resid_post.hook_sae_acts_post"
    assert match_stages(["blocks.*.output"], config) == match_stages(
        ["blocks.*.output"], GPT.config
    )
    assert config.to_dict() == GPT.config.to_dict()


@pytest.mark.parametrize("features", AUTOENCODERS, ids=lambda features: features.name)
def test_features_match_their_definition(features: Features) -> None:
    stage = f"blocks.{features.layer}.{features.key[1]}"
    host = f"blocks.{features.layer}.{features.stage}"
    values = recorded(host, stage)
    expected = features_by_hand(AUTOENCODERS[features], values[host])
    assert_close(values[stage].double(), expected, atol=1e-5, rtol=1e-5)
    assert (expected > 0).any()


def test_ablated_and_steered_features_move_the_stage_along_the_decoder() -> None:
    """The part of the stage that no feature explains does not change."""
    feature = int(recorded(STAGE)[STAGE].sum(dim=0).argmax())
    one = np.zeros((1, COUNT), dtype=np.float32)
    one[0, feature] = 3.0
    steer = Intervention(stage=STAGE, operation="add", values=one)
    values = recorded(HOST, STAGE, "logits", interventions=(steer,))
    expected = changed_by_hand(feature, lambda before: before + 3)
    for name in (HOST, "logits"):
        assert_close(values[name], expected[name], atol=1e-4, rtol=1e-4)
    every = recorded(STAGE)[STAGE]
    every[:, feature] = 0
    ablate = Intervention(
        stage=STAGE, operation="set", positions=tuple(range(LENGTH)), values=every.numpy()
    )
    values = recorded(HOST, STAGE, "logits", interventions=(ablate,))
    expected = changed_by_hand(feature, torch.zeros_like)
    for name in (HOST, "logits"):
        assert_close(values[name], expected[name], atol=1e-4, rtol=1e-4)
    assert not values[STAGE][:, feature].any()


def test_rows_whose_features_stay_keep_their_bits() -> None:
    plain = recorded(HOST)[HOST]
    scale = Intervention(stage=STAGE, operation="scale", factor=2.0, positions=(5, 40))
    moved = recorded(HOST, interventions=(scale,))[HOST]
    same = (plain == moved).all(dim=1)
    assert same.tolist() == [position not in (5, 40) for position in range(LENGTH)]
    zero = np.zeros((1, COUNT), dtype=np.float32)
    none = Intervention(stage=STAGE, operation="add", values=zero)
    unmoved = recorded("logits", interventions=(none,))["logits"]
    assert torch.equal(unmoved, recorded("logits")["logits"])


def test_steered_requests_and_others_keep_their_bits_in_a_batch() -> None:
    """The sizes of chunks and batches differ, and some of the other requests use features."""
    scale = Intervention(stage=STAGE, operation="scale", factor=-2.0)
    units = Intervention(stage="blocks.0.mlp.hidden.sae.units", operation="zero")
    requests: list[Request] = [
        generation("steered", PROMPT[:40], max_tokens=12, interventions=(scale, units)),
        generation("other", PROMPT[:41], max_tokens=12, interventions=(units,)),
        generation("plain", PROMPT[:39], max_tokens=12),
        outputs_request("read", PROMPT, None, output=Activations(stages=(STAGE,))),
        outputs_request("logits", PROMPT, None, output=Logits(), interventions=(scale,)),
    ]
    alone: dict[tuple[str, int], Outcome] = {}
    for request in requests:
        driven = Driven(GPT, autoencoders=AUTOENCODERS, prefill_chunk=128)
        driven.add(request)
        alone |= driven.drain()
    together = Driven(GPT, autoencoders=AUTOENCODERS, prefill_chunk=32, slots=5)
    together.add(*requests)
    outcomes = together.drain()
    for key, outcome in alone.items():
        assert outcome.tokens == outcomes[key].tokens
        if outcome.rows:
            assert torch.equal(outcome.values, outcomes[key].values), key
    without = Driven(GPT)
    without.add(requests[2])
    assert without.drain()["plain", 0].tokens == alone["plain", 0].tokens


def test_features_of_a_bfloat16_model_are_changed_in_float32() -> None:
    """Setting features to their own values changes no bit, although the model rounds to
    bfloat16."""
    gpt = tiny_gpt(tiny_config()).bfloat16()
    driven = Driven(gpt, autoencoders=AUTOENCODERS)
    driven.add(outputs_request("a", PROMPT, None, output=Activations(stages=(STAGE,))))
    values = driven.drain()["a", 0].values.numpy()
    same = Intervention(stage=STAGE, operation="set", positions=tuple(range(LENGTH)), values=values)
    driven.add(outputs_request("b", PROMPT, None, output=Logits(), interventions=(same,)))
    driven.add(outputs_request("c", PROMPT, None, output=Logits(), prefix_reuse=False))
    outcomes = driven.drain()
    assert torch.equal(outcomes["b", 0].values, outcomes["c", 0].values)


def test_encoding_is_charged_for() -> None:
    config = with_features(GPT.config, tuple(AUTOENCODERS))
    read = outputs_request("a", PROMPT, None, output=Activations(stages=(STAGE,)))
    assert step_cost(read, config).position == 2 * WIDTH * COUNT // 32


def test_wrong_values_of_features_are_refused() -> None:
    driven = Driven(GPT, autoencoders=AUTOENCODERS)
    short = Intervention(
        stage=STAGE, operation="set", values=np.zeros((1, COUNT - 1), dtype=np.float32)
    )
    with pytest.raises(InvalidRequest, match=rf"values.*{COUNT - 1}.*{COUNT}"):
        driven.add(generation("a", PROMPT, interventions=(short,)))
    with pytest.raises(InvalidRequest, match=r"output\.sae\.mine"):
        resolve_stages(["nope"], driven.engine.model_config)


def test_rows_alone_and_in_blocks_agree() -> None:
    x = torch.randn(70, WIDTH, generator=torch.Generator().manual_seed(2))
    whole = TOP_K.encode(x)
    assert torch.equal(whole[32:], TOP_K.encode(x[32:]))
    assert_close(whole[5:6], TOP_K.encode(x[5:6]), atol=1e-5, rtol=1e-5)
    assert isinstance(TOP_K, Autoencoder)
