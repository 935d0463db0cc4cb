"""`logitd generate`: text from a checkpoint, streamed to the terminal, without a server."""

import secrets
import sys

from model.llm import LLM, GenerationError, InvalidRequest, LoadError, SamplingParams
from service.settings.tools import GenerateSettings


def run(settings: GenerateSettings) -> int:
    seed = secrets.randbits(32) if settings.seed is None else settings.seed
    try:
        with LLM(
            settings.checkpoint,
            device=settings.device,
            dtype=settings.dtype,
            threads=settings.threads,
            kernels=settings.kernels,
            quantize=settings.quantize,
            slots=settings.n,
            log=_log,
        ) as llm:
            _stream(llm, settings, seed)
        code = 0
    except (LoadError, InvalidRequest) as error:
        _log(str(error))
        return 1
    except GenerationError as error:
        print(file=sys.stderr)  # behind the text so far
        _log(str(error))
        code = 1
    except KeyboardInterrupt:
        code = 130
    print(f"\n(seed {seed})", file=sys.stderr)
    return code


def _stream(llm: LLM, settings: GenerateSettings, seed: int) -> None:
    """Print the first completion as it grows, the others when they are whole."""
    params = SamplingParams(
        max_tokens=_tokens_that_fit(llm, settings),
        seed=seed,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
    )
    texts = [""] * settings.n
    for part in llm.stream(settings.prompt, params, n=settings.n):
        # The prompt comes with the first part: one that cannot be continued is not shown.
        text = part.text if texts[part.index] else settings.prompt + part.text
        texts[part.index] += text
        if part.index == 0:
            _show(text)
    for text in texts[1:]:
        _show(f"\n---\n{text}")


def _tokens_that_fit(llm: LLM, settings: GenerateSettings) -> int:
    """As many tokens as were asked for, or as the context leaves: a terminal needs no exact
    length."""
    room = llm.checkpoint.config.context_length - len(llm.encode(settings.prompt))
    return max(1, min(settings.max_tokens, room))


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _log(line: str) -> None:
    print(f"logitd generate: {line}", file=sys.stderr)
