"""Files of a sparse autoencoder: a folder in SAELens' format, with the facts about its features.

  cfg.json                  architecture, sizes and hook; `metadata.logitd` says how it was trained
  sae_weights.safetensors   W_enc (D, F), b_enc (F), W_dec (F, D), b_dec (D), perhaps threshold (F)
  features.safetensors      density and examples of each feature; only in folders of `logitd sae`

SAELens' architectures `standard`, `topk` and `jumprelu` are supported, as saved by version 6 or
earlier versions; SAELens saves a trained `batchtopk` as `jumprelu`. Two settings are folded into
the weights: `apply_b_dec_to_input` into the encoder's bias, and `rescale_acts_by_decoder_norm` into
encoder and decoder. Anything else is refused, and the error names it.

Shapes: D = width of the stage, F features, E examples of a feature, W tokens of an example.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.checkpoint.weights_file import write_weights
from logitd.model.files import CONFIG_BYTES, atomic_folder, parse_json, read_regular
from logitd.model.transformer.autoencoder import Autoencoder
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.features import Features
from logitd.model.transformer.stages import lens_stages, stages_of

CONFIG, WEIGHTS, FACTS = "cfg.json", "sae_weights.safetensors", "features.safetensors"
MOST_BYTES = 2**33
"""Maximum size, in bytes, of each file that contains arrays."""
ARCHITECTURES = ("standard", "topk", "jumprelu")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "normalize_activations": ("none", None, False),
    "reshape_activations": ("none", None),
    "activation_fn": ("relu", "topk", None),
    "finetuning_scaling_factor": (False, None),
    "noise_scale": (0, 0.0, None),
    "hook_head_index": (None,),
}
"""Settings of SAELens, each with its supported values. Other values would change the
computation."""
OLDER_NAMES: Mapping[Any, str] = {
    "hook_point": "hook_name",
    "hook_point_head_index": "hook_head_index",
    "activation_fn_str": "activation_fn",
}
"""Names of settings in earlier versions of SAELens."""


class AutoencoderError(Exception):
    """Raised if a folder contains no autoencoder that can be served; the message names the file and
    the reason."""


@dataclass(frozen=True, slots=True, eq=False)
class FeatureFacts:
    """Facts about features, measured on a text.

    density      (F,): share of the tokens at which the feature is nonzero
    ids          (F, E, W): token ids around the tokens at which the feature is strongest, in
                 descending order of strength; -1 for no token
    activations  (F, E, W): the value of the feature at each of these tokens
    """

    density: npt.NDArray[Any]
    ids: npt.NDArray[Any]
    activations: npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class StoredAutoencoder:
    """The contents of a folder. `record` is `metadata.logitd` of cfg.json. `facts` is None if the
    folder has no features.safetensors."""

    path: Path
    architecture: str
    hook: str
    autoencoder: Autoencoder
    record: Mapping[str, Any]
    facts: FeatureFacts | None

    def direction(self, index: int) -> npt.NDArray[Any]:
        """The row (D,) of the decoder for a feature."""
        return self.autoencoder.decoder[index].numpy()

    def features(self, name: str, config: GPTConfig) -> Features:
        """A stage with this name whose values are the features. Raises AutoencoderError if the
        model lacks the autoencoder's stage, or if the stage cannot be changed, has several axes
        or has another width."""
        named = {stage.name: stage for stage in stages_of(config)}
        host = lens_stages(config).get(self.hook) or named.get(self.hook)
        if host is None or not host.kind.changes or len(host.kind.axes) != 1:
            raise AutoencoderError(
                f"{self.path / CONFIG}: hook_name is {self.hook[:100]!r}, but the model has no "
                "stage of this name that interventions can change and that has one axis besides "
                "positions: see GET /stages"
            )
        reads = self.autoencoder.decoder.shape[1]
        (width,) = host.shape(config, 1)
        if reads != width:
            raise AutoencoderError(
                f"{self.path}: the autoencoder has width {reads}, but {host.name} has width "
                f"{width}: it was trained on another model"
            )
        return Features(name, host.layer, host.kind.name, self.autoencoder.features, width)


def read_autoencoder(path: Path) -> StoredAutoencoder:
    """Read an autoencoder's folder. Raises AutoencoderError."""
    try:
        config = _settings(parse_json(read_regular(path / CONFIG, CONFIG_BYTES)))
        tensors = load_tensors(read_regular(path / WEIGHTS, MOST_BYTES))
        autoencoder = _folded(config, tensors)
        facts = None
        if (path / FACTS).exists():
            stored = load_tensors(read_regular(path / FACTS, MOST_BYTES))
            facts = _facts(stored, autoencoder.features)
    except (OSError, ValueError, SafetensorError, AutoencoderError) as error:
        raise AutoencoderError(f"{path} is not a readable autoencoder: {error}") from error
    record = config["metadata"].get("logitd")
    return StoredAutoencoder(
        path=path,
        architecture=config["architecture"],
        hook=str(config.get("hook_name")),
        autoencoder=autoencoder,
        record=record if isinstance(record, dict) else {},
        facts=facts,
    )


