"""Rotary positions of Hugging Face's configurations: there and back."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from logitd.model.convert.foreign import Settings
from logitd.model.convert.hf.neox import apart, together
from logitd.model.convert.hf.rope import half_split, read_rope, rope_parameters
from tests.model.factories import tiny_config
from tests.model.shapes import SCALINGS


@given(
    pairs=st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))),
    scaling=st.sampled_from([*SCALINGS]),
    theta=st.sampled_from([500.0, 10_000.0, 5e5]),
)
@example(pairs=(1, 49), scaling="unscaled", theta=500.0)  # 98 * (2 / 98) is below 2
def test_what_is_written_is_read_as_it_was(
    pairs: tuple[int, int], scaling: str, theta: float
) -> None:
    """Whatever part of a head turns: a share is a fraction, and its product is rounded down."""
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


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))))
def test_channels_that_turn_lead_each_half(pairs: tuple[int, int]) -> None:
    turning, half = pairs
    order = half_split(2 * half, 2 * turning)
    assert sorted(order) == [*range(2 * half)]
    assert order[:turning] == [*range(turning)]
    assert order[half : half + turning] == [*range(turning, 2 * turning)]
    still = order[turning:half] + order[half + turning :]
    assert still == [*range(2 * turning, 2 * half)]


def test_heads_are_taken_apart_and_put_together_again() -> None:
    """Of a name for each row: head, part, channel."""
    config = tiny_config(positions="rotary", n_head=2, d_model=12, rotary_dim=2)
    names = torch.tensor([[head, part, channel] for head in range(2) for part in range(3)
                          for channel in range(6)])  # fmt: skip
    rows = apart(names, config)
    order = [0, 2, 3, 1, 4, 5]
    assert rows.tolist() == [
        [head, part, channel]
        for part in range(3)
        for head in range(2)
        for channel in (range(6) if part == 2 else order)
    ]
    assert torch.equal(together(rows, config), names)
