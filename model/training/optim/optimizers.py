"""Recipe, carried out: initial weights, optimizers and the learning-rate schedule.

Parameters fall into four kinds, each with a learning rate of its own: the block matrices, the
embeddings, the head, and the rest (norms, biases, gates). With `optimizer: muon` the matrices are
Muon's and the others AdamW's; with `adamw` all are AdamW's. Adapters (`model/transformer/lora.py`)
count as matrices, and what is frozen belongs to no optimizer. Does not compute losses or take
steps.

Sources: Muon by Keller Jordan (2024) as it stands in torch.optim, stepped by
`model/training/optim/muon.py`; zero-initialised projections and
separate learning rates from modded-nanogpt and nanochat.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon

from model.training.distributed.fsdp import Piece, gather, local, piece_of
from model.training.distributed.ranks import ALONE, Ranks
from model.training.optim import muon
from model.training.presets import Recipe
from model.training.step.forward import native_bfloat16
from model.transformer.gpt import GPT, Block
from model.transformer.lora import NARROW

Kind = Literal["matrix", "embedding", "head", "scalar"]


@torch.no_grad()
def initialise(gpt: GPT, recipe: Recipe, generator: torch.Generator) -> None:
    """Fill in the initial weights. `generator` is the only source of randomness.

    gpt2     N(0, 0.02), projections into the residual stream scaled down, as `GPT` itself does
    modern   matrices uniform with variance 1 / fan_in, projections into the residual stream zero
             (each block begins as the identity), embeddings N(0, 1), the head nearly zero
    """
    width = gpt.config.d_model
    for name, parameter in gpt.named_parameters():
        owner, _, leaf = name.rpartition(".")
        module = gpt.get_submodule(owner)
        if leaf == "bias" or parameter.ndim < 2:
            continue  # biases are zero and norms one since `GPT` was built
        if recipe.init == "gpt2":
            scale = math.sqrt(2 * gpt.config.n_layer) if _into_residual(name) else 1.0
            parameter.normal_(std=0.02 / scale, generator=generator)
        elif isinstance(module, nn.Embedding):
            tied = gpt.config.tied_head and module is gpt.token_embedding
            std = 0.02 if tied else 1.0 if "value" not in name else width**-0.5
            parameter.normal_(std=std, generator=generator)
        elif _into_residual(name) or name.endswith("value_gate.weight"):
            parameter.zero_()
        elif module is getattr(gpt, "head", None):
            parameter.normal_(std=0.001, generator=generator)
        else:
            bound = math.sqrt(3 / parameter.shape[1])
            parameter.uniform_(-bound, bound, generator=generator)


def _into_residual(name: str) -> bool:
    return name.endswith(("attention_out.weight", "mlp_down.weight"))


def kind(gpt: GPT, name: str) -> Kind:
    """Which of the four kinds a parameter is of."""
    leaf = name.removesuffix(".weight")
    if leaf.endswith(NARROW):
        return "matrix"
    if leaf == "head" or (leaf == "token_embedding" and gpt.config.tied_head):
        return "head"
    if leaf.endswith("embedding"):
        return "embedding"
    if leaf.endswith(("qkv", "attention_out", "mlp_up", "mlp_down")) and name.endswith(".weight"):
        return "matrix"
    return "scalar"


@dataclass(frozen=True, eq=False, slots=True)
class _Part:
    """What an optimizer has in the place of a parameter: rows of it, in the same memory."""

    tensor: nn.Parameter  # what the optimizer updates
    parameter: nn.Parameter  # of the model
    rows: slice  # of what is here of the parameter
    piece: Piece  # which rows of a map these are


class Optimizers:
    """The optimizers of a model, stepped together.

    Muon orthogonalises a matrix as a whole, but a fused one is several maps side by side (query,
    key and value; the two halves of SwiGLU). Each is given to Muon as a parameter of its own that
    shares the fused one's storage; `step` hands it its rows of the gradient. Of a sharded model
    every optimizer has what is here of the parameters, and nothing else.
    """

    def __init__(self, gpt: GPT, recipe: Recipe, ranks: Ranks = ALONE) -> None:
        maps = list(_maps(gpt)) if recipe.optimizer == "muon" else []
        self._parts = list(maps)
        own: tuple[Kind, ...] = ("embedding", "head", "scalar")
        if recipe.optimizer == "adamw":
            own = ("matrix", *own)
        kinds: dict[Kind, list[nn.Parameter]] = {each: [] for each in own}
        for name, parameter in gpt.named_parameters():
            if parameter.requires_grad and (of := kind(gpt, name)) in own:
                kinds[of].append(self._what_is_here(parameter))
        self._pieces: dict[Tensor, Piece] = {part.tensor: part.piece for part in self._parts}
        self._ranks = ranks
        self.peaks: Mapping[Kind, float] = {
            "matrix": recipe.matrix_lr,
            "embedding": recipe.embedding_lr,
            "head": recipe.head_lr,
            "scalar": recipe.scalar_lr,
        }
        device = gpt.token_embedding.weight.device
        self._muon_dtype = torch.bfloat16 if native_bfloat16(device) else torch.float32
        self.all: dict[str, torch.optim.Optimizer] = {}
        if recipe.optimizer == "muon":
            self.all["muon"] = Muon(
                [{"params": [part.tensor for part in maps], "kind": "matrix"}],
                lr=recipe.matrix_lr,
                momentum=recipe.momentum,
                weight_decay=recipe.weight_decay,
            )
        self.all["adamw"] = AdamW(
            [
                {
                    "params": kinds[each],
                    "kind": each,
                    "lr": self.peaks[each],
                    "weight_decay": _adamw_decay(each, recipe),
                }
                for each in own
                if kinds[each]
            ],
            betas=(recipe.beta1, recipe.beta2),
            eps=1e-10 if recipe.optimizer == "muon" else 1e-8,
            fused=True,
        )

    def step(self, share_of_peak: float) -> None:
        """One update at a share of every peak learning rate; the gradients are dropped."""
        for part in self._parts:
            gradient = part.parameter.grad
            assert gradient is not None
            part.tensor.grad = local(gradient)[part.rows]
        for optimizer in self.all.values():
            for group in optimizer.param_groups:
                group["lr"] = share_of_peak * self.peaks[group["kind"]]
            if isinstance(optimizer, Muon):
                muon.step(optimizer, self._muon_dtype, self._pieces, self._ranks)
            else:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for part in self._parts:
            part.parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The states as one process would have them. Of a sharded model all processes have to ask,
        and the first gets them."""
        return {name: self._gathered(optimizer) for name, optimizer in self.all.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave the first process."""
        for name, optimizer in self.all.items():
            optimizer.load_state_dict(self._cut(optimizer, state[name]))

    def _what_is_here(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter itself, or of a divided one the rows."""
        piece = piece_of(parameter)
        if not piece.divided:
            return parameter
        here = nn.Parameter(local(parameter.data))
        self._parts.append(_Part(here, parameter, slice(None), piece))
        return here

    def _gathered(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        def whole(tensor: Tensor, piece: Piece) -> Tensor:
            return gather(tensor, piece, self._ranks) if tensor.ndim else tensor

        return self._mapped(optimizer, optimizer.state_dict(), whole)

    def _cut(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        def rows(tensor: Tensor, piece: Piece) -> Tensor:
            # Copies: a view, even of one number, would keep the file and its blocks on the disk.
            return (tensor[piece.rows] if tensor.ndim else tensor).clone()

        return self._mapped(optimizer, state, rows)

    def _mapped(
        self,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        change: Callable[[Tensor, Piece], Tensor],
    ) -> dict[str, Any]:
        """An optimizer's state with every tensor changed that belongs to a divided parameter: its
        moments, which have its rows, and its count of steps, which has no dimension."""
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        pieces = [self._pieces.get(tensor) for tensor in tensors]
        changed = {
            index: {
                name: change(value, piece) if piece and piece.divided else value
                for name, value in values.items()
            }
            for index, values in state["state"].items()
            for piece in (pieces[index],)
        }
        return {**state, "state": changed}


def _maps(gpt: GPT) -> Iterator[_Part]:
    """The block matrices as maps of one thing each."""
    for block in gpt.blocks:
        assert isinstance(block, Block)
        for name, heights in gpt.config.maps().items():
            linear = getattr(block, name)
            start = 0
            for height in heights:
                whole = linear.weight
                assert isinstance(whole, nn.Parameter)
                rows, piece = piece_of(whole).within(start, start + height)
                yield _Part(nn.Parameter(local(whole.data)[rows]), whole, rows, piece)
                start += height


def _adamw_decay(each: Kind, recipe: Recipe) -> float:
    """Beside Muon only the matrices decay; with AdamW alone everything but the scalars, as in
    GPT-2."""
    return 0.0 if recipe.optimizer == "muon" or each == "scalar" else recipe.weight_decay


def share_of_peak(recipe: Recipe, step: int, done: float) -> float:
    """The learning rate of a step as a share of its peak, `done` of the run being behind it."""
    rise = min(1.0, (step + 1) / recipe.warmup) if recipe.warmup else 1.0
    fall = 0.0
    match recipe.decay:
        case "linear":
            fall = min(1.0, max(0.0, done - (1 - recipe.cooldown)) / max(recipe.cooldown, 1e-9))
        case "cosine":
            fall = (1 - math.cos(math.pi * min(done, 1.0))) / 2
        case "constant":
            pass
    return rise * (1 - fall * (1 - recipe.final_lr))
