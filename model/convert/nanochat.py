"""nanochat's checkpoints: `model_*.pt` with `meta_*.json`.

The JSON file has no settings except sizes. The computation depends on nanochat's version, and the
tensors show the version (`_version`), with one exception that the import reports. Recognition by
role (`by_role/`) cannot replace this reader: it does not support residual scales, sliding windows
or logit caps.

Some parts of the computation are moved into the weights. Norms without weights get weights of 1,
the factor of queries and keys becomes the weight of their norms, and the value embeddings are
multiplied by the factor of their gates. nanochat rotates pairs of channels backward, so the halves
of each head are exchanged.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logitd.model.convert.foreign import (
    ConvertError,
    ForeignModel,
    ForeignTokenizer,
    Settings,
    StateDictReader,
    count_or_zero,
    naming,
)
from logitd.model.convert.layouts import NANOCHAT, read_weights
from logitd.model.convert.pt_file import read_pt
from logitd.model.convert.source_file import source_object
from logitd.model.convert.state_file import named_tensors
from logitd.model.convert.unknown_settings import unknown_settings
from logitd.model.text.tokenizer import Tokenizer
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gate import VALUE_GATE_WIDTH
from logitd.model.transformer.shapes import gpt2_shape

KIND = "nanochat"
_FILE = re.compile(r"model_(\d+)\.pt")
_LAYER = r"transformer\.h\.\d+\.(attn\.(c_q|c_k|c_v|c_proj|ve_gate)|mlp\.(c_fc|c_proj))\.weight"
_OUTSIDE = r"transformer\.wte\.weight|lm_head\.weight|value_embeds\.\d+\.weight"
_SCALES = r"resid_lambdas|x0_lambdas|smear_gate\.weight|smear_lambda|backout_lambda"
_OWN = re.compile(rf"({_SCALES})$|value_embeds\.")
"""Names of tensors that only nanochat and programs derived from it have."""
_NAMES = re.compile(f"{_LAYER}|{_OUTSIDE}|{_SCALES}")
PATTERN = "SSSL"
"""nanochat's default pattern of windows: S is a short window, L is the whole context."""
EPS = torch.finfo(torch.float32).eps
"""The default eps of torch's `rms_norm` for float32 inputs."""

TEMPLATE = """\
{{- '<|bos|>' }}
{%- set first = 1 if messages[0].role == 'system' else 0 %}
{%- for message in messages[first:] %}
    {%- if message.role == 'user' %}
        {{- '<|user_start|>' }}
        {%- if first and loop.first %}{{- messages[0].content + '\\n\\n' }}{% endif %}
        {{- message.content + '<|user_end|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant_start|>' + message.content + '<|assistant_end|>' }}
    {%- else %}
        {{- raise_exception('nanochat knows the roles user and assistant, and system first') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant_start|>' }}{% endif %}
"""
LAYOUT = replace(
    NANOCHAT,
    outside={"token_embedding": "transformer.wte"},
    inside={
        "qkv": ("attn.c_q", "attn.c_k", "attn.c_v"),
        "attention_out": ("attn.c_proj",),
        "mlp_up": ("mlp.c_fc",),
        "mlp_down": ("mlp.c_proj",),
    },
    layer="transformer.h.{N}.",
)
_TURNS = ("<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>")


