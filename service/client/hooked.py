"""HookedClient: a served model with TransformerLens' interface, without functions as hooks.

    with Client() as client:
        logits, cache = client.run_with_cache("def main():", ["blocks.0.attn.hook_pattern"])
        ablate = {"operation": "zero", "heads": [3]}
        client.run_with_hooks("def main():", fwd_hooks=[("blocks.0.attn.hook_z", ablate)])

Names, axes and the beginning of texts are as in `LLM.run_with_cache`; values are NumPy arrays. A
change is an intervention without its stage. Functions are refused, because they would have to run
in the server; `LLM` runs them in process. GET /stages and /info are requested once.
"""

import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]
Input = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | npt.NDArray[Any]
NamesFilter = str | Sequence[str] | Callable[[str], bool] | None
Changes = Sequence[tuple[str, Mapping[str, Any]]]

BEGINNINGS = ("<|bos|>", "<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>")
"""Names of special tokens that begin a text. If there is none, the end of a document begins it."""
HEADS_FIRST = ("hook_attn_scores", "hook_pattern")
"""Suffixes of names whose axis of heads comes before that of positions."""
ROTATED = re.compile(r"hook_(rot_)?[qk]$")


class Cache:
    """Arrays (B, ...) by TransformerLens' names. Short names work too: `cache["pattern", 0]`.
    Negative layers count from the end."""

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

    def keys(self) -> KeysView[str]:
        return self.cache_dict.keys()

    def items(self) -> ItemsView[str, Floats]:
        return self.cache_dict.items()


class HookedClient:
    """The model of a `Client`: the one named by its `model`, or the server's first one."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The server's name of each stage, by TransformerLens' name, in the order of the forward
        pass."""
        found: dict[str, str] = {}
        infos = self._client.stages().stages
        own = [name for info in infos for name in info.names]
        compared = "" if any(name.endswith("q_raw") for name in own) else "rot_"
        for layer in [None, *range(self._layers)]:
            start = "" if layer is None else f"blocks.{layer}."
            before = "embedding" if layer == 0 else f"blocks.{(layer or 0) - 1}.output"
            if layer is not None:
                found[f"{start}hook_resid_pre"] = (
                    f"{start}input" if f"{start}input" in own else before
                )
            for info in infos:
                name = info.name.replace("blocks.N.", start) if "N" in info.name else info.name
                lens = info.transformer_lens
                if lens is None or name not in own or ("N" in info.name) is (layer is None):
                    continue
                lens = lens.replace("blocks.N.", start)
                found[lens.replace(f"hook_{compared}", "hook_")] = name
        return found

    @cached_property
    def _config(self) -> Mapping[str, Any]:
        config: Mapping[str, Any] = self._client.info().config
        return config

    @property
    def _layers(self) -> int:
        layers: int = self._config["n_layer"]
        return layers

    @cached_property
    def _beginning(self) -> int | None:
        info = self._client.tokenizer_info()
        special: Mapping[str, int] = info.special_tokens
        end: int | None = info.eos_token_id
        return next((special[name] for name in BEGINNINGS if name in special), end)

    def to_tokens(self, input: str | Sequence[str], prepend_bos: bool | None = None) -> Ids:
        """Ids (texts, tokens) of texts with the same number of tokens. The beginning-of-text id is
        added always (True), never (False), or if the vocabulary has one (None)."""
        texts = [input] if isinstance(input, str) else list(input)
        first = self._beginning if prepend_bos is not False else None
        if prepend_bos and first is None:
            raise ValueError("prepend_bos is True, but the vocabulary has no beginning of text")
        start = [] if first is None else [first]
        found = self._client.tokenize(texts, special_tokens="ids")
        rows = [[*start, *each.tokens] for each in found]
        if len({len(row) for row in rows}) > 1:
            raise ValueError(
                f"the texts have {[len(row) for row in rows]} tokens; send texts of the same length"
            )
        return np.array(rows, dtype=np.int64)

    def run_with_cache(
        self,
        input: Input,
        names_filter: NamesFilter = None,
        *,
        prepend_bos: bool | None = None,
        remove_batch_dim: bool = False,
        fwd_hooks: Changes = (),
        **fields: Any,
    ) -> tuple[Floats, Cache]:
        """Logits (B, T, V), and the values of the chosen stages after the changes. `fields` are
        those of /activations."""
        names = self._filtered(names_filter)
        ids = self._ids(input, prepend_bos)
        own = list(dict.fromkeys(self.names[name] for name in names))
        if "interventions" not in fields:
            fields["interventions"] = self._interventions(fwd_hooks)
        found = self._client.activations(ids.tolist(), [*own, "logits"], positions="all", **fields)
        arrays = {
            name: self._lens_axes(name, np.stack([each.stages[self.names[name]] for each in found]))
            for name in names
        }
        logits = np.stack([each.stages["logits"] for each in found])
        if remove_batch_dim:
            arrays = {name: array[0] for name, array in arrays.items()}
        return logits, Cache(arrays, self._layers)

    def run_with_hooks(
        self,
        input: Input,
        fwd_hooks: Changes = (),
        *,
        prepend_bos: bool | None = None,
        **fields: Any,
    ) -> Floats:
        """Logits (B, T, V) with these changes."""
        return self.run_with_cache(
            input, [], prepend_bos=prepend_bos, fwd_hooks=fwd_hooks, **fields
        )[0]

    def _filtered(self, names_filter: NamesFilter) -> list[str]:
        known = [name for name in self.names if not name.startswith("unembed")]
        if names_filter is None:
            return [name for name in known if not name.endswith("hook_result")]
        if callable(names_filter):
            return [name for name in known if names_filter(name)]
        wanted = [names_filter] if isinstance(names_filter, str) else list(names_filter)
        for name in wanted:
            if name not in known:
                raise ValueError(
                    f"the server has no stage {name!r}; it has {', '.join(known[:40])} and so on"
                )
        return [name for name in known if name in wanted]

    def _interventions(self, changes: Changes) -> list[dict[str, Any]]:
        result = []
        for place, (name, change) in enumerate(changes):
            if callable(change) or callable(name):
                raise TypeError(
                    f"fwd_hooks[{place}] has a function, and a server runs no code of its clients: "
                    "send a change, such as {'operation': 'zero', 'heads': [3]}, or run functions "
                    "in process with LLM"
                )
            result.append({"stage": self.names.get(name, name), **change})
        return result

    def _ids(self, input: Input, prepend_bos: bool | None) -> Ids:
        if isinstance(input, str) or (len(input) > 0 and isinstance(input[0], str)):
            return self.to_tokens(input, prepend_bos)  # type: ignore[arg-type]
        ids = np.asarray(input, dtype=np.int64)
        return ids[None] if ids.ndim == 1 else ids

    def _lens_axes(self, name: str, array: Floats) -> Floats:
        """A stage (B, T, ...) with TransformerLens' order of axes."""
        if name.endswith(HEADS_FIRST):
            return array.swapaxes(1, 2)
        width, turning = self._config["head_dim"], self._config["rotary_dim"]
        if not ROTATED.search(name) or self._config["positions"] != "rotary" or turning == width:
            return array
        half, rest = turning // 2, (width - turning) // 2
        first = [*range(half), *range(width // 2, width // 2 + half)]
        others = [*range(half, half + rest), *range(width // 2 + half, width)]
        return array[..., first + others]
