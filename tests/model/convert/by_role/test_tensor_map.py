"""TensorMap: the tensors of a role have the same values in every form, and `check` refuses tensors
that do not fit."""

import pytest
import torch

from logitd.model.convert.by_role.recognize import recognize
from logitd.model.convert.by_role.tensor_map import MappedTensors, TensorMap, check
from logitd.model.convert.foreign import ConvertError
from tests.model.convert.by_role.scheme import state
from tests.model.convert.by_role.schemes import SCHEMES


def test_tensors_of_a_role_are_equal_in_every_form() -> None:
    """The same rows are read from separate heads, from heads as an axis, and from a matrix (in,
    out)."""
    torch.manual_seed(0)
    rows = torch.randn(2 * 3, 8)  # 2 heads of 3 channels
    names = {("query", "weight"): "q.{M}"}
    apart = {"q.0": rows[:3], "q.1": rows[3:]}
    as_map = TensorMap(n_layer=1, n_head=2, names=names)  # type: ignore[arg-type]
    assert torch.equal(MappedTensors("x", apart, as_map).take("query"), rows)
    axis = {"q": rows.unflatten(0, (2, 3)).mT}  # (H, C, D)
    as_map = TensorMap(n_layer=1, names={("query", "weight"): "q"}, transposed=frozenset({"query"}))
    assert torch.equal(MappedTensors("x", axis, as_map).take("query"), rows)
    assert torch.equal(MappedTensors("x", {"q": rows.T}, as_map).take("query"), rows)


def test_layers_that_differ_in_shape_are_refused() -> None:
    scheme = SCHEMES["book"]
    tensors = state(scheme.model())
    tensors["trf_blocks.1.ff.layers.0.weight"] = torch.ones(40, 32)
    with pytest.raises(ConvertError, match=r"layers\.0\.weight"):
        check("model.pt", tensors, recognize("model.pt", tensors))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_infinite_values_are_named(value: float) -> None:
    tensors = state(SCHEMES["nanoGPT"].model())
    tensors["transformer.h.1.mlp.c_fc.bias"][3] = value
    with pytest.raises(ConvertError, match=r"h\.1\.mlp\.c_fc\.bias has NaN or infinite values"):
        check("model.pt", tensors, recognize("model.pt", tensors))


def test_quantized_weights_are_refused() -> None:
    tensors = state(SCHEMES["nanoGPT"].model())
    name = "transformer.h.0.mlp.c_fc.weight"
    tensors |= {name.replace("0", n): torch.ones(128, 32, dtype=torch.int8) for n in "01"}
    with pytest.raises(ConvertError, match=r"is int8; only weights in .* can be imported"):
        check("model.pt", tensors, recognize("model.pt", tensors))
