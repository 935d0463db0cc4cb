"""`transformers`: its GPT-2 and its `generate`, with the default cache."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, StoppingCriteria

from benchmarks.peers.contract import Run, Unsupported
from benchmarks.peers.weights import NORM_EPS, Tensors, load_weights
from benchmarks.shapes import Shape

PARTS = {
    "attention_norm": "ln_1",
    "qkv": "attn.c_attn",
    "attention_out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp_up": "mlp.c_fc",
    "mlp_down": "mlp.c_proj",
}


def load(folder: Path, dtype: str, threads: int) -> "TransformersGenerate":
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    return TransformersGenerate(load_gpt2(folder, getattr(torch, dtype)))


def load_gpt2(folder: Path, dtype: torch.dtype) -> Any:
    """The transformers GPT-2 with these weights."""
    shape, tensors = load_weights(folder)
    if shape.family != "gpt2":
        raise Unsupported("only GPT-2 models can be loaded into transformers here")
    gpt2: Any = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape.vocab_size,
            n_positions=shape.context_length,
            n_layer=shape.n_layer,
            n_head=shape.n_head,
            n_embd=shape.d_model,
            layer_norm_epsilon=NORM_EPS,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    gpt2.load_state_dict(gpt2_state(shape, tensors))
    return gpt2.to(dtype).eval().requires_grad_(False)


def gpt2_state(shape: Shape, tensors: Tensors) -> dict[str, Tensor]:
    """The tensors with the names and layouts that transformers uses."""
    names = {
        "token_embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "final_norm": "transformer.ln_f",
    }
    for layer in range(shape.n_layer):
        for ours, theirs in PARTS.items():
            names[f"blocks.{layer}.{ours}"] = f"transformer.h.{layer}.{theirs}"
    state = {}
    for name, array in tensors.items():
        module, _, kind = name.rpartition(".")
        value = torch.from_numpy(array)
        if names[module].endswith(("c_attn", "c_proj", "c_fc")) and kind == "weight":
            value = value.T  # Conv1D of transformers holds (in, out)
        state[f"{names[module]}.{kind}"] = value
    return {**state, "lm_head.weight": state["transformer.wte.weight"]}


def sampling(new_tokens: int) -> Any:
    """Sample at temperature 1 from the whole vocabulary. A completion ends only at its maximum
    length."""
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        pad_token_id=0,
    )


class TransformersGenerate:
    """A transformers model, with one call to `generate` for the whole batch."""

    def __init__(self, gpt2: Any) -> None:
        self._gpt2 = gpt2

    @property
    def about(self) -> str:
        attention = self._gpt2.config._attn_implementation
        return f"transformers {transformers.__version__}, generate, {attention}, default cache"

    def logprobs(self, ids: list[int]) -> NDArray[np.float64]:
        return logprobs(self._gpt2, ids)

    def run(self, prompts: list[list[int]], steps: int) -> Run:
        ids = torch.tensor(prompts)
        clock = Clock()
        began = time.perf_counter()
        output = self._gpt2.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=sampling(steps + 1),
            stopping_criteria=[clock],
        )
        assert output.shape[1] == ids.shape[1] + steps + 1
        times = clock.times
        return Run(times[0] - began, np.diff(times).tolist())


@torch.inference_mode()
def logprobs(gpt2: Any, ids: list[int]) -> NDArray[np.float64]:
    """`Peer.logprobs` for a transformers model."""
    row = torch.tensor([ids])
    prompt = gpt2(row[:, :-1], use_cache=True)
    logits = gpt2(row[:, -1:], past_key_values=prompt.past_key_values).logits[0, -1]
    return logits.double().log_softmax(-1).numpy()


class Clock(StoppingCriteria):
    """A stopping criterion that never stops, but records the time after each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)
