"""Weights: loads the tensors of a checkpoint into the owner's model, under the model's names."""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from logitd.model.owner_code.process.problem import Problem

WRAPPERS = {
    "_orig_mod",  # torch.compile
    "_forward_module",  # Lightning Fabric
    "_checkpoint_wrapped_module",
    "_fsdp_wrapped_module",
}
"""Parts that wrappers add to the names of parameters, at the place of the wrapped module."""

TABLES = frozenset(
    ("mask", "masks", "tril", "triu", "cos", "sin", "cis", "freq", "freqs", "rope", "rotary")
)
"""Words in the names of masks and tables of positions, which a class may compute anew."""

EXPRESSION = (
    "Give an expression that creates the model as it was trained, such as "
    "'GPT(vocab_size=..., n_head=...)'"
)


def load(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load the weights. Raises Problem if a parameter is missing, unless it shares its tensor with
    another, if a tensor is unused, unless it is a mask or a table of positions, or if parameters
    that share their tensor have different weights."""
    problems: list[str] = []
    for names in renamed(weights, model):
        try:
            missing, unexpected = model.load_state_dict(names, strict=False)
        except RuntimeError as error:
            said = " ".join(str(error).split())
            raise Problem(
                f"the weights do not fit the owner's model: {said[:500]}. {EXPRESSION}"
            ) from error
        buffers = {name for name, _ in model.named_buffers()}
        learned = [name for name in missing if name not in buffers]
        tied = [name for name in learned if shared(model, name, names)]
        left = [name for name in unexpected if is_weight(name, names[name])]
        if len(learned) == len(tied) and not left:
            _refuse_overwritten(model, names)
            return
        problems.append(
            f"the owner's model and the checkpoint have different tensors: the checkpoint lacks "
            f"{learned[:3] or 'none'}, and the model lacks {left[:3] or 'none'}"
        )
    raise Problem(problems[0])  # report the attempt with unchanged names


def _refuse_overwritten(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in weights:
            continue
        other = first.setdefault(parameter, name)
        if not torch.equal(weights[name], weights[other]):
            raise Problem(
                f"{other} and {name} are one parameter in the owner's model, but they differ in "
                f"the checkpoint. {EXPRESSION}"
            )


def without_wrappers(name: str) -> str:
    """The name of a parameter without the parts that wrappers add."""
    parts = name.split(".")
    return ".".join(part for part in parts if part not in WRAPPERS)


def renamed(weights: Mapping[str, Tensor], model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield the weights under different names: first under their own names; then under the names
    of a model that wraps its own modules; then, if all names have the same first part, without that
    part; then with the name of each child module as a prefix."""
    yield dict(weights)
    wrapped = {without_wrappers(name): name for name in model.state_dict()}
    yield {wrapped.get(name, name): tensor for name, tensor in weights.items()}
    heads = {name.partition(".")[0] for name in weights}
    if len(heads) == 1:
        yield {name.partition(".")[2]: tensor for name, tensor in weights.items()}
    for child, _ in model.named_children():
        yield {f"{child}.{name}": tensor for name, tensor in weights.items()}


def shared(model: nn.Module, name: str, weights: Mapping[str, Tensor]) -> bool:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return any(
        other != name and other in weights and parameters[other] is parameters.get(name)
        for other in parameters
    )


def is_weight(name: str, tensor: Tensor) -> bool:
    """False for integers, and for names of masks and tables of positions: `inv_freq`, but not
    `sinks`."""
    last = name.rpartition(".")[2].lower()
    if tensor.dim() == 4 and last == "bias":
        return False
    learned = tensor.is_floating_point() or tensor.is_complex()
    return learned and TABLES.isdisjoint(re.split(r"[_\d]+", last))
