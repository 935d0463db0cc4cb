"""Seeds of a generation; its results are tested through `LLM` and HTTP."""

from logitd.model.operations.generate import new_seed


def test_drawn_seeds_are_exact_as_a_double() -> None:
    seeds = {new_seed() for _ in range(1000)}
    assert len(seeds) == 1000
    assert 2**48 < max(seeds) < 2**53
