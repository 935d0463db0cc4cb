"""Objectives: how well a variant of a model explains what is known of it.

`TextObjective` has a text that the model was trained for: nats of each token. `LogitsObjective` has
logits of the owner's code for some ids: the largest difference. Both run this project's forward in
float32 over weights that `build.py` made. Does not choose (`resolve.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.checkpoint.checkpoint import empty_gpt
from logitd.model.convert.by_role.build import Built
from logitd.model.transformer.gpt import GPT

Effort = Literal["quick", "full", "thorough"]
TOKENS: Mapping[Effort, int] = {"quick": 768, "full": 8192, "thorough": 65536}
"""Most tokens of a text that are predicted."""
SECONDS: Mapping[Effort, float] = {"quick": 0.5, "full": 3.0, "thorough": 15.0}
"""Approximate limit of time: fewer tokens are predicted by large models."""
WINDOW_TOKENS = 128


class Objective(Protocol):
    """Gives penalties, lower being better: equally many at every call with the same effort.

    distinct   most of them that are independent of each other
    """

    @property
    def distinct(self) -> int: ...

    def __call__(self, built: Built, *, causal: bool, effort: Effort) -> Tensor: ...


def open_gpt(built: Built) -> GPT:
    """The model of a variant, in float32 on the CPU."""
    gpt = empty_gpt(built.config, torch.device("meta"))
    gpt.load_state_dict({name: w.float() for name, w in built.weights.items()}, assign=True)
    gpt.reset_tables()
    return gpt.eval().requires_grad_(False)


@torch.inference_mode()
def logits_of(gpt: GPT, token_ids: Tensor, *, causal: bool) -> Tensor:
    """Logits (B, T, V) of ids (B, T). If not causal, every position sees its whole sequence."""
    positions = torch.arange(token_ids.shape[1]).expand_as(token_ids)
    if causal:
        return gpt(token_ids).logits
    return gpt.logits(gpt.transform(token_ids, positions, _attend_to_all))


def _attend_to_all(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


@dataclass(frozen=True)
class TextObjective:
    """The loss on windows (W, T + 1) of a text's ids.

    distinct   tokens of the text that are predicted, each counted once
    tokens     tokens that are predicted, by effort
    """

    windows: Tensor
    distinct: int
    tokens: Mapping[Effort, int] = field(default_factory=lambda: TOKENS)

    def at_speed(self, seconds_per_token: float) -> "TextObjective":
        """The same objective, with fewer tokens if there is no time for more."""
        tokens = {
            effort: max(WINDOW_TOKENS, min(most, int(SECONDS[effort] / seconds_per_token)))
            for effort, most in TOKENS.items()
        }
        return replace(self, tokens=tokens)

    def __call__(self, built: Built, *, causal: bool, effort: Effort) -> Tensor:
        """Nats of each token (W * T,)."""
        length = self.windows.shape[1] - 1
        windows = self.windows[: max(1, self.tokens[effort] // length)]
        gpt, losses = open_gpt(built), []
        for batch in windows.split(max(1, 1024 // length)):
            logits = logits_of(gpt, batch[:, :-1], causal=causal)  # (B, T, V)
            nats = F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none")
            losses.append(nats.flatten().double())  # (B, T) to (B * T,)
        return torch.cat(losses)

    def unigram_nats(self) -> float:
        """Nats per token of the text's own frequencies, which a model has to beat."""
        counts = torch.bincount(self.windows.flatten()).double()
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * shares.log()).sum())


def text_objective(token_ids: Sequence[int], context_length: int) -> TextObjective | None:
    """Windows spread over a text; None if it is too short for one of two tokens."""
    length = min(context_length, WINDOW_TOKENS, len(token_ids) - 1)
    if length < 2:
        return None
    last = len(token_ids) - length - 1
    # A window at every half of one, as far as the budget reaches.
    count = max(1, min(TOKENS["thorough"] // length, 2 * last // length + 1))
    starts = sorted({round(last * i / max(1, count - 1)) for i in range(count)})
    # In an order in which the first windows, a quick look, come from everywhere.
    order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(0)).tolist()
    ids = torch.tensor(token_ids)
    windows = torch.stack([ids[starts[i] : starts[i] + length + 1] for i in order])
    return TextObjective(windows, distinct=min(windows[:, 1:].numel(), len(token_ids) - 1))


@dataclass(frozen=True)
class LogitsObjective:
    """The largest difference to logits (B, T, V) that the owner's code gave for ids (B, T).

    log_probs   the owner's code gives log-probabilities instead of logits
    """

    token_ids: Tensor
    logits: Tensor
    log_probs: bool = False

    def __call__(self, built: Built, *, causal: bool, effort: Effort) -> Tensor:
        """The largest difference (1,); infinite if it is not a number."""
        logits = logits_of(open_gpt(built), self.token_ids, causal=causal)
        if self.log_probs:
            logits = logits.log_softmax(dim=-1)
        difference = float((logits - self.logits).abs().max())
        return torch.tensor([difference if math.isfinite(difference) else math.inf])

    @property
    def distinct(self) -> int:
        return 1

    @property
    def tolerance(self) -> float:
        """1e-4, or for large logits the error of float32."""
        return 1e-4 * max(1.0, float(self.logits.abs().max()) / 20)
