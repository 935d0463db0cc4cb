"""`transformers serve`: a folder that it can serve, its process, and its streams.

The server takes texts instead of ids, and returns the number of generated tokens only at the end of
a stream. So the folder has a vocabulary in which every id is one word: a prompt has as many tokens
as words, and each piece of text in a stream is one token. Both numbers are compared with the
server's counts at the end of the stream.

An option names the Python interpreter that runs the server. That interpreter needs
`transformers[serving]` and accelerate, which nothing else here needs.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.peers.foreign_server import foreign_server, free_port
from benchmarks.peers.transformers_continuous import PAGE, PREFILL_TOKENS
from benchmarks.peers.transformers_generate import load_gpt2
from benchmarks.peers.weights import load_weights
from benchmarks.streams import Arrived, Ask, StreamFailed


def save_for_transformers(weights: Path, folder: Path, dtype: str) -> None:
    """Save a folder with the weights of `weights.py` and a vocabulary of words. The saved settings
    draw at temperature 1 from the whole vocabulary and have no end token."""
    import torch  # imported only here, so that clients need no torch

    shape, _ = load_weights(weights)
    gpt2 = load_gpt2(weights, getattr(torch, dtype))
    gpt2.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0
    )
    gpt2.save_pretrained(folder)
    words = {word(index): index for index in range(shape.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=word(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def word(token_id: int) -> str:
    return f"t{token_id}"


def text_of(token_ids: Sequence[int]) -> str:
    """A text with exactly these ids."""
    return " ".join(word(token_id) for token_id in token_ids)


@contextmanager
def transformers_server(
    folder: Path,
    *,
    python: str,
    dtype: str,
    threads: int,
    continuous: bool,
    largest: int,
    positions: int,
) -> Iterator[str]:
    """Start `transformers serve` with the model in `folder`, and yield its URL once it is ready.
    With continuous batching, its cache has pages for `largest` sequences of `positions` positions
    each. Raises ServerMissing."""
    port = free_port()
    command = [
        python, "-c", "from transformers.cli.transformers import main; main()",
        "serve", str(folder), "--host", "127.0.0.1", "--port", str(port),
        "--device", "cpu", "--dtype", dtype,
    ]  # fmt: skip
    if continuous:
        pages = (-(-positions // PAGE) + 1) * largest + 1
        command += [
            "--continuous-batching", "--cb-block-size", str(PAGE), "--cb-num-blocks", str(pages),
            "--cb-max-batch-tokens", str(PREFILL_TOKENS + largest),
        ]  # fmt: skip
    with foreign_server(
        command,
        port=port,
        log=folder / "serve.log",
        environment={**os.environ, "OMP_NUM_THREADS": str(threads)},
    ) as url:
        yield url


def asking_transformers(http: httpx.AsyncClient, url: str) -> Ask:
    """Return a function that sends a prompt to `/v1/completions` and reads the stream."""

    async def ask(prompt: Sequence[int], tokens: int, seed: int, arrived: Arrived) -> None:
        # No seed: it would apply to the whole process, and to the draws of all streams.
        body = {"prompt": text_of(prompt), "max_tokens": tokens, "stream": True}
        came, usage = 0, None
        try:
            async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
                if response.status_code != 200:
                    said = (await response.aread()).decode(errors="replace")
                    raise StreamFailed(f"HTTP {response.status_code}", said[:300])
                async for line in response.aiter_lines():
                    count, usage = tokens_in(line, usage)
                    came += count
                    arrived(count)
        except httpx.HTTPError as error:
            raise StreamFailed(type(error).__name__, str(error)) from error
        check_usage(usage, prompt=len(prompt), came=came)

    return ask


def tokens_in(line: str, usage: dict[str, int] | None) -> tuple[int, dict[str, int] | None]:
    """Number of tokens in a line of the stream, and the server's token counts. If the line has no
    counts, the second value is `usage`, the counts so far."""
    data = re.fullmatch(r"data: (\{.*\})", line)
    if data is None:
        return 0, usage
    chunk = json.loads(data[1])
    if "error" in chunk:
        raise StreamFailed("error", str(chunk["error"]))
    text = "".join(choice.get("text", "") for choice in chunk["choices"])
    return len(text.split()), chunk.get("usage") or usage


def check_usage(usage: dict[str, int] | None, *, prompt: int, came: int) -> None:
    """Raise StreamFailed unless the server's counts equal the client's."""
    if usage is None:
        raise StreamFailed("NoEnd", f"the stream ended without token counts, after {came} tokens")
    counted = (usage["prompt_tokens"], usage["completion_tokens"])
    if counted != (prompt, came):
        raise StreamFailed(
            "Miscounted",
            f"the server counts {counted[0]} prompt tokens and {counted[1]} completion tokens, "
            f"but {prompt} were sent and {came} arrived",
        )
