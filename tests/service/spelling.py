"""A real GPT whose text is known: after each letter of ALPHABET it generates the next one.

The embeddings of the letters are orthogonal, the blocks add nothing, and the head's row of a letter
is the embedding of the letter before it. So the completion of any prompt is known, stop strings can
be placed, and characters of two, three and four bytes arrive byte by byte. After the last letter
comes END_OF_TEXT, then the first letter again; every other id is followed by the first letter.
"""

from pathlib import Path

import torch

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.transformer.gpt import GPT, Block
from tests.model.factories import VOCAB_SIZE, random_ids, save_tiny_checkpoint, tiny_config

ALPHABET = "abcdefghijklmnopqrstuvwxyz é€😀."
END_OF_TEXT_ID = 256
RING = (*ALPHABET.encode(), END_OF_TEXT_ID)
CONTEXT_LENGTH = 8192
"""Long enough for a generation to outlast any test."""

_WIDTH = 64
_SHARPNESS = 40.0
"""Logit of the next letter. The logits of all other letters are about 0, so the next letter is
always drawn."""


def spelling_gpt() -> GPT:
    gpt = GPT(
        tiny_config(
            n_layer=1,
            n_head=2,
            d_model=_WIDTH,
            context_length=CONTEXT_LENGTH,
            positions="rotary",
            bias=False,
            tied_head=False,
        )
    ).requires_grad_(False)
    letters = _orthogonal_rows()
    gpt.token_embedding.weight.copy_(
        letters[RING.index(END_OF_TEXT_ID)]
    )  # every id that is not a letter
    # A little noise between the ids that do not come next, so that their order is the same
    # everywhere.
    gpt.head.weight.copy_(torch.randn(gpt.head.weight.shape, generator=_generator()) * 1e-3)
    for place, token_id in enumerate(RING):
        gpt.token_embedding.weight[token_id] = letters[place]
        gpt.head.weight[RING[(place + 1) % len(RING)]] = letters[place] * _SHARPNESS / _WIDTH
    for block in gpt.blocks:
        assert isinstance(block, Block)
        block.attention_out.weight.zero_()
        block.mlp_down.weight.zero_()
    return gpt.eval()


def save_spelling_checkpoint(path: Path) -> CheckpointInfo:
    return save_tiny_checkpoint(path, gpt=spelling_gpt())


def spelled(prompt: str, tokens: int) -> list[int]:
    """The ids that follow a prompt, END_OF_TEXT included."""
    last = prompt.encode()[-1]
    place = RING.index(last) if last in RING else -1
    return [RING[(place + 1 + i) % len(RING)] for i in range(tokens)]


def long_prompt(length: int) -> list[int]:
    """A prompt of random ids, except that the last id is a letter."""
    ids: list[int] = random_ids(length, vocab_size=VOCAB_SIZE - 1).tolist()
    return [*ids[:-1], ord("a")]


def _orthogonal_rows() -> torch.Tensor:
    """Rows of +1 and -1 with sum 0, orthogonal to each other (a Hadamard matrix without one of its
    rows)."""
    matrix = torch.ones(1, 1)
    while len(matrix) < _WIDTH:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix[1:]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
