"""The whole GPT compared with GPT-2, GPT-NeoX, OPT, Llama and Qwen3 of `transformers`, in float32,
without downloads. The weights, biases and norms of their models are imported into ours. They are
random, and large enough to make attention selective."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.testing import assert_close

from logitd.model.convert.foreign import Settings, StateDictReader
from logitd.model.convert.hf.config import read_model
from logitd.model.transformer.gpt import GPT
from tests.model.factories import random_ids
from tests.model.shapes import SCALINGS

VOCAB_SIZE = 99
SIZE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "max_position_embeddings": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "hidden_size": 32,
}  # fmt: skip
THETA = 5_000.0

SCALED = {name: scaling for name, scaling in SCALINGS.items() if scaling is not None}

Case = tuple[GPT, torch.nn.Module]


def gpt2() -> Case:
    return imported(
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCAB_SIZE,
                n_positions=64,
                n_layer=3,
                n_head=4,
                n_embd=32,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    )


def llama(**overrides: Any) -> Case:
    return llama_shaped(transformers.LlamaForCausalLM, transformers.LlamaConfig, **overrides)


def qwen3(**overrides: Any) -> Case:
    return llama_shaped(transformers.Qwen3ForCausalLM, transformers.Qwen3Config, **overrides)


def llama_shaped(
    model: Callable[[Any], Any],
    config: Callable[..., Any],
    *,
    tied_head: bool = False,
    head_dim: int = 8,
    scaling: Mapping[str, Any] | None = None,
) -> Case:
    return imported(
        model(
            config(
                **SIZE,
                num_key_value_heads=2,
                head_dim=head_dim,
                intermediate_size=48,
                rms_norm_eps=1e-6,
                rope_parameters=rope(scaling),
                tie_word_embeddings=tied_head,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    )


def rope(scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """The `rope_parameters` that `transformers` needs for a scaling."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": THETA}
    values = {name: value for name, value in scaling.items() if name != "kind"}
    original = values.pop("original_context_length", None)
    if original is not None:
        values["original_max_position_embeddings"] = original
    return {"rope_type": scaling["kind"], "rope_theta": THETA, **values}


def neox(share: float = 0.25, scaling: Mapping[str, Any] | None = None, **overrides: Any) -> Case:
    theirs = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            **SIZE,
            intermediate_size=48,
            rope_parameters={**rope(scaling), "partial_rotary_factor": share},
            **overrides,
        )
    )
    return imported(theirs)


def opt(**overrides: Any) -> Case:
    config = transformers.OPTConfig(**SIZE, ffn_dim=48, **overrides)
    return imported(transformers.OPTForCausalLM(config))


def imported(theirs: Any) -> Case:
    """Give their model random weights and import it as ours. Returns our model, then theirs. The
    padding rows of our model hold large numbers."""
    prepare(theirs)
    state = theirs.state_dict()
    reader = StateDictReader("theirs", state)
    config, weights = read_model(Settings("theirs", theirs.config.to_dict()), reader)
    assert config.padded_vocab_size == 128
    noise = torch.full((128 - VOCAB_SIZE, 32), 1e3)
    padded = {"token_embedding.weight", "head.weight"}
    gpt = GPT(config)
    gpt.load_state_dict(
        {
            name: torch.cat((value, noise)) if name in padded else value
            for name, value in weights.items()
        }
    )
    return gpt.eval().requires_grad_(False), theirs


def prepare(theirs: Any) -> None:
    """Draw every weight anew, and enable the return of attention weights."""
    theirs.set_attn_implementation("eager")
    theirs.eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in theirs.named_parameters():
        if parameter.dim() == 2:
            chooses = any(part in name for part in ("c_attn", "q_proj", "k_proj", "query_key"))
            parameter.normal_(std=0.2 if chooses else 0.12, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(std=0.2, generator=generator)
        else:
            parameter.uniform_(0.5, 1.5, generator=generator)


@pytest.mark.parametrize(
    "make",
    [
        gpt2,
        llama,
        lambda: llama(tied_head=True),
        lambda: llama(head_dim=10),
        qwen3,
        lambda: qwen3(tied_head=True, head_dim=16),
        *(partial(llama, head_dim=16, scaling=scaling) for scaling in SCALED.values()),
        *(partial(neox, share=0.5, scaling=scaling) for scaling in SCALED.values()),
        neox,
        lambda: neox(use_parallel_residual=False, attention_bias=False),
        lambda: neox(share=1.0, tie_word_embeddings=True, hidden_act="gelu_new"),
        opt,
        lambda: opt(do_layer_norm_before=False),
        lambda: opt(_remove_final_layer_norm=True, tie_word_embeddings=False),
    ],
    ids=[
        *("gpt2", "llama", "llama-tied", "llama-wide-heads", "qwen3", "qwen3-tied-wide-heads"),
        *(f"llama-{kind}" for kind in SCALED),
        *(f"neox-{kind}" for kind in SCALED),
        *("neox", "neox-sequential", "neox-whole-tied"),
        *("opt", "opt-post", "opt-untied-bare"),
    ],
)
def test_forward_computes_what_transformers_does(make: Callable[[], Case]) -> None:
    gpt, theirs = make()
    ids = random_ids(2, 32, vocab_size=VOCAB_SIZE)
    expected = theirs(ids, output_hidden_states=True, output_attentions=True)
    assert expected.logits.std() > 0.5  # large enough for 1e-5 to be meaningful
    output = gpt(ids, hidden_states=True, attentions=True)

    def same(actual: Tensor, theirs: Tensor) -> None:
        assert_close(actual, theirs, atol=1e-5, rtol=1e-5)

    same(output.logits, expected.logits)
    same(gpt(ids).logits, expected.logits)  # the fused kernel
    same(output.attentions, torch.stack(expected.attentions))
    # Theirs ends with the state after the final norm, ours with the one before.
    same(output.hidden_states[:-1], torch.stack(expected.hidden_states[:-1]))
    same(gpt.final_norm(output.hidden_states[-1]), expected.hidden_states[-1])
