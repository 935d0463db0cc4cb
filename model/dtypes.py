"""Names of the floating-point formats of weights and arithmetic. Does not import torch."""

from typing import Literal

FloatName = Literal["float32", "bfloat16", "float16"]
DTypeName = Literal["auto", FloatName]
