"""`logitd generate`: generates text with a checkpoint and streams it to the terminal, without a
server.

If the model has no vocabulary, the prompt and the completion are token ids separated by spaces.
"""

import secrets
import sys
from dataclasses import asdict
from functools import partial

from logitd.model.inference.options import ComputeOptions
from logitd.model.llm import LLM, GenerationError, InvalidRequest, LoadError, SamplingParams
from logitd.model.text.tokenizer import NO_VOCABULARY
from logitd.service.cli.program_name import command
from logitd.service.cli.terminal import say, tell
from logitd.service.settings.tools import GenerateSettings

ERRORS = InvalidRequest, LoadError
_log = partial(tell, "generate")


def run(settings: GenerateSettings) -> int:
    code, seed = 0, secrets.randbits(32) if settings.seed < 0 else settings.seed
    with LLM(
        settings.checkpoint,
        slots=settings.n,
        log=_log,
        **asdict(ComputeOptions.of(settings)),
    ) as llm:
        try:
            _stream(llm, settings, seed)
        except GenerationError as error:
            print(file=sys.stderr)  # ends the line with the text so far
            _log(str(error))
            code = 1
        except KeyboardInterrupt:
            code = 130
    say(f"\n(seed {seed})", file=sys.stderr)
    return code


def _stream(llm: LLM, settings: GenerateSettings, seed: int) -> None:
    """Print the first completion as it grows, and the others at the end."""
    params = SamplingParams(
        max_tokens=_tokens_that_fit(llm, settings),
        seed=seed,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
    )
    texts = [""] * settings.n
    for part in llm.stream([_prompt(llm, settings)], params, n=settings.n):
        text = part.text if llm.tokenizer.has_text else "".join(f" {i}" for i in part.token_ids)
        # The prompt is printed with the first part, and only if it can be continued.
        text = text if texts[part.index] else settings.prompt + text
        texts[part.index] += text
        if part.index == 0:
            say(text, end="")
    for text in texts[1:]:
        say(f"\n---\n{text}", end="")


def _prompt(llm: LLM, settings: GenerateSettings) -> str | list[int]:
    """The prompt, as text or token ids. Raises InvalidRequest."""
    if llm.tokenizer.has_text:
        return settings.prompt
    if (ids := token_ids_of(settings.prompt)) is None:
        raise InvalidRequest(
            f"the prompt {settings.prompt[:40]!r} is not a list of token ids, and "
            f"{NO_VOCABULARY}. For example: {command('generate', '0 1 2')}",
            "prompt",
        )
    return ids


def token_ids_of(words: str) -> list[int] | None:
    """The token ids in a text, separated by spaces or commas; None if it contains anything else."""
    parts = words.replace(",", " ").split()
    return list(map(int, parts)) if parts and all(part.isdecimal() for part in parts) else None


def _tokens_that_fit(llm: LLM, settings: GenerateSettings) -> int:
    """The value of --max-tokens, or fewer tokens if the prompt leaves less room in the context."""
    room = llm.checkpoint.shape.context_length - len(llm.encode(_prompt(llm, settings)))
    return max(1, min(settings.max_tokens, room))
