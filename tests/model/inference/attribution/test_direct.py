"""Direct contributions: they add up to the logit, and each matches its definition."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from logitd.model.inference.attribution.attribute import attributing
from logitd.model.inference.attribution.task import Attribution, AttributionTask
from logitd.model.transformer.gpt import GPT, Block
from tests.model.factories import FAMILIES, random_ids, tiny_config, tiny_gpt
from tests.model.plain_stages import plain_stages, without_softcap
from tests.model.shapes import shapes
from tests.profiles import examples

IDS = random_ids(9, seed=4).tolist()
SHAPES: dict[str, dict[str, Any]] = {
    **{name: dict(overrides) for name, overrides in FAMILIES.items()},
    "without a final norm": {"final_norm": False},
    "mixed with post": {**FAMILIES["original"], "residual_mix": True, "backout": True},
    "post with a final norm": {**FAMILIES["original"], "final_norm": True, "head_bias": True},
}


@pytest.fixture(scope="module", params=SHAPES)
def gpt(request: pytest.FixtureRequest) -> GPT:
    return tiny_gpt(tiny_config(**SHAPES[request.param]))


def _block(module: nn.Module) -> Block:
    assert isinstance(module, Block)
    return module


def direct(gpt: GPT, ids: list[int] = IDS, **fields: Any) -> Attribution:
    values: dict[str, Any] = {"position": len(ids) - 1, "token_id": 70, "methods": ("direct",)}
    return attributing(gpt, ids, AttributionTask(**(values | fields))).result()


@given(shapes(), st.integers(0, 8), st.sampled_from([None, 1]))
@settings(max_examples=examples(60))
def test_direct_parts_add_up_to_the_logit(
    shape: dict[str, Any], position: int, minus_id: int | None
) -> None:
    gpt = tiny_gpt(tiny_config(**shape))
    ids = random_ids(9, vocab_size=gpt.config.vocab_size).tolist()
    for model, tolerance in ((gpt, 1e-3), (copy.deepcopy(gpt).double(), 1e-9)):
        found = direct(model, ids, position=position, token_id=0, minus_id=minus_id)
        logits = plain_stages(without_softcap(model), ids)["logits"][position]
        expected = logits[0] - (0 if minus_id is None else logits[minus_id])
        scale = float(logits.abs().max()) * tolerance
        assert found.direct_sum == pytest.approx(expected.item(), rel=tolerance, abs=scale)
        assert found.direct_sum == pytest.approx(found.target, rel=tolerance, abs=scale)


def test_direct_parts_are_each_head_bias_and_mlp(gpt: GPT) -> None:
    config = gpt.config
    expected: list[tuple[str, int | None]] = [("embedding", None)]
    post = config.norm_position == "post" and config.norm == "layernorm"
    for layer in range(config.n_layer):
        name = f"blocks.{layer}"
        expected += [(f"{name}.attention.heads", head) for head in range(config.n_head)]
        expected += [(f"{name}.attention.bias", None)] if config.bias else []
        expected += [(f"{name}.attention.norm.bias", None)] if post and config.bias else []
        expected += [(f"{name}.mlp.out", None)]
        expected += [(f"{name}.mlp.norm.bias", None)] if post and config.bias else []
    final_bias = config.final_norm and config.norm == "layernorm" and config.bias
    expected += [("final_norm.bias", None)] if final_bias else []
    expected += [("head.bias", None)] if config.head_bias else []
    parts = direct(gpt).direct
    assert parts is not None
    assert [(part.stage, part.head) for part in parts] == expected


def test_each_part_is_the_drop_in_the_logit_without_it(gpt: GPT) -> None:
    """The scale of every norm is held constant. The expected parts are computed by hand from the
    stages of the forward pass."""
    gpt = copy.deepcopy(gpt).double()
    config, stages, blocks = gpt.config, plain_stages(gpt, IDS), [*map(_block, gpt.blocks)]
    position = len(IDS) - 1

    def frozen(norm: Any, x: Tensor, part: Tensor) -> Tensor:
        centered = isinstance(norm, nn.LayerNorm)
        variance = x.var(correction=0) if centered else x.square().mean()
        part = part - part.mean() if centered else part
        scaled: Tensor = part / (variance + config.norm_eps).sqrt() * norm.weight
        return scaled

    def to_logit(part: Tensor, layer: int, after: str) -> float:
        """The amount that a part of the residual stream adds to the logit. The part is added after
        the sublayer `after` of block `layer`, or before the block if `after` is "embedding". All
        later norms and mixtures of the stream are applied to it."""
        embedding = part if after == "embedding" else torch.zeros_like(part)
        middle = torch.zeros_like(part)
        for later in range(layer, config.n_layer):
            before = stages["embedding"] if later == 0 else stages[f"blocks.{later - 1}.output"]
            block, name = blocks[later], f"blocks.{later}"
            enters = later > layer or after == "embedding"
            if config.residual_mix:
                before = stages[f"{name}.input"]
                if enters:
                    mixed = gpt.residual_scales[later], gpt.embedding_scales[later]
                    part = mixed[0] * part + mixed[1] * embedding
            if config.norm_position == "post":
                if enters or after == "attention":
                    x = (before + stages[f"{name}.attention.out"])[position]
                    part = frozen(block.attention_norm, x, part)
                x = (stages[f"{name}.middle"] + stages[f"{name}.mlp.out"])[position]
                part = frozen(block.mlp_norm, x, part)
            if later == config.n_layer // 2:
                middle = part
        last = stages[f"blocks.{config.n_layer - 1}.output"][position]
        if config.backout:
            part, last = part - gpt.backout_scale * middle, stages["backout"][position]
        if config.final_norm:
            part = frozen(gpt.final_norm, last, part)
        return float(part @ gpt.head_parameters()[0][70])

    for part in direct(gpt).direct or ():
        value = None
        if part.stage == "embedding":
            value = to_logit(stages["embedding"][position], 0, "embedding")
        elif part.stage.endswith("attention.heads"):
            layer = int(part.stage.split(".")[1])
            outs = stages[f"blocks.{layer}.attention.head_out"][position]
            value = to_logit(outs[part.head], layer, "attention")
        elif part.stage.endswith("mlp.out"):
            layer = int(part.stage.split(".")[1])
            value = to_logit(stages[part.stage][position], layer, "mlp")
        elif part.stage.endswith("attention.bias"):
            layer = int(part.stage.split(".")[1])
            value = to_logit(blocks[layer].attention_out.bias, layer, "attention")
        if value is not None:
            assert part.value == pytest.approx(value, rel=1e-8, abs=1e-10), part.stage
