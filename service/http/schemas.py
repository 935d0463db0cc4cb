"""Schemas: replies about the server and its models, and error replies."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from logitd.model.files import without_surrogates
from logitd.model.operations.body import CheckpointName, ReplyBody

Reason = Annotated[str, AfterValidator(without_surrogates)]
"""A text that may name a path."""


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
    reason: Reason | None = Field(description="Reason why the model does not answer, if known.")


class Health(ReplyBody):
    status: Literal["ok", "loading", "draining", "stalled", "failed"]
    reason: Reason | None = None
    models: list[ModelStatus] | None = Field(
        None,
        description="Status of each model, if there are several. If one could not be loaded, "
        "the others still answer.",
    )


class QuantizationInfo(ReplyBody):
    """The increase in loss from quantizing the weights, or the keys and values, measured when the
    model was loaded. The figures are null if there was no text to measure on."""

    kind: str = Field(description="Quantization of the weights: `int8`, `int4` or `none`.")
    kv_cache_dtype: str = Field(
        description="Dtype of keys and values: `int8`, or `auto` for `dtype`."
    )
    relative_loss: float | None = Field(
        description="Bits per byte that quantization adds, as a share of `exact_bits_per_byte`."
    )
    bits_per_byte: float | None
    exact_bits_per_byte: float | None = Field(description="Bits per byte without quantization.")
    tokens: int | None
    text: str = Field(description="Text of the measurement, or the reason why there is none.")


class Info(ReplyBody):
    version: str
    model: str
    models: list[ModelStatus] = Field(
        description="All models of the server, including those that could not be loaded. The "
        "first one answers requests that name no model."
    )
    checkpoint: CheckpointName
    config: dict[str, Any] = Field(
        description="The model's shape: `model` in config.json. If its `kind` is `code`, the "
        "owner's code computes it, which the server was allowed to run."
    )
    vocabulary: str = Field(
        description="Kind of the tokenizer, as in /tokenizer_info. With `none`, prompts are ids."
    )
    training: dict[str, Any] = Field(description="Origin of the weights, from config.json.")
    parameters: int
    device: str
    decoding: str = Field(description="Implementation that computes decode steps.")
    decoding_note: str | None = Field(
        description="Reason why plain torch computes decode steps by default: a part of the model "
        "that the native kernels do not cover, or a failed self-check of CUDA graphs."
    )
    kernels: str | None = Field(
        description="The loaded native kernels: their target, and whether they were compiled "
        "now, compiled earlier or prebuilt. null if none are loaded."
    )
    speculate: str = Field(
        description="Source of drafts, which are tokens that a decode step verifies: `ngram` "
        "takes them from the text itself, `none` makes none. It does not change the "
        "replies."
    )
    dtype: str = Field(
        description="Dtype of the computation; weights stored in another dtype are rounded to it."
    )
    dtype_why: str = Field(
        description="`as requested` if --dtype is set, otherwise the reason for this dtype."
    )
    quantization: QuantizationInfo | None = Field(description="null if nothing is quantized.")
    threads: int
    slots: int
    kv_cache_bytes: int
    prefill_chunk: int = Field(description="Largest number of prompt positions per step.")
    target_gap: str = Field(
        description="Time limit of a step that computes prompts while other sequences decode: "
        "`3x` is three times a step that only decodes, `0.15s` a time. With `none`, only "
        "`prefill_chunk` limits the step."
    )
    target_ttft: str = Field(
        description="Target for the wait until a first token, not counting the computation of the "
        "prompt. If waits are longer, steps with prompts may exceed `target_gap`. `none`: no "
        "target."
    )
    api_keys: bool = Field(description="True if requests need an API key.")
    history: bool = Field(
        description="True if requests may choose one of the steps listed by GET /history in the "
        "field `step`."
    )
    limits: dict[str, int]


class CurvePoint(ReplyBody):
    step: int
    loss: float = Field(
        description="Nats per token; a training loss is the mean of the steps since the previous "
        "report."
    )
    bits_per_byte: float | None = Field(description="null if not measured.")


class TrainingCurve(ReplyBody):
    training: list[CurvePoint]
    validation: list[CurvePoint]


class TrainingProgress(ReplyBody):
    """The newest report of the checkpoint's run, which may still be in progress."""

    step: int
    done: float = Field(description="Completed share of the run, 0 to 1.")
    loss: float = Field(
        description="Training loss of the steps since the previous report, nats per token."
    )
    tokens_per_second: float
    seconds_left: float = Field(
        description="Expected seconds from the report until the last step is saved."
    )
    idle_seconds: float = Field(description="Seconds since the run wrote to its log.")
    sampled_at: int | None = Field(description="Step of the samples; null if there are none.")
    samples: list[str] = Field(description="The newest samples, including their prompts.")


