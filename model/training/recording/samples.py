"""Samples: texts that a model in training generates from a few prompts.

The whole window is computed again for every token, which is simple, and fast enough for a hundred
tokens of a small model. (The serving engine has a KV cache, `model/inference/engine`.) Samples use
a separate random generator, so they never disturb training. If several processes share the model,
all of them compute, and the main process samples. `recorder.py` writes the files.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from logitd.model.data.prepare import PreparedText
from logitd.model.text.tokenizer import Tokenizer, TokenizerError
from logitd.model.training.distributed.ranks import ALONE
from logitd.model.training.run.run import Run
from logitd.model.transformer.gpt import GPT

TEMPERATURE = 0.8
PYTHON_PROMPTS: tuple[str, ...] = ("def read(self", "import os\nimport", "The built-in function")
"""Prompts for the built-in text."""
INCOMPLETE = "\ufffd"
"""Replaces an incomplete character in decoded text, for example at the end of a sample."""


def samples(
    run: Run, gpt: GPT, forward: Callable[[Tensor], Tensor], seconds: float
) -> Iterator[tuple[str, str]]:
    """Yield each prompt with the text that the model generates after it. Generating all texts takes
    at most about `seconds`. `forward` maps ids (B, T) to logits (B, T, V)."""
    prompts = run.training.config.prompts or default_prompts(run.text)
    for index, prompt in enumerate(prompts):
        seed = run.training.recipe.seed + index
        yield prompt, _text_after(prompt, seed, run, gpt, forward, seconds / len(prompts))


def _text_after(
    prompt: str,
    seed: int,
    run: Run,
    gpt: GPT,
    forward: Callable[[Tensor], Tensor],
    seconds: float,
) -> str:
    """The generated text after a prompt: `sample_tokens` tokens, or fewer if the document ends or
    `seconds` have passed. The model sees only the last `context_length` ids."""
    tokenizer, ranks = run.text.tokenizer, run.ranks if run.sharded else ALONE
    draw = torch.Generator().manual_seed(seed)
    ids = prompt_ids(prompt, run.text)
    start, device, training = len(ids), gpt.token_embedding.weight.device, gpt.training
    end = time.monotonic() + seconds
    gpt.eval()
    try:
        with torch.no_grad():
            for _ in range(run.training.config.sample_tokens):
                window = torch.tensor([ids[-gpt.config.context_length :]], device=device)
                logits = forward(window)[0, -1].float().cpu()  # (V,)
                probs = (logits / TEMPERATURE).softmax(dim=-1)
                drawn = int(torch.multinomial(probs, 1, generator=draw))
                token_id = int(ranks.broadcast(drawn))
                if token_id == tokenizer.end_of_text:
                    break
                ids.append(token_id)
                if ranks.broadcast(time.monotonic() >= end):
                    break
    finally:
        gpt.train(training)
    return tokenizer.decode(ids[start:]).rstrip(INCOMPLETE)


def prompt_ids(prompt: str, text: PreparedText) -> list[int]:
    """The token ids of a prompt, encoded as the text was. Raises TokenizerError if it cannot be
    encoded or has no tokens."""
    ids = text.tokenizer.encode(prompt, special_ids=text.special_ids)
    if not ids:
        raise TokenizerError("it has no tokens, but a sample needs at least one to begin with")
    return ids


def default_prompts(text: PreparedText) -> tuple[str, ...]:
    """Prompts that suit the text: fixed ones for the built-in text, otherwise excerpts from three
    places in the held-out text. Those without tokens, or with a word that the vocabulary lacks, are
    left out."""
    prompts = PYTHON_PROMPTS
    if not text.record["built_in"]:
        tokens = text.val.tokens
        starts = (n * len(tokens) // 3 for n in range(3))
        prompts = tuple(_excerpt(tokens[i : i + 8].tolist(), text.tokenizer) for i in starts)
    return tuple(prompt for prompt in prompts if _has_ids(prompt, text))


def _excerpt(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of the longest part without special tokens."""
    parts = (list(part) for special, part in groupby(ids, tokenizer.is_special) if not special)
    return tokenizer.decode(max(parts, key=len, default=[])).strip(INCOMPLETE)


def _has_ids(prompt: str, text: PreparedText) -> bool:
    try:
        return bool(prompt_ids(prompt, text))
    except TokenizerError:
        return False
