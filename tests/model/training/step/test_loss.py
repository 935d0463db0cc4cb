"""The piecewise loss compared with its twin: F.cross_entropy of whole logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from logitd.model.training.step import loss as loss_module
from logitd.model.training.step.loss import cross_entropy
from tests.profiles import examples


def _both(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    vocab_size: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> list[tuple[Tensor, ...]]:
    """Loss and gradients with respect to the hidden states, the head and its bias: ours, then the
    twin's."""
    mine = cross_entropy(
        hidden, head, targets, bias=bias, vocab_size=vocab_size, softcap=softcap, dtype=dtype
    )
    added = None if bias is None else bias.to(dtype)
    logits = F.linear(hidden.to(dtype), head.to(dtype), added)[..., :vocab_size].float()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    theirs = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    inputs = (hidden, head, *(() if bias is None else (bias,)))
    # Divided, as by a step of several batches.
    return [(loss, *torch.autograd.grad(loss / 3, inputs)) for loss in (mine, theirs)]


def _bias(rows: int) -> Tensor:
    return torch.randn(rows, generator=torch.Generator().manual_seed(rows)).requires_grad_()


def _inputs(
    batch: int, length: int, width: int, rows: int, vocab_size: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch * length + rows)
    hidden = torch.randn(batch, length, width, generator=generator).requires_grad_()
    head = (scale * torch.randn(rows, width, generator=generator)).requires_grad_()
    return hidden, head, torch.randint(vocab_size, (batch, length), generator=generator)


@settings(max_examples=examples(25))
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 20),
    width=st.sampled_from([1, 8, 33]),
    vocab_size=st.integers(1, 70),
    padding=st.integers(0, 5),
    scale=st.sampled_from([0.02, 1.0, 5.0]),
    rows=st.integers(1, 70),
    biased=st.booleans(),
    softcap=st.sampled_from([None, 0.5, 15.0]),
)
def test_loss_is_cross_entropy_for_any_chunks(
    batch: int,
    length: int,
    width: int,
    vocab_size: int,
    padding: int,
    scale: float,
    rows: int,
    biased: bool,
    softcap: float | None,
) -> None:
    hidden, head, targets = _inputs(batch, length, width, vocab_size + padding, vocab_size, scale)
    bias = _bias(len(head)) if biased else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "MIN_ROWS", rows)
        patch.setattr(loss_module, "CHUNK_LOGITS", {"cpu": 1})
        mine, theirs = _both(hidden, head, targets, vocab_size, torch.float32, bias, softcap)
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-4)
    assert len(mine) == 3 + biased
    for gradient in mine[2:]:
        assert not gradient[vocab_size:].any()


@pytest.mark.parametrize("biased", [False, True])
def test_loss_in_bfloat16_rounds_as_the_plain_one(biased: bool) -> None:
    hidden, head, targets = _inputs(4, 300, 64, 320, 300, 0.2)
    bias = _bias(len(head)) if biased else None
    mine, theirs = _both(hidden, head, targets, 300, torch.bfloat16, bias)
    torch.testing.assert_close(mine[0], theirs[0], atol=1e-6, rtol=1e-6)
    for own, other in zip(mine[1:], theirs[1:], strict=True):
        assert own.dtype == torch.float32
        assert float((own - other).norm() / other.norm()) < 0.01


def test_no_float32_logits_of_a_whole_batch_are_held() -> None:
    """In float32, the logits of 2,048 positions over a vocabulary of 8,192 take 64 MB; a piece
    takes 16 MB."""
    hidden, head, targets = _inputs(8, 256, 8, 8192, 8192, 1.0)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():  # type: ignore[no-untyped-call]
        cross_entropy(hidden, head, targets, vocab_size=8192, dtype=torch.float32).backward()
    assert largest == 512 * 8192
