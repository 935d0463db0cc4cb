"""`logitd generate`: text from a checkpoint, streamed to the terminal, without a server."""

import secrets
import sys

from model.checkpoint.checkpoint import CheckpointError
from model.device import DeviceError, use_threads
from model.inference.engine.config import EngineConfig
from model.inference.engine.engine import Engine
from model.inference.engine.events import FinishEvent, FinishReason, TokenEvent
from model.inference.engine.requests import GenerationRequest
from model.inference.errors import InvalidRequest
from model.inference.kernels.select import KernelError
from model.inference.load import load_model
from model.inference.sampling.params import SamplingParams
from model.text.tokenizer import Tokenizer, TokenizerError
from service.settings.tools import GenerateSettings


def run(settings: GenerateSettings) -> int:
    try:
        opened = load_model(
            settings.checkpoint,
            device=settings.device,
            dtype=settings.dtype,
            threads=settings.threads,
            kernels=settings.kernels,
            quantize=settings.quantize,
            say=lambda line: print(f"logitd generate: {line}", file=sys.stderr),
        )
        use_threads(opened.placement.threads)
        checkpoint, tokenizer = opened.checkpoint, opened.checkpoint.tokenizer
        seed = secrets.randbits(32) if settings.seed is None else settings.seed
        engine = Engine(
            opened.gpt,
            EngineConfig(slots=settings.n),
            make_decoder=opened.decode_path.make_decoder,
        )
        request = _request(settings, tokenizer, seed, checkpoint.config.context_length)
        engine.add(request)
    except (CheckpointError, DeviceError, InvalidRequest, KernelError, TokenizerError) as error:
        print(f"logitd generate: {error}", file=sys.stderr)
        return 1
    try:
        code = _stream(engine, settings, tokenizer)
    except KeyboardInterrupt:
        code = 130
    finally:
        engine.close()
    print(f"\n(seed {seed})", file=sys.stderr)
    return code


def _request(
    settings: GenerateSettings, tokenizer: Tokenizer, seed: int, context_length: int
) -> GenerationRequest:
    if any("\ud800" <= character <= "\udfff" for character in settings.prompt):
        raise InvalidRequest("the prompt is no UTF-8 text")
    token_ids = tuple(tokenizer.encode(settings.prompt))
    room = context_length - len(token_ids)
    stop = () if tokenizer.end_of_text is None else (tokenizer.end_of_text,)
    params = SamplingParams(
        # What was asked for, or what fits: text in a terminal is no promise of a length.
        max_tokens=max(1, min(settings.max_tokens, room)),
        seed=seed,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        stop_token_ids=frozenset(stop),
    )
    return GenerationRequest(
        request_id="generate", token_ids=token_ids, params=params, n=settings.n
    )


def _stream(engine: Engine, settings: GenerateSettings, tokenizer: Tokenizer) -> int:
    """Print the first completion as it grows, the others when they are whole."""
    detokenizers = [tokenizer.detokenizer() for _ in range(settings.n)]
    texts = [settings.prompt] * settings.n
    _show(settings.prompt)
    while engine.has_work():
        for event in engine.step().events:
            if isinstance(event, TokenEvent) and not tokenizer.is_special(event.token_id):
                text = detokenizers[event.index].push(event.token_id)
            elif isinstance(event, FinishEvent):
                if event.reason is FinishReason.ERROR:
                    print(f"\nlogitd generate: {event.error}", file=sys.stderr)
                    return 1
                text = detokenizers[event.index].finish()
            else:
                continue
            texts[event.index] += text
            if event.index == 0:
                _show(text)
    for text in texts[1:]:
        _show(f"\n---\n{text}")
    return 0


def _show(text: str) -> None:
    print(text, end="", flush=True)
