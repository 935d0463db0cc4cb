"""Replies about the server and its models: health, facts, errors."""

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
    """The state of one of several models."""

    model: str
    status: Literal["ok", "stalled", "failed"]
    reason: str | None = Field(description="Why it does not answer, if known.")


class Health(ReplyBody):
    status: Literal["ok", "loading", "draining", "stalled", "failed"]
    reason: str | None = None
    models: list[ModelStatus] | None = Field(
        None, description="Each of several models. The others answer if one could not be loaded."
    )


class QuantizationInfo(ReplyBody):
    """Cost of quantizing weights, or keys and values, measured when they were loaded. The figures
    are null if there was no text to measure on."""

    kind: str = Field(description="Of the weights: `int8`, `int4` or `none`.")
    kv_cache_dtype: str = Field(description="Of keys and values: `int8`, or `auto` for `dtype`.")
    relative_loss: float | None = Field(
        description="Bits per byte that quantization adds, as a share of those without it."
    )
    bits_per_byte: float | None
    exact_bits_per_byte: float | None = Field(description="Bits per byte without quantization.")
    tokens: int | None
    text: str = Field(description="The text it was measured on, or the reason why there is none.")


class Info(ReplyBody):
    version: str
    model: str
    models: list[ModelStatus] = Field(
        description="All models of the server, including those that could not be loaded. The first "
        "answers requests that name none."
    )
    checkpoint: CheckpointName
    config: dict[str, Any] = Field(description="The model's shape: config.json's `model`.")
    vocabulary: str = Field(
        description="Kind of the tokenizer, as in /tokenizer_info; for `none`, prompts are ids."
    )
    training: dict[str, Any] = Field(description="Origin of the weights.")
    parameters: int
    device: str
    decoding: str = Field(description="Code that computes decode steps.")
    decoding_note: str | None = Field(
        description="Why decode steps are computed in plain torch by default: the part that the "
        "native kernels do not cover, or the failed self-check of CUDA graphs."
    )
    kernels: str | None = Field(
        description="The loaded native kernels: their target, and whether they were compiled now "
        "or before, or prebuilt; null without any."
    )
    speculate: str = Field(
        description="Source of drafts, tokens that a decode step verifies: `ngram`, from the text "
        "itself, or `none`. Replies do not depend on it."
    )
    dtype: str = Field(
        description="Dtype of the computation; stored weights of another dtype are rounded to it."
    )
    dtype_why: str = Field(description="`as requested` by --dtype, or the reason of the default.")
    quantization: QuantizationInfo | None = Field(description="null if nothing is quantized.")
    threads: int
    slots: int
    kv_cache_bytes: int
    prefill_chunk: int = Field(description="Largest number of prompt positions in a step.")
    target_gap: str = Field(
        description="Longest time of a step that computes prompts while others decode: `4x` is "
        "four times a step that only decodes, `0.15s` a time; `none`: only `prefill_chunk` limits "
        "the step."
    )
    api_keys: bool = Field(description="True if requests need an API key.")
    limits: dict[str, int]


class CurvePoint(ReplyBody):
    step: int
    loss: float = Field(description="Nats per token; the training loss is smoothed.")
    bits_per_byte: float | None = Field(description="null if it was not measured.")


class TrainingCurve(ReplyBody):
    training: list[CurvePoint]
    validation: list[CurvePoint]


class CardReply(ReplyBody):
    model: str
    checkpoint: CheckpointName
    card: str | None = Field(description="Markdown; null if the checkpoint has none.")
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
    changeable: bool = Field(description="True if an intervention may change it.")
    transformer_lens: str | None = Field(description="Its name in TransformerLens.")


class StagesReply(ReplyBody):
    model: str
    stages: list[StageInfo]


class TokenizerInfo(ReplyBody):
    model: str
    checkpoint: CheckpointName
    vocab_size: int
    kind: Literal["bpe", "pieces", "words", "none"] = Field(
        description="The way from text to ids: cut and merged (bpe), cut into tokens (pieces), or "
        "cut into words that white space separates (words). none: only ids, texts are refused."
    )
    eos_token: str | None = Field(description="Name of the token that ends a text.")
    eos_token_id: int | None
    eos_token_ids: list[int] = Field(description="Every id that ends a generated text.")
    bos_token: str | None = Field(description="null: a text does not begin with a special token.")
    pad_token: str | None
    chat_template: str | None
    pattern: str = Field(description="Regular expression that cuts a text; empty for kind none.")
    special_tokens: dict[str, int]
    added_tokens: dict[str, int] = Field(
        description="Other texts that are always one token, and their ids."
    )
