"""Samples: what a model in training writes after a prompt.

The whole window is computed anew for every token: plain, and fast enough for a hundred tokens of a
small model. Serving has the KV cache (`model/engine`). Draws from a generator of its own, so a
sample never disturbs training. Of a sharded model all processes have to sample; the first draws.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from logitd.model.text.tokenizer import Tokenizer
from logitd.model.training.distributed.ranks import ALONE, Ranks
from logitd.model.transformer.gpt import GPT


def sample_text(
    gpt: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float,
    seed: int,
    forward: Callable[[Tensor], Tensor],
    ranks: Ranks = ALONE,
) -> str:
    """What follows the prompt: at most `max_tokens` tokens, or up to the document's end.

    `forward` maps ids (1, T) to logits (1, T, V). Only the last `context_length` ids are seen.
    """
    draw = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt)
    start = len(ids)
    device = gpt.token_embedding.weight.device
    training = gpt.training
    gpt.eval()
    try:
        with torch.no_grad():
            for _ in range(max_tokens):
                window = torch.tensor([ids[-gpt.config.context_length :]], device=device)
                logits = forward(window)[0, -1].float().cpu()  # (V,)
                probs = (logits / temperature).softmax(dim=-1)
                token_id = int(ranks.broadcast(int(torch.multinomial(probs, 1, generator=draw))))
                if token_id == tokenizer.end_of_text:
                    break
                ids.append(token_id)
    finally:
        gpt.train(training)
    return tokenizer.decode(ids[start:])
