"""OPT in Hugging Face folders: shape and weights, in this project's terms.

The table of positions begins with two rows that no position has, as fairseq counted the padding;
they are left out. Norms before or after the sublayers. Not covered, and rejected by name:
embeddings narrower than the stream (opt-350m), layers without biases, and other activations than
ReLU (Galactica has both).
"""

import torch
from torch import Tensor

from logitd.model.convert.foreign import Settings, StateDictReader
from logitd.model.transformer.config import GPTConfig, gpt2_shape

BEFORE_THE_FIRST = 2
"""Rows of the table of positions that no position has."""


def read_opt(settings: Settings, reader: StateDictReader) -> tuple[GPTConfig, dict[str, Tensor]]:
    """The model without its head. Raises ConvertError and ConfigError."""
    width = settings.integer("hidden_size")
    settings.reject_unless(
        "word_embed_proj_dim",
        (width,),
        f"hidden_size is {width}, and projections between both are not supported",
    )
    settings.reject_unless("activation_function", ("relu",), "OPT's own is relu")
    for name in ("enable_bias", "layer_norm_elementwise_affine"):
        settings.reject_unless(name, (True,), "not supported for OPT")
    before = settings.flag("do_layer_norm_before", True)
    config = gpt2_shape(
        vocab_size=settings.integer("vocab_size"),
        context_length=settings.integer("max_position_embeddings"),
        n_layer=settings.integer("num_hidden_layers"),
        n_head=settings.integer("num_attention_heads"),
        d_model=width,
        d_ff=settings.integer("ffn_dim"),
        norm_position="pre" if before else "post",
        final_norm=before and not settings.flag("_remove_final_layer_norm", False),
        activation="relu",
        tied_head=settings.flag("tie_word_embeddings", True),
    )
    return config, _weights(reader, config)


def _weights(reader: StateDictReader, config: GPTConfig) -> dict[str, Tensor]:
    width, hidden = config.d_model, config.d_ff
    prefixes = ("", "decoder.", "model.decoder.")
    prefix = next((p for p in prefixes if f"{p}embed_tokens.weight" in reader), prefixes[-1])
    positions = config.context_length + BEFORE_THE_FIRST
    table = reader.take(f"{prefix}embed_positions.weight", positions, width)
    weights = {
        "token_embedding.weight": reader.take(
            f"{prefix}embed_tokens.weight", config.vocab_size, width
        ),
        "position_embedding.weight": table[BEFORE_THE_FIRST:],
    }
    norms = {"final_norm": f"{prefix}final_layer_norm"} if config.final_norm else {}
    for layer in reader.layers(config.n_layer):
        theirs, here = f"{prefix}layers.{layer}", f"blocks.{layer}"
        norms |= {
            f"{here}.attention_norm": f"{theirs}.self_attn_layer_norm",
            f"{here}.mlp_norm": f"{theirs}.final_layer_norm",
        }
        for ours, parts, rows, columns in (
            ("qkv", [f"self_attn.{part}_proj" for part in "qkv"], width, width),
            ("attention_out", ["self_attn.out_proj"], width, width),
            ("mlp_up", ["fc1"], hidden, width),
            ("mlp_down", ["fc2"], width, hidden),
        ):
            weights[f"{here}.{ours}.weight"] = torch.cat(
                [reader.take(f"{theirs}.{part}.weight", rows, columns) for part in parts]
            )
            weights[f"{here}.{ours}.bias"] = torch.cat(
                [reader.take(f"{theirs}.{part}.bias", rows) for part in parts]
            )
    for here, theirs in norms.items():
        for kind in ("weight", "bias"):
            weights[f"{here}.{kind}"] = reader.take(f"{theirs}.{kind}", width)
    return weights
