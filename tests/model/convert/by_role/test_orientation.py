"""Orientation: if names do not tell the up matrix from the down matrix, their shapes do."""

import torch

from logitd.model.convert.by_role.recognize import recognize

ROWS, WIDTH, HIDDEN = 50, 32, 64


def test_swapped_up_and_down_are_exchanged() -> None:
    """Attention matrices are (out, in), so the feed-forward matrix of shape (width, hidden) is the
    down matrix."""
    layer = {
        "attn.qkv.weight": (3 * WIDTH, WIDTH),
        "attn.proj.weight": (WIDTH, WIDTH),
        "mlp.alpha_matrix.weight": (WIDTH, HIDDEN),
        "mlp.alpha_matrix.bias": (WIDTH,),
        "mlp.beta_matrix.weight": (HIDDEN, WIDTH),
        "ln1.weight": (WIDTH,),
        "ln2.weight": (WIDTH,),
    }
    tensors = {"wte.weight": torch.ones(ROWS, WIDTH)}
    tensors |= {
        f"h.{n}.{name}": torch.ones(shape) for n in range(2) for name, shape in layer.items()
    }
    mapped = recognize("model.pt", tensors)
    assert mapped.names["mlp_up", "weight"] == "h.{N}.mlp.beta_matrix.weight"
    assert mapped.names["mlp_down", "weight"] == "h.{N}.mlp.alpha_matrix.weight"
    assert mapped.names["mlp_down", "bias"] == "h.{N}.mlp.alpha_matrix.bias"
    assert ("mlp_up", "bias") not in mapped.names
    assert mapped.transposed == frozenset()
