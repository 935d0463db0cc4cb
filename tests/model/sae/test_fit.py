"""The fit, compared with known dictionaries."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.extraction.plan import Unit
from logitd.model.sae.files import AutoencoderError
from logitd.model.sae.training import fit as module
from logitd.model.sae.training.activations import _shuffled
from logitd.model.sae.training.fit import Length, fit, with_weights
from logitd.model.sae.training.measure import AFTER, BEFORE, EXAMPLES, _each_once, _Examples
from logitd.model.transformer.autoencoder import Autoencoder

WIDTH, COUNT, ACTIVE = 16, 32, 3
OFFSET, SIZE = 5.0, 0.2
TOKENS = 2**18


def known() -> Tensor:
    """Directions (COUNT, WIDTH) of length 1."""
    return F.normalize(torch.randn(COUNT, WIDTH, generator=torch.Generator().manual_seed(1)), dim=1)


def sums(seed: int, size: int = 512) -> Iterator[Tensor]:
    """Batches of vectors. Each is a weighted sum of ACTIVE directions, scaled by SIZE and shifted
    by OFFSET."""
    generator, directions = torch.Generator().manual_seed(seed), known()
    while True:
        chosen = torch.rand(size, COUNT, generator=generator).topk(ACTIVE).indices
        weights = 1 + torch.rand(size, ACTIVE, generator=generator)
        yield OFFSET + SIZE * torch.einsum("bk,bkd->bd", weights, directions[chosen])


@pytest.fixture(scope="module")
def fitted() -> Autoencoder:
    tensors, _ = fit(sums(0), COUNT, ACTIVE, Length(TOKENS, 0, 1), seed=0)
    return with_weights(tensors, ACTIVE)


def test_known_dictionary_is_recovered(fitted: Autoencoder) -> None:
    similarity = (known() @ fitted.decoder.T).max(dim=1).values
    assert (similarity > 0.9).float().mean() > 0.8
    assert torch.allclose(fitted.decoder.norm(dim=1), torch.ones(COUNT), atol=1e-5)


def test_reconstruction_is_in_the_units_of_the_stage(fitted: Autoencoder) -> None:
    x = next(sums(7))
    rebuilt = fitted.decode(fitted.encode(x))
    error = (x - rebuilt).square().mean() / (x - x.mean(dim=0)).square().mean()
    assert error < 0.15


def test_same_seed_gives_the_same_bits() -> None:
    first, second, other = (
        fit(sums(0), COUNT, ACTIVE, Length(4096, 0, 1), seed=seed)[0]["W_enc"] for seed in (3, 3, 4)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_constant_stage_is_refused() -> None:
    with pytest.raises(AutoencoderError, match="same values at all 9 positions"):
        fit(iter([torch.zeros(9, WIDTH)]), COUNT, ACTIVE, Length(9, 0, 1), seed=0)


def test_dead_features_learn_from_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the auxiliary loss, features that are never among the largest would stay
    unchanged."""
    monkeypatch.setattr(module, "DEAD_TOKENS", 0)
    learner = module._Learner(WIDTH, COUNT, 1, seed=0)
    before = learner._decoder.detach().clone()
    x = next(sums(0)) - OFFSET
    learner.step(x, 0.5)
    untouched = (learner._decoder.detach() == before).all(dim=1)
    assert not untouched.any()


def test_examples_are_the_strongest_places_with_their_surroundings() -> None:
    rng = np.random.default_rng(0)
    examples, peaks = _Examples(5), []
    for window in range(EXAMPLES + 8):
        features = np.maximum(0, rng.normal(size=(40, 5))).astype(np.float32)
        features[:, 3] = 0
        examples.add(range(100 * window, 100 * window + 40), features)
        peaks.append(features.max(axis=0))
    facts = examples.facts()
    strongest = -np.sort(-np.stack(peaks), axis=0)[:EXAMPLES].T  # (F, E)
    np.testing.assert_array_equal(facts.activations.max(axis=2), strongest)
    np.testing.assert_array_equal(facts.activations[:, :, BEFORE], strongest)
    assert facts.ids.shape == (5, EXAMPLES, BEFORE + 1 + AFTER)
    assert facts.density[3] == 0
    assert (facts.ids[3] == -1).all()
    at = facts.ids[0, 0]
    shown = at[at >= 0]
    assert (np.diff(shown) == 1).all()


def test_shuffled_windows_are_all_there_once() -> None:
    for size in (1, 7, 100):
        drawn = list(_shuffled(range(50), size, random.Random(0)))
        assert sorted(drawn) == list(range(50))
    assert drawn != sorted(drawn)


def test_each_window_is_measured_once_in_a_text_that_repeats() -> None:
    def passes(seed: int) -> Iterator[Unit]:
        rng, units = random.Random(seed), [Unit(n, "", 0, (0,), 0) for n in range(4)]
        while True:
            yield from _shuffled(units, 2, rng)

    for seed in range(20):
        windows = passes(seed)
        for _ in range(seed % 4):  # training ends within a pass
            next(windows)
        assert sorted(unit.document for unit in _each_once(windows)) == [0, 1, 2, 3]
