"""The service's forward pass, computed by the decoder alone: no engine, a cache of one slot.

Tests use it as the oracle for served logits, hidden states and attention weights. On a CPU, the
service and this oracle compute the same bits if their dtype, number of threads and kernels are the
same. `GPT.forward` defines the values; this module computes them with the service's kernels.
"""

import torch
from torch import Tensor

from logitd.model.inference.kernels.base import AttentionSelection, PrefillInput
from logitd.model.inference.kernels.select import choose_decode_path
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.options import ComputeOptions, KernelChoice, Quantization
from logitd.model.transformer.gpt import GPT, GPTOutput


@torch.inference_mode()
def forward_as_served(
    gpt: GPT,
    token_ids: Tensor,  # (T,)
    *,
    hidden_states: bool = False,
    attentions: bool = False,
    kernels: KernelChoice = "auto",
    quantize: Quantization = "none",
) -> GPTOutput:
    """`GPT.forward` of one sequence in the service's arithmetic, which depends on `kernels` and
    `quantize`. Shapes as in `GPT.forward`, with B = 1.

    The model's parameters may be moved into one block of memory, and rounded if `quantize` is set.
    Raises ValueError if the text is empty or longer than the model's context, and KernelError if
    the kernels are not available."""
    config, weight, length = gpt.config, gpt.token_embedding.weight, len(token_ids)
    if not 0 < length <= config.context_length:
        raise ValueError(
            f"the text has {length} tokens; this model takes 1 to {config.context_length}"
        )
    threads = torch.get_num_threads()
    path = choose_decode_path(
        gpt, ComputeOptions(kernels=kernels, quantize=quantize), threads=threads
    )
    decoder = path.make_decoder(gpt, KVCache(config, 1, device=weight.device, dtype=weight.dtype))
    everything = AttentionSelection(range(config.n_layer), range(config.n_head), length)
    try:
        weights_wanted = everything if attentions else None
        [found] = decoder.prefill(
            [PrefillInput(token_ids.tolist(), 0, 0, hidden_states, weights_wanted)]
        )
        logits = decoder.head(found.hidden)
    finally:
        decoder.close()
    states, weights = found.states, found.weights  # (n_layer + 1, T, C) and (T, n_layer, H, T)
    return GPTOutput(
        logits=logits[None],
        hidden_states=None if states is None else states[:, None],
        attentions=None if weights is None else weights.permute(1, 2, 0, 3)[:, None],
    )
