"""The features of sparse autoencoders, as part of a model's shape.

`autoencoder.py` computes them, and `model/sae` trains, reads and writes them.
"""

from dataclasses import dataclass, fields

from logitd.model.owner_code.config import CodeConfig
from logitd.model.transformer.config import ConfigError, GPTConfig, ModelConfig


@dataclass(frozen=True, slots=True)
class Features:
    """The features of a sparse autoencoder. They are a stage of the model that is served with this
    autoencoder.

    layer, stage  the block (None: outside the blocks) and kind of the stage that the autoencoder
                  reads
    count         number of features
    width         width of the stage that the autoencoder reads
    """

    name: str
    layer: int | None
    stage: str
    count: int
    width: int

    @property
    def reads(self) -> tuple[int | None, str]:
        """The stage that the autoencoder reads."""
        return self.layer, self.stage

    @property
    def key(self) -> tuple[int | None, str]:
        """The stage of the features."""
        return self.layer, f"{self.stage}.sae.{self.name}"

    @property
    def stage_name(self) -> str:
        """The full name of the stage of the features."""
        return self.key[1] if self.layer is None else f"blocks.{self.layer}.{self.key[1]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTWithFeatures(GPTConfig):
    """The shape of a GPT that is served with sparse autoencoders. `to_dict` leaves out the
    autoencoders."""

    features: tuple[Features, ...]


def with_features(config: ModelConfig, features: tuple[Features, ...]) -> ModelConfig:
    """A model's shape, with these features added. Raises ConfigError if the model runs its owner's
    code."""
    if not features:
        return config
    if isinstance(config, CodeConfig):
        raise ConfigError(
            f"the model is computed by its owner's code ({config.code}); such models cannot be "
            "served with sparse autoencoders"
        )
    values = {field.name: getattr(config, field.name) for field in fields(GPTConfig)}
    return GPTWithFeatures(**values, features=features)
