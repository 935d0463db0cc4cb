"""Shares: the slots of each of several models, decided together before any of them is loaded.

A model that cannot be read gets nothing, and the others are still served. How memory is divided:
`model/inference/sharing.py`.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from logitd.model.checkpoint.checkpoint import check_header, read_checkpoint
from logitd.model.checkpoint.run_folder import checkpoint_of
from logitd.model.device import choose_device, choose_placement
from logitd.model.inference.kernels.select import choose_dtype
from logitd.model.inference.memory import SlotBudget
from logitd.model.inference.options import parse_memory
from logitd.model.inference.sharing import Shape, divide_slots
from logitd.model.memory import available
from logitd.service.engine.build import STARTUP_ERRORS, default_slots
from logitd.service.settings.model_source import ModelSource
from logitd.service.settings.serve import ServeSettings

logger = logging.getLogger("logitd")


@dataclass(frozen=True, slots=True)
class Shares:
    """Slots of each model by its name; `refused` says why a model cannot be read."""

    slots: Mapping[str, int]
    refused: Mapping[str, str]


def divide_memory(settings: ServeSettings) -> Shares:
    """The shares of the settings' models, all of which have names. Raises DeviceError if they do
    not fit together."""
    shapes, refused = [], {}
    for source in settings.models:
        assert source.name is not None
        try:
            shapes.append(_shape(source, settings))
        except (*STARTUP_ERRORS, OSError) as error:
            refused[source.name] = str(error)
    if not shapes:
        return Shares({}, refused)
    memory = None if settings.kv_cache_memory is None else parse_memory(settings.kv_cache_memory)
    device = choose_device(settings.device)
    gpu = device.type == "cuda"
    budget, default = SlotBudget(settings.slots, memory), default_slots(settings, gpu=gpu)
    slots = divide_slots(shapes, budget, available(device), default=default, gpu=gpu)
    return Shares({shape.name: n for shape, n in zip(shapes, slots, strict=True)}, refused)


def _shape(source: ModelSource, settings: ServeSettings) -> Shape:
    """The shape of the checkpoint that would be loaded now; its weights are not read."""
    assert source.name is not None
    checkpoint = read_checkpoint(checkpoint_of(source.path, settings.follow))
    check_header(checkpoint)
    choice = choose_dtype(
        settings.dtype,
        checkpoint.config,
        choose_device(settings.device),
        kernels=settings.kernels,
        kernel_target=settings.kernel_target,
        log=logger.info,
    )
    placement = choose_placement(settings.device, choice.name, settings.threads)
    return Shape(source.name, checkpoint.config, placement.dtype.itemsize, settings.kv_cache_dtype)
