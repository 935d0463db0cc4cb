"""LLM: a checkpoint in this process, without a server.

    from logitd import LLM, SamplingParams

    with LLM("checkpoints/python-small") as llm:
        params = SamplingParams(max_tokens=20, temperature=0.8, seed=1)
        for completion in llm.generate(["def main():", "import "], params):
            print(completion.text)
        for delta in llm.stream("class ", params):
            print(delta.text, end="", flush=True)

        llm.logits("def main():")                # (tokens, vocabulary)
        llm.probs("def main():")                 # (vocabulary,): the next token
        llm.score("def main", ["():", "body"])   # the logprobs of each continuation

`LLM` runs the operations of `model/operations/` in the same engine as `logitd serve`: the fields of
a request, their checks and, on a CPU, the exact results are the same. Each method takes the fields
of its endpoint as keywords. Chat templates and queue limits exist only in the server.
"""

import dataclasses
import logging
import math
import operator
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast, get_type_hints

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError, create_model

from logitd.model.checkpoint.checkpoint import CheckpointError
from logitd.model.checkpoint.stored_weights import StoredWeights, Weight, parse_part
from logitd.model.device import DeviceError, use_threads
from logitd.model.dtypes import DTypeName
from logitd.model.hooked.model import HookedGPT
from logitd.model.in_process import BY_NAME, GenerationError, Operations, refuse
from logitd.model.inference.attribution.task import Attribution
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.interventions import Intervention
from logitd.model.inference.kernels.select import KernelError
from logitd.model.inference.load import choose_slots, load_model
from logitd.model.inference.memory import SlotBudget
from logitd.model.inference.options import (
    ComputeOptions,
    KernelChoice,
    KernelTarget,
    KVCacheDType,
    Quantization,
    SlotDefault,
)
from logitd.model.inference.sampling.distribution import log_softmax
from logitd.model.inference.sampling.lens import LensRow, read_lens
from logitd.model.inference.sampling.params import SamplingParams, TokenLogprob
from logitd.model.inference.selection import gpt_only
from logitd.model.inference.sweep import Axis
from logitd.model.operations.completion import GrowingReply, Piece
from logitd.model.operations.computed import Computed, logprobs_of
from logitd.model.operations.operation import Completions, Record, Series, envelope
from logitd.model.operations.prompts import encode_text
from logitd.model.operations.validation import describe_errors
from logitd.model.sae.files import AutoencoderError, placed, read_autoencoders
from logitd.model.text.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "Completion",
    "GenerationError",
    "Intervention",
    "InvalidRequest",
    "LoadError",
    "SamplingParams",
    "Score",
]

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]]
"""A string, or token ids."""
Prompts = Prompt | Sequence[Prompt]
Token = str | int
"""The text of a token, or its id."""
Floats = npt.NDArray[np.float32]
Change = Intervention | dict[str, Any]
"""An intervention: an object, or a dict with the same fields as in a request."""

_ABSENT: Any = object()
"""Default of a prompt that is not given."""
RUN_CODE = "LOGITD_RUN_CODE"
"""Environment variable that allows a checkpoint's own code to run, like --run-code."""
logger = logging.getLogger("logitd")


class LoadError(Exception):
    """Raised if a checkpoint cannot be loaded with the given options; the message gives the reason
    and the fix."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One completion of one prompt; in a stream, a part of it.

    index          its index among the n completions of the prompt
    text           the text, without the stop token or stop string that ended it
    token_ids      the generated tokens, including a stop token; with `echo`, the prompt's before
    finish_reason  "stop" or "length"; None in a stream until the last part
    stop_reason    the stop string, or the id of the stop token, that ended the completion
    seed           the prompt's seed: the same request with this seed generates the same tokens
    logprobs       (tokens,), in nats; None unless `SamplingParams.logprobs` is set. The first token
                   of a prompt has NaN, because no token comes before it
    top_logprobs   for each token, the k likeliest tokens at its position
    """

    prompt_index: int
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    seed: int | None = None
    logprobs: npt.NDArray[np.float64] | None = None
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """The score of a text: `logprobs` (scored tokens,) in nats, and their sum `logprob`. The first
    token of a prompt has no logprob, because no token comes before it."""

    token_ids: tuple[int, ...]
    logprobs: npt.NDArray[np.float64]
    logprob: float


