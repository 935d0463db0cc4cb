"""HookedCalls: calls a served model through TransformerLens' interface, but without hook functions.

    with Client() as client:
        logits, cache = client.run_with_cache("def main():", ["blocks.0.attn.hook_pattern"])
        ablate = {"operation": "zero", "heads": [3]}
        client.run_with_hooks("def main():", fwd_hooks=[("blocks.0.attn.hook_z", ablate)])

Names, axes and the token that begins a text are the same as in `LLM.run_with_cache`. Values are
NumPy arrays. A change is an intervention without the member `stage`. Functions would have to run in
the server, so they are refused; `LLM` runs them in process. Like `wire.py`, this module serves both
clients.
"""

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from logitd.service.client import endpoints
from logitd.service.client.calls import Call
from logitd.service.client.fields import TokenizeFields
from logitd.service.client.results import Info, Stages, TokenizerInfo

Floats = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]
Input = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | npt.NDArray[Any]
NamesFilter = str | Sequence[str] | Callable[[str], bool] | None
Changes = Sequence[tuple[str, Mapping[str, Any]]]

BEGINNINGS = ("<|bos|>", "<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>")
"""Names of special tokens that begin a text. If the vocabulary has none of them, its end-of-text
token begins a text."""
HEADS_FIRST = ("hook_attn_scores", "hook_pattern")
"""Suffixes of the names of arrays in which the axis of heads comes before the axis of positions."""
ROTATED = re.compile(r"hook_(rot_)?[qk]$")


class Cache(Mapping[str, Floats]):
    """Arrays (B, ...), keyed by TransformerLens' names. Short names work too, as in
    `cache["pattern", 0]`. Negative layers count from the end."""

    def __init__(self, arrays: dict[str, Floats], layers: int) -> None:
        self.cache_dict = arrays
        self._layers = layers

    def __getitem__(self, key: str | tuple[str, int] | tuple[str, int, str]) -> Floats:
        if isinstance(key, str) and key in self.cache_dict:
            return self.cache_dict[key]
        name, start, kind = key, "", ""
        if not isinstance(key, str):
            name, start = key[0], f"blocks.{key[1] % self._layers}."
            kind = f"{key[2]}." if len(key) > 2 else ""
        found = [
            each
            for each in self.cache_dict
            if each.startswith(start + kind) and each.endswith(f"hook_{name}")
        ]
        if len(found) != 1:
            raise KeyError(key)
        return self.cache_dict[found[0]]

    def __contains__(self, key: object) -> bool:
        return key in self.cache_dict

    def __iter__(self) -> Iterator[str]:
        return iter(self.cache_dict)

    def __len__(self) -> int:
        return len(self.cache_dict)


