"""Activations by the names that Hugging Face's configurations have for them.

Covers those of GPT-2's, GPT-NeoX's and OPT's feed-forwards; Llama's gate is SiLU without a choice.
"""

from collections.abc import Mapping

from logitd.model.convert.foreign import Settings
from logitd.model.transformer.config import Activation

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}


def read_activation(settings: Settings, key: str, default: str) -> Activation:
    """The activation under a key. Raises ConvertError."""
    name = settings.get(key, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        settings.reject_unless(key, (), f"known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def activation_name(activation: Activation) -> str:
    """Its first name there."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == activation)