class LLM:
    """A loaded checkpoint. Only one thread may use it, but that thread may switch between several
    streams while it reads them.

    checkpoint          directory of a checkpoint, or of a run, whose best checkpoint is loaded
    device, dtype, threads, kernels, kernel_target, quantize, kv_cache_dtype
                        as for `logitd serve`. `threads` sets the size of torch's thread pool for
                        the whole process
    slots               number of sequences that are computed together; default 16, because batches
                    of this size are fast
    run_code            run the model's own code, if the checkpoint comes with such code; default:
                        True if LOGITD_RUN_CODE is 1
    batch_code          let that code compute sequences in batches; the last bits may differ
    saes                folders of sparse autoencoders, by name; their features become stages
    log                 called with a line of text when native kernels are built

    Raises LoadError. Methods raise InvalidRequest, a ValueError, for requests that cannot be
    computed. A fork lacks the threads of its parent: unless these were set to 1, methods raise
    DeviceError there, and a new LLM raises LoadError.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        device: str = "auto",
        dtype: DTypeName = "auto",
        threads: int = 0,
        kernels: KernelChoice = "auto",
        kernel_target: KernelTarget = "auto",
        quantize: Quantization = "none",
        kv_cache_dtype: KVCacheDType = "auto",
        slots: int | None = None,
        run_code: bool | None = None,
        batch_code: bool = False,
        saes: Mapping[str, str | Path] | None = None,
        log: Callable[[str], None] = logger.info,
    ) -> None:
        budget = SlotBudget(slots, default=SlotDefault(EngineConfig().slots))
        options = ComputeOptions(
            device=device,
            dtype=dtype,
            threads=threads,
            kernels=kernels,
            kernel_target=kernel_target,
            quantize=quantize,
            kv_cache_dtype=kv_cache_dtype,
            run_code=os.environ.get(RUN_CODE) == "1" if run_code is None else run_code,
            batch_code=batch_code,
        )
        try:
            _check_types(LLM.__init__, {**dataclasses.asdict(options), "slots": slots})
            loaded = load_model(Path(checkpoint), options, slots=budget, log=log)
            use_threads(loaded.placement.threads)
            count, _ = choose_slots(loaded, budget)
            config = EngineConfig(slots=count, kv_cache_dtype=kv_cache_dtype)
            folders = {name: Path(path) for name, path in (saes or {}).items()}
            stored = read_autoencoders(folders, loaded.checkpoint)
        except (
            AutoencoderError,
            CheckpointError,
            DeviceError,
            KernelError,
            InvalidRequest,
        ) as error:
            raise LoadError(str(error)) from error
        self._engine = Engine(
            loaded.network,
            config,
            make_decoder=loaded.decode_path.make_owner,
            autoencoders=placed(stored, loaded.placement.device),
        )
        self.checkpoint = replace(loaded.checkpoint, shape=self._engine.model_config)
        self._operations = Operations(self._engine, self.checkpoint)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.checkpoint.tokenizer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine's threads. No method may be called after this."""
        self._engine.close()

    def generate(
        self, prompts: Prompts, params: SamplingParams | None = None, **fields: Any
    ) -> list[Completion]:
        """Generate `n` completions of each prompt, and return them in the order of the prompts.
        `fields` are fields of /generate (n, stop, ignore_eos, interventions, regex, ...); `params`
        sets several of them together."""
        plan = self._completions(prompts, params, fields)
        growing = GrowingReply(plan, self.tokenizer)
        for _ in self._operations.grow(growing, plan):
            pass
        return [_completion(piece, plan) for piece in growing.take()]

    def stream(
        self, prompts: Prompts, params: SamplingParams | None = None, **fields: Any
    ) -> Generator[Completion]:
        """Yield parts of the completions as tokens are generated. All completions grow at the same
        time. Generation starts when the first part is read, and stops when the iterator is closed.
        """
        plan = self._completions(prompts, params, fields)
        growing = GrowingReply(plan, self.tokenizer)
        with closing(self._operations.grow(growing, plan)) as events:
            for _ in events:
                for piece in growing.take():
                    yield _completion(piece, plan)

    def logits(self, prompt: Prompt, **fields: Any) -> Floats:
        """Logits (T, V); row i predicts the token after token i. With the field `token_ids`, only
        the columns of these tokens are returned."""
        refuse(fields, "top_k")
        return self._arrays("logits", prompt=prompt, **fields)["logits"]

    def probs(self, prompt: Prompt, **fields: Any) -> npt.NDArray[np.float64]:
        """Probabilities (V,) of the next token."""
        refuse(fields, "top_k", "token_ids", "positions")
        row = self._arrays("logits", prompt=prompt, positions="last", **fields)["logits"][0]
        return np.exp(log_softmax(row))

    def hidden_states(self, prompt: Prompt, **fields: Any) -> Floats:
        """The residual stream (n_layer + 1, T, d_model), after the embeddings and after each
        block."""
        return self._arrays("hidden_states", prompt=prompt, **fields)["hidden_states"]

    def attention(self, prompt: Prompt, **fields: Any) -> Floats:
        """Attention weights (n_layer, n_head, T, T); each row sums to 1."""
        return self._arrays("attention", prompt=prompt, **fields)["attention"]

    def activations(
        self, prompt: Prompt, stages: str | Sequence[str], **fields: Any
    ) -> dict[str, Floats]:
        """The values (T, ...) of the stages with these names or patterns (`blocks.*.attention.q`);
        `model/transformer/stages.py` lists the stages. The field `heads` selects some heads of
        stages that have heads."""
        names = [stages] if isinstance(stages, str) else stages
        return self._arrays("activations", prompt=prompt, stages=names, **fields)

    def lens(self, prompt: Prompt, **fields: Any) -> list[list[LensRow]]:
        """The predictions after each layer (0: after the embeddings), by position and layer. Each
        prediction has the likeliest ids, the rank and logprob of each id in the field `token_ids`,
        the entropy, and the divergence of the model's own prediction from it."""
        given = {"positions": "all", "prompt": prompt, **fields}
        plan, computed = self._computed("lens", **given)
        (request,) = plan.requests
        # One array (layers, numbers) for each position.
        rows = computed.rows[request.request_id]
        lens = request.output
        return [[read_lens(numbers, lens.top_k, lens.named) for numbers in at] for at in rows]

    def attributions(
        self,
        prompt: Prompt,
        token: Token | None = None,
        minus: Token | None = None,
        **fields: Any,
    ) -> Attribution:
        """The contribution of each part to the logit of `token` (None: the likeliest next token),
        minus the logit of `minus` if given. The parts are the tokens of the prompt (methods
        "gradient_times_input" and "integrated_gradients") or the heads and MLPs ("direct").

        With the field `stages`, `gradients` has the gradients with respect to these stages; with
        `direction`, the target is a direction at a stage instead of a logit."""
        given = {"prompt": prompt, **_tokens(token=token, minus=minus), **fields}
        _, computed = self._computed("attributions", **given)
        attribution: Attribution
        (attribution,) = computed.attributions.values()
        return attribution

    def sweep(
        self,
        prompt: Prompts,
        vary: Change,
        over: Sequence[Axis],
        token: Token | Sequence[Token] | None = None,
        minus: Token | Sequence[Token] | None = None,
        **fields: Any,
    ) -> npt.NDArray[np.float64]:
        """Apply the intervention `vary` in each place in turn. For each place, the result has
        the logit of `token` after the prompt, minus the logit of `minus` if given; `metric` chooses
        another metric. The result has one axis for each entry of `over` ("layers", "heads",
        "positions"). For several prompts, with one token for all of them or one for each, the
        result is the mean over the prompts."""
        given = {"vary": vary, "over": over, **_tokens(token=token, minus=minus), **fields}
        plan = cast(Series, self._operations.plan("sweep", prompt=prompt, **given))
        return np.array(plan.members(self._operations.parts(plan))["grid"])

    def patch(
        self,
        prompt: Prompt,
        source: Prompt,
        token: Token | None = None,
        minus: Token | None = None,
        *,
        stage: str = "blocks.*.output",
        over: Sequence[Axis] = ("layers", "positions"),
        **fields: Any,
    ) -> npt.NDArray[np.float64]:
        """Activation patching: a sweep that sets a stage to the values it has in `source`, a prompt
        with the same number of tokens."""
        vary = {"stage": stage, "operation": "set", "from": {"prompt": source}}
        return self.sweep(prompt, vary, over, token, minus, **fields)

    def score(
        self, prompt: Prompt, continuations: Sequence[Prompt] = (), **fields: Any
    ) -> list[Score]:
        """The score of each continuation of the prompt, or of the prompt itself if there are no
        continuations."""
        given = {"prompt": prompt, "continuations": continuations or None, **fields}
        _, computed = self._computed("score", **given)
        return [_score(tokens) for _, tokens in sorted(computed.tokens.items())]

    def run(self, operation: str, prompt: Prompt = _ABSENT, **fields: Any) -> Any:
        """Run any operation whose reply is a JSON object. Returns the reply that a server would
        send, with its members as attributes."""
        chosen = BY_NAME.get(operation)
        if chosen is None:
            raise InvalidRequest(
                f"there is no operation {operation!r}; use one of {', '.join(BY_NAME)}", "operation"
            )
        given = fields if prompt is _ABSENT else {"prompt": prompt, **fields}
        plan = self._operations.plan(operation, **given)
        if isinstance(plan, Record):
            members = plan.reply(self._operations.compute(plan.requests))
        elif isinstance(plan, Series):
            members = {**plan.head, **plan.members(self._operations.parts(plan))}
        else:
            raise InvalidRequest(
                f"the reply of {operation} is not a JSON object: call LLM.{operation} instead"
            )
        head = envelope(chosen.reply_id, self.checkpoint.name, self.checkpoint)
        return TypeAdapter(chosen.reply).validate_python({**head, **members})

    @cached_property
    def hooked(self) -> HookedGPT:
        """The model with TransformerLens' interface (`model/hooked/model.py`). Its weights are a
        float32 copy or, if the model is in float32, the model's own. Raises InvalidRequest if the
        model runs its owner's code."""
        gpt_only(self.checkpoint.shape, "hook points of TransformerLens")
        return HookedGPT(self._engine.whole_gpt(), self.tokenizer, self.checkpoint.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model as TransformerLens does: `llm(prompt, return_type="loss")`."""
        return self.hooked(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """The operations that have no method above, such as `llm.tokenize("def")`, and the
        names of TransformerLens, such as `llm.run_with_cache("def")`."""
        if name in BY_NAME:
            return partial(self.run, name)
        if name in HookedGPT.API:
            return getattr(self.hooked, name)
        raise AttributeError(f"LLM has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        """The names that a notebook completes, with those of `__getattr__`."""
        return [*super().__dir__(), *BY_NAME, *HookedGPT.API]

    def weights(self) -> list[Weight]:
        """The names and shapes of the checkpoint's weights, then of derived weights such as
        `blocks.0.attention.W_OV` (`model/checkpoint/stored_weights.py`)."""
        with self._stored_weights() as stored:
            return stored.all()

    def weight(self, name: str, slice: str | None = None) -> Floats:
        """A weight of the checkpoint in float32, or a part of it: "3,:,0:64" has an index or a
        range for each axis. The matrices of attention heads can also be named as in
        TransformerLens: `blocks.0.attn.W_Q`. Raises LoadError if the checkpoint's folder has
        changed."""
        with self._stored_weights() as stored:
            if (shape := stored.shape_of(name)) is None:
                raise InvalidRequest(
                    f"the model has no weight {name[:100]!r}; LLM.weights lists its weights",
                    "name",
                )
            try:
                part, kept = parse_part(slice, shape)
            except ValueError as error:
                raise InvalidRequest(str(error), "slice") from error
            return stored.read(name, part).reshape(kept)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids of a prompt. The name of a special token in a text is encoded as plain
        text. Raises InvalidRequest for a text if the model has no vocabulary."""
        if not isinstance(prompt, str):
            return tuple(map(operator.index, prompt))
        return tuple(encode_text(prompt, self.tokenizer))

    @contextmanager
    def _stored_weights(self) -> Iterator[StoredWeights]:
        try:
            with StoredWeights(self.checkpoint) as stored:
                yield stored
        except CheckpointError as error:
            raise LoadError(str(error)) from error

    def _completions(
        self, prompts: Prompts, params: SamplingParams | None, fields: dict[str, Any]
    ) -> Completions:
        """The plan of a generation. A constraint in `params` is already compiled, so it is not
        passed as a field but is put directly into the engine's requests."""
        given: dict[str, Any] = {}
        constraint = None
        if params is not None:
            if not isinstance(params, SamplingParams):
                raise InvalidRequest(
                    f"params is {params!r}; it must be a SamplingParams object", "params"
                )
            # `dataclasses.asdict` would copy a compiled constraint.
            given = {each.name: getattr(params, each.name) for each in dataclasses.fields(params)}
            # JSON cannot have NumPy integers as keys.
            given["logit_bias"] = {int(i): bias for i, bias in params.logit_bias.items()}
            constraint = given.pop("constraint")
        for name in given.keys() & fields.keys():
            raise InvalidRequest(
                f"{name} is {fields[name]!r}, but params sets it to {given[name]!r}; leave out "
                "one of them, or change params with dataclasses.replace",
                name,
            )
        plan = cast(
            Completions, self._operations.plan("generate", prompt=prompts, **given, **fields)
        )
        if constraint is None:
            return plan
        requests = [
            replace(request, params=replace(request.params, constraint=constraint))
            for request in plan.requests
        ]
        return replace(plan, requests=requests)

    def _arrays(self, name: str, /, **fields: Any) -> dict[str, Floats]:
        """The arrays that an operation computes for one prompt, by default at all positions."""
        plan, computed = self._computed(name, **{"positions": "all", **fields})
        (rows,) = computed.rows.values()
        return {
            array.name: np.moveaxis(part, 0, array.position_axis)
            for array, part in zip(plan.arrays, plan.parts(0, np.stack(rows)), strict=True)
        }

    def _computed(self, name: str, /, **fields: Any) -> tuple[Any, Computed]:
        """The plan of an operation on one prompt, and its results. Raises InvalidRequest for
        several prompts."""
        plan: Any = self._operations.plan(name, **fields)
        if (count := len(plan.requests)) > 1:
            raise InvalidRequest(
                f"prompt has {count} prompts, but this method takes one: call it once for each",
                "prompt",
            )
        return plan, self._operations.compute(plan.requests)


def _check_types(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise InvalidRequest unless the arguments have the types of the function's parameters."""
    hints = get_type_hints(function)
    types: Any = {name: (hints[name], ...) for name in arguments}
    try:
        create_model("Arguments", **types).model_validate(arguments, strict=True)
    except ValidationError as error:
        raise describe_errors(error) from error


def _tokens(**named: Any) -> dict[str, Any]:
    """The fields that name tokens: `token` for a string, `token_id` for an id, and so on. A value
    may also be a list, with a token for each prompt."""
    fields = {}
    for name, value in named.items():
        if value is not None:
            is_text = isinstance(value, str) or (
                np.ndim(value) and any(isinstance(each, str) for each in value)
            )
            fields[name if is_text else f"{name}_id"] = value
    return fields


def _completion(piece: Piece, plan: Completions) -> Completion:
    chosen = [token.chosen for token in piece.tokens]
    logprobs = [math.nan if token is None else token.logprob for token in chosen]
    return Completion(
        prompt_index=piece.prompt_index,
        index=piece.index % plan.n,
        text=piece.text,
        token_ids=tuple(piece.token_ids),
        finish_reason=piece.finish_reason,
        stop_reason=piece.stop_reason,
        seed=piece.seed,
        logprobs=np.array(logprobs, dtype=np.float64) if plan.logprobs is not None else None,
        top_logprobs=tuple(token.top for token in piece.tokens),
    )


def _score(tokens: Sequence[Any]) -> Score:
    logprobs = logprobs_of(tokens)
    token_ids = tuple(token.token_id for token in tokens)
    return Score(token_ids, np.array(logprobs, dtype=np.float64), math.fsum(logprobs))
