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

Covers generation, streams, logits, next-token probabilities, hidden states, attention weights,
scores, the values of any stage of the forward, interventions in it and sweeps of them. Prompts run
together in the engine that `logitd serve` runs, so on a CPU the results are the same bits. Does not
cover chat templates, JSON or queue limits, which belong to the service, and compiles no constraint:
give a compiled one in `SamplingParams`.
"""

import itertools
import logging
import math
import operator
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt

from logitd.model.checkpoint.checkpoint import CheckpointError
from logitd.model.device import DeviceError, use_threads
from logitd.model.dtypes import DTypeName
from logitd.model.inference.attribution.task import (
    DEFAULT_STEPS,
    Attribution,
    AttributionTask,
    Method,
)
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.cost import split_activations
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import (
    AttributionEvent,
    Event,
    FinishEvent,
    FinishReason,
    OutputsChunk,
    PromptEvent,
    PromptToken,
    TokenEvent,
)
from logitd.model.inference.engine.requests import (
    Activations,
    AttentionWeights,
    AttributionRequest,
    GenerationRequest,
    HiddenStates,
    Lens,
    Logits,
    Output,
    OutputsRequest,
    Request,
    ScoreRequest,
    sequence_lengths,
)
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.interventions import Intervention, changeable_stages
from logitd.model.inference.kernels.select import KernelError
from logitd.model.inference.load import Slots, choose_slots, load_model
from logitd.model.inference.memory import SlotBudget
from logitd.model.inference.options import (
    KernelChoice,
    KernelTarget,
    KVCacheDType,
    Quantization,
    SlotDefault,
)
from logitd.model.inference.sampling.distribution import log_softmax
from logitd.model.inference.sampling.lens import LensRow, read_lens
from logitd.model.inference.sampling.params import SamplingParams, TokenLogprob
from logitd.model.inference.selection import resolve_heads, resolve_indices, resolve_stages
from logitd.model.inference.sweep import Axis, make_grid
from logitd.model.text.growing_text import GrowingText
from logitd.model.text.tokenizer import NO_VOCABULARY, NoVocabularyError, Tokenizer

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
"""A text, or the token ids of one."""
Floats = npt.NDArray[np.float32]

logger = logging.getLogger("logitd")


class LoadError(Exception):
    """A checkpoint that cannot be loaded as asked; the message says why and what to do."""


class GenerationError(Exception):
    """A sequence that the engine could not finish; the message says what failed."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One completion of one prompt; in a stream, what is new of it.

    text           without the stop token or stop string that ended it
    token_ids      all of them, a stop token included
    finish_reason  "stop" or "length"; None in a stream until the last part
    stop_reason    the stop string, or the id of the stop token, that ended it
    logprobs       (tokens,), in nats; None unless `SamplingParams.logprobs` asks for them
    top_logprobs   of each token, the k likeliest in its place
    """

    prompt_index: int
    index: int  # which of the prompt's n
    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: npt.NDArray[np.float64] | None = None
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """How likely a text is. `logprobs` (scored tokens,) are in nats, `logprob` is their sum. The
    first token of a prompt has none: nothing predicts it."""

    token_ids: tuple[int, ...]
    logprobs: npt.NDArray[np.float64]
    logprob: float


class LLM:
    """One checkpoint, ready to compute. One thread may use it; streams may be read in turns.

    checkpoint          its directory
    device, dtype, threads, kernels, kernel_target, quantize, kv_cache_dtype
                        as for `logitd serve`. `threads` sets the size of torch's thread pool for
                        the whole process
    slots               sequences that are computed at once; 16 if not given, with which a batch is
                        fast: nobody waits in its queue
    log                 gets a line where native kernels are being built

    Raises LoadError. Methods raise InvalidRequest, a ValueError, for what cannot be computed.
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
        log: Callable[[str], None] = logger.info,
    ) -> None:
        wanted = Slots(SlotBudget(slots), SlotDefault(EngineConfig().slots), kv_cache_dtype)
        try:
            loaded = load_model(
                Path(checkpoint),
                device=device,
                dtype=dtype,
                threads=threads,
                kernels=kernels,
                kernel_target=kernel_target,
                quantize=quantize,
                slots=wanted,
                log=log,
            )
            use_threads(loaded.placement.threads)
            count = choose_slots(loaded, wanted).count
            config = EngineConfig(slots=count, kv_cache_dtype=kv_cache_dtype)
        except (CheckpointError, DeviceError, KernelError, InvalidRequest) as error:
            raise LoadError(str(error)) from error
        self.checkpoint = loaded.checkpoint
        self._engine = Engine(
            loaded.gpt,
            config,
            make_decoder=loaded.decode_path.make_owner,
        )
        self._ids = itertools.count()
        self._mailboxes: dict[str, deque[Event]] = {}  # of unfinished requests

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
        """End the threads that compute; no calls after this."""
        self._engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams,
        *,
        n: int = 1,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        interventions: Sequence[Intervention] = (),
    ) -> list[Completion]:
        """The `n` completions of each prompt, prompt by prompt.

        stop           texts that end a completion; none where the model has no vocabulary
        ignore_eos     whether to go on after the end-of-text token
        interventions  what is changed inside the forward, here and below
        """
        parts: dict[tuple[int, int], list[Completion]] = {}
        stream = self.stream(
            prompts, params, n=n, stop=stop, ignore_eos=ignore_eos, interventions=interventions
        )
        for part in stream:
            parts.setdefault((part.prompt_index, part.index), []).append(part)
        return [_joined(parts[key]) for key in sorted(parts)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams,
        *,
        n: int = 1,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        interventions: Sequence[Intervention] = (),
    ) -> Generator[Completion]:
        """The same, token by token: what is new of the completions, as they grow side by side.

        Starts when the first part is asked for. To close the iterator ends the rest.
        """
        # 1) A request for each prompt, and the parts of each of its sequences.
        if stop and not self.tokenizer.has_text:
            raise InvalidRequest(f"stop is a list of texts, and {NO_VOCABULARY}", "stop")
        end_of_text = self.tokenizer.end_of_text
        if end_of_text is not None and not ignore_eos:
            params = replace(params, stop_token_ids=params.stop_token_ids | {end_of_text})
        ids = [self.encode(prompt) for prompt in _as_list(prompts)]
        requests = [
            GenerationRequest(
                request_id=self._new_id(),
                token_ids=token_ids,
                params=params,
                n=n,
                interventions=tuple(interventions),
            )
            for token_ids in ids
        ]
        sequences = {
            (request.request_id, index): _Parts(
                Completion(prompt_index, index, ""),
                GrowingText(self.tokenizer, stop_token_ids=params.stop_token_ids, stop=stop),
            )
            for prompt_index, request in enumerate(requests)
            for index in range(n)
        }
        # 2) Each event is a part of a completion, until a stop string has ended it.
        with closing(self._run(requests)) as events:
            for event in events:
                if not isinstance(event, (TokenEvent, FinishEvent)):
                    continue
                part = sequences[event.request_id, event.index].take(event)
                if part is None:
                    continue
                if part.finish_reason and isinstance(event, TokenEvent):
                    self._stop(event.request_id, event.index)
                yield part

    def logits(self, prompt: Prompt, interventions: Sequence[Intervention] = ()) -> Floats:
        """Logits (T, V): row i predicts the token after token i."""
        return self._rows(self.encode(prompt), Logits(), interventions)

    def probs(
        self, prompt: Prompt, interventions: Sequence[Intervention] = ()
    ) -> npt.NDArray[np.float64]:
        """Probabilities (V,) of the token that follows."""
        row = self._rows(self.encode(prompt), Logits(), interventions, only_last=True)[0]
        return np.exp(log_softmax(row))

    def activations(
        self,
        prompt: Prompt,
        stages: str | Sequence[str],
        *,
        heads: Sequence[int] | None = None,
        interventions: Sequence[Intervention] = (),
    ) -> dict[str, Floats]:
        """The values (T, ...) of the stages that names or patterns (`blocks.*.attention.q`) choose;
        `model/transformer/stages.py` lists them. Of those that have heads, the chosen ones."""
        config, token_ids = self.checkpoint.config, self.encode(prompt)
        chosen = resolve_stages([stages] if isinstance(stages, str) else stages, config)
        output = Activations(
            stages=tuple(stage.name for stage in chosen),
            heads=None if heads is None else resolve_heads(heads, chosen, config),
        )
        rows = self._rows(token_ids, output, interventions)  # (T, elements)
        return split_activations(rows, output, config, len(token_ids))

    def lens(
        self,
        prompt: Prompt,
        top_k: int = 5,
        token_ids: Sequence[int] = (),
        interventions: Sequence[Intervention] = (),
    ) -> list[list[LensRow]]:
        """What the model would say if it stopped after each layer (0: after the embeddings), by
        position and layer: the likeliest ids, rank and logprob of `token_ids`, entropy and the
        divergence of the model's own answer."""
        layers = tuple(range(self.checkpoint.config.n_layer + 1))
        output = Lens(layers=layers, top_k=top_k, token_ids=tuple(token_ids))
        rows = self._rows(self.encode(prompt), output, interventions)  # (T, layers, numbers)
        named = len(token_ids)
        return [[read_lens(numbers, top_k, named) for numbers in at] for at in rows]

    def attributions(
        self,
        prompt: Prompt,
        token: int | None = None,
        minus: int | None = None,
        *,
        position: int = -1,
        methods: Sequence[Method] = ("gradient_times_input",),
        steps: int = DEFAULT_STEPS,
        baseline: int | None = None,
    ) -> Attribution:
        """What the logit of `token` (None: the likeliest next one), less that of `minus`, hangs on:
        by token of the prompt ("gradient_times_input", and "integrated_gradients" in `steps` steps
        from zero vectors or from a `baseline` token), and by head and MLP ("direct")."""
        token_ids = self.encode(prompt)
        length = len(token_ids)
        place = 0  # an empty prompt is rejected by the engine
        if length:
            what = f"the prompt has {length} tokens"
            (place,) = resolve_indices("position", [position], length, what)
        task = AttributionTask(
            position=place,
            token_id=token,
            minus_id=minus,
            methods=tuple(methods),
            steps=steps,
            baseline=baseline,
        )
        request = AttributionRequest(request_id=self._new_id(), token_ids=token_ids, task=task)
        (attribution,) = (
            event.attribution
            for event in self._run([request])
            if isinstance(event, AttributionEvent)
        )
        return attribution

    def sweep(
        self,
        prompt: Prompt,
        vary: Intervention,
        over: Sequence[Axis],
        token: int,
        minus: int | None = None,
        *,
        interventions: Sequence[Intervention] = (),
    ) -> npt.NDArray[np.float64]:
        """The logit of `token` after the prompt, less that of `minus`, with `vary` carried out in
        one place after another: an axis for each of `over` ("layers", "heads", "positions"). The
        stage of `vary` may be a pattern; values are those of each of its layers alike."""
        config, token_ids = self.checkpoint.config, self.encode(prompt)
        varied = [
            replace(vary, stage=stage.name, field="vary")
            for stage in changeable_stages(vary.stage, config)
        ]
        return self._swept(token_ids, varied, over, token, minus, tuple(interventions))

    def patch(
        self,
        prompt: Prompt,
        source: Prompt,
        token: int,
        minus: int | None = None,
        *,
        stage: str = "blocks.*.output",
        over: Sequence[Axis] = ("layers", "positions"),
    ) -> npt.NDArray[np.float64]:
        """The sweep that sets a stage to what `source`, a prompt of as many tokens, has there."""
        token_ids = self.encode(prompt)
        values = self.activations(source, stage)
        varied = [
            Intervention(
                stage=name,
                operation="set",
                positions=tuple(range(len(token_ids))),
                values=value,
                field="stage",
            )
            for name, value in values.items()
        ]
        return self._swept(token_ids, varied, over, token, minus)

    def _swept(
        self,
        token_ids: tuple[int, ...],
        varied: Sequence[Intervention],
        over: Sequence[Axis],
        token: int,
        minus: int | None,
        interventions: tuple[Intervention, ...] = (),
    ) -> npt.NDArray[np.float64]:
        """The values of a grid, whose cells run side by side."""
        grid = make_grid(varied, over, len(token_ids), self.checkpoint.config)
        output = Logits(columns=(token,) if minus is None else (token, minus))
        requests = [
            OutputsRequest(
                request_id=self._new_id(),
                token_ids=token_ids,
                positions=(len(token_ids) - 1,),
                output=output,
                interventions=(*interventions, *changes),
            )
            for _, changes in grid.cells()
        ]
        rows = {
            event.request_id: event.rows[0].astype(np.float64)  # (1 or 2,)
            for event in self._run(requests)
            if isinstance(event, OutputsChunk)
        }
        logits = np.stack([rows[request.request_id] for request in requests])  # (cells, 1 or 2)
        values = logits[:, 0] if minus is None else logits[:, 0] - logits[:, 1]
        return values.reshape([len(places) for places in grid.axes.values()])

    def hidden_states(self, prompt: Prompt, interventions: Sequence[Intervention] = ()) -> Floats:
        """The residual stream (n_layer + 1, T, d_model): after the embeddings, after each block."""
        layers = range(self.checkpoint.config.n_layer + 1)
        output = HiddenStates(layers=tuple(layers))
        return self._rows(self.encode(prompt), output, interventions).swapaxes(0, 1)

    def attention(self, prompt: Prompt, interventions: Sequence[Intervention] = ()) -> Floats:
        """Attention weights (n_layer, n_head, T, T); each row sums to 1."""
        config = self.checkpoint.config
        output = AttentionWeights(
            layers=tuple(range(config.n_layer)), heads=tuple(range(config.n_head))
        )
        rows = self._rows(self.encode(prompt), output, interventions)
        return rows.transpose(1, 2, 0, 3)

    def score(
        self,
        prompt: Prompt,
        continuations: Sequence[Prompt] = (),
        interventions: Sequence[Intervention] = (),
    ) -> list[Score]:
        """How likely each continuation is after the prompt; where there are none, the prompt."""
        request = ScoreRequest(
            request_id=self._new_id(),
            token_ids=self.encode(prompt),
            continuations=tuple(map(self.encode, continuations)),
            interventions=tuple(interventions),
        )
        tokens: list[list[PromptToken]] = [[] for _ in sequence_lengths(request)]
        for event in self._run([request]):
            if isinstance(event, PromptEvent):
                tokens[event.index] += event.tokens
        return [_score(scored) for scored in tokens]

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids of a prompt. Special tokens in a text are plain text; where the model has
        no vocabulary, a text is rejected."""
        if not isinstance(prompt, str):
            return tuple(map(operator.index, prompt))
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise InvalidRequest("the prompt is not UTF-8 text", "prompt")
        try:
            return tuple(self.tokenizer.encode(prompt))
        except NoVocabularyError as error:
            raise InvalidRequest(f"the prompt is a text, and {error}", "prompt") from error
        except ValueError as error:  # a byte that the vocabulary lacks, or a pathological text
            raise InvalidRequest(f"the prompt cannot be tokenized: {error}", "prompt") from error

    def _new_id(self) -> str:
        return f"llm-{next(self._ids)}"

    def _rows(
        self,
        token_ids: tuple[int, ...],
        output: Output,
        interventions: Sequence[Intervention] = (),
        *,
        only_last: bool = False,
    ) -> Floats:
        """Rows of a prompt's positions, the first axis, in the order of the engine."""
        positions = tuple(range(len(token_ids)))
        request = OutputsRequest(
            request_id=self._new_id(),
            token_ids=token_ids,
            positions=positions[-1:] if only_last else positions,
            output=output,
            interventions=tuple(interventions),
        )
        pieces = [event.rows for event in self._run([request]) if isinstance(event, OutputsChunk)]
        return np.concatenate(pieces)

    def _run(self, requests: Sequence[Request]) -> Generator[Event]:
        """The events of requests until all have ended; whatever ends the loop early aborts them.

        Steps compute the requests of other streams too, whose events wait in their mailboxes."""
        mailbox: deque[Event] = deque()
        running = sum(len(sequence_lengths(request)) for request in requests)
        try:
            for request in requests:
                self._engine.add(request)
                self._mailboxes[request.request_id] = mailbox
            while running:
                while not mailbox:
                    for event in self._engine.step().events:
                        self._mailboxes[event.request_id].append(event)
                event = mailbox.popleft()
                if isinstance(event, OutputsChunk):
                    self._engine.grant(event.request_id)
                elif isinstance(event, FinishEvent):
                    running -= 1
                    if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
                        raise GenerationError(event.error or event.reason)
                yield event
        finally:
            for request in requests:
                self._engine.abort(request.request_id)
                self._mailboxes.pop(request.request_id, None)

    def _stop(self, request_id: str, index: int) -> None:
        """End a sequence whose text has ended."""
        ended = self._engine.abort(request_id, index, FinishReason.STOP)
        self._mailboxes[request_id].extend(ended)


