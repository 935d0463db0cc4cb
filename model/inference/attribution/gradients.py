"""Gradients of a logit with respect to the residual stream, block by block.

`TextPasses` are the passes of one text: forward through one block, and backward through one, which
is computed anew with autograd for its vector-Jacobian product. So no more than one block's
activations are ever kept, beside the stream before each block. What the gradients are made into:

    gradient_times_input   a_t = <df/dx_t (x), x_t>
    integrated_gradients   a_t = <x_t - b_t, 1/m sum_k df/dx_t (b + (k + 1/2)/m (x - b))>

where f is the target and x_t the vector of token t in the stage `embedding`, the stream that enters
the first block; b is the baseline. The second is that of Sundararajan, Taly and Yan (2017), by the
midpoint rule. What a model reads of the token ids beside the stream (value embeddings) stays that
of the prompt all along the path.

Computed in float32 from the weights that are served, of bfloat16 and int8 models too (there, from
the rounded ones); in float64 for a float64 model. Parameters get no gradients. One text at a time
and always the same operations: the bits depend on nothing else.

Shapes: T positions of the text, with the padding behind the one whose logits are looked at, which
nothing depends on; C = d_model, V = vocab_size.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from logitd.model.device import one_thread
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.tap import UNTAPPED, Tap

Watch = Callable[[int], AbstractContextManager[None]]
"""Is put around what a block computes on so many rows; it may give torch fewer threads, where
`threads_keep_bits`."""

HEAD_ROWS = 4096
"""Rows of the head that are multiplied at a time, so that no wider copy of it is made."""


class TextPasses:
    """Passes of one text through a model, whose logits are looked at in one `row`. To be used
    outside of inference mode, without autograd; whatever needs gradients turns them on."""

    def __init__(
        self, gpt: GPT, token_ids: Sequence[int], row: int, watched: Watch | None = None
    ) -> None:
        weight = gpt.token_embedding.weight
        self._gpt = gpt
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        self.row = row
        self._ids = torch.tensor([token_ids], device=weight.device)  # (1, T)
        self._watched: Watch = watched or (lambda rows: nullcontext())
        self._rotation = None
        if gpt.config.positions == "rotary":
            tables = gpt.rope_cos, gpt.rope_sin
            cos, sin = (_wide(table[: len(token_ids)], self.dtype) for table in tables)
            self._rotation = cos[None, None], sin[None, None]  # (1, 1, T, D / 2)

    def embedding(self, baseline: int | None = None) -> Tensor:
        """The stream that enters the first block (1, T, C): that of the text, or of one that has
        the token `baseline` at every position."""
        gpt, length = self._gpt, self._ids.shape[1]
        ids = self._ids if baseline is None else torch.full_like(self._ids, baseline)
        x = _wide(gpt.token_embedding.weight[ids], self.dtype)
        if gpt.config.positions == "learned":
            x = x + _wide(gpt.position_embedding.weight[:length], self.dtype)
        elif gpt.config.positions == "sinusoidal":
            x = x + _wide(gpt.sinusoids[:length], self.dtype)
        return x

    def forward(self, layer: int, x: Tensor, tap: Tap = UNTAPPED) -> Tensor:
        """The stream (1, T, C) after a block. Autograd is on as in `backward`, for the same
        operations."""
        with self._watched(x.shape[1]), torch.enable_grad():
            return self._block(layer, x.detach().requires_grad_(), tap).detach()

    def backward(self, layer: int, x: Tensor, gradient: Tensor) -> Tensor:
        """The gradient (1, T, C) with respect to `x`, which enters a block, from the one with
        respect to what leaves it."""
        with self._watched(x.shape[1]), torch.enable_grad():
            x = x.detach().requires_grad_()
            (result,) = torch.autograd.grad(self._block(layer, x, UNTAPPED), x, gradient)
        return result

    def likeliest(self, x: Tensor) -> int:
        """The id of the largest logit at the row of the last stream (1, T, C); of equals the
        lowest."""
        config = self._gpt.config
        weight, bias = self._gpt.head_parameters()
        row = self._final_norm(x[0, self.row])
        logits = torch.cat(
            [
                row @ _wide(rows, self.dtype).T
                for rows in weight[: config.vocab_size].split(HEAD_ROWS)
            ]
        )
        if bias is not None:
            logits = logits + _wide(bias[: config.vocab_size], self.dtype)
        return int((logits == logits.max()).nonzero()[0]) if logits.isfinite().all() else 0

    def logit(self, x: Tensor, token_id: int) -> float:
        """A token's logit at the row of the last stream (1, T, C), added up in float64."""
        _, bias = self._gpt.head_parameters()
        row = self._final_norm(x[0, self.row])
        logit = row.double() @ self.direction(token_id, None).double()
        return (logit if bias is None else logit + bias[token_id]).item()

    def direction(self, token_id: int, minus_id: int | None) -> Tensor:
        """What the target is a product with: a row of the head, or the difference of two (C,)."""
        weight, _ = self._gpt.head_parameters()
        row = _wide(weight[token_id], self.dtype)
        return row if minus_id is None else row - _wide(weight[minus_id], self.dtype)

    def head_gradient(self, x: Tensor, direction: Tensor) -> Tensor:
        """The gradient (1, T, C) of the target with respect to the last stream (1, T, C)."""
        with torch.enable_grad():
            last = x[0, self.row].detach().requires_grad_()
            (row,) = torch.autograd.grad(self._final_norm(last) @ direction, last)
        gradient = torch.zeros_like(x)
        gradient[0, self.row] = row
        return gradient

    def _block(self, layer: int, x: Tensor, tap: Tap) -> Tensor:
        block = self._gpt.blocks[layer]
        arguments = (x, self._ids, self._rotation, _attend, tap)
        result: Tensor = functional_call(block, wide_parameters(block, self.dtype), arguments)
        return result

    def _final_norm(self, row: Tensor) -> Tensor:
        norm = self._gpt.final_norm
        result: Tensor = functional_call(norm, wide_parameters(norm, self.dtype), (row,))
        return result


def threads_keep_bits(gpt: GPT, rows: int) -> bool:
    """Whether a block, forward and backward over that many rows, gives the same bits with one
    thread as with all of torch's."""
    passes, layer = TextPasses(gpt, [0] * rows, 0), gpt.config.n_layer - 1
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, rows, gpt.config.d_model, generator=generator).to(passes.dtype)
    x, gradient = x.to(gpt.token_embedding.weight.device), x.roll(1, dims=1).to(passes.dtype)

    def computed() -> tuple[Tensor, Tensor]:
        return passes.forward(layer, x), passes.backward(layer, x, gradient)

    together = computed()
    with one_thread():
        alone = computed()
    return all(map(torch.equal, together, alone))


def wide_parameters(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters of a module in a dtype that autograd computes in: themselves where they are in
    it."""
    return {name: _wide(value, dtype) for name, value in module.named_parameters()}


def per_token(vectors: Tensor, gradient: Tensor) -> Tensor:
    """<gradient, vector> of each token (T,), added up in float64, of (1, T, C) both."""
    return (vectors.double() * gradient.double()).sum(dim=-1)[0]


def _wide(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in a dtype. One that was made in inference mode is copied: autograd takes none."""
    wide = tensor.detach().to(dtype)
    return wide.clone() if wide.is_inference() else wide


def _attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention within the text (1, H, T, D). On a GPU the one kernel whose backward pass
    adds up in a fixed order; it keeps the attention weights of the block."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # (1, H, T, D)
    with nullcontext() if q.is_cpu else sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
