"""Tiny random models and tokenizers of other projects, saved by their own libraries."""

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import nn

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.convert.probe import probe_text
from logitd.model.transformer.gpt import GPT

TEXT = probe_text()
SAMPLE = "def main(): it's 12345 naïve\n\n   \t x  "
ROWS = 387
"""Rows of embeddings; the vocabularies have fewer ids."""

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 64, "n_layer": 2, "n_head": 4, "n_embd": 32},
    "gpt2-untied": {
        "n_positions": 64, "n_layer": 2, "n_head": 4, "n_embd": 32, "n_inner": 48,
        "activation_function": "gelu", "tie_word_embeddings": False,
    },
    "llama": {"tie_word_embeddings": False},
    "llama-tied-biased": {"tie_word_embeddings": True, "attention_bias": True},
    "llama-biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 12},
    "mistral": {"sliding_window": None},
    "mistral-window": {"sliding_window": 8},
    "qwen2-window": {
        "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1,
    },
    "qwen3-window": {
        "use_sliding_window": True, "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False, "head_dim": 16},
    "qwen3-biased": {"tie_word_embeddings": True, "head_dim": 8, "attention_bias": True},
    "llama-linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0}},
    "llama-llama3": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 3.0, "original_max_position_embeddings": 48,
        },
    },
    "qwen3-yarn": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 8.0,
            "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.5,
        },
    },
    "qwen2-yarn": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0},
    },
    "nanochat": {"hidden_size": 48},
    "nanochat-tied": {"tie_word_embeddings": True, "final_logit_softcapping": None},
    "nanochat-yarn": {  # norms after rotation undo yarn's factor of queries and keys
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0},
    },
    "gpt_neox": {},
    "gpt_neox-sequential": {"use_parallel_residual": False, "hidden_act": "gelu_fast"},
    "gpt_neox-tied": {"tie_word_embeddings": True, "hidden_act": "relu"},
    "gpt_neox-half": {
        "attention_bias": False, "layer_norm_eps": 1e-4,
        "rope_parameters": {
            "rope_type": "linear", "factor": 2.0, "rope_theta": 700.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "gpt_neox-whole": {
        "rope_parameters": {"rope_theta": 700.0, "partial_rotary_factor": 1.0},
    },
    "opt": {},
    "opt-post": {"do_layer_norm_before": False},
    "opt-untied": {"tie_word_embeddings": False, "_remove_final_layer_norm": True},
}  # fmt: skip
"""Arguments for the configurations of `transformers`, by case name; each name begins with the model
type."""

ROTARY: dict[str, Any] = {
    "max_position_embeddings": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 48,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5_000.0},
}  # fmt: skip


OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt_neox": {
        "max_position_embeddings": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "hidden_size": 32, "intermediate_size": 48,
    },
    "opt": {
        "max_position_embeddings": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "hidden_size": 32, "ffn_dim": 48,
    },
}  # fmt: skip
"""Sizes for the model families whose configuration keys differ from Llama's."""


def their_model(family: str, **overrides: Any) -> Any:
    """A random model of `transformers`; biases and norms are random, too."""
    kind = family.partition("-")[0]
    values = OTHERS.get(kind, ROTARY) | FAMILIES[family]
    name = {"gpt2": "GPT2", "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2",
            "qwen3": "Qwen3", "nanochat": "NanoChat", "gpt_neox": "GPTNeoX",
            "opt": "OPT"}[kind]  # fmt: skip
    config = getattr(transformers, f"{name}Config")(
        vocab_size=ROWS, bos_token_id=0, eos_token_id=0, **values | overrides
    )
    head = "LMHeadModel" if kind == "gpt2" else "ForCausalLM"
    model = getattr(transformers, f"{name}{head}")(config)
    draw(model)
    return model.eval()


def draw(model: nn.Module, seed: int = 0) -> None:
    """Draw large weights, so that attention is selective."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 or name.endswith("bias"):
                parameter.normal_(std=0.2, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)


def their_tokenizer(
    *, pattern: str | None = None, special_first: bool = False, size: int = 380
) -> Any:
    """A byte-level BPE that the `tokenizers` library learned, with two special tokens."""
    special = ["<|endoftext|>", "<|user|>"]
    tokenizer = tokenizers.Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    steps = [] if pattern is None else [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    ]  # fmt: skip
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, level]) if steps else level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special if special_first else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    if not special_first:
        tokenizer.add_special_tokens(special)
    return tokenizer


def save_theirs(
    folder: Path, family: str, tokenizer: Any = None, **overrides: Any
) -> tuple[Any, Any]:
    """Save a model of `transformers` with its tokenizer; returns both."""
    model, tokenizer = their_model(family, **overrides), tokenizer or their_tokenizer()
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return model, tokenizer


def loaded(path: Path) -> tuple[CheckpointInfo, GPT]:
    return load_checkpoint(path, device=torch.device("cpu"), dtype=torch.float32)
