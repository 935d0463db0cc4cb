"""Names of the floating-point formats that weights and arithmetic can have. Without torch."""

from typing import Literal

FloatName = Literal["float32", "bfloat16", "float16"]
DTypeName = Literal["auto", FloatName]
