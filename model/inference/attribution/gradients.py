"""Gradients of a logit with respect to the residual stream, block by block.

`TextPasses` runs one text forward or backward through one block. The backward pass computes the
block again with autograd, so only the stream before each block and the activations of one block are
kept. The methods:

    gradient_times_input   a_t = <df/dx_t (x), x_t>
    integrated_gradients   a_t = <x_t - b_t, 1/m sum_k df/dx_t (b + (k + 1/2)/m (x - b))>

f is the target (a logit before `logit_softcap`), x_t is the vector of token t in the stage
`embedding`, which enters the first block, and b is the baseline. Integrated gradients are from
Sundararajan, Taly and Yan (2017); the integral uses the midpoint rule. Value embeddings are looked
up by token id, so every point of the path uses the value embeddings of the prompt.

All arithmetic is in float32 on the served weights (in int8 models, on the rounded weights), or in
float64 for a float64 model. Parameters get no gradients. Texts are computed one at a time by the
same operations, so the bits of one text do not depend on other texts.

Shapes: T positions of the text, C = d_model, V = vocab_size. T includes padding after the position
of the target, which does not affect any result.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from logitd.model.device import for_autograd, one_thread
from logitd.model.transformer.attention import Attend, visible_keys
from logitd.model.transformer.gate import smear
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.tap import UNTAPPED, Tap

Watch = Callable[[int], AbstractContextManager[None]]
"""For a number of rows, returns the context in which a block computes that many rows. The context
may limit torch to one thread if `threads_keep_bits` is true for this number."""

AnyTap = TypeVar("AnyTap", bound=Tap)
Result = TypeVar("Result")

HEAD_ROWS = 4096
"""Number of rows of the head that are multiplied at a time, to avoid a float32 copy of the whole
head."""


class Pieces(Generic[Result]):
    """A computation in pieces: a generator that ends with the result. Each piece runs in the
    context that `around` creates."""

    def __init__(
        self,
        pieces: Generator[None, None, Result],
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._pieces, self._around = pieces, around

    def advance(self) -> Result | None:
        """Compute one piece. Returns the result after the last piece, and None before that."""
        # The engine computes in inference mode, but autograd rejects its tensors.
        with self._around(), torch.inference_mode(False), torch.no_grad():
            try:
                next(self._pieces)
            except StopIteration as end:
                result: Result = end.value
                return result
        return None

    def result(self) -> Result:
        """Compute all pieces that are left."""
        while (result := self.advance()) is None:
            pass
        return result


class TextPasses:
    """Forward and backward passes of one text through a model. The target is a logit at position
    `row`. The caller turns inference mode and autograd off; the methods that need gradients turn
    autograd on."""

    def __init__(
        self, gpt: GPT, token_ids: Sequence[int], row: int, watched: Watch | None = None
    ) -> None:
        weight = gpt.token_embedding.weight
        self._gpt = gpt
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        self.row = row
        self._ids = torch.tensor([token_ids], device=weight.device)  # (1, T)
        self.watched: Watch = watched or (lambda rows: nullcontext())
        self.rotation: tuple[Tensor, Tensor] | None = None
        if gpt.config.positions == "rotary":
            tables = gpt.rope_cos, gpt.rope_sin
            cos, sin = (for_autograd(table[: len(token_ids)], self.dtype) for table in tables)
            self.rotation = cos[None, None], sin[None, None]  # (1, 1, T, D / 2)

    def embedding(self, baseline: int | None = None) -> Tensor:
        """The stream (1, T, C) that enters the first block. With `baseline`, every position has
        this token instead of the token of the text."""
        gpt, length = self._gpt, self._ids.shape[1]
        ids = self._ids if baseline is None else torch.full_like(self._ids, baseline)
        x = for_autograd(gpt.token_embedding.weight[ids], self.dtype)
        if gpt.config.embedding_norm:
            x = self.normed(gpt.embedding_norm, x)
        if gpt.config.smear:
            before, positions = F.pad(x[:, :-1], (0, 0, 1, 0)), torch.arange(length)[None]
            x = smear(x, before, positions.to(x.device), gpt.smear_gate.weight, gpt.smear_scale)
        if gpt.config.positions == "learned":
            x = x + for_autograd(gpt.position_embedding.weight[:length], self.dtype)
        elif gpt.config.positions == "sinusoidal":
            x = x + for_autograd(gpt.sinusoids[:length], self.dtype)
        return x

    def block_input(self, layer: int, x: Tensor, embedding: Tensor) -> Tensor:
        """The input (1, T, C) of a block, from the stream `x` before it."""
        if not self._gpt.config.residual_mix:
            return x
        of_stream, of_embedding = mixture(self._gpt, layer)
        return of_stream * x + of_embedding * embedding

    def all_blocks(
        self,
        x: Tensor,
        tap_of: Callable[[int], AnyTap],
        computed: Callable[[int, Tensor, AnyTap], None] = lambda layer, x, tap: None,
    ) -> Generator[None, None, Tensor]:
        """Run `x` (1, T, C), the stream that enters the first block, through all blocks, one per
        piece, each with the tap `tap_of(layer)`. Returns the last stream, after `backout`. Calls
        `computed` after each block with the layer, the block's input and its tap."""
        gpt, embedding, middle = self._gpt, x, x
        for layer in range(gpt.config.n_layer):
            before, tap = self.block_input(layer, x, embedding), tap_of(layer)
            x = self.forward(layer, before, tap)
            computed(layer, before, tap)
            del before, tap
            if layer == gpt.config.backout_layer:
                middle = x
            yield
        return x - backout(gpt) * middle if gpt.config.backout else x

    def forward(self, layer: int, x: Tensor, tap: Tap = UNTAPPED) -> Tensor:
        """The stream (1, T, C) after a block. Autograd is on, so that torch runs the same
        operations as in `backward`."""
        with self.watched(x.shape[1]), torch.enable_grad():
            return self.block(layer, x.detach().requires_grad_(), tap).detach()

    def backward(self, layer: int, x: Tensor, gradient: Tensor) -> Tensor:
        """The gradient (1, T, C) with respect to a block's input `x`; `gradient` is with respect to
        its output."""
        with self.watched(x.shape[1]), torch.enable_grad():
            x = x.detach().requires_grad_()
            (result,) = torch.autograd.grad(self.block(layer, x, UNTAPPED), x, gradient)
        return result

    def likeliest(self, x: Tensor, without: int | None = None) -> int:
        """The id with the largest logit at `row`, ignoring the id `without`, computed from the last
        stream (1, T, C). The lowest id wins a tie."""
        config = self._gpt.config
        weight, bias = self._gpt.head_parameters()
        row = self.normed(self._gpt.final_norm, x[0, self.row])
        logits = torch.cat(
            [
                row @ for_autograd(rows, self.dtype).T
                for rows in weight[: config.vocab_size].split(HEAD_ROWS)
            ]
        )
        if bias is not None:
            logits = logits + for_autograd(bias[: config.vocab_size], self.dtype)
        if not logits.isfinite().all():
            return 0
        if without is not None:
            logits[without] = -torch.inf
        return int((logits == logits.max()).nonzero()[0])

    def logit(self, x: Tensor, token_id: int) -> float:
        """A token's logit at `row`, computed in float64 from the last stream (1, T, C)."""
        _, bias = self._gpt.head_parameters()
        row = self.normed(self._gpt.final_norm, x[0, self.row])
        logit = row.double() @ self.direction(token_id, None).double()
        return (logit if bias is None else logit + bias[token_id]).item()

    def direction(self, token_id: int, minus_id: int | None) -> Tensor:
        """The vector (C,) whose product with the final hidden state is the target: a row of the
        head, or the difference of two rows."""
        weight, _ = self._gpt.head_parameters()
        row = for_autograd(weight[token_id], self.dtype)
        return row if minus_id is None else row - for_autograd(weight[minus_id], self.dtype)

    def head_gradient(self, x: Tensor, direction: Tensor) -> Tensor:
        """The gradient (1, T, C) of the target with respect to the last stream (1, T, C)."""
        with torch.enable_grad():
            last = x[0, self.row].detach().requires_grad_()
            (row,) = torch.autograd.grad(self.normed(self._gpt.final_norm, last) @ direction, last)
        gradient = torch.zeros_like(x)
        gradient[0, self.row] = row
        return gradient

    def block(self, layer: int, x: Tensor, tap: Tap, attend: Attend | None = None) -> Tensor:
        """The stream (1, T, C) after a block. The caller turns autograd on or off. `attend`
        computes the attention (None: `fused_attend`)."""
        block = self._gpt.blocks[layer]
        arguments = (x, self._ids, self.rotation, attend or fused_attend, tap)
        result: Tensor = functional_call(block, wide_parameters(block, self.dtype), arguments)
        return result

    def normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        """A stream (..., C) after a norm, or the same stream if the norm is the identity."""
        result: Tensor = functional_call(norm, wide_parameters(norm, self.dtype), (x,))
        return result


