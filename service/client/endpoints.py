# ruff: noqa: F403, F405
"""Endpoints: functions that build calls. Both clients have a method for each.

Functions whose arguments and result follow from an operation are generated; the others are written
by hand.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Unpack, overload
from urllib.parse import quote

from logitd.service.client import errors
from logitd.service.client.calls import (
    EVENTS,
    SAFETENSORS,
    Answer,
    Call,
    Request,
    array,
    is_many,
    post,
    record,
    tensors,
    with_request_id,
)
from logitd.service.client.fields import *
from logitd.service.client.reading import WrongShape, read
from logitd.service.client.results import *
from logitd.service.client.tensors import Array, TensorFile

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Version:
    version: str


@dataclass(frozen=True, slots=True)
class _Prompts:
    prompts: tuple[dict[str, Any], ...]


def generate(prompt: Prompt, **fields: Unpack[GenerateFields]) -> Call[Generation]:
    """Continue one prompt or several."""
    return Call(post("/generate", {"prompt": prompt, **fields}), _generation)


def stream(prompt: Prompt, **fields: Unpack[GenerateFields]) -> Request:
    """Stream the continuation of one prompt or several."""
    return post("/generate", {"prompt": prompt, **fields}, EVENTS, stream=True)


@overload
def logits(  # type: ignore[overload-overlap]  # a text is a sequence of texts
    prompt: OnePrompt, **fields: Unpack[LogitsFields]
) -> Call[Logits]: ...
@overload
def logits(  # type: ignore[overload-overlap]
    prompt: OnePrompt, *, top_k: int, **fields: Unpack[LogitsFields]
) -> Call[TopLogits]: ...
@overload
def logits(prompt: ManyPrompts, **fields: Unpack[LogitsFields]) -> Call[list[Logits]]: ...
@overload
def logits(
    prompt: ManyPrompts, *, top_k: int, **fields: Unpack[LogitsFields]
) -> Call[list[TopLogits]]: ...
def logits(
    prompt: Prompt, *, top_k: int | None = None, **fields: Unpack[LogitsFields]
) -> Call[Any]:
    """Logits of a prompt as an array, or a list of results for a list of prompts. With `top_k`, the
    result has only the k largest logits of each row, and their ids."""
    if top_k is None:
        return tensors("/logits", {"prompt": prompt, **fields}, _logits)
    return tensors("/logits", {"prompt": prompt, **fields, "top_k": top_k}, _top_logits)


@overload
def activations(  # type: ignore[overload-overlap]
    prompt: OnePrompt, stages: str | Sequence[str], **fields: Unpack[ActivationsFields]
) -> Call[Activations]: ...
@overload
def activations(
    prompt: ManyPrompts, stages: str | Sequence[str], **fields: Unpack[ActivationsFields]
) -> Call[list[Activations]]: ...
def activations(
    prompt: Prompt, stages: str | Sequence[str], **fields: Unpack[ActivationsFields]
) -> Call[Any]:
    """Values of stages of the forward pass. `stages` contains names or patterns
    (`blocks.*.attention.q`). For a list of prompts, this is a list of results."""
    names = [stages] if isinstance(stages, str) else stages
    return tensors("/activations", {"prompt": prompt, "stages": names, **fields}, _activations)


def patch(
    prompt: OnePrompt,
    source: OnePrompt,
    stage: str = "blocks.*.output",
    over: Sequence[str] = ("layers", "positions"),
    **fields: Unpack[SweepFields],
) -> Call[Sweep]:
    """Sweep over layers and positions. At each layer and position in turn, `stage` gets its value
    from `source`, a prompt with the same number of tokens."""
    vary: Intervention = {"stage": stage, "operation": "set", "from": {"prompt": source}}
    return record("/sweep", Sweep, {"prompt": prompt, "vary": vary, "over": over, **fields})


def stages(*, model: str | None = None) -> Call[Stages]:
    """Names, shapes and meanings of the stages."""
    return _get("/stages", Stages, model)


def weights(*, model: str | None = None, step: int | None = None) -> Call[Weights]:
    """Names and shapes of the weights, including derived ones such as the matrices of heads."""
    return _get("/weights", Weights, model, step=step)


def weight(
    name: str,
    slice: str | None = None,
    *,
    dtype: Literal["float32", "float16", "bfloat16"] = "float32",
    model: str | None = None,
    step: int | None = None,
) -> Call[Array]:
    """A weight, or a part of it: "3,:,0:64" has an index or a range for each axis. Head matrices
    can also be named as in TransformerLens: `blocks.0.attn.W_Q`."""
    given = {"slice": slice, "dtype": dtype, "model": model, "step": step}
    fields = {key: value for key, value in given.items() if value is not None}
    request = Request("GET", f"/weights/{quote(name, safe='')}", fields, SAFETENSORS)
    return Call(request, lambda answer: TensorFile(answer.body).array(name))


def features(sae: str | None = None, *, model: str | None = None) -> Call[FeaturesOfModel]:
    """The sparse autoencoders, and statistics of every feature of `sae` (default: the first
    one)."""
    return _get("/features", FeaturesOfModel, model, sae=sae)


def feature(index: int, sae: str | None = None, *, model: str | None = None) -> Call[Feature]:
    """A feature of `sae`: its density, its examples, and the tokens that it promotes."""
    return _get(f"/features/{index}", Feature, model, sae=sae)


@overload
def tokenize(  # type: ignore[overload-overlap]
    text: str, **fields: Unpack[TokenizeFields]
) -> Call[Tokenized]: ...
@overload
def tokenize(text: Sequence[str], **fields: Unpack[TokenizeFields]) -> Call[list[Tokenized]]: ...
def tokenize(text: str | Sequence[str], **fields: Unpack[TokenizeFields]) -> Call[Any]:
    """Token ids of a text, or a list of results for a list of texts."""
    request = post("/tokenize", {"prompt": text, **fields})
    return _one_or_many(request, Tokenized, many=not isinstance(text, str))


@overload
def detokenize(tokens: OneIds, **fields: Unpack[DetokenizeFields]) -> Call[Detokenized]: ...
@overload
def detokenize(tokens: ManyIds, **fields: Unpack[DetokenizeFields]) -> Call[list[Detokenized]]: ...
def detokenize(tokens: OneOrManyIds, **fields: Unpack[DetokenizeFields]) -> Call[Any]:
    """Text of token ids, or a list of results for a list of lists. `[]` is an empty list of
    ids."""
    request = post("/detokenize", {"tokens": tokens, **fields})
    return _one_or_many(request, Detokenized, many=is_many(tokens, "tokens") and len(tokens) > 0)


def tokenizer_info(*, model: str | None = None) -> Call[TokenizerInfo]:
    """The vocabulary, its special tokens, and how texts are split."""
    return _get("/tokenizer_info", TokenizerInfo, model)


def info(*, model: str | None = None) -> Call[Info]:
    """The served model, and how the server runs it."""
    return _get("/info", Info, model)


def history(*, model: str | None = None) -> Call[History]:
    """The steps of the run that a request's field `step` can select, and the loss curve."""
    return _get("/history", History, model)


