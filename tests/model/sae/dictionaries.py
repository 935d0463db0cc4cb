"""Random autoencoders for tests, and their features by the papers' definitions."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from logitd.model.sae.files import FeatureFacts, write_autoencoder
from logitd.model.transformer.autoencoder import Autoencoder


def random_autoencoder(
    width: int, features: int, *, k: int | None = 4, threshold: float | None = None, seed: int = 0
) -> Autoencoder:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return Autoencoder(
        encoder=drawn(width, features) / width**0.5,
        encoder_bias=0.1 * drawn(features),
        decoder=drawn(features, width) / width**0.5,
        decoder_bias=0.1 * drawn(width),
        k=k,
        threshold=None if threshold is None else threshold * torch.ones(features),
    )


def features_by_hand(autoencoder: Autoencoder, x: Tensor) -> Tensor:
    """Features (T, F) of values (T, D), one position at a time."""
    rows = []
    for row in x.double():
        before = row @ autoencoder.encoder.double() + autoencoder.encoder_bias.double()
        least = torch.zeros_like(before)
        if autoencoder.threshold is not None:
            least = autoencoder.threshold.double()
        if autoencoder.k is not None:
            least = before.sort(descending=True).values[autoencoder.k].clamp(min=0)
        rows.append(torch.where(before > least, before.clamp(min=0), 0.0))
    return torch.stack(rows)


def write_random_autoencoder(
    path: Path, *, hook: str, width: int, features: int, sha256: str = "other"
) -> Autoencoder:
    """Write the folder of a random TopK autoencoder. Each feature has two examples, both with the
    bytes "abc"; feature 7 is dead."""
    autoencoder = random_autoencoder(width, features)
    ids = np.full((features, 2, 4), -1, dtype=np.int32)
    ids[:, :, 1:] = 97 + np.arange(3)
    activations = np.zeros((features, 2, 4), dtype=np.float32)
    activations[:, 0, 2], activations[:, 1, 3] = 2.5, 1.5
    activations[7] = 0
    density = np.full(features, 0.25, dtype=np.float32)
    density[7] = 0
    write_autoencoder(
        path,
        {
            "W_enc": autoencoder.encoder,
            "b_enc": autoencoder.encoder_bias + autoencoder.decoder_bias @ autoencoder.encoder,
            "W_dec": autoencoder.decoder,
            "b_dec": autoencoder.decoder_bias,
        },
        k=4,
        hook=hook,
        record={"weights_sha256": sha256, "checkpoint": "another", "figures": {"active": 4.0}},
        facts=FeatureFacts(density, ids, activations),
    )
    return autoencoder
