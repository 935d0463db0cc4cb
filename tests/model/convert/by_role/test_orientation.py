"""Orientation: if names do not tell the up matrix from the down matrix, their shapes do."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from logitd.model.convert.by_role.map_file import MapFile, recognize_with
from logitd.model.convert.by_role.recognize import recognize
from logitd.model.convert.by_role.tensor_map import Role, check
from logitd.model.convert.foreign import ConvertError

ROWS, WIDTH, HIDDEN = 50, 32, 64


def model_of(layer: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    tensors = {"wte.weight": torch.ones(ROWS, WIDTH)}
    return tensors | {
        f"h.{n}.{name}": torch.ones(shape) for n in range(2) for name, shape in layer.items()
    }


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
    mapped = recognize("model.pt", model_of(layer))
    assert mapped.names["mlp_up", "weight"] == "h.{N}.mlp.beta_matrix.weight"
    assert mapped.names["mlp_down", "weight"] == "h.{N}.mlp.alpha_matrix.weight"
    assert mapped.names["mlp_down", "bias"] == "h.{N}.mlp.alpha_matrix.bias"
    assert ("mlp_up", "bias") not in mapped.names
    assert mapped.transposed == frozenset()


ATTENTION = ("W_q", "W_k", "W_v", "W_o")
SQUARES: frozenset[Role] = frozenset(("query", "key", "value", "attention_out"))
NORMS = {"ln1.weight": (WIDTH,), "ln2.weight": (WIDTH,)}


def attention(end: str) -> dict[str, tuple[int, ...]]:
    return {f"attn.{name}{end}": (WIDTH, WIDTH) for name in ATTENTION}


def feed_forward(end: str, *, transposed: bool) -> dict[str, tuple[int, ...]]:
    up, down = (HIDDEN, WIDTH), (WIDTH, HIDDEN)
    shapes = (down, up) if transposed else (up, down)
    return {f"mlp.{name}{end}": shape for name, shape in zip(("w1", "w2"), shapes, strict=True)}


@pytest.mark.parametrize(
    ("attention_end", "end", "in_out", "squares"),
    [
        (".weight", ".weight", False, False),
        (".weight", ".weight", True, True),
        ("", "", True, True),
        ("", "", False, False),
        (".weight", "", True, False),
    ],
)
def test_square_matrices_are_stored_like_others_of_their_kind(
    attention_end: str, end: str, in_out: bool, squares: bool
) -> None:
    layer = attention(attention_end) | feed_forward(end, transposed=in_out) | NORMS
    mapped = recognize("model.pt", model_of(layer))
    assert mapped.unclear == frozenset()
    assert (mapped.transposed >= SQUARES) is squares


@pytest.mark.parametrize(
    "layer",
    [
        attention("") | feed_forward(".weight", transposed=False) | NORMS,
        attention("") | {"mlp.w1": (WIDTH, WIDTH), "mlp.w2": (WIDTH, WIDTH)} | NORMS,
        {"attn.c_attn.weight": (WIDTH, 3 * WIDTH), "attn.c_proj.weight": (WIDTH, WIDTH)}
        | feed_forward(".weight", transposed=False)
        | NORMS,
    ],
)
def test_unclear_square_matrices_are_a_question(layer: Mapping[str, tuple[int, ...]]) -> None:
    """They were read as (out, in) without a word."""
    tensors = model_of(layer)
    with pytest.raises(ConvertError, match=r"square matrix .* --map file: transposed = \["):
        check("model.pt", tensors, recognize("model.pt", tensors))
    for given in (frozenset[Role](), frozenset[Role](("attention_out",))):
        stated = recognize_with(MapFile(Path("m.toml"), transposed=given), "model.pt", tensors)
        assert ("attention_out" in stated.transposed) is bool(given)
        check("model.pt", tensors, stated)


def test_square_head_and_single_wide_head_are_a_question() -> None:
    """A bare `W_U` may be (width, vocabulary); one head as wide as the stream may be (in, out)."""
    usual = {"ln1.weight": (WIDTH,), "ln2.weight": (WIDTH,)}
    layer = usual | feed_forward(".weight", transposed=False)
    for end in ("", ".weight"):
        single = {f"attn.{name}{end}": (1, WIDTH, WIDTH) for name in ("W_Q", "W_K", "W_V", "W_O")}
        mapped = recognize("model.pt", model_of(layer | single))
        assert mapped.unclear == {"query", "key", "value"}
    tensors = model_of(layer | attention(".weight"))
    tensors["wte.weight"], tensors["W_U"] = torch.rand(2, WIDTH, WIDTH)
    assert recognize("model.pt", tensors).unclear == {"head"}


@pytest.mark.parametrize("named", [True, False])
def test_names_decide_which_matrix_is_up(named: bool) -> None:
    """The feed-forward is stored (in, out), and attention (out, in). The two matrices were taken
    for each other; unless a name shows which is up, they are."""
    names = ("W1", "W2") if named else ("matrix_x", "matrix_y")
    layer = {
        "attn.qkv.weight": (3 * WIDTH, WIDTH),
        "attn.proj.weight": (WIDTH, WIDTH),
        f"mlp.{names[0]}": (WIDTH, HIDDEN),
        f"mlp.{names[1]}": (HIDDEN, WIDTH),
    } | NORMS
    mapped = recognize("model.pt", model_of(layer))
    assert mapped.name("mlp_up") == f"h.{{N}}.mlp.{names[0 if named else 1]}"
    assert ("mlp_up" in mapped.transposed) is named


def test_square_feed_forward_without_names_is_refused() -> None:
    """The order in the file decided."""
    square = {"mlp.alpha.weight": (WIDTH, WIDTH), "mlp.beta.weight": (WIDTH, WIDTH)}
    layer = attention(".weight") | square | NORMS
    with pytest.raises(ConvertError, match=r"found h\.\{N\}\.mlp\.alpha.* Name the matrices"):
        recognize("model.pt", model_of(layer))


def test_norms_without_a_place_are_refused() -> None:
    """The order in the file decided."""
    layer = attention(".weight") | feed_forward(".weight", transposed=False)
    tensors = model_of(layer | {"norm_x.weight": (WIDTH,), "norm_y.weight": (WIDTH,)})
    with pytest.raises(ConvertError, match=r"without a known role in a GPT: h\.0\.norm_x"):
        check("model.pt", tensors, recognize("model.pt", tensors))


def test_up_and_down_without_words_next_to_squares_are_a_question() -> None:
    """The first one was up, stored (in, out), and so were the square matrices of attention."""
    down_first = {"mlp.x.weight": (WIDTH, HIDDEN), "mlp.y.weight": (HIDDEN, WIDTH)}
    mapped = recognize("model.pt", model_of(attention(".weight") | down_first | NORMS))
    assert mapped.unclear == {"mlp_up", "mlp_down"}


def test_tensors_of_heads_do_not_show_how_matrices_are_stored() -> None:
    """Query, key and value (heads, width, channels) made the output matrix (in, out)."""
    heads = {f"attn.{name}.weight": (4, WIDTH, WIDTH // 4) for name in ("q", "k", "v")}
    layer = heads | {"attn.out.weight": (WIDTH, WIDTH)} | NORMS
    mapped = recognize("model.pt", model_of(layer | feed_forward("", transposed=False)))
    assert mapped.transposed == {"query", "key", "value"}


@pytest.mark.parametrize("shape", [(WIDTH, 4, WIDTH // 4), (WIDTH, 1, WIDTH)])
def test_three_axes_that_begin_with_the_width_are_refused(shape: tuple[int, ...]) -> None:
    """Their first axis was the number of heads: the import failed, or computed something else."""
    heads = {f"attn.{name}.weight": shape for name in ("q", "k", "v")}
    layer = heads | {"attn.out.weight": (WIDTH, WIDTH)} | NORMS
    tensors = model_of(layer | feed_forward(".weight", transposed=False))
    with pytest.raises(ConvertError, match=r"q\.weight has shape \[32, .* matrix \(rows, 32\)"):
        check("model.pt", tensors, recognize("model.pt", tensors))


def test_fused_tensor_with_three_axes_is_refused() -> None:
    """Its first axis was the number of heads."""
    layer = {"attn.qkv.weight": (3, WIDTH, WIDTH), "attn.proj.weight": (WIDTH, WIDTH)} | NORMS
    tensors = model_of(layer | feed_forward(".weight", transposed=False))
    with pytest.raises(ConvertError, match=r"qkv\.weight has shape \[3, 32, 32\]"):
        check("model.pt", tensors, recognize("model.pt", tensors))


def test_gated_feed_forward_is_known_by_its_odd_shape_or_names() -> None:
    """Up and down were exchanged; in a square one, the third matrix was up."""
    shapes = {"wg": (WIDTH, HIDDEN), "wu": (WIDTH, HIDDEN), "wd": (HIDDEN, WIDTH)}
    gated = {f"mlp.{name}.weight": shape for name, shape in shapes.items()}
    layer: dict[str, tuple[int, ...]] = {
        "attn.qkv.weight": (3 * WIDTH, WIDTH),
        "attn.proj.weight": (WIDTH, WIDTH),
        **NORMS,
    }
    assert recognize("model.pt", model_of(layer | gated)).name("mlp_down").endswith("wd.weight")
    square = {f"mlp.{name}.weight": (WIDTH, WIDTH) for name in ("w1", "w2", "w3")}
    with pytest.raises(ConvertError, match=r"found h\.\{N\}\.mlp\.w1.* Name the matrices"):
        recognize("model.pt", model_of(layer | square))


@pytest.mark.parametrize("norm", ["ln_mlp", "attn.norm", "norm2"])
def test_norm_of_one_sublayer_does_not_serve_both(norm: str) -> None:
    """Attention had a norm that the source does not have."""
    layer = attention(".weight") | feed_forward(".weight", transposed=False)
    tensors = model_of(layer | {f"{norm}.weight": (WIDTH,)})
    with pytest.raises(ConvertError, match=rf"without a known role in a GPT: h\.0\.{norm}"):
        check("model.pt", tensors, recognize("model.pt", tensors))


def test_table_of_another_width_is_no_table_of_positions() -> None:
    """One bias per distance and head has the name of positions. It ended the import."""
    layer = attention(".weight") | feed_forward(".weight", transposed=False) | NORMS
    tensors = model_of(layer) | {"pos_bias.weight": torch.ones(WIDTH, 4)}
    with pytest.raises(ConvertError, match=r"without a known role in a GPT: pos_bias\.weight"):
        check("model.pt", tensors, recognize("model.pt", tensors))
