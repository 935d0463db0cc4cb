"""The presets by name."""

from dataclasses import asdict
from typing import Any

import pytest

from logitd.model.training.configuration.presets import PRESETS
from logitd.model.transformer.gpt import GPT

TINY = PRESETS["tiny"].config(vocab_size=1024)
SIZE = ("n_layer", "n_head", "d_model", "d_ff", "head_dim")


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_a_valid_model(name: str) -> None:
    assert PRESETS[name].config(vocab_size=1000).vocab_size == 1000


VALUES: dict[str, dict[str, Any]] = {
    "gpt2-124m": {
        "n_layer": 12, "n_head": 12, "d_model": 768, "context_length": 1024,
        "activation": "gelu_tanh", "tied_head": True,
    },
    "decoder-8x64": {
        "n_layer": 8, "n_head": 4, "d_model": 64, "d_ff": 256, "context_length": 16,
        "positions": "sinusoidal", "activation": "relu", "norm_position": "post",
        "qkv_bias": True, "dropout": 0.1, "batch_size": 4, "matrix_lr": 1e-3, "seed": 1337,
        "steps": 5000, "eval_every": 50, "eval_batches": 20, "val_fraction": 0.2,
    },
    "nanogpt": {
        **{name: getattr(TINY, name) for name in SIZE}, "norm": "layernorm",
        "context_length": 256, "positions": "learned", "activation": "gelu", "bias": False,
        "qkv_bias": False,
        "tied_head": True, "qk_norm": False, "value_embeddings": False, "dropout": 0.0,
        "optimizer": "adamw", "decay": "cosine", "init": "gpt2", "matrix_lr": 2e-3,
        "batch_size": 4, "clip": 1.0,
    },
}  # fmt: skip
"""Settings of the published models that the presets follow. nanoGPT's model has the size of
`tiny`."""


@pytest.mark.parametrize("name", VALUES)
def test_preset_has_the_values_of_its_model(name: str) -> None:
    preset = PRESETS[name]
    values = preset.config(vocab_size=1000).to_dict() | asdict(preset.recipe)
    assert {key: values[key] for key in VALUES[name]} == VALUES[name]


def test_small_preset_stays_below_the_size_limit_of_the_bundled_checkpoint() -> None:
    """In bfloat16 each parameter takes two bytes; with its other files, the checkpoint takes 19
    MB."""
    small = PRESETS["small"]
    count = GPT(small.config(small.recipe.vocab_size)).parameter_count()
    assert 2 * count < 18.5e6
    assert small.recipe.save_dtype == "bfloat16"


def test_nanogpt_char_preset_is_the_published_command() -> None:
    """For a vocabulary of 65 characters, nanoGPT reports 0.80 M parameters, not including position
    embeddings."""
    start = PRESETS["nanogpt-char"]
    gpt = GPT(start.config(65, padded_vocab_size=65))
    assert gpt.parameter_count() - 64 * 128 == 795_904
    recipe = start.recipe
    assert recipe.steps * recipe.batch_size * gpt.config.context_length == 1_536_000
    assert (recipe.matrix_lr, recipe.final_lr, recipe.warmup) == (1e-3, 0.1, 100)
    assert (recipe.beta1, recipe.beta2, recipe.weight_decay) == (0.9, 0.99, 0.1)
    assert (recipe.tokenizer, recipe.vocab_size) == ("own", 257)