def health() -> Call[Health]:
    """The state of the server. If the server is loading or shutting down, this returns a result and
    raises no error."""
    return Call(Request("GET", "/health", answers=frozenset({200, 503})), _health)


def version() -> Call[str]:
    """The version of the server."""
    return Call(Request("GET", "/version"), lambda answer: answer.read(_Version).version)


def _get(
    path: str, form: type[Result], model: str | None, **more: str | int | None
) -> Call[Result]:
    given = {"model": model, **more}
    fields = {name: value for name, value in given.items() if value is not None}
    return Call(Request("GET", path, fields), lambda answer: answer.read(form))


def _generation(answer: Answer) -> Generation:
    generation = answer.read(Generation)
    if not generation.choices:
        raise WrongShape("choices is empty")
    return generation


def _one_or_many(request: Request, form: type[Result], *, many: bool) -> Call[Any]:
    """A call that returns one result, or a list if the reply has the member `prompts`."""

    def results(answer: Answer) -> list[Result]:
        head = with_request_id(answer.json(), answer.request_id)
        prompts = read(_Prompts, head).prompts
        return [read(form, head | prompt, f"prompts.{i}") for i, prompt in enumerate(prompts)]

    return Call(request, results if many else lambda answer: answer.read(form))


def _health(answer: Answer) -> Health:
    """The server's state, from a reply with status 200 or 503. If a 503 reply does not contain the
    state, the error that it reports is raised."""
    try:
        return answer.read(Health)
    except WrongShape:
        if answer.status == 200:
            raise
        raise errors.from_reply(
            answer.status, answer.headers, answer.body, answer.request_id
        ) from None


def _logits(file: TensorFile, suffix: str, **facts: Any) -> Logits:
    return Logits(logits=file.array(f"logits{suffix}"), stage=file.stage, **facts)


def _top_logits(file: TensorFile, suffix: str, **facts: Any) -> TopLogits:
    ids, values = file.array(f"top_ids{suffix}"), file.array(f"top_logits{suffix}")
    return TopLogits(top_ids=ids, top_logits=values, stage=file.stage, **facts)


def _activations(file: TensorFile, suffix: str, **facts: Any) -> Activations:
    names = [name.removesuffix(suffix) for name in file.names if name.endswith(suffix)]
    stages = {n: file.array(n + suffix) for n in names if n not in ("token_ids", "positions")}
    return Activations(stages=stages, **facts)


