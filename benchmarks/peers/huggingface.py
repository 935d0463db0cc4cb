"""Writes a GPT as a Hugging Face folder, for peers that read no other format.

Weights are float32. The vocabulary is a placeholder of the right size: requests use ids, never
texts.
"""

from pathlib import Path

from benchmarks.synthetic import RANDOM, synthetic_tokenizer
from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.convert.family import family_of
from logitd.model.convert.hf.export import write_folder
from logitd.model.text.tokenizer import SPLIT_PATTERN
from logitd.model.transformer.gpt import GPT


def write_huggingface(folder: Path, gpt: GPT) -> None:
    """Write the folder, which must not exist. Raises ConvertError if no
    architecture has this shape."""
    info = CheckpointInfo(
        path=folder,
        name=folder.name,
        shape=gpt.config,
        tokenizer=synthetic_tokenizer(gpt.config.vocab_size),
        training=RANDOM,
        files={},
    )
    family = family_of(gpt.config, SPLIT_PATTERN)
    folder.mkdir()
    write_folder(folder, info, gpt, family, log=lambda line: None)
