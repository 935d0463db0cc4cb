"""A random model that writes under constraints, and checks of its texts.

Its vocabulary splits characters and JSON in odd places, and its logits favor nothing: it tries
everything that the mask allows. Covers finished texts and texts cut by max_tokens. Each test states
what they must match.
"""

from typing import Any

from logitd.model.inference.constraints.compiler import Compiler, Source
from logitd.model.inference.constraints.protocol import TokenConstraint
from logitd.model.inference.engine.events import FinishReason
from tests.model.factories import byte_tokenizer, merging_tokenizer, tiny_config, tiny_gpt
from tests.model.inference.engine.harness import Outcome, generation, run

TOKENIZER = merging_tokenizer()
COMPILER = Compiler(TOKENIZER)
BYTES = Compiler(byte_tokenizer())
GPT_OF_THE_TESTS = tiny_gpt(
    tiny_config(n_layer=1, n_head=2, d_model=16, vocab_size=TOKENIZER.vocab_size)
)
PROMPT = tuple(b"some text")
ROOM = 128 - len(PROMPT)


def written(constraint: TokenConstraint, seed: int, n: int = 3, **fields: Any) -> list[Outcome]:
    """Outcomes under a constraint, up to its end or the end of the context."""
    stop = frozenset(COMPILER.ends)
    values: dict[str, Any] = {
        "temperature": 3.0,
        "seed": seed,
        "stop_token_ids": stop,
        "max_tokens": ROOM,
    } | fields
    request = generation("a", PROMPT, n=n, constraint=constraint, **values)
    return list(run(GPT_OF_THE_TESTS, request, slots=n).values())


def written_bytes(outcome: Outcome) -> bytes:
    ids = outcome.token_ids
    assert "<|other|>" not in map(TOKENIZER.token_text, ids)
    return TOKENIZER.decode_bytes([i for i in ids if i != TOKENIZER.end_of_text])


def begins_a_match(source: Source, text: bytes) -> bool:
    """True if a text, byte by byte, can still become a match. For vocabularies of bytes."""
    matcher = BYTES.compile(source).matcher()
    for byte in text:
        if matcher.complete or not matcher.allowed()[byte]:
            return False
        matcher.advance(byte)
    return True


def check(source: Source, outcome: Outcome) -> str | None:
    """Check a completion by the rules for finished texts or for cut ones. Returns the text if it is
    finished."""
    text = written_bytes(outcome)
    if outcome.ended.reason is FinishReason.STOP:
        return text.decode()  # whole characters
    assert outcome.ended.reason is FinishReason.LENGTH
    assert len(outcome.tokens) == ROOM
    assert begins_a_match(source, text), text
    return None
