"""The connection to the process of an owner's code, as far as it needs no code."""

import pytest
import torch

from logitd.model.owner_code.connection import CodeError, compare
from logitd.model.owner_code.process.build import Request
from tests.model.full_disk import files_of_at_most


def test_full_temporary_folder_is_named() -> None:
    weights = {"w": torch.zeros(1000)}
    with (
        files_of_at_most(1000),
        pytest.raises(CodeError, match=r"weights cannot be written to .*logitd-code-.*TMPDIR"),
    ):
        compare("model.py:Model", Request("model.py", "Model"), weights, rows=10, length=4)
