"""Small real objects for tests: a tokenizer, a GPT of each family, a saved checkpoint. None is a
mock."""

from collections.abc import Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from logitd.model.checkpoint.checkpoint import CheckpointInfo, TrainingRecord, save_checkpoint
from logitd.model.text.tokenizer import END_OF_TEXT, SPLIT_PATTERN, Tokenizer
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.shapes import MODERN, ORIGINAL, gpt2_shape

VOCAB_SIZE = 257
"""Number of ids of `byte_tokenizer`, for the 256 bytes and END_OF_TEXT."""

CHAT_TEMPLATE = """\
{% for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content | trim }}<|im_end|>
{% endfor %}
<|im_start|>assistant
"""
"""A typical template, like ChatML."""

NANOCHAT: Mapping[str, Any] = {
    **MODERN,
    "activation": "relu2",
    "n_kv_head": 2,
    "embedding_norm": True,
    "smear": True,
    "windows": (40, 7, None),
    "residual_mix": True,
    "backout": True,
    "logit_softcap": 6.0,
}
"""Every part of nanochat's architecture, as overrides of `tiny_config`, which has three layers."""

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {},
    "original": ORIGINAL,
    "original-pre": {**ORIGINAL, "norm_position": "pre", "qkv_bias": False},
    "modern": {**MODERN, "activation": "relu2", "n_kv_head": 2},
    "llama": {
        **MODERN,
        "activation": "swiglu",
        "n_kv_head": 2,
        "qk_norm": False,
        "value_embeddings": False,
    },
    "multi-query": {"activation": "gelu", "n_kv_head": 1, "head_dim": 16, "bias": False},
    "neox": {
        "positions": "rotary",
        "rotary_dim": 4,
        "residual": "parallel",
        "activation": "gelu",
        "head_bias": True,
    },
    "scaled": {
        **MODERN,
        "norm_position": "post",
        "final_norm": True,
        "n_kv_head": 2,
        "activation": "swiglu",
        "rotary_dim": 6,
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_context_length": 32},
        "head_bias": True,
        "value_embeddings": False,
    },
    "nanochat": NANOCHAT,
}
"""Overrides of `tiny_config` that together reach every branch of the forward pass."""


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token, without merges: the ids of a text are its UTF-8 bytes."""
    return Tokenizer(
        ranks={bytes([byte]): byte for byte in range(256)},
        pattern=SPLIT_PATTERN,
        special_tokens={END_OF_TEXT: 256},
    )


def chat_tokenizer() -> Tokenizer:
    """`byte_tokenizer` with the special tokens of CHAT_TEMPLATE."""
    plain = byte_tokenizer()
    special_tokens = {END_OF_TEXT: 256, "<|im_start|>": 257, "<|im_end|>": 258}
    return Tokenizer(ranks=plain.ranks, pattern=plain.pattern, special_tokens=special_tokens)


def merging_tokenizer() -> Tokenizer:
    """A tokenizer with a token for each byte and two special tokens. Its other tokens split
    characters, words and JSON in odd places."""
    pieces = (
        b"\xc3\xa9", b"\xa9a", b"\xe2\x82", b"\x82\xac", b"\xf0\x9f", b"\x9f\x98\x80",
        b"\x80\xe2", b"ab", b"abc", b"ca", b"bb", b" a", b"a\n", b"\n\n", b"00", b"12", b"1.",
        b"-0", b"5e", b".5", b'{"', b'": ', b', "', b'"}', b"}}", b"[{", b"]}", b"[]", b"], ",
        b"tru", b"e}", b"null", b'"a": ', b'\\"', b"\\u", b"<|", b"|>", b"endoftext",
    )  # fmt: skip
    tokens = [bytes([byte]) for byte in range(256)] + list(pieces)
    return Tokenizer(
        ranks={token: rank for rank, token in enumerate(tokens)},
        pattern=SPLIT_PATTERN,
        special_tokens={"<|other|>": len(tokens), END_OF_TEXT: len(tokens) + 1},
    )


def tiny_config(**overrides: Any) -> GPTConfig:
    """GPT-2's shape, tiny, with the vocabulary of `byte_tokenizer`."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "context_length": 128,
        "n_layer": 3,
        "n_head": 4,
        "d_model": 32,
    } | overrides
    if (windows := values.get("windows")) is not None:  # for any number of layers
        values["windows"] = tuple(islice(cycle(windows), values["n_layer"]))
    return gpt2_shape(**values)


def tiny_gpt(config: GPTConfig | None = None, seed: int = 0) -> GPT:
    """A random GPT in evaluation mode whose every parameter matters.

    Weights are large, so that attention is selective and greedy text does not repeat one token.
    Biases and norms are random too, so omitting one of them changes the logits.
    """
    gpt = GPT(config or tiny_config())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, module in gpt.named_modules():
            if isinstance(module, nn.Linear):
                gain = 3 if name.endswith("qkv") else 1  # selective attention, varied text
                module.weight.normal_(std=gain * module.in_features**-0.5, generator=generator)
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(std=1, generator=generator)
            elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
                module.weight.uniform_(0.5, 1.5, generator=generator)
            elif isinstance(module, GPT):
                for scales in module.parameters(recurse=False):
                    scales.uniform_(0.3, 1.1, generator=generator)
            if isinstance(bias := getattr(module, "bias", None), torch.Tensor):
                bias.normal_(std=0.1, generator=generator)
    return gpt.eval().requires_grad_(False)


def random_ids(*shape: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """Token ids of the given shape, the same for the same seed."""
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def training_record(**overrides: Any) -> TrainingRecord:
    values: dict[str, Any] = {
        "step": 7,
        "tokens": 7168,
        "val_loss": 2.5,
        "val_bits_per_byte": 3.6,
        "data": {"name": "tiny", "licence": "MIT"},
        "created": "2026-01-02T03:04:05Z",
    }
    return TrainingRecord(**(values | overrides))


def save_tiny_checkpoint(path: Path, gpt: GPT | None = None, **save: Any) -> CheckpointInfo:
    """Save `gpt` (or `tiny_gpt()`) with the byte tokenizer at `path`."""
    gpt = gpt or tiny_gpt()
    values: dict[str, Any] = {
        "config": gpt.config,
        "weights": gpt.state_dict(),
        "tokenizer": byte_tokenizer(),
        "training": training_record(),
        "card": "# tiny\n",
    }
    return save_checkpoint(path, **(values | save))
