"""Unusual names: the role of a tensor follows from its place in the model and its shape."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from logitd.model.convert.by_role.computation import Computation
from logitd.model.convert.by_role.left_out import require_roles
from logitd.model.convert.by_role.recognize import recognize
from logitd.model.convert.by_role.tensor_map import MappedTensors, Part, Role, check
from logitd.model.convert.foreign import ConvertError
from tests.model.convert.by_role.scheme import USUAL

ROWS, LENGTH, WIDTH = 50, 16, 32


def block(names: Mapping[str, tuple[int, ...]], prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": torch.rand(shape) for name, shape in names.items()}


def roles(tensors: Mapping[str, Tensor]) -> Mapping[tuple[Role, Part], str]:
    mapped = recognize("file.pt", tensors)
    check("file.pt", tensors, mapped)
    return mapped.names


BLOCK: Mapping[str, tuple[int, ...]] = {
    **{f"{name}.weight": (WIDTH, WIDTH) for name in ("sa.q", "sa.k", "sa.v", "sa.proj")},
    "mlp.0.weight": (64, WIDTH),
    "mlp.2.weight": (WIDTH, 64),
    "ln1.weight": (WIDTH,),
    "ln2.weight": (WIDTH,),
}


def test_blocks_without_a_word_for_attention() -> None:
    """Each block is a list of two lists; the one with the projections is attention."""
    names = {
        "1.net.0.weight": (WIDTH,),
        "1.net.0.bias": (WIDTH,),
        "1.net.1.weight": (64, WIDTH),
        "1.net.4.weight": (WIDTH, 64),
        "0.norm.weight": (WIDTH,),
        "0.norm.bias": (WIDTH,),
        "0.to_qkv.weight": (3 * WIDTH, WIDTH),
        "0.to_out.0.weight": (WIDTH, WIDTH),
    }
    names_by_role = roles(
        {
            "token_emb.weight": torch.rand(ROWS, WIDTH),
            "pos_emb.weight": torch.rand(LENGTH, WIDTH),
            **block(names, "layers.0."),
            **block(names, "layers.1."),
            "to_logits.weight": torch.rand(ROWS, WIDTH),
        }
    )
    assert names_by_role["attention_out", "weight"] == "layers.{N}.0.to_out.0.weight"
    assert names_by_role["attention_norm", "weight"] == "layers.{N}.0.norm.weight"
    assert names_by_role["mlp_norm", "weight"] == "layers.{N}.1.net.0.weight"
    assert names_by_role["mlp_down", "weight"] == "layers.{N}.1.net.4.weight"


def test_vector_before_a_matrix_in_a_sequential_is_a_norm() -> None:
    """`nn.Sequential(nn.RMSNorm(), nn.Linear(), ...)` names neither; a vector behind the matrices
    may scale the output."""
    names = {
        "0.norm.weight": (WIDTH,),
        **{f"0.{name}.weight": (WIDTH, WIDTH) for name in ("to_q", "to_k", "to_v", "to_out")},
        "1.0.weight": (WIDTH,),
        "1.1.weight": (64, WIDTH),
        "1.3.weight": (WIDTH, 64),
    }
    table = {"token_emb.weight": torch.rand(ROWS, WIDTH)}
    tensors = table | block(names, "layers.0.") | block(names, "layers.1.")
    assert roles(tensors)["mlp_norm", "weight"] == "layers.{N}.1.0.weight"
    moved = {name.replace("1.0.", "1.4."): shape for name, shape in names.items()}
    behind = table | block(moved, "layers.0.") | block(moved, "layers.1.")
    with pytest.raises(ConvertError, match=r"without a known role .* layers\.0\.1\.4\.weight"):
        roles(behind)


def test_final_norm_may_end_the_list_of_blocks() -> None:
    """One lecture has `nn.Sequential(Block(), Block(), nn.LayerNorm())`."""
    tensors = {
        "table.weight": torch.rand(ROWS, WIDTH),
        **block(BLOCK, "blocks.0."),
        **block(BLOCK, "blocks.1."),
        "blocks.2.weight": torch.rand(WIDTH),
        "blocks.2.bias": torch.rand(WIDTH),
    }
    mapped = recognize("file.pt", tensors)
    assert mapped.n_layer == 2
    assert mapped.names["final_norm", "weight"] == "blocks.2.weight"
    assert mapped.names["token_embedding", "weight"] == "table.weight"


def test_final_norm_may_be_named_before_the_head() -> None:
    tensors = {
        "letters.weight": torch.rand(ROWS, WIDTH),
        **block(BLOCK, "layers.0."),
        **block(BLOCK, "layers.1."),
        "pre_head_norm.weight": torch.rand(WIDTH),
    }
    assert roles(tensors)["final_norm", "weight"] == "pre_head_norm.weight"


def test_tables_without_a_telling_name() -> None:
    """The table with the same shape as the head holds token embeddings; the other table holds
    position embeddings."""
    names_by_role = roles(
        {
            "places.weight": torch.rand(LENGTH, WIDTH),
            "letters.weight": torch.rand(ROWS, WIDTH),
            **block(BLOCK, "layers.0."),
            **block(BLOCK, "layers.1."),
            "out.weight": torch.rand(ROWS, WIDTH),
        }
    )
    assert names_by_role["token_embedding", "weight"] == "letters.weight"
    assert names_by_role["positions", "weight"] == "places.weight"
    assert names_by_role["head", "weight"] == "out.weight"


def test_vector_next_to_a_bias_is_its_weight() -> None:
    """The norms have `gain` and `shift`, or a word of their own and `bias`."""
    names = {name: shape for name, shape in BLOCK.items() if not name.startswith("ln")}
    norms = {"pre.gain": (WIDTH,), "pre.shift": (WIDTH,), "post.a": (WIDTH,), "post.bias": (WIDTH,)}
    tensors = block({**names, **norms}, "stack.0.") | {
        "embed.weight": torch.rand(ROWS, WIDTH),
        "last.stretch": torch.rand(WIDTH),
        "last.bias": torch.rand(WIDTH),
    }
    found = roles(tensors)
    assert found["attention_norm", "weight"] == "stack.{N}.pre.gain"
    assert found["attention_norm", "bias"] == "stack.{N}.pre.shift"
    assert found["mlp_norm", "weight"] == "stack.{N}.post.a"
    assert found["mlp_norm", "bias"] == "stack.{N}.post.bias"
    assert found["final_norm", "weight"] == "last.stretch"
    assert found["final_norm", "bias"] == "last.bias"


@pytest.mark.parametrize("name", ["bigrams.weight", "decoder.bigrams.weight", "wte2.weight"])
def test_second_table_of_the_vocabulary_is_no_head(name: str) -> None:
    """It was taken for the head of a model with a tied head."""
    home = "decoder." if name.startswith("decoder.") else ""
    tensors = {
        f"{home}wte.weight": torch.rand(ROWS, WIDTH),
        name: torch.rand(ROWS, WIDTH),
        **block(BLOCK, f"{home}h.0."),
        **block(BLOCK, f"{home}h.1."),
    }
    with pytest.raises(ConvertError, match=f"without a known role in a GPT: {name}"):
        roles(tensors)


@pytest.mark.parametrize(
    ("embedding", "head"),
    [("decoder.letters", "decoder_head"), ("vocab_emb", "lin_out"), ("decoder.embed", "lin_out")],
)
def test_embedding_and_head_are_not_exchanged(embedding: str, head: str) -> None:
    """`decoder` and `vocab_emb` are also names of heads."""
    home = embedding.partition(".")[0] + "." if "." in embedding else ""
    found = roles(
        {
            f"{head}.weight": torch.rand(ROWS, WIDTH),
            f"{embedding}.weight": torch.rand(ROWS, WIDTH),
            **block(BLOCK, f"{home}stack.0."),
            **block(BLOCK, f"{home}stack.1."),
        }
    )
    assert found["token_embedding", "weight"] == f"{embedding}.weight"
    assert found["head", "weight"] == f"{head}.weight"


@pytest.mark.parametrize(
    ("name", "shape", "how", "field"),
    [
        ("registers", (4, WIDTH), {"positions": "rotary"}, "positions is rotary"),
        ("wpe.weight", (64, WIDTH), {"positions": "rotary"}, "positions is rotary"),
        ("ln0.weight", (WIDTH,), {"final_norm": False}, "final_norm is false"),
    ],
)
def test_recognized_tensor_is_not_dropped(
    name: str, shape: tuple[int, ...], how: Mapping[str, Any], field: str
) -> None:
    """Four registers became a table of positions; a model with rotary positions then left them
    out, and kept a context of 4 positions. A model that adds a table and also rotates lost the
    table."""
    tensors = {
        "wte.weight": torch.rand(ROWS, WIDTH),
        name: torch.rand(shape),
        **block(BLOCK, "h.0."),
        **block(BLOCK, "h.1."),
    }
    mapped = MappedTensors("file.pt", tensors, recognize("file.pt", tensors))
    with pytest.raises(ConvertError, match=f"{field}, but then {name} has no role. .*--map"):
        require_roles(mapped, Computation(**{**USUAL, **how}))


@pytest.mark.parametrize(
    ("names", "width", "how"),
    [
        (("norm",), WIDTH, {"final_norm": False, "norm_position": "post"}),
        (("h.0.sa.q_norm", "h.0.sa.k_norm", "h.1.sa.q_norm", "h.1.sa.k_norm"), 8,
         {"qk_norm": "none"}),
        (("h.0.sa.q_norm", "h.0.sa.k_norm", "h.1.sa.q_norm", "h.1.sa.k_norm"), 8,
         {"qk_norm": "unit"}),
    ],
    ids=["final_norm", "qk_norm", "unit"],
)  # fmt: skip
def test_trained_norm_is_not_dropped(
    names: tuple[str, ...], width: int, how: Mapping[str, Any]
) -> None:
    """A norm behind the embedding was taken for an unused norm behind the layers, and LayerNorms of
    queries and keys were left out by --qk-norm none."""
    tensors = {
        "wte.weight": torch.rand(ROWS, WIDTH),
        **block(BLOCK, "h.0."),
        **block(BLOCK, "h.1."),
        **{f"{name}.weight": torch.ones(width) for name in names},
        **{f"{name}.bias": torch.zeros(width) for name in names},
    }
    mapped = MappedTensors("file.pt", tensors, recognize("file.pt", tensors))
    computation = Computation(**{**USUAL, **how})
    require_roles(mapped, computation)
    tensors[f"{names[-1]}.bias"][1] = 0.01
    with pytest.raises(ConvertError, match=r"norm.*, which a training has changed, has no role"):
        require_roles(mapped, computation)
