"""Sharding: one model divided among its processes, if it does not fit into each (FSDP).

A process keeps some rows of every parameter, of its gradient and of its optimizer states. To
compute, the parameters of a block are gathered, used and freed, and again in the backward pass,
after which the gradients are added up and each process keeps its rows of them. Embeddings and head
stay gathered from the forward to the backward pass. torch's `fully_shard` does all of that. This
module divides a model (`shard_model`), knows which rows are here (`ParamShard`), and gathers whole
tensors: a matrix for Muon (`all_gather`), or everything for a file (`gather`).

Matrices travel in the dtype of their products: in float32, autocast's bfloat16 copies of all layers
would stay in memory from the forward to the backward pass. Other parameters travel in float32. So
if two processes compute one pass each, the gradients are the same bits as with copies of the model;
else they are added up in another order, and so is the norm that clips them.

Does not cover a model that is larger than the memory of one CPU: each process builds it whole there
before it is divided (two models to fine-tune one), and to save, the main process holds the whole
weights and optimizer states.

Source: Zhao et al., PyTorch FSDP (2023), as implemented in torch.distributed.fsdp.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from logitd.model.device import Placement, machine_memory
from logitd.model.training.distributed.ranks import Ranks
from logitd.model.transformer.config import TARGETS, GPTConfig
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.lora import load_trained_weights, trained_weights
from logitd.model.transformer.size import parameter_count

WEIGHT, TRAINED = 4, 16
"""Bytes of a parameter: in float32, and with its gradient and AdamW's two moments. Muon has one."""
MODEL_SHARE = 0.75
"""Share of a process's memory; the rest is for activations. Chosen, not measured."""


@dataclass(frozen=True, slots=True)
class ParamShard:
    """Rows [first, last) of a tensor of `shape`, which this process has; all unless `divided`."""

    shape: tuple[int, ...]
    first: int
    last: int
    divided: bool

    @property
    def rows(self) -> slice:
        return slice(self.first, self.last)

    def within(self, first: int, last: int) -> tuple[slice, "ParamShard"]:
        """Rows [first, last) as a tensor of their own: its part in this shard, as a location here
        and as a shard."""
        begin = min(max(self.first, first), last)
        end = max(begin, min(self.last, last))
        shape = (last - first, *self.shape[1:])
        location = slice(begin - self.first, end - self.first) if end > begin else slice(0, 0)
        return location, ParamShard(shape, begin - first, end - first, self.divided)


def worth_sharding(config: GPTConfig, device: torch.device, ranks: Ranks, *, adapted: bool) -> bool:
    """True if a copy in each process would leave too little memory for activations. `adapted`: only
    adapters are trained."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = machine_memory() // ranks.local_size
    return parameter_count(config) * (WEIGHT if adapted else TRAINED) > MODEL_SHARE * memory


def shard_model(gpt: GPT, placement: Placement, ranks: Ranks) -> None:
    """Divide a GPT among all processes, each of which has built the same one, and move this
    process's rows to the device."""
    mesh = init_device_mesh(placement.device.type, (ranks.size,))
    narrow = MixedPrecisionPolicy(
        param_dtype=placement.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in gpt.blocks:
        fully_shard([getattr(block, name) for name in TARGETS], mesh=mesh, mp_policy=narrow)
        fully_shard(block, mesh=mesh)
    fully_shard(gpt, mesh=mesh)
    register_fsdp_forward_method(gpt, "transform")
    for module in gpt.modules():
        if isinstance(module, FSDPModule):  # sums: losses are divided by all parts already
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled ones


def is_sharded(gpt: GPT) -> bool:
    return isinstance(gpt, FSDPModule)


def without_backward(gpt: GPT, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A forward that frees the parameters that it gathered, for calls without a backward pass."""
    if not isinstance(gpt, FSDPModule):
        return forward

    def computed(token_ids: Tensor) -> Tensor:
        logits = forward(token_ids)
        gpt.reshard()
        return logits

    return computed


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_of(parameter: Tensor) -> ParamShard:
    """The rows of a parameter that are here."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return ParamShard(shape, 0, shape[0], divided=False)
    mesh = parameter.device_mesh
    height = -(-shape[0] // mesh.size())  # rows of every shard except the last ones
    first = min(mesh.get_local_rank() * height, shape[0])
    return ParamShard(shape, first, min(first + height, shape[0]), divided=True)


def unsummed_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Gradients of this process's sequences alone. Those of shards are summed already."""
    gradients = [parameter.grad for parameter in parameters if not isinstance(parameter, DTensor)]
    return [gradient for gradient in gradients if gradient is not None]


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale the gradient down to at most `max_norm`, and return the norm before that."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm or math.inf)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def all_gather(
    tensors: Sequence[Tensor], shards: Sequence[ParamShard], ranks: Ranks
) -> list[Tensor]:
    """Whole tensors from shards of one dtype, on all processes, which all have to call it. Each
    fills the others' rows with zeros, so that adding them up changes no bits."""
    if not any(shard.divided for shard in shards):
        return list(tensors)
    wholes = []
    for tensor, shard in zip(tensors, shards, strict=True):
        whole = tensor.new_zeros(shard.shape)
        whole[shard.rows] = tensor
        wholes.append(whole)
    ranks.all_reduce_sum(wholes)
    return wholes


def gather(tensor: Tensor, shard: ParamShard, ranks: Ranks) -> Tensor:
    """The whole tensor of a shard on the main process's CPU, and an empty one on the others, which
    all have to call it."""
    if not shard.divided:
        return tensor
    (whole,) = all_gather([tensor], [shard], ranks)
    return whole.cpu() if ranks.is_main else tensor.new_empty(0)


def gather_weights(gpt: GPT, ranks: Ranks) -> dict[str, Tensor]:
    return {
        name: gather(local(tensor), shard_of(tensor), ranks)
        for name, tensor in trained_weights(gpt).items()
    }


def scatter_weights(gpt: GPT, weights: Mapping[str, Tensor]) -> None:
    """Load the weights that `gather_weights` returned on the main process; each takes its rows.
    Raises RuntimeError if names or shapes differ."""
    own = trained_weights(gpt)

    def shard_like(name: str, whole: Tensor) -> Tensor:
        model = own.get(name)
        if not isinstance(model, DTensor) or model.shape != whole.shape:
            return whole
        rows = whole[shard_of(model).rows].to(model.device)
        return DTensor.from_local(
            rows, model.device_mesh, model.placements, shape=model.shape, stride=model.stride()
        )

    load_trained_weights(gpt, {name: shard_like(name, whole) for name, whole in weights.items()})
