"""Replies about the server and its models: health, facts, errors.

Replies of operations are in `model/operations/`.
"""

from typing import Any, Literal

from pydantic import Field

from logitd.model.operations.body import CheckpointName, ReplyBody


class ErrorDetail(ReplyBody):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(ReplyBody):
    error: ErrorDetail


class ModelStatus(ReplyBody):
    """Whether one of several models answers."""

    model: str
    status: Literal["ok", "stalled", "failed"]
    reason: str | None = Field(description="Why it does not, where that is known.")


class Health(ReplyBody):
    status: Literal["ok", "loading", "draining", "stalled", "failed"]
    reason: str | None = None
    models: list[ModelStatus] | None = Field(
        None, description="Each of several. One that could not be loaded takes no other along."
    )


class QuantizationInfo(ReplyBody):
    """What quantizing weights, or keys and values, costs, measured when they were loaded; the
    figures are null where no text was found to measure on."""

    kind: str = Field(description="Of the weights: `int8`, `int4` or `none`.")
    kv_cache_dtype: str = Field(description="Of keys and values: `int8`, or `auto` for `dtype`.")
    relative_loss: float | None = Field(
        description="Bits per byte that quantization adds, as a share of those without it."
    )
    bits_per_byte: float | None
    exact_bits_per_byte: float | None = Field(description="The same without quantization.")
    tokens: int | None
    text: str = Field(description="What it was measured on, or why it was not.")


class Info(ReplyBody):
    version: str
    model: str
    models: list[ModelStatus] = Field(
        description="All that were to be served, also what could not be loaded; the first answers "
        "requests that name none."
    )
    checkpoint: CheckpointName
    config: dict[str, Any] = Field(description="The model's shape: config.json's `model`.")
    vocabulary: str = Field(
        description="Its tokenizer's kind, as in /tokenizer_info; of `none` prompts are token ids."
    )
    training: dict[str, Any] = Field(description="Where the weights come from.")
    parameters: int
    device: str
    decoding: str = Field(description="How decode steps are computed.")
    decoding_note: str | None = Field(
        description="Why decode steps are computed in plain torch, if that was not asked for: what "
        "the native kernels do not cover, or how CUDA graphs failed their self-check."
    )
    kernels: str | None = Field(
        description="Which native kernels were loaded: their target, and whether they were "
        "compiled now or before, or prebuilt; null without any."
    )
    speculate: str = Field(
        description="Where drafts come from, tokens that a decode step verifies: `ngram`, from the "
        "text itself, or `none`. Answers do not depend on it."
    )
    dtype: str = Field(
        description="The dtype of the computation, to which stored weights of another are rounded."
    )
    dtype_why: str = Field(description="`as asked` by --dtype, or the reason of the default.")
    quantization: QuantizationInfo | None = Field(description="null where nothing is quantized.")
    threads: int
    slots: int
    kv_cache_bytes: int
    prefill_chunk: int = Field(description="Prompt positions that a step computes at most.")
    target_gap: str = Field(
        description="How long a step should take at most that computes prompts while others "
        "decode: `4x` is four times a step that only decodes, `0.15s` a time; `none`: "
        "`prefill_chunk` alone bounds it."
    )
    api_keys: bool = Field(description="Whether requests need an API key.")
    limits: dict[str, int]


class CurvePoint(ReplyBody):
    step: int
    loss: float = Field(description="Nats per token; of the training smoothed.")
    bits_per_byte: float | None = Field(description="Where it was measured.")


class TrainingCurve(ReplyBody):
    training: list[CurvePoint]
    validation: list[CurvePoint]


class CardReply(ReplyBody):
    model: str
    checkpoint: CheckpointName
    card: str | None = Field(description="Markdown; null where the checkpoint has none.")
    curve: TrainingCurve


class Version(ReplyBody):
    version: str


class StageInfo(ReplyBody):
    """A stage of the model, in each of its layers."""

    name: str = Field(description="With N for the layer.")
    names: list[str] = Field(description="Layer by layer.")
    axes: list[Literal["positions", "n_head", "n_kv_head", "head_dim", "T", "d_model", "d_ff",
                       "vocab_size"]]  # fmt: skip
    shape: list[int | None] = Field(description="null: positions, and T, the prompt's tokens.")
    meaning: str
    changeable: bool = Field(description="Whether an intervention may change it.")
    transformer_lens: str | None = Field(description="What TransformerLens calls it.")


class StagesReply(ReplyBody):
    model: str
    stages: list[StageInfo]


class TokenizerInfo(ReplyBody):
    model: str
    checkpoint: CheckpointName
    vocab_size: int
    kind: Literal["bpe", "pieces", "words", "none"] = Field(
        description="How a text becomes ids: cut and merged (bpe), cut into tokens (pieces), cut "
        "into words that white space separates (words), or not at all (none): then there are token "
        "ids alone, and texts are rejected."
    )
    eos_token: str | None = Field(description="The token that ends a text, by name.")
    eos_token_id: int | None
    eos_token_ids: list[int] = Field(description="Every id that ends a generated text.")
    bos_token: str | None = Field(description="null: a text does not begin with a special token.")
    pad_token: str | None
    chat_template: str | None
    pattern: str = Field(description="The regular expression that cuts a text; empty of kind none.")
    special_tokens: dict[str, int]
    added_tokens: dict[str, int] = Field(
        description="Other texts that are one token wherever they occur, and their ids."
    )
