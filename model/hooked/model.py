"""HookedGPT: a served model with TransformerLens' interface, computed in plain torch.

    hooked = LLM("checkpoints/python-small").hooked
    logits, cache = hooked.run_with_cache("def main():")
    cache["pattern", 0]                                       # (B, H, T, T)
    hooked.run_with_hooks("def main():", fwd_hooks=[("blocks.0.hook_mlp_out", my_function)])

Names, shapes and semantics are those of TransformerLens' TransformerBridge: the weights are those
of the checkpoint until `enable_compatibility_mode` processes them as HookedTransformer does. The
caller's functions run in process on torch tensors (float32 or wider). Gradients flow from the
embeddings on, unless the caller turns them off; parameters get none.

It shares no state with the engine, whose results never change.

Shapes: B sequences, T positions, V = vocab_size.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from logitd.model.hooked.cache import ActivationCache, Where, take
from logitd.model.hooked.config import HookedConfig
from logitd.model.hooked.names import point_names, positions_axis, usual_name
from logitd.model.hooked.network import Norm, fold_weights, hooked_copy, run
from logitd.model.hooked.points import Direction, Hook, HookPoint
from logitd.model.hooked.tokens import Tokens, beginning
from logitd.model.hooked.weights import OF_ATTENTION, OF_MLP, nested_blocks
from logitd.model.inference.errors import ContextLengthExceeded, InvalidRequest
from logitd.model.text.tokenizer import Tokenizer
from logitd.model.transformer.gpt import GPT

NamesFilter = str | Sequence[str] | Callable[[str], bool] | None
HookName = str | Callable[[str], bool]
AddedHooks = Sequence[tuple[HookName, Hook]]
Input = str | Sequence[str] | Tensor | Sequence[int] | Any
ReturnType = Literal["logits", "loss", "both"] | None

RESULT = "hook_result"


class HookedGPT:
    """A GPT with hook points. `API` lists the names that `LLM` passes on."""

    API = frozenset(
        (
            *("run_with_cache", "run_with_hooks", "hooks", "add_hook", "add_perma_hook"),
            *("reset_hooks", "hook_dict", "mod_dict", "cfg", "blocks", "ln_final", "unembed"),
            *("W_E", "W_pos", "W_U", "b_U", *OF_ATTENTION, *OF_MLP, "all_head_labels"),
            *("to_tokens", "to_string", "to_str_tokens", "to_single_token", "to_single_str_token"),
            *("get_token_position", "tokens_to_residual_directions", "loss_fn"),
            *("set_use_attn_result", "enable_compatibility_mode"),
        )
    )

    def __init__(self, gpt: GPT, tokenizer: Tokenizer, name: str) -> None:
        self._config = gpt.config
        points = {each: HookPoint(each) for each in point_names(gpt.config)}
        self.hook_dict: Mapping[str, HookPoint] = points
        self._gpt, self.unembed = hooked_copy(gpt, points)
        self.cfg = HookedConfig.of(
            gpt.config, self.unembed.W_U, name, bos=beginning(tokenizer) is not None
        )
        self.tokenizer = tokenizer
        tokens = self._tokens = Tokens(tokenizer, self.cfg)
        self.to_tokens, self.to_string = tokens.to_tokens, tokens.to_string
        self.to_str_tokens, self.to_single_token = tokens.to_str_tokens, tokens.to_single_token
        self.to_single_str_token = tokens.to_single_str_token
        self.get_token_position = tokens.get_token_position
        self._level = 0  # depth of the `hooks` contexts

    # Running the model

    def __call__(
        self,
        input: Input,
        return_type: ReturnType = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        stop_at_layer: int | None = None,
    ) -> Any:
        """Run a text, several texts, or ids (B, T) or (T,) through the model.

        return_type     "logits" (B, T, V), "loss", "both", or None
        loss_per_token  losses (B, T - 1) in nats instead of their mean over all real tokens
        stop_at_layer   return the stream (B, T, d_model) before this block; negative numbers count
                        from the end

        Raises InvalidRequest for ids outside the vocabulary, and ContextLengthExceeded.
        """
        ids, lengths = self._ids(input, prepend_bos)
        layers = self.cfg.n_layers
        stop = stop_at_layer
        if stop is not None and not -layers <= stop <= layers:
            raise InvalidRequest(f"stop_at_layer is {stop}; the model has {layers} blocks")
        results = self.cfg.use_attn_result
        out = run(
            self._gpt,
            self.unembed,
            ids,
            self.hook_dict,
            results=results,
            stop=None if stop is None else stop % layers if stop < layers else stop,
        )
        if stop is not None or return_type == "logits":
            return out
        if return_type is None:
            return None
        loss = self._loss(out, ids, lengths, per_token=loss_per_token)
        if return_type == "both":
            return out, loss
        if return_type == "loss":
            return loss
        raise InvalidRequest(
            f"return_type is {return_type!r}; it must be 'logits', 'loss', 'both' or None"
        )

    def run_with_hooks(
        self,
        *args: Any,
        fwd_hooks: AddedHooks = (),
        bwd_hooks: AddedHooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the model with hooks. Backward hooks take effect in a later `backward` only if
        `reset_hooks_end` is False."""
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return self(*args, **kwargs)

    def run_with_cache(
        self,
        *args: Any,
        names_filter: NamesFilter = None,
        device: str | torch.device | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: Where = None,
        return_cache_object: bool = True,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Run the model, and cache the tensors of the chosen hook points, as changed by their
        hooks.

        names_filter  a name, names, or a function of a name; None: all points
        device        where the tensors are kept
        incl_bwd      also run backward from the output, which must be a number
                      (return_type="loss"), and keep each gradient as "<name>_grad"
        pos_slice     positions to keep
        """
        kept: dict[str, Tensor] = {}

        def save(value: Tensor, *, hook: HookPoint, suffix: str = "") -> None:
            value = value.detach().to(device or value.device)
            kept[hook.name + suffix] = take(value, pos_slice, positions_axis(hook.name))

        names = self._filtered(names_filter)
        save_gradient = partial(save, suffix="_grad")
        backward = [(name, save_gradient) for name in names] if incl_bwd else []
        with self.hooks(
            [(name, save) for name in names], backward, reset_hooks_end, clear_contexts
        ):
            out = self(*args, **kwargs)
            if incl_bwd:
                out.backward()
        cache = ActivationCache(kept, self)
        if remove_batch_dim:
            cache.remove_batch_dim()
        return out, cache if return_cache_object else cache.cache_dict

    @torch.no_grad()
    def generate(
        self,
        input: Input = "",
        max_new_tokens: int = 10,
        stop_at_eos: bool = True,
        do_sample: bool = True,
        top_k: int | None = None,
        temperature: float = 1.0,
        prepend_bos: bool | None = None,
        return_type: Literal["input", "str", "tokens"] = "input",
    ) -> Any:
        """Continue a text or ids (B, T), with all hooks in place and torch's random numbers.
        Sequences that have ended are padded with the end of a document. `LLM.generate` is many
        times faster."""
        ids, lengths = self._ids(input, prepend_bos)
        if len(set(lengths)) > 1:
            raise InvalidRequest("the prompts have different lengths; generate one at a time")
        ends = self.tokenizer.ends if stop_at_eos else ()
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for _ in range(max_new_tokens):
            row = self(ids[:, -self.cfg.n_ctx :])[:, -1]
            if do_sample and temperature > 0:
                row = row / temperature
                if top_k is not None:
                    row = row.masked_fill(row < row.topk(top_k).values[:, -1:], float("-inf"))
                new = torch.multinomial(row.softmax(dim=-1), 1)[:, 0]
            else:
                new = row.argmax(dim=-1)
            if ends:
                new = torch.where(ended, ends[0], new)
                ended |= torch.isin(new, torch.tensor(ends, device=ids.device))
            ids = torch.cat((ids, new[:, None]), dim=1)
            if ends and ended.all():
                break
        as_text = return_type == "str" or (return_type == "input" and isinstance(input, str))
        if not as_text:
            return ids
        start = 1 if isinstance(input, str) and self._prepends(prepend_bos) else 0
        texts = self.to_string(ids[:, start:])
        return texts[0] if isinstance(input, str) else texts

    # Hooks

    @property
    def mod_dict(self) -> Mapping[str, HookPoint]:
        return self.hook_dict

    @contextmanager
    def hooks(
        self,
        fwd_hooks: AddedHooks = (),
        bwd_hooks: AddedHooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Generator[Self]:
        """A context that adds hooks to the model and removes them at its end."""
        self._level += 1
        try:
            for direction, added in (("fwd", fwd_hooks), ("bwd", bwd_hooks)):
                for name, hook in added:
                    self._add(name, hook, direction, level=self._level)
            yield self
        finally:
            if reset_hooks_end:
                self.reset_hooks(clear_contexts, level=self._level)
            self._level -= 1

    def add_hook(
        self, name: HookName, hook: Hook, dir: Direction = "fwd", is_permanent: bool = False
    ) -> None:
        """Add a hook to the point with this name, or to all points whose names satisfy a
        function."""
        self._add(name, hook, dir, is_permanent=is_permanent)

    def add_perma_hook(self, name: HookName, hook: Hook, dir: Direction = "fwd") -> None:
        self._add(name, hook, dir, is_permanent=True)

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Remove the hooks that are not permanent."""
        for point in self.hook_dict.values():
            point.remove_hooks(direction, including_permanent, level)
            if clear_contexts:
                point.clear_context()

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Also compute `attn.hook_result`, the output of each head (B, T, H, d_model)."""
        self.cfg.use_attn_result = use_attn_result

    # Weights

    def enable_compatibility_mode(
        self,
        *,
        no_processing: bool = False,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool = True,
    ) -> None:
        """Process the weights as TransformerLens' HookedTransformer does when it loads a model.
        Direct logit attribution needs this. Probabilities stay the same, up to rounding. Raises
        InvalidRequest for shapes whose probabilities would change."""
        if no_processing:
            return
        config = self._config
        if config.norm_position == "post" or (
            config.norm == "layernorm" and (config.smear or config.value_embeddings)
        ):
            raise InvalidRequest("the norms of this shape cannot be folded: use no_processing=True")
        fold_weights(
            self._gpt,
            self.unembed,
            fold_ln=fold_ln,
            center_writing_weights=center_writing_weights,
            center_unembed=center_unembed,
            fold_value_biases=fold_value_biases,
        )
        if fold_ln:
            self.cfg.normalization_type = f"{self.cfg.normalization_type.removesuffix('Pre')}Pre"
        self.__dict__.pop("blocks", None)

    @cached_property
    def blocks(self) -> list[SimpleNamespace]:
        """The blocks, with weights and points as attributes: `blocks[0].attn.W_Q`."""
        return nested_blocks(self._gpt, self.hook_dict)

    @property
    def ln_final(self) -> Norm | None:
        """The final norm, as a function of a stream; None if the model has none."""
        norm = self._gpt.final_norm
        return norm if isinstance(norm, Norm) else None

    @property
    def W_E(self) -> Tensor:
        """(V, d_model)"""
        return self._gpt.token_embedding.weight[: self.cfg.d_vocab]

    @property
    def W_pos(self) -> Tensor:
        """(n_ctx, d_model)"""
        return self._gpt.position_embedding.weight

    @property
    def W_U(self) -> Tensor:
        """(d_model, V)"""
        return self.unembed.W_U

    @property
    def b_U(self) -> Tensor:
        return self.unembed.b_U

    def __getattr__(self, name: str) -> Tensor:
        """The weights of all blocks, stacked: `W_Q` (n_layers, n_heads, d_model, d_head)."""
        if name in OF_ATTENTION:
            return torch.stack([getattr(block.attn, name) for block in self.blocks])
        if name in OF_MLP:
            return torch.stack([getattr(block.mlp, name) for block in self.blocks])
        raise AttributeError(f"HookedGPT has no attribute {name!r}")

    def tokens_to_residual_directions(self, tokens: Any) -> Tensor:
        """The columns (..., d_model) of `W_U` for a token, given as text, an id or ids."""
        ids = self.to_single_token(tokens) if isinstance(tokens, str) else tokens
        ids = torch.as_tensor(ids, device=self.cfg.device)
        return self.W_U[:, ids.reshape(()) if ids.numel() == 1 else ids].movedim(0, -1)

    @property
    def all_head_labels(self) -> list[str]:
        """The labels L0H0, L0H1 and so on."""
        cfg = self.cfg
        return [f"L{layer}H{head}" for layer in range(cfg.n_layers) for head in range(cfg.n_heads)]

    def loss_fn(self, logits: Tensor, tokens: Tensor, per_token: bool = False) -> Tensor:
        """The loss of each token after the first (B, T - 1), in nats, or their mean."""
        losses = -logits[:, :-1].log_softmax(dim=-1).gather(-1, tokens[:, 1:, None])[..., 0]
        return losses if per_token else losses.mean()

    # Helpers of the methods above

    def _loss(
        self, logits: Tensor, ids: Tensor, lengths: Sequence[int], *, per_token: bool
    ) -> Tensor:
        losses = self.loss_fn(logits, ids, per_token=True)
        if per_token:
            return losses
        real = torch.arange(1, ids.shape[1], device=ids.device) < torch.tensor(
            lengths, device=ids.device
        ).unsqueeze(1)
        return losses[real].mean()

    def _ids(self, input: Input, prepend_bos: bool | None) -> tuple[Tensor, list[int]]:
        """Ids (B, T) and the number of real ones in each row."""
        texts = [input] if isinstance(input, str) else input
        if isinstance(texts, list | tuple) and texts and isinstance(texts[0], str):
            rows = self._tokens.encode_all(texts, prepend_bos)
            ids, lengths = self._tokens.pad(rows), list(map(len, rows))
        else:
            ids = torch.as_tensor(input, device=self.cfg.device)
            ids = ids[None] if ids.ndim == 1 else ids
            lengths = [ids.shape[-1]] * len(ids)
        if ids.ndim != 2 or not ids.numel():
            raise InvalidRequest("the input is empty; give a text, texts, or ids (B, T) or (T,)")
        if ids.shape[1] > self.cfg.n_ctx:
            raise ContextLengthExceeded(
                f"the input has {ids.shape[1]} tokens; the model's context is {self.cfg.n_ctx}"
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.cfg.d_vocab:
            raise InvalidRequest(
                f"the input has ids from {low} to {high}; the vocabulary has {self.cfg.d_vocab}"
            )
        return ids, lengths

    def _prepends(self, prepend_bos: bool | None) -> bool:
        return self.cfg.default_prepend_bos if prepend_bos is None else prepend_bos

    def _filtered(self, names_filter: NamesFilter) -> list[str]:
        if names_filter is None or callable(names_filter):
            wanted: Callable[[str], bool] = names_filter or (lambda name: True)
            return [
                name
                for name in self.hook_dict
                if (self.cfg.use_attn_result or not name.endswith(RESULT)) and wanted(name)
            ]
        names = [names_filter] if isinstance(names_filter, str) else names_filter
        chosen = {self._point(name).name for name in names}
        return [name for name in self.hook_dict if name in chosen]

    def _point(self, name: str) -> HookPoint:
        point = self.hook_dict.get(usual_name(name))
        if point is None:
            raise InvalidRequest(f"the model has no hook point {name!r}; hook_dict lists them")
        if name.endswith(RESULT) and not self.cfg.use_attn_result:
            raise InvalidRequest(f"{name} is not computed; call set_use_attn_result(True) first")
        return point

    def _add(
        self,
        name: HookName,
        hook: Hook,
        direction: Any,
        *,
        is_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        points = (
            [self._point(name)]
            if isinstance(name, str)
            else [self.hook_dict[each] for each in self._filtered(name)]
        )
        for point in points:
            point.add_hook(hook, direction, is_permanent, level)