def threads_keep_bits(gpt: GPT, rows: int) -> bool:
    """True if a forward and backward pass of one block over this number of rows produces the same
    bits on one thread as on all of torch's threads."""
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


def mixture(gpt: GPT, layer: int) -> tuple[float, float]:
    """The block's input is a weighted sum of two vectors: the stream before the block, and the
    embedding. Returns their weights, in this order."""
    if not gpt.config.residual_mix:
        return 1.0, 0.0
    return gpt.residual_scales[layer].item(), gpt.embedding_scales[layer].item()


def backout(gpt: GPT) -> float:
    """The factor by which the middle block's output is multiplied before it is subtracted from the
    last stream."""
    return gpt.backout_scale.item() if gpt.config.backout else 0.0


def wide_parameters(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters of a module, converted to a dtype; not copied if they already have it."""
    return {name: for_autograd(value, dtype) for name, value in module.named_parameters()}


def per_token(vectors: Tensor, gradient: Tensor) -> Tensor:
    """The inner product (T,) of each token's vector and gradient, from two tensors (1, T, C),
    summed in float64."""
    return (vectors.double() * gradient.double()).sum(dim=-1)[0]


def fused_attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Causal attention within the text (1, H, T, D). On a GPU, this uses the only kernel whose
    backward pass sums in a fixed order, although that kernel keeps all attention weights of the
    block in memory."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # (1, H, T, D)
    length = q.shape[2]
    mask = None if window is None else visible_keys(length, length, q.device, window)
    with nullcontext() if q.is_cpu else sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
