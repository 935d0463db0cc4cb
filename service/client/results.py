"""Results: what the calls of the client give, as frozen dataclasses.

Those without arrays are read from JSON (`reading.py`) and have the members of the server's replies
under the same names; `bytes` is bytes here, and `request_id` comes from the reply's header. Logits,
hidden states, attention weights and activations are NumPy arrays of the caller's own, which may be
written to. Shapes: `P` positions asked for, `T` tokens of the prompt, `C` columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = bytes  # the type, where a member is called `bytes`
Floats = npt.NDArray[np.floating[Any]]
"""float32; float16 where that was asked for."""
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights that an answer comes from."""

    name: str
    step: int
    val_loss: float | None  # nats per token
    weights_sha256: str


# generate and stream


@dataclass(frozen=True, slots=True)
class TopToken:
    """One of the likeliest tokens at a place; rank 1 is the likeliest."""

    id: int
    text: str
    bytes: Bytes
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Token:
    """A token with its logprob, which is None for a prompt's first: nothing predicts it."""

    id: int
    text: str
    bytes: Bytes
    logprob: float | None
    rank: int | None
    top: tuple[TopToken, ...]


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """The tokens of the prompt `index`, with `prompt_logprobs`."""

    index: int
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion; in a stream's chunk, what is new of it. `tokens` is None without `logprobs`.

    finish_reason  "stop" or "length"; None while it goes on
    stop_reason    the stop text or the token id that ended it
    """

    index: int
    prompt_index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    tokens: tuple[Token, ...] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int  # prompt tokens that were copied instead of computed


@dataclass(frozen=True, slots=True)
class Timings:
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    ttft_ms: float  # arrival to the first token
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer of /generate. `choices` are in the order of their index, one at least."""

    id: str
    created: int
    model: str
    checkpoint: Checkpoint
    choices: tuple[Choice, ...]
    usage: Usage
    seed: int
    timings: Timings
    request_id: str
    prompts: tuple[ScoredPrompt, ...] | None = None

    @property
    def text(self) -> str:
        """The first completion."""
        return self.choices[0].text


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is new in a stream: of the choices that grew, and of the prompts' logprobs."""

    id: str
    created: int
    model: str
    checkpoint: Checkpoint
    choices: tuple[Choice, ...]
    request_id: str
    prompts: tuple[ScoredPrompt, ...] | None = None

    @property
    def text(self) -> str:
        """What is new of the first completion; often nothing where there are several."""
        return "".join(choice.text for choice in self.choices if choice.index == 0)


# logits, hidden states, attention


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """`logits` (P, C) of one prompt: row i predicts the token after `positions[i]`."""

    logits: Floats
    positions: Integers  # (P,)
    token_ids: Integers  # (T,)
    stage: str
    checkpoint: Checkpoint
    request_id: str


@dataclass(frozen=True, slots=True, eq=False)
class TopLogits:
    """The k largest logits of each row (P, k), descending. Where processing has left fewer than k,
    the rest are -inf, with the id -1."""

    top_ids: Integers
    top_logits: Floats
    positions: Integers  # (P,)
    token_ids: Integers  # (T,)
    stage: str
    checkpoint: Checkpoint
    request_id: str


@dataclass(frozen=True, slots=True, eq=False)
class HiddenStates:
    """`hidden_states` (layers, P, d_model) of one prompt: the residual stream, before the final
    norm; of all layers, 0 is after the embeddings and i after block i."""

    hidden_states: Floats
    positions: Integers  # (P,)
    token_ids: Integers  # (T,)
    checkpoint: Checkpoint
    request_id: str


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """`attention` (layers, heads, P, T) of one prompt; each row sums to 1."""

    attention: Floats
    positions: Integers  # (P,)
    token_ids: Integers  # (T,)
    checkpoint: Checkpoint
    request_id: str


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """The values of stages (P, ...) of one prompt, by their names."""

    stages: Mapping[str, Floats]
    positions: Integers  # (P,)
    token_ids: Integers  # (T,)
    checkpoint: Checkpoint
    request_id: str

    def __getitem__(self, stage: str) -> Floats:
        return self.stages[stage]


@dataclass(frozen=True, slots=True)
class StageInfo:
    """A stage of the model's forward, N standing for the layer; None in `shape`: positions, and
    tokens of the prompt."""

    name: str
    names: tuple[str, ...]
    axes: tuple[str, ...]
    shape: tuple[int | None, ...]
    meaning: str
    changeable: bool
    transformer_lens: str | None


@dataclass(frozen=True, slots=True)
class Stages:
    """What the served model computes, in that order."""

    model: str
    stages: tuple[StageInfo, ...]
    request_id: str


