"""HookedGPT: a served model with TransformerLens' interface, computed in plain torch.

    hooked = LLM("checkpoints/python-small").hooked
    logits, cache = hooked.run_with_cache("def main():")
    cache["pattern", 0]                                       # (B, H, T, T)
    hooked.run_with_hooks("def main():", fwd_hooks=[("blocks.0.hook_mlp_out", my_function)])

Names, shapes and semantics are the same as in TransformerLens' TransformerBridge: the weights are
the checkpoint's own until `enable_compatibility_mode` processes them as HookedTransformer does. The
caller's functions run in process on torch tensors (float32 or wider). Autograd records all
operations after the embeddings, unless the caller turns it off; parameters get no gradients.

A HookedGPT shares no state with the engine, so the engine's results never change.

Shapes: B sequences, T positions, V = vocab_size.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from logitd.model.device import refuse_lost_threads
from logitd.model.hooked.cache import ActivationCache, Where, take
from logitd.model.hooked.config import HookedConfig, PaddingSide
from logitd.model.hooked.folding import fold_weights
from logitd.model.hooked.names import positions_axis
from logitd.model.hooked.network import hooked_copy
from logitd.model.hooked.points import AddedHooks, HookedModel, HookPoint, NamesFilter
from logitd.model.hooked.tap import run
from logitd.model.hooked.tokens import Batch, Input, Tokens, beginning
from logitd.model.hooked.weights import HookedWeights
from logitd.model.inference.errors import InvalidRequest
from logitd.model.text.tokenizer import Tokenizer
from logitd.model.transformer.gpt import GPT

ReturnType = Literal["logits", "loss", "both"] | None


class HookedGPT(HookedModel):
    """A GPT with hook points. `API` lists the attributes that `LLM` forwards to this class."""

    API = frozenset(
        (
            *("run_with_cache", "run_with_hooks", "hooks", "add_hook", "add_perma_hook"),
            *("reset_hooks", "hook_dict", "mod_dict", "cfg", "loss_fn", *HookedWeights.NAMES),
            *("to_tokens", "to_string", "to_str_tokens", "to_single_token", "to_single_str_token"),
            *("get_token_position", "tokens_to_residual_directions", "enable_compatibility_mode"),
            *("set_use_attn_result", "set_use_split_qkv_input", "set_use_attn_in"),
            "set_use_hook_mlp_in",
        )
    )

    def __init__(self, gpt: GPT, tokenizer: Tokenizer, name: str) -> None:
        self._config = gpt.config
        self.cfg = HookedConfig.of(
            gpt.config, gpt.token_embedding.weight, name, bos=beginning(tokenizer) is not None
        )
        super().__init__(gpt.config, self.cfg)
        self._gpt, self._unembed = hooked_copy(gpt, self.hook_dict)
        self._weights = HookedWeights(self._gpt, self._unembed, self.hook_dict)
        self.tokenizer = tokenizer
        tokens = self._tokens = Tokens(tokenizer, self.cfg)
        self.to_tokens, self.to_string = tokens.to_tokens, tokens.to_string
        self.to_str_tokens, self.to_single_token = tokens.to_str_tokens, tokens.to_single_token
        self.to_single_str_token = tokens.to_single_str_token
        self.get_token_position = tokens.get_token_position

    def __getattr__(self, name: str) -> Any:
        """The weights, and values computed from the weights, such as `W_Q`, `blocks` and `OV`."""
        if name in HookedWeights.NAMES:
            return getattr(self._weights, name)
        raise AttributeError(f"HookedGPT has no attribute {name!r}")

    # Running the model

    def __call__(
        self,
        input: Input,
        return_type: ReturnType = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        padding_side: PaddingSide | None = None,
        attention_mask: Tensor | None = None,
        stop_at_layer: int | None = None,
    ) -> Any:
        """Run a text, several texts, or ids (B, T) or (T,) through the model.

        return_type     "logits" (B, T, V), "loss", "both", or None
        loss_per_token  losses (B, T - 1) in nats, 0 at padding, instead of their mean over tokens
        padding_side    the side on which shorter texts, or rows of ids, are padded
        attention_mask  (B, T), 0 for padding
        stop_at_layer   return the stream (B, T, d_model) before this block; negative numbers count
                        from the end

        Values at the positions of padding have no meaning. Raises InvalidRequest for ids outside
        the vocabulary, and ContextLengthExceeded.
        """
        batch = self._tokens.batch(input, prepend_bos, padding_side, attention_mask)
        out = self._run(batch, self._stop(stop_at_layer))
        if stop_at_layer is not None or return_type == "logits":
            return out
        if return_type is None:
            return None
        mask = None if batch.real.all() else batch.real
        loss = self.loss_fn(out, batch.ids, mask, per_token=loss_per_token)
        if return_type == "both":
            return out, loss
        if return_type == "loss":
            return loss
        raise InvalidRequest(
            f"return_type is {return_type!r}; it must be 'logits', 'loss', 'both' or None"
        )

    def _run(self, batch: Batch, stop: int | None = None) -> Tensor:
        refuse_lost_threads()
        points, real = self.hook_dict, batch.hidden_padding
        return run(self._gpt, self._unembed, batch.ids, points, real=real, stop=stop)

    def _stop(self, layer: int | None) -> int | None:
        layers = self.cfg.n_layers
        if layer is None or layer == layers:
            return layer
        if not -layers <= layer < layers:
            raise InvalidRequest(f"stop_at_layer is {layer}; the model has {layers} blocks")
        return layer % layers

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
        device        the device on which the tensors are kept
        incl_bwd      also run backward from the output, which must be a scalar
                      (return_type="loss"), and keep each gradient as "<name>_grad"
        pos_slice     positions to keep
        """
        kept: dict[str, Tensor] = {}

        def save(value: Tensor, *, hook: HookPoint, suffix: str = "") -> None:
            value = value.detach().to(device or value.device)
            kept[hook.name + suffix] = take(value, pos_slice, positions_axis(hook.name))

        names = self.chosen_points(names_filter)
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

    def generate(
        self,
        input: Input = "",
        max_new_tokens: int = 10,
        stop_at_eos: bool = True,
        eos_token_id: int | list[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        temperature: float = 1.0,
        prepend_bos: bool | None = None,
        return_type: Literal["input", "str", "tokens"] = "input",
    ) -> Any:
        """Continue a text, texts, or ids (B, T), with the hooks in place. A sequence that has ended
        is padded with the first token of `eos_token_id`, by default the end-of-document token.
        Shorter texts are padded on the left.

        At temperature 0 or below, each token is the likeliest; otherwise it is sampled from the
        `top_k` likeliest (None: all) with torch's global random generator. The whole text is
        computed again for each new token, so `LLM.generate` is many times faster."""
        as_texts = isinstance(input, str) or (len(input) > 0 and isinstance(input[0], str))
        batch = self._tokens.batch(input, prepend_bos, "left" if as_texts else None)
        chosen = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id
        ends = (chosen or self.tokenizer.ends) if stop_at_eos else ()
        temperature = temperature if do_sample else 0.0
        ids = self._continued(batch, max_new_tokens, temperature, top_k, ends)
        if return_type == "tokens" or (return_type == "input" and not as_texts):
            return ids
        begins = as_texts and self._tokens.prepends(prepend_bos)
        starts = (~batch.real).sum(dim=1) + begins
        rows = zip(ids, starts.tolist(), strict=True)
        texts = [self.to_string(row[start:]) for row, start in rows]
        return texts[0] if isinstance(input, str) else texts

    @torch.no_grad()
    def _continued(
        self, batch: Batch, tokens: int, temperature: float, top_k: int | None, ends: Sequence[int]
    ) -> Tensor:
        """The ids of the batch and of its continuations (B, T + tokens); fewer columns if all
        sequences end earlier. Each row of the batch is padded at its beginning."""
        ids, real, context = batch.ids, batch.real, self.cfg.n_ctx
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for _ in range(tokens):
            row = self._run(Batch(ids[:, -context:], real[:, -context:]))[:, -1]
            new = _chosen(row, temperature, top_k)
            if ends:
                new = torch.where(ended, ends[0], new)
                ended |= torch.isin(new, torch.tensor(ends, device=ids.device))
            ids = torch.cat((ids, new[:, None]), dim=1)
            real = torch.cat((real, torch.ones_like(real[:, :1])), dim=1)
            if ends and ended.all():
                break
        return ids

    # Hooks

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Also compute `attn.hook_result`, the output of each head (B, T, H, d_model)."""
        self.cfg.use_attn_result = use_attn_result

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Give the queries, keys and values of each head separate copies of the stream:
        `hook_q_input` (B, T, H, d_model), `hook_k_input` and `hook_v_input`. Raises InvalidRequest
        if `use_attn_in` is on."""
        self._exclude("use_split_qkv_input", use_split_qkv_input, "use_attn_in")
        self.cfg.use_split_qkv_input = use_split_qkv_input

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Give each head a separate copy of the stream, `hook_attn_in` (B, T, H, d_model). Raises
        InvalidRequest if `use_split_qkv_input` is on, or if heads share keys."""
        self._exclude("use_attn_in", use_attn_in, "use_split_qkv_input")
        if use_attn_in and self.cfg.n_key_value_heads is not None:
            raise InvalidRequest(
                "use_attn_in needs separate keys and values for each head, but these heads share "
                "them: call set_use_split_qkv_input(True) instead"
            )
        self.cfg.use_attn_in = use_attn_in

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Give each MLP a separate copy of the stream, `hook_mlp_in` (B, T, d_model). Raises
        InvalidRequest if norms come after the MLPs."""
        if use_hook_mlp_in and self._config.norm_position == "post":
            raise InvalidRequest(
                "the model has no hook_mlp_in, because its norms come after the MLPs"
            )
        self.cfg.use_hook_mlp_in = use_hook_mlp_in

    def _exclude(self, setting: str, on: bool, other: str) -> None:
        if on and getattr(self.cfg, other):
            raise InvalidRequest(
                f"{setting} and {other} cannot both be on: call set_{other}(False) first"
            )

    # Weights

    def enable_compatibility_mode(
        self,
        *,
        no_processing: bool = False,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool = True,
        refactor_factored_attn_matrices: bool = False,
        disable_warnings: bool = True,
    ) -> None:
        """Process the weights as TransformerLens' HookedTransformer does when it loads a model.
        Probabilities stay the same, up to rounding. Direct logit attribution needs the processed
        weights. No warnings are issued. Raises InvalidRequest for shapes whose probabilities would
        change."""
        if no_processing:
            return
        config = self._config
        if config.norm_position == "post" or (
            config.norm == "layernorm" and (config.smear or config.value_embeddings)
        ):
            raise InvalidRequest(
                "the model's norms cannot be folded into its weights: use no_processing=True"
            )
        if refactor_factored_attn_matrices and (
            config.positions == "rotary"
            or config.qk_norm
            or config.value_embeddings
            or config.n_kv_head < config.n_head
        ):
            raise InvalidRequest(
                "refactor_factored_attn_matrices is not possible for this model: its queries and "
                "keys are rotated or normalized, its heads share keys and values, or it has value "
                "embeddings. Leave the option out"
            )
        fold_weights(
            self._gpt,
            self._unembed,
            fold_ln=fold_ln,
            center_writing_weights=center_writing_weights,
            center_unembed=center_unembed,
            fold_value_biases=fold_value_biases,
            refactor=refactor_factored_attn_matrices,
        )
        if fold_ln:
            self.cfg.normalization_type = f"{self.cfg.normalization_type.removesuffix('Pre')}Pre"
        self._weights = HookedWeights(self._gpt, self._unembed, self.hook_dict)

    def tokens_to_residual_directions(self, tokens: Any) -> Tensor:
        """The columns (..., d_model) of `W_U` for one token (a string or an id) or for several
        ids."""
        ids = self.to_single_token(tokens) if isinstance(tokens, str) else tokens
        ids = torch.as_tensor(ids, device=self.cfg.device)
        return self.W_U[:, ids.reshape(()) if ids.numel() == 1 else ids].movedim(0, -1)

    def loss_fn(
        self,
        logits: Tensor,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        per_token: bool = False,
    ) -> Tensor:
        """The loss of each token after the first (B, T - 1), in nats, or their mean. Padding (0 in
        `attention_mask`, (B, T)) is excluded: its losses are 0."""
        losses = -logits[:, :-1].log_softmax(dim=-1).gather(-1, tokens[:, 1:, None])[..., 0]
        if attention_mask is None:
            return losses if per_token else losses.mean()
        real = (attention_mask[:, :-1] * attention_mask[:, 1:]).bool()
        return losses.masked_fill(~real, 0.0) if per_token else losses[real].mean()


def _chosen(row: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """The token (B,) chosen from each row of logits (B, V)."""
    if temperature <= 0:
        return row.argmax(dim=-1)
    row = row / temperature
    if top_k is not None:
        least = row.topk(top_k).values[:, -1:]
        row = row.masked_fill(row < least, float("-inf"))
    return torch.multinomial(row.softmax(dim=-1), 1)[:, 0]
