"""Sharding: divides one model among the processes if a whole copy does not fit into each (FSDP).

Each process stores some rows of every parameter, of its gradient and of its optimizer states. To
compute a block, its parameters are gathered, used and freed, first in the forward and again in the
backward pass. Then the gradients are added up, and each process keeps its rows of the sum.
Embeddings and head stay gathered from the forward to the backward pass. torch's `fully_shard` does
all of this. This module divides a model (`shard_model`), records which rows a process has
(`ParamShard`), and gathers whole tensors: matrices for Muon (`all_gather`), or all tensors for a
file (`gather`).

Matrices are sent in the dtype in which they are multiplied. If they were sent in float32,
autocast's bfloat16 copies of all layers would stay in memory from the forward to the backward pass.
Other parameters are sent in float32. If two processes compute one pass each, the gradients have the
same bits as with two copies of the model. Otherwise the gradients, and the norm that clips them,
are added up in a different order.

A model that is larger than the memory of one machine is not supported: each process builds the
whole model in CPU memory before it is divided (two models when fine-tuning), and to save, the main
process holds all weights and optimizer states.

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

WEIGHT, TRAINED = 4, 20
"""Bytes per parameter: WEIGHT is the float32 value alone; TRAINED also includes its gradient,
AdamW's two moments and the average. Muon has only one moment."""
MODEL_SHARE = 0.75
"""Share of a process's memory that a model may take; the rest is for activations. Chosen, not
measured."""


@dataclass(frozen=True, slots=True)
class ParamShard:
    """The rows [first, last) that this process has of a tensor of `shape`: all rows unless
    `divided`."""

    shape: tuple[int, ...]
    first: int
    last: int
    divided: bool

    @property
    def rows(self) -> slice:
        return slice(self.first, self.last)

    def within(self, first: int, last: int) -> tuple[slice, "ParamShard"]:
        """Treat the rows [first, last) of the tensor as a separate tensor. Returns the slice of
        this process's rows that belongs to the separate tensor, and the ParamShard that describes
        these rows in the separate tensor."""
        begin = min(max(self.first, first), last)
        end = max(begin, min(self.last, last))
        shape = (last - first, *self.shape[1:])
        location = slice(begin - self.first, end - self.first) if end > begin else slice(0, 0)
        return location, ParamShard(shape, begin - first, end - first, self.divided)


def worth_sharding(config: GPTConfig, device: torch.device, ranks: Ranks, *, adapted: bool) -> bool:
    """True if a whole copy of the model in each process would leave too little memory for
    activations. If `adapted`, only adapters are trained."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = machine_memory() // ranks.local_size
    return parameter_count(config) * (WEIGHT if adapted else TRAINED) > MODEL_SHARE * memory


def shard_model(gpt: GPT, placement: Placement, ranks: Ranks) -> None:
    """Divide a GPT, which every process has built, among all processes, and move this process's
    rows to its device."""
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
        if isinstance(module, FSDPModule):
            # Sum gradients: each loss is already divided by the number of parts.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums


def is_sharded(gpt: GPT) -> bool:
    return isinstance(gpt, FSDPModule)


def without_backward(gpt: GPT, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a forward pass so that it frees the gathered parameters at its end. Use it for calls
    without a backward pass."""
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
    """The rows of a parameter that this process has."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return ParamShard(shape, 0, shape[0], divided=False)
    mesh = parameter.device_mesh
    height = -(-shape[0] // mesh.size())  # rows of every shard except the last ones
    first = min(mesh.get_local_rank() * height, shape[0])
    return ParamShard(shape, first, min(first + height, shape[0]), divided=True)


def unsummed_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients of unsharded parameters. The gradients of sharded parameters were already
    summed over the processes."""
    gradients = [parameter.grad for parameter in parameters if not isinstance(parameter, DTensor)]
    return [gradient for gradient in gradients if gradient is not None]


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale the gradients down to a norm of at most `max_norm`. Returns the norm before scaling."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm or math.inf)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def all_gather(
    tensors: Sequence[Tensor], shards: Sequence[ParamShard], ranks: Ranks
) -> list[Tensor]:
    """Gather whole tensors of one dtype on all processes. Every process must call it. Each process
    sets the rows of the others to zero, so that the sum over all processes has the same bits as the
    rows."""
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
    """Gather a whole tensor on the main process's CPU. Every process must call this; the other
    processes get an empty tensor."""
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
    """Load the weights that `gather_weights` returned on the main process. Each process loads its
    rows. Raises RuntimeError if names or shapes differ."""
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
