"""Optimizers: the initial weights and the optimizers of a recipe.

There are four kinds of parameters, each with its own learning rate: the block matrices, the
embeddings, the head, and the rest (norms, biases, gates, scales). With `optimizer: muon`, Muon
updates the matrices and AdamW the others; with `adamw`, AdamW updates all. Adapters
(`model/transformer/lora.py`) count as matrices. Frozen parameters belong to no optimizer.
`model/training/optim/schedule.py` computes the learning rate of a step.

Sources: Muon by Keller Jordan (2024) from torch.optim, stepped by `model/training/optim/muon.py`;
zero-initialized projections and separate learning rates from modded-nanogpt and nanochat.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon

from logitd.model.training.configuration.presets import Recipe
from logitd.model.training.distributed.fsdp import ParamShard, gather, local, shard_of
from logitd.model.training.distributed.ranks import ALONE, Ranks
from logitd.model.training.optim import muon
from logitd.model.training.step.forward import native_bfloat16
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.lora import NARROW
from logitd.model.transformer.value_map import MAP, map_values

Kind = Literal["matrix", "embedding", "head", "scalar"]
MOMENTS = {"muon": ("momentum_buffer",), "adamw": ("step", "exp_avg", "exp_avg_sq")}
"""Names of the tensors in the state of each optimizer."""


@torch.no_grad()
def initialize(gpt: GPT, recipe: Recipe, generator: torch.Generator) -> None:
    """Set the initial weights. `generator` is the only source of randomness. If all blocks have
    value embeddings, their tables are first replaced by linear maps of the token embeddings.

    gpt2     N(0, 0.02), projections into the residual stream scaled down, as `GPT` itself does
    modern   matrices uniform with variance 1 / fan_in, projections into the residual stream zero
             (each block begins as the identity), embeddings N(0, 1), the head nearly zero
    """
    width = gpt.config.d_model
    if gpt.config.value_embeddings == "all":
        map_values(gpt)
    for name, parameter in gpt.named_parameters():
        owner, _, leaf = name.rpartition(".")
        module = gpt.get_submodule(owner)
        if leaf == "bias" or parameter.ndim < 2:
            continue  # `GPT` has set biases to zero, norms to one, and learned scales
        if recipe.init == "gpt2":
            scale = math.sqrt(2 * gpt.config.n_layer) if _into_residual(name) else 1.0
            parameter.normal_(std=0.02 / scale, generator=generator)
        elif isinstance(module, nn.Embedding):
            tied = gpt.config.tied_head and module is gpt.token_embedding
            std = 0.02 if tied else 1.0 if "value" not in name else width**-0.5
            parameter.normal_(std=std, generator=generator)
        elif _into_residual(name) or name.endswith("_gate.weight"):
            parameter.zero_()
        elif name.endswith(MAP):
            parameter.uniform_(-0.02, 0.02, generator=generator)
        elif module is getattr(gpt, "head", None):
            parameter.normal_(std=0.001, generator=generator)
        else:
            bound = math.sqrt(3 / parameter.shape[1])
            parameter.uniform_(-bound, bound, generator=generator)


def _into_residual(name: str) -> bool:
    return name.endswith(("attention_out.weight", "mlp_down.weight"))


def kind_of(gpt: GPT, name: str) -> Kind:
    leaf = name.removesuffix(".weight")
    if leaf.endswith((*NARROW, MAP)):
        return "matrix"
    if leaf == "head" or (leaf == "token_embedding" and gpt.config.tied_head):
        return "head"
    if leaf.endswith("embedding"):
        return "embedding"
    if leaf.endswith(("qkv", "attention_out", "mlp_up", "mlp_down")) and name.endswith(".weight"):
        return "matrix"
    return "scalar"


@dataclass(frozen=True, eq=False, slots=True)
class _View:
    """Some rows of a parameter, which share its memory. An optimizer updates them instead of the
    parameter."""

    tensor: nn.Parameter  # updated by the optimizer
    parameter: nn.Parameter  # the model's
    rows: slice  # location in the local part of the parameter
    shard: ParamShard  # location in the map


class Optimizers:
    """The optimizers of a model, stepped together.

    Muon orthogonalizes whole matrices, but some matrices fuse several maps (query, key and value;
    the two halves of SwiGLU). So Muon gets each map as a separate parameter that shares the fused
    matrix's storage, and `step` sets the gradient of each map to its rows of the fused gradient. If
    the model is sharded, the optimizers get only the rows of this process.
    """

    def __init__(self, gpt: GPT, recipe: Recipe, ranks: Ranks = ALONE) -> None:
        maps = list(_maps(gpt)) if recipe.optimizer == "muon" else []
        self._views = list(maps)
        adamw_kinds: tuple[Kind, ...] = ("embedding", "head", "scalar")
        if recipe.optimizer == "adamw":
            adamw_kinds = ("matrix", *adamw_kinds)
        by_kind: dict[Kind, list[nn.Parameter]] = {kind: [] for kind in adamw_kinds}
        for name, parameter in gpt.named_parameters():
            kind = kind_of(gpt, name)
            if parameter.requires_grad and kind in adamw_kinds:
                by_kind[kind].append(self._local_parameter(parameter))
        self._shards: dict[Tensor, ParamShard] = {view.tensor: view.shard for view in self._views}
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
                [{"params": [view.tensor for view in maps], "kind": "matrix"}],
                lr=recipe.matrix_lr,
                momentum=recipe.momentum,
                weight_decay=recipe.weight_decay,
            )
        self.all["adamw"] = AdamW(
            [
                {
                    "params": by_kind[kind],
                    "kind": kind,
                    "lr": self.peaks[kind],
                    "weight_decay": _adamw_decay(kind, recipe),
                }
                for kind in adamw_kinds
                if by_kind[kind]
            ],
            betas=(recipe.beta1, recipe.beta2),
            eps=1e-10 if recipe.optimizer == "muon" else 1e-8,
            fused=True,
        )

    def step(self, lr_scale: float, head_scale: float = 1.0) -> None:
        """Make one update, with learning rates of `lr_scale` times their peaks, the head's also
        times `head_scale`. Then drop the gradients."""
        for view in self._views:
            gradient = view.parameter.grad
            assert gradient is not None
            view.tensor.grad = local(gradient)[view.rows]
        for optimizer in self.all.values():
            for group in optimizer.param_groups:
                by_kind = head_scale if group["kind"] == "head" else 1.0
                group["lr"] = lr_scale * by_kind * self.peaks[group["kind"]]
            if isinstance(optimizer, Muon):
                muon.step(optimizer, self._muon_dtype, self._shards, self._ranks)
            else:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for view in self._views:
            view.parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The complete states of the optimizers, on the main process, as a single process would
        have them, without hyperparameters. All processes of a sharded model must call it."""

        def whole(tensor: Tensor, shard: ParamShard) -> Tensor:
            return gather(tensor, shard, self._ranks) if tensor.ndim else tensor

        return {
            name: self._map_state(optimizer, optimizer.state_dict(), whole)
            for name, optimizer in self.all.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` returned on the main process. The hyperparameters are
        the recipe's. Raises ValueError or LookupError if the state belongs to another model."""

        def rows(tensor: Tensor, shard: ParamShard) -> Tensor:
            # Copy: a view of even one number would keep the mapped file, and its blocks on the
            # disk.
            return (tensor[shard.rows] if tensor.ndim else tensor).clone()

        for name, optimizer in self.all.items():
            loaded = self._map_state(optimizer, state[name], rows)
            _check_state(name, optimizer, loaded["state"])
            optimizer.load_state_dict({**optimizer.state_dict(), **loaded})

    def _local_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        shard = shard_of(parameter)
        if not shard.divided:
            return parameter
        here = nn.Parameter(local(parameter.data))
        self._views.append(_View(here, parameter, slice(None), shard))
        return here

    def _map_state(
        self,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        change: Callable[[Tensor, ParamShard], Tensor],
    ) -> dict[str, Any]:
        """The member `state` of an optimizer's state, with the results of `change` for the tensors
        of divided parameters. These tensors are moments, which have the parameter's rows, and
        counts of steps, which are scalars."""
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        shards = [self._shards.get(tensor) for tensor in tensors]
        changed = {
            index: {
                name: change(value, shard) if shard and shard.divided else value
                for name, value in values.items()
            }
            for index, values in state["state"].items()
            for shard in (shards[index],)
        }
        return {"state": changed}


def _check_state(
    name: str, optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, Any]]
) -> None:
    """Raise ValueError unless each parameter's state has the right tensors. torch's fused kernels
    do not check shapes."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    for index, values in state.items():
        right = dict.fromkeys(MOMENTS[name], tensors[index].shape)
        if "step" in right:
            right["step"] = torch.Size()
        found = {each: getattr(value, "shape", None) for each, value in values.items()}
        if found != right:
            raise ValueError(f"{name} has {found} for parameter {index}; expected {right}")


def _maps(gpt: GPT) -> Iterator[_View]:
    """Views of the maps in the block matrices: several views of a matrix that fuses maps, otherwise
    one."""
    fused = {str(target): heights for target, heights in gpt.config.maps().items()}
    for name, whole in gpt.named_parameters():
        if kind_of(gpt, name) != "matrix":
            continue
        target = name.removesuffix(".weight").rpartition(".")[2]
        start = 0
        for height in fused.get(target, (len(whole),)):
            rows, shard = shard_of(whole).within(start, start + height)
            yield _View(nn.Parameter(local(whole.data)[rows]), whole, rows, shard)
            start += height


def _adamw_decay(kind: Kind, recipe: Recipe) -> float:
    """The weight decay of parameters that AdamW updates. If Muon updates the matrices, only the
    matrices decay. With AdamW alone, all parameters except norms, biases, gates and scales decay,
    as in GPT-2."""
    return 0.0 if recipe.optimizer == "muon" or kind == "scalar" else recipe.weight_decay
