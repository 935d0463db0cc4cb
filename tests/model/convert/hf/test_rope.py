"""Rotary positions in Hugging Face's configurations, written and read."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from logitd.model.convert.foreign import Settings
from logitd.model.convert.hf.export import FAMILIES
from logitd.model.convert.hf.rope import read_rope, rope_parameters
from tests.model.factories import tiny_config
from tests.model.shapes import SCALINGS


@given(
    pairs=st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))),
    scaling=st.sampled_from([*SCALINGS]),
    theta=st.sampled_from([500.0, 10_000.0, 5e5]),
)
@example(pairs=(1, 49), scaling="unscaled", theta=500.0)  # 98 * (2 / 98) is below 2
def test_written_weights_are_read_unchanged(
    pairs: tuple[int, int], scaling: str, theta: float
) -> None:
    """Any even number of a head's channels may rotate. The file stores this number as a fraction of
    the head width; readers multiply it by the width and round down."""
    turning, head_dim = (2 * n for n in pairs)
    config = tiny_config(
        positions="rotary", head_dim=head_dim, rotary_dim=turning, rope_theta=theta,
        rope_scaling=SCALINGS[scaling],
    )  # fmt: skip
    written = Settings("here", {"rope_parameters": rope_parameters(config)})
    rope = read_rope(written, head_dim=head_dim, context_length=config.context_length)
    assert rope == {
        "rope_theta": theta,
        "rotary_dim": turning,
        "rope_scaling": config.rope_scaling,
    }


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_old_form_alone_gives_the_same_scaling(family: str) -> None:
    """Versions of transformers before 5 read `rope_scaling` instead of `rope_parameters`."""
    config = tiny_config(positions="rotary", rope_theta=500.0, rope_scaling=SCALINGS["yarn"])
    written = FAMILIES[family][2](config)
    del written["rope_parameters"]
    rope = read_rope(
        Settings("here", written),
        head_dim=config.head_dim,
        context_length=config.context_length,
        theta="rotary_emb_base" if family == "gpt_neox" else "rope_theta",
        share="rotary_pct" if family == "gpt_neox" else "partial_rotary_factor",
    )
    assert (rope["rope_theta"], rope["rope_scaling"]) == (500.0, config.rope_scaling)