@dataclass(frozen=True, slots=True)
class HookedModel:
    """Facts about a served model, from which names, axes and token ids are derived."""

    stages: Stages
    info: Info
    vocabulary: TokenizerInfo

    @property
    def layers(self) -> int:
        layers: int = self.config["n_layer"]
        return layers

    @property
    def config(self) -> Mapping[str, Any]:
        return self.info.config

    @property
    def beginning(self) -> int | None:
        """The id that begins a text; None if the vocabulary has none."""
        special = self.vocabulary.special_tokens
        found = (special[name] for name in BEGINNINGS if name in special)
        return next(found, self.vocabulary.eos_token_id)

    def names(self) -> dict[str, str]:
        """The server's name for each stage, keyed by TransformerLens' name, in the order of the
        forward pass."""
        found: dict[str, str] = {}
        own = [name for info in self.stages.stages for name in info.names]
        compared = "" if any(name.endswith("q_raw") for name in own) else "rot_"
        for layer in [None, *range(self.layers)]:
            start = "" if layer is None else f"blocks.{layer}."
            before = "embedding" if layer == 0 else f"blocks.{(layer or 0) - 1}.output"
            if layer is not None:
                found[f"{start}hook_resid_pre"] = (
                    f"{start}input" if f"{start}input" in own else before
                )
            for info in self.stages.stages:
                name = info.name.replace("blocks.N.", start) if "N" in info.name else info.name
                lens = info.transformer_lens
                if lens is None or name not in own or ("N" in info.name) is (layer is None):
                    continue
                lens = lens.replace("blocks.N.", start)
                found[lens.replace(f"hook_{compared}", "hook_")] = name
        return found

    def lens_axes(self, name: str, array: Floats) -> Floats:
        """Reorder the axes and channels of a stage (B, T, ...) as in TransformerLens."""
        if name.endswith(HEADS_FIRST):
            return array.swapaxes(1, 2)
        width, turning = self.config["head_dim"], self.config["rotary_dim"]
        if not ROTATED.search(name) or self.config["positions"] != "rotary" or turning == width:
            return array
        half, rest = turning // 2, (width - turning) // 2
        first = [*range(half), *range(width // 2, width // 2 + half)]
        others = [*range(half, half + rest), *range(width // 2 + half, width)]
        return array[..., first + others]


class HookedCalls:
    """Calls to served models through TransformerLens' interface. `ask` sends a call. The facts
    about each model are requested only once."""

    def __init__(self, ask: Callable[[Call[Any]], Awaitable[Any]]) -> None:
        self._ask = ask
        self._models: dict[str | None, HookedModel] = {}

    async def _facts(self, model: str | None) -> HookedModel:
        """Facts about the model of this name; None is the client's model."""
        if model not in self._models:
            self._models[model] = HookedModel(
                await self._ask(endpoints.stages(model=model)),
                await self._ask(endpoints.info(model=model)),
                await self._ask(endpoints.tokenizer_info(model=model)),
            )
        return self._models[model]

    async def _tokens(
        self, input: str | Sequence[str], prepend_bos: bool | None, model: str | None
    ) -> Ids:
        """The token ids of texts, as an array (texts, tokens). All texts must have the same number
        of tokens. If `prepend_bos` is True, the token that begins a text is put before each text.
        If it is None, this is done only if the vocabulary has such a token."""
        texts = [input] if isinstance(input, str) else list(input)
        first = (await self._facts(model)).beginning if prepend_bos is not False else None
        if prepend_bos and first is None:
            raise ValueError(
                "prepend_bos is True, but the vocabulary has no token for the beginning of a text"
            )
        start = [] if first is None else [first]
        fields: TokenizeFields = {"special_tokens": "ids"}
        if model is not None:
            fields["model"] = model
        found = await self._ask(endpoints.tokenize(texts, **fields))
        rows = [[*start, *each.tokens] for each in found]
        if len({len(row) for row in rows}) > 1:
            raise ValueError(
                f"the texts have {[len(row) for row in rows]} tokens; send texts of the same length"
            )
        return np.array(rows, dtype=np.int64)

    async def run_with_cache(
        self,
        input: Input,
        names_filter: NamesFilter = None,
        *,
        prepend_bos: bool | None = None,
        remove_batch_dim: bool = False,
        fwd_hooks: Changes = (),
        **fields: Any,
    ) -> tuple[Floats, Cache]:
        """Logits (B, T, V), and the values of the stages that `names_filter` selects, computed with
        the changes in `fwd_hooks`, which precede `interventions`. `fields` are fields of
        /activations."""
        asked: str | None = fields.get("model")
        model = await self._facts(asked)
        own = model.names()
        chosen = _filtered(own, names_filter)
        ids = await self._ids(input, prepend_bos, asked)
        changes = _interventions(own, fwd_hooks)
        changes = [await self._encoded(change, prepend_bos, asked) for change in changes]
        fields["interventions"] = [*changes, *fields.get("interventions", ())]
        stages = [*dict.fromkeys(own[name] for name in chosen), "logits"]
        call = endpoints.activations(ids.tolist(), stages, positions="all", **fields)
        found = await self._ask(call)
        arrays = {
            name: model.lens_axes(name, np.stack([each.stages[own[name]] for each in found]))
            for name in chosen
        }
        logits = np.stack([each.stages["logits"] for each in found])
        if remove_batch_dim:
            arrays = {name: array[0] for name, array in arrays.items()}
        return logits, Cache(arrays, model.layers)

    async def run_with_hooks(
        self,
        input: Input,
        fwd_hooks: Changes = (),
        *,
        prepend_bos: bool | None = None,
        **fields: Any,
    ) -> Floats:
        """Logits (B, T, V), computed with the changes in `fwd_hooks`."""
        logits, _ = await self.run_with_cache(
            input, [], prepend_bos=prepend_bos, fwd_hooks=fwd_hooks, **fields
        )
        return logits

    async def _encoded(self, change: Any, prepend_bos: bool | None, model: str | None) -> Any:
        """A change in which the text of each prompt is token ids, encoded as the input is."""
        if not isinstance(change, Mapping):
            return change
        encoded = {
            key: await self._encoded(value, prepend_bos, model) for key, value in change.items()
        }
        if isinstance(text := change.get("prompt"), str):
            encoded["prompt"] = (await self._tokens(text, prepend_bos, model))[0].tolist()
        return encoded

    async def _ids(self, input: Input, prepend_bos: bool | None, model: str | None) -> Ids:
        if isinstance(input, str) or (len(input) > 0 and isinstance(input[0], str)):
            return await self._tokens(input, prepend_bos, model)  # type: ignore[arg-type]
        ids = np.asarray(input, dtype=np.int64)
        return ids[None] if ids.ndim == 1 else ids


def _filtered(own: Mapping[str, str], names_filter: NamesFilter) -> list[str]:
    known = [name for name in own if not name.startswith("unembed")]
    if names_filter is None:
        return [name for name in known if not name.endswith("hook_result")]
    if callable(names_filter):
        return [name for name in known if names_filter(name)]
    wanted = [names_filter] if isinstance(names_filter, str) else list(names_filter)
    for name in wanted:
        if name not in known:
            raise ValueError(
                f"the server has no stage {name!r}; it has {', '.join(known[:40])} ..."
            )
    return [name for name in known if name in wanted]


def _interventions(own: Mapping[str, str], changes: Changes) -> list[dict[str, Any]]:
    result = []
    for place, (name, change) in enumerate(changes):
        if callable(change) or callable(name):
            raise TypeError(
                f"fwd_hooks[{place}] has a function, but a server does not run its clients' code: "
                "send a change, such as {'operation': 'zero', 'heads': [3]}, or run functions "
                "in process with LLM"
            )
        result.append({"stage": own.get(name, name), **change})
    return result