# sweep


@dataclass(frozen=True, slots=True)
class SweptToken:
    id: int
    text: str
    bytes: Bytes


@dataclass(frozen=True, slots=True)
class SweepAxis:
    """An axis of the grid: "layers", "heads" or "positions", and the places along it."""

    name: str
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SweepCell:
    """A place of the grid, None where an axis is not swept. `value` is the token's logit, less that
    of `minus` where there is one."""

    layer: int | None
    head: int | None
    position: int | None
    logit: float
    minus_logit: float | None
    value: float


@dataclass(frozen=True, slots=True)
class Sweep:
    """A token's logit, or the difference of two, in each place of a grid; `unchanged` is what it is
    without the change."""

    token_ids: tuple[int, ...]
    token: SweptToken
    minus: SweptToken | None
    axes: tuple[SweepAxis, ...]
    unchanged: SweepCell
    cells: tuple[SweepCell, ...]
    checkpoint: Checkpoint
    request_id: str

    @property
    def grid(self) -> npt.NDArray[np.float64]:
        """The values, an axis of the array for each axis of the grid."""
        shape = [len(axis.values) for axis in self.axes]
        return np.array([cell.value for cell in self.cells], dtype=np.float64).reshape(shape)

    @property
    def effect(self) -> npt.NDArray[np.float64]:
        """The same less the unchanged value: what each place does to it."""
        return self.grid - self.unchanged.value


# probs and score


@dataclass(frozen=True, slots=True)
class TokenProb:
    """A token of the next-token distribution. Where processing has dropped it, `prob` is 0 and
    `logprob` None."""

    id: int
    text: str
    bytes: Bytes
    prob: float
    logprob: float | None
    rank: int


@dataclass(frozen=True, slots=True)
class LensLayer:
    """What the model would say after a layer: the likeliest tokens, the named ones, the entropy,
    and the divergence of the model's own answer from it, in nats."""

    layer: int
    top: tuple[TokenProb, ...]
    tokens: tuple[TokenProb, ...]
    entropy: float
    divergence: float


@dataclass(frozen=True, slots=True)
class LensPosition:
    position: int
    layers: tuple[LensLayer, ...]


@dataclass(frozen=True, slots=True)
class PromptLens:
    index: int
    token_ids: tuple[int, ...]
    positions: tuple[LensPosition, ...]


@dataclass(frozen=True, slots=True)
class LensReadings:
    """Of each prompt, position by position and layer by layer."""

    prompts: tuple[PromptLens, ...]
    checkpoint: Checkpoint
    request_id: str


@dataclass(frozen=True, slots=True)
class TargetToken:
    """A token whose logit is attributed."""

    id: int
    text: str
    bytes: Bytes
    logit: float


@dataclass(frozen=True, slots=True)
class AttributedToken:
    """A token of the prompt, with what each method that was asked for attributes to it."""

    id: int
    text: str
    bytes: Bytes
    gradient_times_input: float | None = None
    integrated_gradients: float | None = None


@dataclass(frozen=True, slots=True)
class PathSummary:
    """How well the steps of integrated gradients add up: `gap` is the tokens' `sum` less what the
    target gains on the way from the baseline."""

    steps: int
    baseline: str | int  # "zero", or a token id
    baseline_value: float
    sum: float
    gap: float


@dataclass(frozen=True, slots=True)
class DirectPart:
    """What a part of the model adds to the target by itself; of a head, which one."""

    stage: str
    head: int | None
    value: float


