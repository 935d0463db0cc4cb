"""Objectives: measure how well a variant of a model's computation fits; lower is better.

`TextObjective` returns the loss of each token of a text that is like the training data.
`LogitsObjective` returns the largest difference from the logits that the owner's code computes.
Both run this project's forward pass in float32 on the weights from `build.py`. Calls with the same
effort return the same number of values. `resolve.py` chooses the best variant.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from logitd.model.checkpoint.load import empty_gpt
from logitd.model.convert.by_role.build import Built
from logitd.model.convert.by_role.ngrams import NgramNats, ngram_nats
from logitd.model.convert.by_role.stated_loss import StatedLoss
from logitd.model.convert.foreign import ConvertError
from logitd.model.transformer.gpt import GPT

Effort = Literal["quick", "full", "thorough"]
TOKENS: Mapping[Effort, int] = {"quick": 768, "full": 8192, "thorough": 65536}
"""Maximum number of predicted tokens of a text, for each level of effort."""
SECONDS: Mapping[Effort, float] = {"quick": 0.5, "full": 3.0, "thorough": 15.0}
"""Approximate time limit in seconds for each level of effort. A slow model predicts fewer
tokens."""
WINDOW_TOKENS = 128
MARGIN_ERRORS = 2.0
"""A variant's loss must be lower than the loss of a bigram or trigram model by more than this many
standard errors."""
FEWEST_LINES = 30
SAMPLE_TOKENS = 64
"""A line may be a training sample only if it has at most this many tokens, including the token at
the end of the line."""
_UNCOUNTED = -1


@dataclass(frozen=True)
class CheckText:
    """A text that the model should predict well, encoded with the source's token ids.

    token_ids  the whole text; empty if it cannot be encoded because a line break has no id
    lines      its lines, if each may be a training sample, as in a list of names; otherwise empty
    starts     ids that may come before and after each line
    """

    name: str
    token_ids: Sequence[int]
    lines: Sequence[Sequence[int]] = ()
    starts: Sequence[int] = ()


def open_gpt(built: Built) -> GPT:
    """The model of a variant, in float32 on the CPU."""
    gpt = empty_gpt(built.config, torch.device("meta"))
    gpt.load_state_dict({name: w.float() for name, w in built.weights.items()}, assign=True)
    gpt.reset_tables()
    return gpt.eval().requires_grad_(False)


@torch.inference_mode()
def logits_of(gpt: GPT, token_ids: Tensor, *, causal: bool) -> Tensor:
    """Logits (B, T, V) of ids (B, T). If `causal` is False, every position attends to the whole
    sequence."""
    positions = torch.arange(token_ids.shape[1]).expand_as(token_ids)
    if causal:
        return gpt(token_ids).logits
    return gpt.logits(gpt.transform(token_ids, positions, _attend_to_all))


def _attend_to_all(
    layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None
) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


@dataclass(frozen=True)
class TextObjective:
    """The loss on windows (W, T + 1) of a text's ids. Shorter windows are padded with -1.

    distinct   number of predicted tokens; a token in several windows counts once
    counts     losses of unigram, bigram and trigram models; infinite if the text has too few
               tokens
    stated     loss that the file states
    tokens     maximum number of predictions for each level of effort; at least one window is used
    """

    name: str
    windows: Tensor
    distinct: int
    counts: NgramNats
    stated: StatedLoss | None = None
    tokens: Mapping[Effort, int] = field(default_factory=lambda: TOKENS)

    def at_speed(self, seconds_per_token: float) -> "TextObjective":
        """The objective, limited to the number of tokens that a model of this speed can predict
        within the time limits."""
        tokens = {
            effort: max(WINDOW_TOKENS, min(most, int(SECONDS[effort] / seconds_per_token)))
            for effort, most in TOKENS.items()
        }
        return replace(self, tokens=tokens)

    def __call__(self, built: Built, *, causal: bool, effort: Effort) -> Tensor:
        """The loss of each predicted token (at most W * T), in nats."""
        length = self.windows.shape[1] - 1
        windows = self.windows[: max(1, self.tokens[effort] // length)]
        gpt, losses = open_gpt(built), []
        for batch in windows.split(max(1, 1024 // length)):
            logits = logits_of(gpt, batch[:, :-1].clamp(min=0), causal=causal)  # (B, T, V)
            predicted = batch[:, 1:]
            nats = F.cross_entropy(
                logits.transpose(1, 2), predicted, reduction="none", ignore_index=_UNCOUNTED
            )
            losses.append(nats[predicted != _UNCOUNTED].double())
        return torch.cat(losses)

    def unigram_nats(self) -> float:
        """The loss of a unigram model with the token frequencies of this text, in nats per
        token."""
        counts = torch.bincount(self.windows[self.windows != _UNCOUNTED]).double()
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * shares.log()).sum())

    @property
    def pairs(self) -> float:
        """The lower of the unigram and bigram losses, in nats per token."""
        return self.counts.pairs

    @property
    def triples(self) -> float:
        """The lowest loss that an n-gram model up to trigrams reaches, averaged over a window, in
        nats per token."""
        return self.counts.over(self.windows.shape[1] - 1)


def text_objectives(
    text: CheckText, context_length: int, stated: StatedLoss | None = None
) -> list[TextObjective]:
    """The objectives for a text. One objective has windows from all parts of the text. If each line
    may be a training sample, there is another objective for each id that may come before a line.
    Raises ConvertError if the text is too short for a window of two predictions."""
    objectives = list(_line_objectives(text, context_length))
    if text.token_ids or not objectives:
        objectives.insert(0, text_objective(text, context_length))
    return [replace(objective, stated=stated) for objective in objectives]


def _line_objectives(text: CheckText, context_length: int) -> Iterator[TextObjective]:
    longest = max((len(line) for line in text.lines), default=0) + 1
    if len(text.lines) < FEWEST_LINES or longest > min(context_length, SAMPLE_TOKENS):
        return
    order = torch.randperm(len(text.lines), generator=torch.Generator().manual_seed(0)).tolist()
    order = order[: max(1, TOKENS["thorough"] // longest)]
    for start in dict.fromkeys(text.starts):
        windows = torch.full((len(order), longest + 1), _UNCOUNTED)
        for row, index in enumerate(order):
            line = [start, *text.lines[index], start]
            windows[row, : len(line)] = torch.tensor(line)
        stream = [token_id for line in text.lines for token_id in (start, *line)]
        yield TextObjective(text.name, windows, len(stream), ngram_nats(stream, max(stream) + 1))


def text_objective(text: CheckText, context_length: int) -> TextObjective:
    """An objective with windows from all parts of a text. Raises ConvertError if the text is too
    short for a window of two predictions."""
    length = min(context_length, WINDOW_TOKENS, len(text.token_ids) - 1)
    if length < 2:
        raise ConvertError(
            f"{text.name} has {len(text.token_ids)} tokens, and the context length is "
            f"{context_length}; checking needs at least 3 tokens and a context length of 2"
        )
    last = len(text.token_ids) - length - 1
    # Windows overlap by half if the budget allows it.
    count = max(1, min(TOKENS["thorough"] // length, 2 * last // length + 1))
    starts = sorted({round(last * i / max(1, count - 1)) for i in range(count)})
    # The first windows are used for a quick effort. Shuffle, so that they come from the whole text.
    order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(0)).tolist()
    ids = torch.tensor(text.token_ids)
    windows = torch.stack([ids[starts[i] : starts[i] + length + 1] for i in order])
    distinct = min(windows[:, 1:].numel(), len(ids) - 1)
    counts = ngram_nats(text.token_ids, max(text.token_ids) + 1)
    return TextObjective(text.name, windows, distinct, counts)


@dataclass(frozen=True)
class LogitsObjective:
    """The largest difference from the logits (B, T, V) that the owner's code computes.

    name        the owner's code as FILE.py:EXPRESSION, for messages
    long_ids    a longer sequence (1, L); None if there is none
    late        logits (1, N, V) of its last positions
    edge_ids    sequences (B, T) of ids that may be special: the first, the last, those that the
                vocabulary or settings name, and numbers in the code; None if there are none
    edge        their logits (B, T, V)
    log_probs   True if the owner's code returns log-probabilities instead of logits
    assumed     sentence about values that only a default of the owner's code states; "" if none
    """

    name: str
    token_ids: Tensor
    logits: Tensor
    long_ids: Tensor | None = None
    late: Tensor | None = None
    edge_ids: Tensor | None = None
    edge: Tensor | None = None
    log_probs: bool = False
    assumed: str = ""
    distinct: ClassVar[int] = 1

    def __call__(self, built: Built, *, causal: bool, effort: Effort) -> Tensor:
        """The largest difference, of shape (1,); infinite if the difference is NaN. A quick effort
        compares the short sequences of random ids, a full one the end of the long sequence, and a
        thorough one the sequences of special ids."""
        token_ids, theirs = self.token_ids, self.logits
        if effort == "full" and self.long_ids is not None and self.late is not None:
            token_ids, theirs = self.long_ids, self.late
        if effort == "thorough" and self.edge_ids is not None and self.edge is not None:
            token_ids, theirs = self.edge_ids, self.edge
        logits = logits_of(open_gpt(built), token_ids, causal=causal)[:, -theirs.shape[1] :]
        if self.log_probs:
            logits = logits.log_softmax(dim=-1)
        difference = float((logits - theirs).abs().max())
        return torch.tensor([difference if math.isfinite(difference) else math.inf])

    @property
    def tolerance(self) -> float:
        """Logits count as equal if they differ by at most this: 1e-4, or more for large logits,
        whose rounding error in float32 is larger."""
        return 1e-4 * max(1.0, float(self.logits.abs().max()) / 20)

    @property
    def late_tolerance(self) -> float:
        """The tolerance at the end of the long sequence. The rounding errors of rotary angles grow
        with the position."""
        return 100 * self.tolerance

    @property
    def length(self) -> int:
        """The number of positions of the longest sequence."""
        return (self.token_ids if self.long_ids is None else self.long_ids).shape[1]


Objective = TextObjective | LogitsObjective
