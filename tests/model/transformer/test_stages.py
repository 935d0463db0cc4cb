"""The list of stages: names, patterns and families, and the README's table of them."""

from pathlib import Path

import pytest

from logitd.model.transformer.stages import STAGES, UnknownStage, match_stages, stages_of
from tests.model.factories import FAMILIES, tiny_config

README = Path(__file__).parents[3] / "model/transformer/README.md"


def test_readme_table_matches_the_list() -> None:
    rows = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in README.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    assert rows == [
        [
            kind.pattern,
            f"({', '.join(('P', *map(str, kind.axes)))})",
            kind.meaning,
            kind.lens_pattern or "",
        ]
        for kind in STAGES
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_of_a_model_are_ordered_by_layer(family: str) -> None:
    config = tiny_config(**FAMILIES[family])
    stages = stages_of(config)
    names = [stage.name for stage in stages]
    assert len(set(names)) == len(names)
    layers = [stage.layer for stage in stages if stage.layer is not None]
    assert layers == sorted(layers)
    assert names[0] == "embedding"
    assert names[-1] == "logits"
    assert ("final_norm" in names) == config.final_norm
    assert ("blocks.0.attention.norm" in names) == (config.norm_position == "pre")
    assert ("blocks.0.mlp.up" in names) == (config.activation == "swiglu")
    assert match_stages(["*"], config) == stages


def test_pattern_chooses_layer_by_layer() -> None:
    config = tiny_config()
    names = [stage.name for stage in match_stages(["blocks.*.mlp.out", "embedding"], config)]
    assert names == ["embedding", *(f"blocks.{n}.mlp.out" for n in range(config.n_layer))]
    assert match_stages(["embedding", "embedding"], config) == match_stages(["embedding"], config)


@pytest.mark.parametrize("family", FAMILIES)
def test_name_finds_the_same_stage_as_a_search(family: str) -> None:
    config = tiny_config(**FAMILIES[family])
    for stage in stages_of(config):
        assert match_stages([stage.name], config) == (stage,)
        assert match_stages([f"{stage.name[:-1]}?", stage.name], config)[0] in stages_of(config)
    lacking = [
        f"blocks.{config.n_layer}.output", "blocks.00.output", "blocks.-1.output", "output",
        "blocks.0.embedding", "blocks.0.logits", "blocks.0.", "blocks.9999999.output",
    ]  # fmt: skip
    for name in lacking:
        with pytest.raises(UnknownStage):
            match_stages([name], config)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformer_lens_name_finds_the_stage_that_lists_it(family: str) -> None:
    config = tiny_config(**FAMILIES[family])
    for stage in stages_of(config):
        name = stage.transformer_lens
        if name is not None and not name.endswith("resid_pre"):
            assert match_stages([name], config) == match_stages([name, name], config) == (stage,)
    reads = [stage.name for stage in match_stages(["blocks.*.hook_resid_pre"], config)]
    outputs = ["embedding", *(f"blocks.{layer}.output" for layer in range(config.n_layer - 1))]
    inputs = [f"blocks.{layer}.input" for layer in range(config.n_layer)]
    assert reads == (inputs if config.residual_mix else outputs)
    rotated = config.positions == "rotary" or config.qk_norm
    (queries,) = match_stages(["blocks.1.attn.hook_q"], config)
    assert queries.name == f"blocks.1.attention.{'q_raw' if rotated else 'q'}"
    for lacking in ("hook_embed", "blocks.3.hook_mlp_out", "blocks.*.hook_nothing"):
        with pytest.raises(UnknownStage, match="hook"):
            match_stages([lacking], config)


def test_unknown_stage_names_the_missing_kind_or_the_layers() -> None:
    with pytest.raises(UnknownStage, match=r"mlp\.up"):
        match_stages(["blocks.*.mlp.up"], tiny_config())
    with pytest.raises(UnknownStage, match="0 to 2"):
        match_stages(["blocks.7.output"], tiny_config(n_layer=3))