@dataclass(frozen=True, slots=True)
class DirectContributions:
    """The parts in the order of the forward, and their sum: the target, but for rounding."""

    parts: tuple[DirectPart, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class PromptAttributions:
    """Of one prompt: the target's `value` at `position`, which is the logit of `token` less that of
    `minus`, and what each method that was asked for makes of it."""

    index: int
    token_ids: tuple[int, ...]
    position: int
    token: TargetToken
    minus: TargetToken | None
    value: float
    tokens: tuple[AttributedToken, ...]
    integrated_gradients: PathSummary | None = None
    direct: DirectContributions | None = None


@dataclass(frozen=True, slots=True)
class Attributions:
    """The answer of /attributions, prompt by prompt."""

    id: str
    created: int
    model: str
    checkpoint: Checkpoint
    prompts: tuple[PromptAttributions, ...]
    request_id: str


@dataclass(frozen=True, slots=True)
class PromptProbs:
    """The listed tokens after one prompt, their `mass` together, and the entropy (nats) of the
    whole distribution. `perplexity` is the prompt's own, if it was asked for."""

    index: int
    token_ids: tuple[int, ...]
    tokens: tuple[TokenProb, ...]
    mass: float
    entropy: float
    perplexity: float | None = None


@dataclass(frozen=True, slots=True)
class Probs:
    """The answer of /probs, prompt by prompt."""

    id: str
    created: int
    model: str
    checkpoint: Checkpoint
    stage: str
    prompts: tuple[PromptProbs, ...]
    request_id: str


@dataclass(frozen=True, slots=True)
class TextScore:
    """How likely a text is. `logprob` is the sum over `scored_tokens` tokens, in nats; where none
    is scored, perplexity and bits per byte are None. `tokens` come with `logprobs`."""

    index: int
    token_ids: tuple[int, ...]
    scored_tokens: int
    logprob: float
    is_greedy: bool  # whether temperature 0 would have given it
    perplexity: float | None
    bits_per_byte: float | None
    tokens: tuple[Token, ...] | None = None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Of one prompt: its own score, or those of the continuations, if any were given."""

    index: int
    token_ids: tuple[int, ...]
    score: TextScore | None = None
    continuations: tuple[TextScore, ...] | None = None


@dataclass(frozen=True, slots=True)
class ScoreUsage:
    prompt_tokens: int
    scored_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Scores:
    """The answer of /score, prompt by prompt."""

    id: str
    created: int
    model: str
    checkpoint: Checkpoint
    prompts: tuple[PromptScores, ...]
    usage: ScoreUsage
    request_id: str


# tokenize and detokenize


@dataclass(frozen=True, slots=True)
class Piece:
    """A token of a text, which touches the characters [start, end) of it."""

    id: int
    text: str
    bytes: Bytes
    start: int
    end: int
    special: bool


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The token ids of one text. `pieces` describes them, unless that was not wanted, or they are
    more than the server describes."""

    id: str
    created: int
    model: str
    checkpoint: Checkpoint
    tokens: tuple[int, ...]
    count: int
    pieces: tuple[Piece, ...] | None
    request_id: str


@dataclass(frozen=True, slots=True)
class Detokenized:
    """The text of token ids, and its bytes, which are the truth where they are not UTF-8."""

    id: str
    created: int
    model: str
    checkpoint: Checkpoint
    prompt: str
    bytes: Bytes
    request_id: str

    @property
    def text(self) -> str:
        """`prompt`, by another name."""
        return self.prompt


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """The vocabulary: its size, its special tokens and the pattern that cuts texts. Of `kind`
    "none" there are token ids alone."""

    model: str
    checkpoint: Checkpoint
    vocab_size: int
    kind: str
    eos_token: str | None
    eos_token_id: int | None
    bos_token: str | None
    pad_token: str | None
    chat_template: str | None
    pattern: str
    special_tokens: dict[str, int]
    request_id: str


# info and health


@dataclass(frozen=True, slots=True)
class QuantizationInfo:
    """What rounding weights (`kind`), or keys and values, costs in bits per byte of `text`: of
    `relative_loss` 0.001 is 0.1 %. The numbers are None where nothing was measured, and `text`
    then says why."""

    kind: str
    kv_cache_dtype: str
    relative_loss: float | None
    bits_per_byte: float | None
    exact_bits_per_byte: float | None
    tokens: int | None
    text: str


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """Whether a model of a server answers: `status` is "ok", or else "stalled" or "failed",
    and `reason` may say why."""

    model: str
    status: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class Info:
    """What is served, where and how. `config` is the model's shape, `training` where the weights
    come from, `limits` those of a request. `models` are all that were to be served, the first of
    which answers requests that name none."""

    version: str
    model: str
    models: tuple[ModelStatus, ...]
    checkpoint: Checkpoint
    config: dict[str, Any]
    vocabulary: str  # the kind of its tokenizer; "none": prompts are token ids
    training: dict[str, Any]
    parameters: int
    device: str
    decoding: str
    kernels: str | None
    speculate: str  # where drafts of tokens come from: "ngram" or "none"
    dtype: str
    quantization: QuantizationInfo | None
    threads: int
    slots: int
    kv_cache_bytes: int
    prefill_chunk: int  # prompt positions that a step computes at most
    target_gap: str  # how long a step with prompts should take beside decoding: "4x", or "none"
    api_keys: bool  # whether requests need one
    limits: dict[str, int]
    request_id: str


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests are answered: `status` is "ok", or else "loading", "draining", "stalled" or
    "failed", and `reason` may say why. `models` has each of several."""

    status: str
    request_id: str
    reason: str | None = None
    models: tuple[ModelStatus, ...] | None = None

    @property
    def ok(self) -> bool:
        return self.status == "ok"