class _Parts:
    """Turns the events of one sequence into parts of its completion."""

    def __init__(self, empty: Completion, text: GrowingText) -> None:
        self._empty = empty
        self._text = text
        self._ended = False

    def take(self, event: TokenEvent | FinishEvent) -> Completion | None:
        """What an event adds; None after a stop string."""
        if self._ended:
            return None
        part = self._token(event) if isinstance(event, TokenEvent) else self._finish(event)
        if (stop := self._text.stopped_by) is not None:
            part = replace(part, finish_reason="stop", stop_reason=stop)
        self._ended = part.finish_reason is not None
        return part

    def _token(self, event: TokenEvent) -> Completion:
        text = self._text.push(event.token_id)
        part = replace(self._empty, text=text, token_ids=(event.token_id,))
        if event.chosen is None:
            return part
        return replace(part, logprobs=np.array([event.chosen.logprob]), top_logprobs=(event.top,))

    def _finish(self, event: FinishEvent) -> Completion:
        return replace(
            self._empty,
            text=self._text.finish(),
            finish_reason=event.reason.value,
            stop_reason=event.stop_token_id,
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """The prompts of a call: a text is one, and so are token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if all(isinstance(prompt, (int, np.integer)) for prompt in prompts):
        return [cast("Sequence[int]", prompts)]
    return cast("Sequence[Prompt]", prompts)


def _joined(parts: Sequence[Completion]) -> Completion:
    """A whole completion of its parts."""
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=tuple(itertools.chain.from_iterable(part.token_ids for part in parts)),
        logprobs=np.concatenate(logprobs) if logprobs else None,
        top_logprobs=tuple(itertools.chain.from_iterable(part.top_logprobs for part in parts)),
    )


def _score(tokens: Sequence[PromptToken]) -> Score:
    logprobs = [token.chosen.logprob for token in tokens if token.chosen is not None]
    token_ids = tuple(token.token_id for token in tokens)
    return Score(token_ids, np.array(logprobs, dtype=np.float64), math.fsum(logprobs))
