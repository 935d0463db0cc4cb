"""Autoencoder: a sparse autoencoder of one stage, in the form used for serving.

`encode` turns the values of the stage into features, few of which are nonzero, and `decode` turns
features into an approximation of the values. Changing features moves the values along the rows of
the decoder; the part of the values that the features do not explain stays unchanged.

Every matrix product is computed by one thread and has a fixed number of rows, BLOCK or one. So the
bits of a row do not depend on how many rows are computed alongside it. `model/sae` trains,
reads and writes autoencoders.

Shapes: T positions, D = width of the stage, F features.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.device import one_thread
from logitd.model.transformer.config import BLOCK
from logitd.model.transformer.features import Features


@dataclass(frozen=True, slots=True, eq=False)
class Autoencoder:
    """The weights of an autoencoder, in float32.

    encoder, encoder_bias  (D, F), (F,); the features before the activation are x @ encoder + bias
    decoder, decoder_bias  (F, D), (D,)
    k                      keep only the k largest features (Gao et al., 2024); None: keep all
    threshold              (F,): set features that do not exceed their threshold to zero (JumpReLU,
                           Rajamanoharan et al., 2024); None: all thresholds are zero
    """

    encoder: Tensor
    encoder_bias: Tensor
    decoder: Tensor
    decoder_bias: Tensor
    k: int | None = None
    threshold: Tensor | None = None

    @property
    def features(self) -> int:
        return len(self.decoder)

    def to(self, device: torch.device) -> "Autoencoder":
        return replace(
            self,
            encoder=self.encoder.to(device),
            encoder_bias=self.encoder_bias.to(device),
            decoder=self.decoder.to(device),
            decoder_bias=self.decoder_bias.to(device),
            threshold=None if self.threshold is None else self.threshold.to(device),
        )

    def encode(self, x: Tensor) -> Tensor:
        """Features (T, F) of values (T, D), in float32."""
        return _by_blocks(self._encode, x.float())

    def decode(self, features: Tensor) -> Tensor:
        """The values (T, D) that the features (T, F) represent."""
        return _by_blocks(lambda rows: rows @ self.decoder + self.decoder_bias, features)

    def moved(self, x: Tensor, difference: Tensor) -> Tensor:
        """Change the features of values (T, D) by `difference` (T, F). Returns the new values."""
        step = _by_blocks(lambda rows: rows @ self.decoder, difference)
        return (x.float() + step).to(x.dtype)

    def _encode(self, x: Tensor) -> Tensor:
        before = x @ self.encoder + self.encoder_bias
        features = before.relu()
        if self.k is not None:
            kept = before.topk(self.k)
            features = torch.zeros_like(before).scatter_(-1, kept.indices, kept.values.relu())
        if self.threshold is not None:
            features = features * (before > self.threshold)
        return features


Autoencoders = Mapping[Features, Autoencoder]
"""The autoencoders with which a model is served."""
WITHOUT: Autoencoders = MappingProxyType({})


def _by_blocks(product: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply `product` to the rows (T, ...), BLOCK rows at a time; the last block is padded."""
    with one_thread():
        if len(rows) == 1:
            return product(rows)
        padded = F.pad(rows, (0, 0, 0, -len(rows) % BLOCK))
        return torch.cat([product(block) for block in padded.split(BLOCK)])[: len(rows)]