def _settings(document: Any) -> dict[str, Any]:
    """The settings in cfg.json, under the names of version 6."""
    if not isinstance(document, dict):
        raise AutoencoderError(f"{CONFIG} is not an object")
    metadata = document.get("metadata")
    config: dict[str, Any] = {
        OLDER_NAMES.get(name, name): value for name, value in document.items()
    }
    config["metadata"] = metadata if isinstance(metadata, dict) else {}
    config.setdefault("hook_name", config["metadata"].get("hook_name"))
    config.setdefault("hook_head_index", config["metadata"].get("hook_head_index"))
    if config.get("activation_fn") == "topk":  # before version 6
        config["architecture"] = "topk"
        kwargs = config.get("activation_fn_kwargs")
        config.setdefault("k", kwargs.get("k") if isinstance(kwargs, dict) else None)
    if config.setdefault("architecture", "standard") not in ARCHITECTURES:
        raise AutoencoderError(
            f"architecture is {config['architecture']!r}; it must be one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    for name, neutral in NEUTRAL.items():
        if (value := config.get(name)) not in neutral:
            raise AutoencoderError(
                f"{name} is {value!r}, which is not supported; it must be {neutral[0]!r}"
            )
    return config


def _folded(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Autoencoder:
    """The weights in the form used for serving."""
    features, width = _size(config, "d_sae"), _size(config, "d_in")
    shapes = {
        "W_enc": (width, features),
        "b_enc": (features,),
        "W_dec": (features, width),
        "b_dec": (width,),
    }
    if config["architecture"] == "jumprelu":
        shapes["threshold"] = (features,)
    if set(tensors) != set(shapes):
        raise AutoencoderError(
            f"{WEIGHTS} has the tensors {', '.join(sorted(tensors))}, but the architecture "
            f"{config['architecture']!r} has {', '.join(shapes)}"
        )
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype not in FLOATS:
            raise AutoencoderError(
                f"{name} has the dtype {tensor.dtype} and the shape {list(tensor.shape)}; "
                f"expected a dtype of 16 to 64 bits and, as {CONFIG} requires, the shape "
                f"{list(shape)}"
            )
        if not tensor.isfinite().all():
            raise AutoencoderError(f"{name} has a number that is not finite")
    encoder, bias, decoder, center = (
        tensors[name].double() for name in ("W_enc", "b_enc", "W_dec", "b_dec")
    )
    if _flag(config, "apply_b_dec_to_input", True):
        bias = bias - center @ encoder
    if _flag(config, "rescale_acts_by_decoder_norm", False):
        norms = decoder.norm(dim=1)
        encoder, bias, decoder = encoder * norms, bias * norms, decoder / norms[:, None]
    folded = {"W_enc": encoder, "b_enc": bias, "W_dec": decoder, "b_dec": center}
    served = {name: tensor.float() for name, tensor in {**tensors, **folded}.items()}
    for name, tensor in served.items():
        if not tensor.isfinite().all():
            raise AutoencoderError(
                f"{name} has a number that is not finite in float32, after the settings in "
                f"{CONFIG} are folded into it"
            )
    return Autoencoder(
        encoder=served["W_enc"],
        encoder_bias=served["b_enc"],
        decoder=served["W_dec"],
        decoder_bias=served["b_dec"],
        k=_size(config, "k", features) if config["architecture"] == "topk" else None,
        threshold=served.get("threshold"),
    )


def _size(config: Mapping[str, Any], name: str, most: int = 2**30) -> int:
    value = config.get(name)
    if type(value) is not int or not 1 <= value <= most:
        raise AutoencoderError(f"{name} is {value!r}; it must be a whole number from 1 to {most}")
    return value


def _flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, bool):
        raise AutoencoderError(f"{name} is {value!r}; it must be true or false")
    return value


def _facts(arrays: Mapping[str, Tensor], features: int) -> FeatureFacts:
    dtypes = {"density": torch.float32, "ids": torch.int32, "activations": torch.float32}
    if {name: array.dtype for name, array in arrays.items()} != dtypes:
        found = ", ".join(f"{name} ({array.dtype})" for name, array in sorted(arrays.items()))
        raise AutoencoderError(
            f"{FACTS} has the arrays {found}; expected density (float32), ids (int32) and "
            "activations (float32): remove the file to serve without it"
        )
    facts = FeatureFacts(**{name: array.numpy() for name, array in arrays.items()})
    shape = facts.ids.shape
    shapes = facts.density.shape, facts.activations.shape, shape[:1], len(shape)
    if shapes != ((features,), shape, (features,), 3) or not facts.ids.size:
        raise AutoencoderError(f"{FACTS} has arrays whose shapes do not match {WEIGHTS}: remove it")
    if not (np.isfinite(facts.density).all() and np.isfinite(facts.activations).all()):
        raise AutoencoderError(f"{FACTS} has a number that is not finite: remove it")
    return facts


def read_autoencoders(
    folders: Mapping[str, Path], checkpoint: CheckpointInfo
) -> dict[Features, StoredAutoencoder]:
    """Read the named autoencoders of a checkpoint. Raises AutoencoderError, or CheckpointError if
    the checkpoint's model runs its owner's code."""
    stored = {name: read_autoencoder(path) for name, path in folders.items()}
    return {each.features(name, checkpoint.config): each for name, each in stored.items()}


def placed(
    stored: Mapping[Features, StoredAutoencoder], device: torch.device
) -> dict[Features, Autoencoder]:
    """The autoencoders, moved to a device."""
    return {features: each.autoencoder.to(device) for features, each in stored.items()}


def foreign_weights(stored: StoredAutoencoder, checkpoint: CheckpointInfo) -> str | None:
    """A warning if the autoencoder was trained on weights other than the checkpoint's; None if it
    was trained on these weights, or if its record names no weights."""
    trained = stored.record.get("weights_sha256")
    if trained in (None, checkpoint.weights_sha256):
        return None
    return (
        f"it was trained on other weights ({stored.record.get('checkpoint')}, sha256 "
        f"{str(trained)[:12]}): its figures do not apply to {checkpoint.name}"
    )


def write_autoencoder(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    k: int,
    hook: str,
    record: Mapping[str, Any],
    facts: FeatureFacts,
) -> None:
    """Write a TopK autoencoder atomically at `path`, which must not exist. `tensors` have SAELens'
    names. Raises OSError."""
    features, width = tensors["W_dec"].shape
    config = {
        "architecture": "topk",
        "d_in": width,
        "d_sae": features,
        "k": k,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "rescale_acts_by_decoder_norm": False,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {"sae_lens_version": "6.0.0", "hook_name": hook, "logitd": record},
    }
    with atomic_folder(path) as aside:
        stored = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
        write_weights(aside / WEIGHTS, stored)
        names = FeatureFacts.__slots__
        arrays = {name: torch.from_numpy(getattr(facts, name)) for name in names}
        write_weights(aside / FACTS, arrays)
        (aside / CONFIG).write_text(json.dumps(config, indent=2, allow_nan=False) + "\n")