@dataclass(frozen=True)
class _Version:
    """Constants of a version of nanochat. Checkpoints do not contain them.

    theta       base of the rotary frequencies
    sharpness   factor by which queries and keys are multiplied after their norms
    gate        largest value of a value embedding's gate
    gate_width  number of channels that a gate reads
    short       the context length is divided by this to get the short window
    tiles       the short window is rounded up to a multiple of this; None rounds it down to an
                integer
    """

    theta: float
    sharpness: float
    gate: float
    gate_width: int
    short: int
    tiles: int | None

    def short_window(self, length: int) -> int:
        """Number of positions that a short window covers. This includes the current position, which
        nanochat does not count."""
        if self.tiles is None:
            return length // self.short + 1
        return -(-length // self.short // self.tiles) * self.tiles + 1


_OLDEST = _Version(10_000.0, 1.0, 2.0, 32, 2, None)
_MARCH = _Version(100_000.0, 1.15, 3.0, 12, 3, 128)
_LATEST = _Version(100_000.0, 1.2, 3.0, 12, 4, 128)
CAP = 15.0


def read_nanochat(source: Path, context_length: int | None) -> ForeignModel | None:
    """Read a nanochat file, or the file with the highest step in a folder; None if there is no such
    file.

    Without `meta_*.json`, the sizes are read from the tensors, `context_length` is used as the
    trained length, and the windows are nanochat's default. Raises ConvertError.
    """
    path = _latest(source) if source.is_dir() else source
    if path is None or not path.is_file() or path.suffix != ".pt":
        return None
    state = read_pt(path)
    if not all(isinstance(name, str) for name in state):
        return None
    names = {name.removeprefix("_orig_mod.") for name in state}
    if not _is_nanochat(names):
        return None
    tensors = named_tensors(str(path), state)
    reader = StateDictReader(str(path), tensors)
    meta = path.with_name(path.name.replace("model_", "meta_")).with_suffix(".json")
    document = source_object(meta) if meta != path and meta.is_file() else {}
    if not document and _FILE.fullmatch(path.name) is None and not any(map(_OWN.match, names)):
        return None  # modded-nanogpt uses the other names, too
    if document:
        settings = Settings(f"model_config of {meta}", _model_config(document, meta))
    else:
        settings = Settings(str(path), _sizes(tensors, path, meta, context_length))
    with naming(path):
        reader.require_layers(settings.integer("n_layer"))
        config = _shape(settings, tensors)
    own = dict(_own_weights(reader, config, _version(tensors)))
    weights = read_weights(reader, config, LAYOUT, own=own)
    step, batch = (count_or_zero(document.get(key)) for key in ("step", "total_batch_size"))
    return ForeignModel(
        kind=KIND,
        config=config,
        weights=weights,
        dtype=reader.finish(),
        step=step,
        tokens=step * batch,
        contents=document or {"vocab_size": config.vocab_size},
        unknown=unknown_settings(settings.unread()),
        facts={"val_bpb": document["val_bpb"]} if "val_bpb" in document else {},
        notes=_notes(tensors, document, config),
    )


def with_conversation(vocabulary: ForeignTokenizer) -> ForeignTokenizer:
    """If a vocabulary has nanochat's special tokens, add nanochat's chat template and the tokens
    that end a text. Other vocabularies are returned unchanged."""
    tokenizer = vocabulary.tokenizer
    ids = tokenizer.special_tokens
    if vocabulary.chat_template is not None or not ids.keys() >= set(_TURNS):
        return vocabulary
    ends = [ids["<|bos|>"], ids["<|assistant_end|>"]]
    described = {**tokenizer.description(), "end_of_text": "<|bos|>", "end_ids": ends}
    return replace(
        vocabulary,
        tokenizer=Tokenizer.described(described, tokenizer.ranks),
        chat_template=TEMPLATE,
        end_known=True,
    )


def _is_nanochat(names: Collection[str]) -> bool:
    """True if these are the tensor names of nanochat or a program derived from it. If the derived
    program has additional tensors, they are refused later; the error names them."""
    derived = any(re.fullmatch(_SCALES, name) for name in names)
    return "transformer.wte.weight" in names and (derived or all(map(_NAMES.fullmatch, names)))


def _latest(folder: Path) -> Path | None:
    found = [
        (int(name[1]), path) for path in folder.iterdir() if (name := _FILE.fullmatch(path.name))
    ]
    return max(found)[1] if found else None


def _model_config(document: Mapping[str, Any], meta: Path) -> dict[str, Any]:
    value = document.get("model_config")
    if not isinstance(value, dict):
        raise ConvertError(f"{meta}: model_config is {value!r:.60}; expected an object")
    return {"window_pattern": "L", **value}  # the first versions had no windows


def _sizes(
    tensors: Mapping[str, Tensor], path: Path, meta: Path, context_length: int | None
) -> dict[str, Any]:
    """The sizes that the tensors' shapes show, under the keys of `model_config`."""
    gates = [t for name, t in tensors.items() if name.endswith(".attn.ve_gate.weight")]
    keys = tensors.get("transformer.h.0.attn.c_k.weight")
    if not gates or keys is None or context_length is None:
        raise ConvertError(
            f"{path} is a nanochat file; the numbers of heads and the attention windows are stored "
            f"in {meta.name}: copy that file to the same folder"
            + ("" if not gates else ", or set --context-length to the model's context length")
            + "; or, if another program saved it, give --n-head to recognize its tensors by role"
        )
    rows, width = tensors["transformer.wte.weight"].shape
    kv_heads = len(gates[0])
    head_dim = len(keys) // kv_heads
    return {
        "sequence_len": context_length,
        "vocab_size": rows,
        "n_layer": sum(name.endswith(".attn.c_q.weight") for name in tensors),
        "n_head": max(1, width // max(1, head_dim)),
        "n_kv_head": kv_heads,
        "n_embd": width,
        "window_pattern": PATTERN,
    }


def _version(tensors: Mapping[str, Tensor]) -> _Version:
    if "smear_gate.weight" in tensors:
        return _LATEST
    gates = (t for name, t in tensors.items() if name.endswith(".attn.ve_gate.weight"))
    gate = next(gates, None)
    return _MARCH if gate is not None and gate.shape[-1] == _MARCH.gate_width else _OLDEST


def _shape(settings: Settings, tensors: Mapping[str, Tensor]) -> GPTConfig:
    version, layers = _version(tensors), settings.integer("n_layer")
    length, heads = settings.integer("sequence_len"), settings.integer("n_head")
    width = settings.integer("n_embd")
    pattern = str(settings.get("window_pattern", "L")).upper()
    if not pattern or set(pattern) - set("SL"):
        settings.reject_unless("window_pattern", (), "expected the letters S and L")
    short = version.short_window(length)
    windows = tuple(short if pattern[n % len(pattern)] == "S" else None for n in range(layers))
    return gpt2_shape(
        vocab_size=len(tensors["transformer.wte.weight"]),
        context_length=length,
        n_layer=layers,
        n_head=heads,
        n_kv_head=settings.integer("n_kv_head", default=heads),
        d_model=width,
        norm="rmsnorm",
        norm_eps=EPS,
        positions="rotary",
        rope_theta=version.theta,
        activation="relu2",
        bias=False,
        qkv_bias=False,
        qk_norm=True,
        tied_head=False,
        value_embeddings=any(name.startswith("value_embeds.") for name in tensors),
        embedding_norm=True,
        smear="smear_gate.weight" in tensors,
        windows=(*windows[:-1], None),
        residual_mix="resid_lambdas" in tensors or "x0_lambdas" in tensors,
        backout="backout_lambda" in tensors,
        logit_softcap=CAP,
    )


def _own_weights(
    reader: StateDictReader, config: GPTConfig, version: _Version
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that `LAYOUT` does not describe, by this project's names."""
    width, layers = config.d_model, config.n_layer
    if config.smear:
        yield "smear_gate.weight", reader.take("smear_gate.weight", 1, min(24, width))
        yield "smear_scale", reader.take("smear_lambda", 1)
    if config.residual_mix:
        for ours, theirs, neutral in (
            ("residual_scales", "resid_lambdas", torch.ones(layers)),
            ("embedding_scales", "x0_lambdas", torch.zeros(layers)),
        ):
            yield ours, reader.take(theirs, layers) if theirs in reader else neutral
    if config.backout:
        yield "backout_scale", reader.take("backout_lambda", 1)
    for layer in range(layers):
        for name in ("query_norm", "key_norm"):
            sharpness = torch.full((config.head_dim,), version.sharpness)
            yield f"blocks.{layer}.{name}.weight", sharpness
        if config.has_value_embedding(layer):
            name, read = f"value_embeds.{layer}.weight", min(version.gate_width, width)
            table = reader.take(name, config.vocab_size, config.kv_width)
            yield f"blocks.{layer}.value_embedding.weight", table.float() * (version.gate / 2)
            name = f"transformer.h.{layer}.attn.ve_gate.weight"
            gate = reader.take(name, config.n_kv_head, read)
            wide = gate.new_zeros(config.n_kv_head, min(VALUE_GATE_WIDTH, width))
            wide[:, :read] = gate
            yield f"blocks.{layer}.value_gate.weight", wide


def _notes(
    tensors: Mapping[str, Tensor], document: Mapping[str, Any], config: GPTConfig
) -> tuple[str, ...]:
    notes = []
    if not document:
        notes.append(
            f"assumed: the window pattern {PATTERN} and the trained length "
            f"{config.context_length:,}, because there is no meta_*.json"
        )
    if config.value_embeddings and _version(tensors) is _OLDEST:
        notes.append(
            f"assumed: logits capped at {CAP:g}; nanochat of 3 to 9 March 2026 capped them at 20, "
            "and its files look the same"
        )
    return tuple(notes)