# begin: generated by `make client` from the operations
def probs(prompt: Prompt, **fields: Unpack[ProbsFields]) -> Call[Probs]:
    """The likeliest next tokens after each prompt, or chosen tokens, with their probability,
    logprob and rank. Also the entropy of the whole distribution."""
    return record("/probs", Probs, {"prompt": prompt, **fields})


def score(prompt: Prompt, **fields: Unpack[ScoreFields]) -> Call[Scores]:
    """How likely each prompt is, or each of its continuations: the sum of logprobs, the perplexity,
    the bits per byte, and on request the logprob of each token. A prompt with several continuations
    is computed once."""
    return record("/score", Scores, {"prompt": prompt, **fields})


@overload
def hidden_states(  # type: ignore[overload-overlap]  # a text is a sequence of texts
    prompt: OnePrompt, **fields: Unpack[HiddenStatesFields]
) -> Call[HiddenStates]: ...
@overload
def hidden_states(
    prompt: ManyPrompts, **fields: Unpack[HiddenStatesFields]
) -> Call[list[HiddenStates]]: ...
def hidden_states(prompt: Prompt, **fields: Unpack[HiddenStatesFields]) -> Call[Any]:
    """The residual stream (layers, positions, d_model). Layer 0 is the stream after the embeddings,
    layer i the stream after block i; the final norm is not applied."""
    return array("/hidden_states", HiddenStates, {"prompt": prompt, **fields})


@overload
def attention(  # type: ignore[overload-overlap]  # a text is a sequence of texts
    prompt: OnePrompt, **fields: Unpack[AttentionFields]
) -> Call[Attention]: ...
@overload
def attention(prompt: ManyPrompts, **fields: Unpack[AttentionFields]) -> Call[list[Attention]]: ...
def attention(prompt: Prompt, **fields: Unpack[AttentionFields]) -> Call[Any]:
    """Causal attention weights (layers, heads, positions, tokens). Each row sums to 1; tokens after
    the position have weight 0."""
    return array("/attention", Attention, {"prompt": prompt, **fields})


def sweep(
    prompt: Prompt,
    vary: Intervention,
    over: Sequence[Literal["layers", "heads", "positions"]],
    **fields: Unpack[SweepFields],
) -> Call[Sweep]:
    """Apply an intervention to one layer, head or position after another, and return a metric for
    each: a token's logit, probability or loss, the difference between the logits of two tokens, or
    the divergence of the distribution without the intervention from the one with it. For example,
    ablate each head in turn, or patch each layer at each position. For several prompts, the reply
    has the mean and the spread."""
    return record("/sweep", Sweep, {"prompt": prompt, "vary": vary, "over": over, **fields})


def lens(prompt: Prompt, **fields: Unpack[LensFields]) -> Call[LensReadings]:
    """The final norm and the head are applied to the residual stream after each layer. For each
    layer, the reply has the likeliest next tokens, the probability and rank of chosen tokens, the
    entropy, and the divergence of the model's own prediction, which is the prediction of the last
    layer, from this one. In a model with `backout`, the middle block's contribution is subtracted
    from the streams after later blocks."""
    return record("/lens", LensReadings, {"prompt": prompt, **fields})


def induction(prompt: Prompt, **fields: Unpack[InductionFields]) -> Call[Induction]:
    """The prompt is given to the model twice in a row. The score of a head is the mean attention
    weight from each token of the second copy to the token after the same place in the first. An
    induction head, which copies what followed earlier, has a score near 1; a head that attends to
    all earlier tokens alike has about ln(2) / T for T tokens. Random token ids measure copying
    alone; in ordinary text, a head may also attend to that token for other reasons."""
    return record("/induction", Induction, {"prompt": prompt, **fields})


def attributions(prompt: Prompt, **fields: Unpack[AttributionsFields]) -> Call[Attributions]:
    """The target is a token's logit, the difference between two logits, or a direction at a stage.
    The gradient methods multiply the vector of each token of the prompt by the gradient of the
    target: the gradient at the prompt itself, or its mean along a path from a baseline. The method
    `direct` lists the share that each head, bias and MLP adds to the logit. With `stages`, the
    reply also has the gradients with respect to these stages. Other requests are computed in
    between: a step of the engine computes one block of one prompt."""
    return record("/attributions", Attributions, {"prompt": prompt, **fields})


def circuit(prompt: Prompt, **fields: Unpack[CircuitFields]) -> Call[Circuit]:
    """The strongest tokens, heads and neurons that explain a share of the difference between two
    logits. With attention weights, norm scales and gates frozen, the model is linear, so an edge is
    a product of weights, and the contributions of the parts add up. The circuit is then verified
    without freezing anything: `verification` has the difference with only the circuit, and with
    everything except the circuit. The engine computes a circuit in small pieces, with steps of
    other requests in between."""
    return record("/circuit", Circuit, {"prompt": prompt, **fields})


# end: generated