class CardReply(ReplyBody):
    model: str
    checkpoint: CheckpointName
    card: str | None = Field(description="Markdown; null if the checkpoint has none.")
    curve: TrainingCurve
    progress: TrainingProgress | None = Field(description="null without a report of the run.")


class KeptStep(ReplyBody):
    """A step in the history of a run."""

    step: int
    val_loss: float | None = Field(
        description="Nats per token on the validation text; null if not evaluated at this step."
    )


class HistoryReply(ReplyBody):
    model: str
    steps: list[KeptStep]
    curve: TrainingCurve


class Version(ReplyBody):
    version: str


class StageInfo(ReplyBody):
    """A stage of the model, in each of its layers."""

    name: str = Field(description="Name, with N for the number of the layer.")
    names: list[str] = Field(description="Its name in each layer, in the order of the layers.")
    axes: list[
        Literal[
            "positions",
            "n_head",
            "n_kv_head",
            "head_dim",
            "T",
            "d_model",
            "d_ff",
            "vocab_size",
            "unnamed",
        ]
    ] = Field(description="Names of the axes; `unnamed` in the outputs of an owner's submodules.")
    shape: list[int | None] = Field(
        description="Sizes of the axes; null for `positions` and for `T`, the number of prompt "
        "tokens."
    )
    meaning: str
    changeable: bool = Field(description="True if interventions may change it.")
    transformer_lens: str | None = Field(description="Name of the stage in TransformerLens.")


class StagesReply(ReplyBody):
    model: str
    stages: list[StageInfo]


class WeightInfo(ReplyBody):
    name: str
    shape: list[int]
    dtype: str | None = Field(description="dtype in the checkpoint; null for derived weights.")


class WeightsReply(ReplyBody):
    model: str
    checkpoint: CheckpointName
    weights: list[WeightInfo]


class SaeInfo(ReplyBody):
    """A sparse autoencoder."""

    name: str
    stage: str = Field(description="Name of the features in /activations and in interventions.")
    architecture: str
    features: int
    k: int | None = Field(description="Largest number of features at a position; null: no limit.")
    training: dict[str, Any] = Field(
        description="Record written by `logitd sae train`: checkpoint, text, figures. Empty for "
        "other autoencoders."
    )


class FeaturesReply(ReplyBody):
    model: str
    checkpoint: CheckpointName
    saes: list[SaeInfo]
    sae: str | None = Field(description="Name of the autoencoder that the lists describe.")
    density: list[float] | None = Field(
        description="Share of the tokens at which each feature is not zero."
    )
    strongest: list[float] | None = Field(description="Largest activation of each feature.")
    tokens: list[str | None] | None = Field(
        description="Text of the token with that activation; null if the feature was never active."
    )


class ExampleToken(ReplyBody):
    id: int
    text: str
    activation: float


class FeatureExample(ReplyBody):
    """A part of a text in which a feature is strongly active."""

    strongest: float
    tokens: list[ExampleToken]


class TokenLogit(ReplyBody):
    id: int
    text: str
    logit: float = Field(
        description="Change of the logit for an activation of 1 if the final norm has scale 1."
    )


class FeatureReply(ReplyBody):
    model: str
    checkpoint: CheckpointName
    sae: str
    stage: str
    index: int
    density: float | None
    examples: list[FeatureExample]
    promoted: list[TokenLogit] | None
    suppressed: list[TokenLogit] | None


class TokenizerInfo(ReplyBody):
    model: str
    checkpoint: CheckpointName
    vocab_size: int
    kind: Literal["bpe", "pieces", "words", "none"] = Field(
        description="How a text becomes ids. `bpe`: it is split, then bytes are merged; "
        "`pieces`: it is split into tokens; `words`: it is split into words at white "
        "space; `none`: texts are refused; send ids."
    )
    eos_token: str | None = Field(description="Name of the token that ends a text.")
    eos_token_id: int | None
    eos_token_ids: list[int] = Field(description="All ids that end a generated text.")
    bos_token: str | None = Field(
        description="Special token at the beginning of a text; null if there is none."
    )
    pad_token: str | None
    chat_template: str | None
    pattern: str = Field(description="Regular expression that splits a text; empty for `none`.")
    special_tokens: dict[str, int]
    added_tokens: dict[str, int] = Field(
        description="Other texts that are always a single token, with their ids."
    )
