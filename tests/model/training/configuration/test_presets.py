"""The presets by name."""

import pytest

from logitd.model.training.configuration.presets import PRESETS
from logitd.model.transformer.gpt import GPT


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_a_valid_model(name: str) -> None:
    assert PRESETS[name].config(vocab_size=1000).vocab_size == 1000


def test_gpt2_preset_has_the_shape_of_gpt2() -> None:
    config = PRESETS["gpt2-124m"].config(vocab_size=50257)
    assert (config.n_layer, config.n_head, config.d_model) == (12, 12, 768)
    assert (config.context_length, config.activation) == (1024, "gelu_tanh")
    assert config.tied_head


def test_decoder_preset_is_the_classroom_model() -> None:
    config = PRESETS["decoder-8x64"].config(vocab_size=1000)
    assert (config.n_layer, config.n_head, config.d_model, config.d_ff) == (8, 4, 64, 256)
    assert (config.context_length, config.positions, config.activation) == (
        16,
        "sinusoidal",
        "relu",
    )
    assert (config.norm_position, config.qkv_bias, config.dropout) == ("post", True, 0.1)
    recipe = PRESETS["decoder-8x64"].recipe
    assert (recipe.batch_size, recipe.matrix_lr, recipe.seed) == (4, 1e-3, 1337)
    assert (recipe.steps, recipe.eval_every, recipe.eval_batches) == (5000, 50, 20)
    assert recipe.val_fraction == 0.2
    pre = PRESETS["decoder-8x64"].config(vocab_size=1000, norm_position="pre")
    assert pre.norm_position == "pre"


def test_small_preset_stays_below_the_size_limit_of_the_bundled_checkpoint() -> None:
    """Two bytes a parameter in bfloat16, 16 MB with everything around."""
    small = PRESETS["small"]
    count = GPT(small.config(small.recipe.vocab_size)).parameter_count()
    assert 2 * count < 15.5e6
    assert small.recipe.save_dtype == "bfloat16"


def test_nanogpt_preset_has_the_shape_of_nanogpt_at_the_size_of_tiny() -> None:
    tiny = PRESETS["tiny"].config(vocab_size=1024)
    config = PRESETS["nanogpt"].config(vocab_size=1024)
    for name in ("n_layer", "n_head", "d_model", "d_ff", "context_length", "head_dim"):
        assert getattr(config, name) == getattr(tiny, name)
    assert (config.norm, config.positions, config.activation) == ("layernorm", "learned", "gelu")
    assert (config.bias, config.qkv_bias, config.tied_head) == (False, False, True)
    assert (config.qk_norm, config.value_embeddings, config.dropout) == (False, False, 0.0)
    recipe = PRESETS["nanogpt"].recipe
    assert (recipe.optimizer, recipe.decay, recipe.init) == ("adamw", "cosine", "gpt2")
    assert (recipe.matrix_lr, recipe.batch_size, recipe.clip) == (2e-3, 4, 1.0)


def test_nanogpt_char_preset_is_the_published_command() -> None:
    """0.80 M parameters in nanoGPT's count, which leaves positions out, with its 65 characters."""
    start = PRESETS["nanogpt-char"]
    gpt = GPT(start.config(65, padded_vocab_size=65))
    assert gpt.parameter_count() - 64 * 128 == 795_904
    recipe = start.recipe
    assert recipe.steps * recipe.batch_size * gpt.config.context_length == 1_536_000
    assert (recipe.matrix_lr, recipe.final_lr, recipe.warmup) == (1e-3, 0.1, 100)
    assert (recipe.beta1, recipe.beta2, recipe.weight_decay) == (0.9, 0.99, 0.1)
    assert (recipe.tokenizer, recipe.vocab_size) == ("own", 257)
