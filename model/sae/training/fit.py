"""Fit: trains a TopK autoencoder to reconstruct the values of a stage.

The method is TopK with an auxiliary loss for dead features (Gao et al., "Scaling and evaluating
sparse autoencoders", 2024): the k largest features at a position reconstruct its values, and the
dead features reconstruct the remaining error. Values are centered and divided by a single number,
so that their mean square is 1; the results are converted back to the units of the stage. Rows of
the decoder have length 1. Adam's learning rate rises, stays constant, and falls to 0.

Shapes: B values of a batch, D = width of the stage, F features.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.sae.files import AutoencoderError
from logitd.model.transformer.autoencoder import Autoencoder

BATCH = 1024
RATE = 4e-3
"""Adam's learning rate for 2^11 features. The rate is inversely proportional to the square root of
the number of features."""
WARM_UP, DECAY = 0.05, 0.2
"""Fractions of the training: the learning rate rises during the first WARM_UP and falls during the
last DECAY."""
DEAD_TOKENS = 2**17
"""A feature is dead if it was zero at this many consecutive tokens."""
AUXILIARY = 1 / 32
"""Weight of the auxiliary loss."""
SECONDS_BETWEEN = 2.0
"""Seconds between two reports of progress."""


@dataclass(frozen=True, slots=True)
class Length:
    """The length of the training: a number of `tokens`, or, if that is None, `seconds` since
    `began` on the monotonic clock."""

    tokens: int | None
    began: float
    seconds: float

    def share(self, tokens: int) -> float:
        """The completed fraction of the training, at most 1."""
        if self.tokens is not None:
            return min(1.0, tokens / self.tokens)
        return min(1.0, (time.monotonic() - self.began) / self.seconds)


@dataclass(frozen=True, slots=True)
class Fitting:
    """Event: the progress of the training. `explained` is the share of the variance that the last
    batch's reconstruction explains."""

    tokens: int
    share: float
    explained: float
    dead: float
    tokens_per_second: float
    seconds_left: float


def fit(
    batches: Iterator[Tensor],
    features: int,
    k: int,
    length: Length,
    *,
    seed: int,
    tell: Callable[[Fitting], None] = lambda event: None,
) -> tuple[Mapping[str, Tensor], int]:
    """Train on batches (B, D) until the length is reached. Returns the weights, keyed by SAELens'
    names, and the number of training tokens. If the length is in tokens, the weights are a function
    of the batches and the seed. Raises AutoencoderError if the stage is constant."""
    batch = next(batches)
    if (batch == batch[0]).all():
        raise AutoencoderError(
            f"the stage has the same values at all {len(batch):,} positions of the first batch, so "
            "it has no features: choose another stage, or a checkpoint that was trained longer"
        )
    center = batch.mean(dim=0)
    scale = (batch - center).square().mean().sqrt().clamp(min=1e-12)
    learner = _Learner(batch.shape[1], features, k, seed)
    tokens, began = 0, time.monotonic()
    reported = began
    while (share := length.share(tokens)) < 1:
        error = learner.step((batch - center) / scale, share)
        tokens += len(batch)
        if (now := time.monotonic()) - reported > SECONDS_BETWEEN:
            reported = now
            rate = tokens / (now - began)
            left = (now - length.began) * (1 - share) / max(share, 1e-9)
            tell(Fitting(tokens, share, 1 - error, learner.dead_share, rate, left))
        batch = next(batches)
    return learner.tensors(center, scale), tokens


def with_weights(tensors: Mapping[str, Tensor], k: int) -> Autoencoder:
    """The autoencoder with the weights that `fit` returns."""
    return Autoencoder(
        encoder=tensors["W_enc"],
        encoder_bias=tensors["b_enc"] - tensors["b_dec"] @ tensors["W_enc"],
        decoder=tensors["W_dec"],
        decoder_bias=tensors["b_dec"],
        k=k,
    )


class _Learner:
    """The weights of an autoencoder for normalized values, and their optimizer."""

    def __init__(self, width: int, features: int, k: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        decoder = F.normalize(torch.randn(features, width, generator=generator), dim=1)
        self._k = k
        self._decoder = decoder.clone().requires_grad_()
        self._encoder = decoder.T.contiguous().requires_grad_()
        self._encoder_bias = torch.zeros(features, requires_grad=True)
        self._decoder_bias = torch.zeros(width, requires_grad=True)
        self._weights = [
            self._encoder, self._encoder_bias, self._decoder, self._decoder_bias,
        ]  # fmt: skip
        self._rate = RATE * math.sqrt(2**11 / features)
        self._adam = torch.optim.Adam(self._weights, lr=self._rate, eps=6.25e-10, fused=True)
        self._silent = torch.zeros(features, dtype=torch.int64)  # tokens since the last activation

    @property
    def dead_share(self) -> float:
        return float((self._silent >= DEAD_TOKENS).float().mean())

    def step(self, x: Tensor, share: float) -> float:
        """Train on a batch (B, D). Returns the mean square error as a share of the variance."""
        for group in self._adam.param_groups:
            group["lr"] = self._rate * min(1.0, (share + 1e-3) / WARM_UP, (1 - share) / DECAY)
        before = (x - self._decoder_bias) @ self._encoder + self._encoder_bias
        kept, indices = before.topk(self._k, sorted=False)
        kept = kept.relu()
        error = x - self._decoder_bias - self._decoded(indices, kept)
        variance = x.square().mean()
        loss = error.square().mean() / variance
        total = loss + AUXILIARY * self._auxiliary(before, error.detach())
        self._adam.zero_grad()
        total.backward()
        self._keep_lengths()
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._adam.step()
        with torch.no_grad():
            self._decoder.copy_(F.normalize(self._decoder, dim=1))
            self._silent += len(x)
            self._silent[indices[kept > 0]] = 0
        return float(loss.detach())

    def _decoded(self, indices: Tensor, values: Tensor) -> Tensor:
        """Decode the features with these indices. Returns values (B, D) without the bias."""
        return F.embedding_bag(indices, self._decoder, per_sample_weights=values, mode="sum")

    def _auxiliary(self, before: Tensor, error: Tensor) -> Tensor:
        """The share of the squared error that the dead features leave unexplained."""
        dead = (self._silent >= DEAD_TOKENS).nonzero().flatten()
        if not len(dead):
            return error.new_zeros(())
        values, places = before[:, dead].topk(min(error.shape[1] // 2, len(dead)), sorted=False)
        left = error - self._decoded(dead[places], values.relu())
        return (left.square().mean() / error.square().mean()).nan_to_num()

    @torch.no_grad()
    def _keep_lengths(self) -> None:
        """Remove the part of the gradient that would only change the lengths of the decoder's
        rows."""
        gradient = self._decoder.grad
        assert gradient is not None
        along = (gradient * self._decoder).sum(dim=1, keepdim=True)
        gradient -= along * self._decoder

    @torch.no_grad()
    def tensors(self, center: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """The weights for values in the units of the stage, by SAELens' names."""
        return {
            "W_enc": self._encoder.detach().clone(),
            "b_enc": scale * self._encoder_bias,
            "W_dec": self._decoder.detach().clone(),
            "b_dec": center + scale * self._decoder_bias,
        }
