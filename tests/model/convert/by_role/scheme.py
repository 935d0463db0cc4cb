"""A textbook model as a file: its computation, the roles of its tensors, and helpers for tests.

The helpers return the tensor names by role, the logits of the textbook model, and the logits of the
GPT that is built from its tensors. The models are in `schemes.py`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from logitd.model.convert.by_role.build import Built, build
from logitd.model.convert.by_role.computation import Computation
from logitd.model.convert.by_role.finding import Finding
from logitd.model.convert.by_role.objective import open_gpt
from logitd.model.convert.by_role.questions import find
from logitd.model.convert.by_role.recognize import recognize
from logitd.model.convert.by_role.resolve import answered
from logitd.model.convert.by_role.tensor_map import MappedTensors, check
from logitd.model.convert.state_file import StateFile
from tests.model.convert.by_role.textbook.common import CONTEXT, HEADS, LAYERS, VOCAB, randomized
from tests.model.convert.by_role.textbook.plain import Plain

USUAL: Mapping[str, Any] = {
    "n_head": HEADS,
    "context_length": CONTEXT,
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "norm_position": "pre",
    "final_norm": True,
    "residual": "sequential",
    "positions": "learned",
    "rotary_layout": "half",
    "rotary_direction": "forward",
    "rope_theta": 10_000.0,
    "activation": "gelu",
    "score_scale": "head_dim",
    "qkv_layout": "qkv",
    "gate_order": "gate_first",
    "qk_norm": "none",
    "qk_norm_eps": 1e-5,
    "qk_norm_position": "before_rotary",
    "embedding_scale": "one",
    "causal": True,
}
"""The `Computation` of most schemes."""
ALTERNATIVES = re.compile(r"\((\w+)\|(\w+)\)")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One textbook model.

    make        returns the model with initial weights; None means `Plain` with the names in `roles`
    how         values of its `Computation` that differ from USUAL
    roles       a role and a tensor name per line; `ln.(weight|bias)` names a weight and its bias
    hidden      feed-forward width of `Plain`
    raw         True if the attention parameters of `Plain` have an axis for the heads
    kv_heads    number of key and value heads of `Plain`
    tied        True if `Plain` uses its embedding as the head
    settings    settings that the file must state, because the importer cannot find them by trying
    logits      calls the model and returns the logits of all positions
    """

    make: Callable[[], nn.Module] | None = None
    how: Mapping[str, Any] = field(default_factory=dict)
    roles: str
    n_layer: int = LAYERS
    first_layer: int = 0
    heads: int = 0
    transposed: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()
    hidden: int = 64
    raw: bool = False
    kv_heads: int = HEADS
    tied: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    logits: Callable[[nn.Module, Tensor], Tensor] = lambda model, ids: model(ids)

    def model(self, seed: int = 0) -> nn.Module:
        model = randomized(Plain(self) if self.make is None else self.make(), seed)
        if not self.computation.final_norm:  # a training does not change an unused norm
            for (role, part), name in self.names().items():
                if role == "final_norm":
                    model.get_parameter(name).data.fill_(part == "weight")
        return model

    @property
    def computation(self) -> Computation:
        return Computation(**{**USUAL, **self.how})

    @property
    def answers(self) -> dict[str, Any]:
        """The right answers to questions that the names leave open."""
        fields = ("n_head", "norm", "norm_position", "final_norm", "positions", "activation",
                  "score_scale", "rotary_layout", "rotary_direction", "residual", "embedding_scale",
                  "qk_norm_position")  # fmt: skip
        return {field: getattr(self.computation, field) for field in fields}

    def names(self) -> dict[tuple[str, str], str]:
        """Tensor names by role and part (weight or bias)."""
        names: dict[tuple[str, str], str] = {}
        for line in self.roles.strip().splitlines():
            role, name = line.split()
            match = ALTERNATIVES.search(name)
            words = match.groups() if match else ("",)
            for part, word in zip(("weight", "bias"), words, strict=False):
                names[role, part] = ALTERNATIVES.sub(word, name)
        return names


def given_logits(scheme: Scheme, model: nn.Module, ids: Tensor) -> Tensor:
    """The textbook model's logits (B, T, V) for ids (B, T)."""
    with torch.no_grad():
        return scheme.logits(model, ids)


def some_ids(rows: int = 3, length: int = CONTEXT, seed: int = 5) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors as `torch.save(model.state_dict())` would store them."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def mapped(model: nn.Module, where: str = "model.pt") -> MappedTensors:
    """The tensors of a model, mapped to the roles that `recognize` finds."""
    tensors = state(model)
    roles = recognize(where, tensors)
    check(where, tensors, roles)
    return MappedTensors(where, tensors, roles)


def findings(
    tensors: MappedTensors, settings: Mapping[str, Any] | None = None, **answers: Any
) -> dict[str, Finding]:
    """What the importer finds in a file with these tensors and settings, given these flags."""
    ignored = {name: tensors.tensors[name] for name in tensors.map.ignored}
    return find(tensors, ignored, settings or {}, answered(answers))


def state_file(
    model: nn.Module, path: Path = Path("model.pt"), settings: Mapping[str, Any] | None = None
) -> StateFile:
    return StateFile(path, str(path), state(model), None, settings or {})


def built_from(scheme: Scheme, model: nn.Module, **changes: Any) -> Built:
    """The GPT built from a model's tensors with the scheme's computation and these `changes` to
    it."""
    how = Computation(**{**USUAL, **scheme.how, **changes})
    return build(mapped(model), how)


@torch.inference_mode()
def our_logits(built: Built, ids: Tensor) -> Tensor:
    return open_gpt(built)(ids).logits


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())
