"""An adapter for tests of commands that read one."""

from pathlib import Path

from logitd.model.checkpoint.adapter import save_adapter
from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.transformer.config import TARGETS
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.lora import LoraShape, trained_weights
from tests.model.factories import training_record
from tests.model.transformer.test_lora import adapted

SHAPE = LoraShape(rank=2, alpha=4.0, targets=TARGETS)


def save_tiny_adapter(path: Path, base: Path, gpt: GPT) -> None:
    """Save an adapter with random weights for the checkpoint `base`, whose model is `gpt`."""
    info = read_checkpoint(base)
    record = {"name": info.name, "weights_sha256": info.weights_sha256, "step": 7}
    save_adapter(
        path,
        weights=trained_weights(adapted(gpt, SHAPE, b=0.05)),
        shape=SHAPE,
        training=training_record(base=record),
        card="# a\n",
    )
