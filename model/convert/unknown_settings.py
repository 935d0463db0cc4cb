"""Unknown settings: finds numbers and flags of a configuration that may change a model's logits.

A setting is known if a reader uses it, if the shapes of tensors show its effect, or if it belongs
to training. The user is asked about every other number and flag, because a logit cap or a factor,
for example, does not show in the names and shapes of tensors. Of texts, the user is asked about
those whose names have a word for a part of the model; `by_role` reads the usual ones.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from logitd.model.convert.by_role.names import (
    RMS_SETTING,
    ROTARY_SETTING,
    SETTINGS,
    SWIGLU_SETTING,
    TIED,
    snake_case,
)
from logitd.model.convert.by_role.stated import as_number, is_number
from logitd.model.convert.foreign import ConvertError, Unread

_KNOWN = frozenset(name for names in SETTINGS.values() for name in names)
COMPUTED = ("activation", "norm_first", "norm_eps", "rope_theta", "qk_norm", "qk_norm_eps")
"""Fields whose effect the tensors do not show."""
_UNSHOWN = frozenset(
    name for field in (*COMPUTED, "n_head", "n_kv_head", "head_dim") for name in SETTINGS[field]
)
"""Names of settings whose effect the tensors do not show."""

_SHAPE = (
    r"d_[kqv]|d_qkv|n_?params|"
    r"(use_|qkv_|attn_|attention_|mlp_|ffn?_|head_|lm_head_|linear_|norm_|ln_)?bias|"
    r"(use_)?(gqa|mqa|grouped_query(_attention)?|multi_query(_attention)?)|(n|num)_kv_groups|n_rep|"
    r"multiple_of|ffn?_(mult(iplier)?|dim_multiplier|ratio|factor)|mlp_(ratio|mult(iplier)?)|"
    r"(hidden|expansion)_(mult(iplier)?|factor|ratio|size_mult)|expansion|"
    r"num_param(eter)?s|total_param(eter)?s|param_count|padded_vocab_size|vocab_size_.*|"
    rf"{TIED.pattern}|tie_encoder_decoder"
)
"""Names of settings whose effect the tensors show, such as widths, biases, shared keys and a tied
head."""
FLAGS = (RMS_SETTING, ROTARY_SETTING, SWIGLU_SETTING)
"""Names of flags that recognition by role reads."""
_COUNTED = (
    r"(epochs?|updates?|steps?|iters?|iterations?|interval|every|freq|frequency|tokens|samples|"
    r"chars|characters|bytes|documents|sequences|examples)"
)
_PHASE = (
    r"(max|min|maximum|total|num|n|number|count|of|per|in|to|and|for|a|the|new|gen|train|training|"
    r"trained|eval|evaluation|val|valid|validation|test|log|logging|save|saving|checkpoint|ckpt|"
    r"backup|sample|sampling|generate|generation|print|report|plot|wandb|warm_?up|warmdown|"
    r"cooldown|lr|decay|learning|rate|weight|grad|gradient|accum|accumulation|accumulate|micro|"
    r"mini|batch|batches|global|current|cur|start|last|best|end|this|until|since|stable|anneal|"
    r"seen|processed|update|optim|optimizer|opt|scheduler|sched|adam|device|rank|worker|dataset|"
    r"data|corpus|file|line|epoch|step|iter|iteration|interval|inner|outer|local|run|display|"
    r"refresh|flush|sync|dump|target|early|stop|stopping|second|sec|document|sequence|example)"
)
"""Words that name the part of a training whose steps, tokens or the like are counted."""
_TRAINING = (
    r"(.*_)?(lr|learning_rate|weight_decay|wd|momentum|betas|beta_?[12]|adam_?(eps|epsilon)|"
    r"patience|seed|workers|accuracy|acc|"
    r"loss(es)?|ppl|perplexity|bpc|bpb|dropout|pdrop|dropout_(p|prob|rate)|drop_prob|layerdrop|"
    r"seconds|minutes|hours|"
    r"time|date|version|world_size|batch|batches|batch_size|bs|bsz|token_id|pad_idx)|"
    rf"({_PHASE}_)*{_COUNTED}(_{_PHASE})*|(local_)?rank|"
    r"(?!val_(residual|emb))(train|training|test|eval|evaluation|val|valid|validation|best|wandb|save|saved|resume|"
    r"checkpoint|warm_?up|adam|optim|optimizer|sched|scheduler|accum|accumulation|grad|"
    r"gradient|ddp|fsdp|init|initializer|data|dataset|summary|log_(interval|every|freq|iters?|steps?))_.*|"
    r"batch.*|warm_?up|adam|decay|lr_.*|decay_lr|(grad_?)?clip|clip_grad.*|max_(grad_)?norm|"
    r"early_stop.*|init(_.*)?|.*_init(_std|_range|_scale)?|init_std|fused(_adam)?|label_smoothing|"
    r"compile|compiled|use_compile|torch_compile|ddp|fsdp|amp|use_amp|(use_)?(fp16|bf16)|"
    r"mixed_precision|(use_)?ema(_(decay|rate|beta|start|every|warm_?up))?|(use_)?muon|nesterov|"
    r"foreach|deterministic|(use_)?activation_checkpointing|"
    r"use_cache|kv_cache|use_kv_cache|cuda|mps|gpu|n?gpus?|num_threads|pin_memory|verbose|debug|"
    r"always_save_checkpoint|eval_only|shuffle|stride|gradient_checkpointing|(use_)?checkpointing|"
    r"(use_)?(flash|sdpa|flash_attn|flash_attention|flash_attn_2)|(use_)?wandb|tensorboard|"
    r"top_?[kp]|max_new_tokens|max_gen_len|num_return_sequences|.*_split|split|"
    r"_step_count|.*elapsed.*|timestamp|created(_at)?|format(_version)?|ignore_index|"
    r"pad(ding)?_(id|idx|index)|(bos|eos|pad|unk|sep|cls)(_id|_idx)?|mask_(id|idx)|ndigit"
)
"""Names of settings that do not change the logits of a trained model: settings for training,
sampling, evaluation and storage."""
PER_LAYER = re.compile(
    r"layer_types|blocks|layers|(attention|attn)s|"
    r"(attention|attn|block)_(layers?|types?|kinds?|windows?|patterns?)|"
    r"((sliding|attention|attn|local)_)*(window|pattern)s?(_(sizes?|pattern|types?|list))?|"
    r".*_(layers|layer_indices|pattern)"
)
"""Names of lists, and of texts such as "SSL", that say how layers differ."""
_KIND = re.compile(
    r"(((self|causal)_)?(attn|attention)(_mask)?|residual|block|rope|rotary|"
    r"(layer_?|rms_?)?norm(alization)?|"
    r"(mlp|ffn?|feed_forward)|qkv|gqa|mqa|gate|softmax|mask|logits?|(token_)?mixer)"
    r"(_(type|kind|mode|class|variant|style|layout|order|format|layer|impl(ementation)?|fn|"
    r"function))?|((final|output|logits?|head)_)+(activation|act|fn|nonlinearity)|"
    r"(rope|rotary|attn|attention|softmax|score|logits?|emb|embed|embedding|embeddings)_"
    r"(scale|scaling)(_type)?|(scale|scaling)_(type|kind|mode)|layout|"
    r"param(etri[sz]|eteri[sz])ation|(.*_)?soft_?cap(ping)?(_.*)?"
)
"""Names of texts that may say how attention, a block, a norm or the like is computed."""
_PARTS = frozenset(
    re.findall(
        "[a-z]+",
        "attn attention softmax sdpa score scores similarity kernel residual residuals skip rope "
        "rotary norm norms normalization layernorm rmsnorm ln mlp ffn ff glu qkv gate gates gating "
        "mask masking logit logits mixer mixing conv transform activation act nonlinearity head "
        "heads unembedding shift combine merge rel feature temperature",
    )
)
"""Words in the names of such texts."""
_PLACES = frozenset(
    re.findall("[a-z]+", "dir path name file device dtype backend url project id description key")
)
"""Words in the names of texts that say where something is, or what it is called."""
_USUAL = frozenset(
    re.findall(
        "[a-z0-9]+",
        "causal masked full global dense softmax vanilla standard default normal self scaled dot "
        "product multi head multihead mha gqa mqa grouped query flash sdpa math eager torch "
        "xformers attn attention v none sequential block decoder transformer gpt layer rope rotary "
        "norm pre post ln rms layernorm rmsnorm nn mlp ffn gated swiglu silu swish qkv no false "
        "gate first gpt2 2",
    )
)
"""Words for what a GPT of this project computes, and for code that computes attention."""
_FLAG_TEXTS = {"true": True, "false": False}
_REPEATS = re.compile(r"((n|num|number_of|max|inner|loop|recurrent)_)?(steps|iters?|iterations)")
"""Names that count a training's steps, or how often a stack of layers is repeated."""
FEWEST_STEPS = 65
"""A smaller number of steps is a number of repetitions."""
_NAMES = re.compile(f"(?:{_SHAPE}|{_TRAINING})")
_NEUTRAL: Mapping[str, object] = {
    **dict.fromkeys(("causal", "is_causal", "causal_mask", "use_causal_mask", "is_decoder"), True),
    **dict.fromkeys(("decoder_only", "use_pos_emb", "scale_attn_weights", "autoregressive"), True),
    **dict.fromkeys(("learned_pos", "learned_pos_emb", "use_learned_pos_emb", "pos_emb"), True),
    **dict.fromkeys(("layer_norm", "layernorm", "use_layer_norm", "use_layernorm"), True),
    **dict.fromkeys(("parallel_residual", "use_parallel_residual", "add_cross_attention"), False),
    **dict.fromkeys(("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"), False),
    **dict.fromkeys(("use_sliding_window", "is_encoder_decoder", "output_attentions"), False),
    **dict.fromkeys(("pretraining_tp", "partial_rotary_factor", "rotary_pct", "temperature"), 1),
}
"""Other settings that may change logits, each with the value that makes the source compute the same
logits as this project's GPT."""


def unknown_settings(settings: Mapping[str, Any], *, by_role: bool = False) -> dict[str, Any]:
    """The numbers, flags, lists of them and lists of unlike layers that are not understood and may
    change logits, texts about attention, blocks and rotary positions, and values that cannot be
    read. Numbers equal to 0 are omitted, because they usually turn a feature off. Recognition
    `by_role` understands the settings of COMPUTED and the number of heads. Any other reader passes
    only the settings that it did not use, so these are unknown, even strings."""
    known = _KNOWN if by_role else _KNOWN - _UNSHOWN

    def is_unknown(name: str, value: Any) -> bool:
        if Unread.is_in(value):
            return _NAMES.fullmatch(name) is None
        if isinstance(value, list) and PER_LAYER.fullmatch(name):
            return not all(map(_is_usual, value))
        if isinstance(value, list):
            texts = bool(_KIND.fullmatch(name)) or _names_part(name)
            return any(is_unknown(name, item) for item in value if texts or type(item) is not str)
        per_layer = PER_LAYER.fullmatch(name) and str(value).isalpha()
        if isinstance(value, str) and (_KIND.fullmatch(name) or per_layer):
            return not _is_usual(value)
        if isinstance(value, str) and _names_part(name) and name not in known:
            return not _is_usual(value)
        is_flag = isinstance(value, bool)
        value = _FLAG_TEXTS.get(str(value).lower(), as_number(value))
        if isinstance(value, str):
            return name in _UNSHOWN - known
        if _REPEATS.fullmatch(name) and is_number(value):
            return 1 < value < FEWEST_STEPS
        return (
            isinstance(value, int | float)
            and (value is False or value != 0)
            and name not in known
            and not _is_neutral(name, value)
            and not (by_role and is_flag and any(f.fullmatch(name) for f in FLAGS))
            and _NAMES.fullmatch(name) is None
        )

    return {name: value for name, value in settings.items() if is_unknown(snake_case(name), value)}


def _names_part(name: str) -> bool:
    """True if a text of this name may say how a part of the model is computed."""
    words = frozenset(name.split("_"))
    return bool(words & _PARTS) and not words & _PLACES and _NAMES.fullmatch(name) is None


def is_of_training(name: str) -> bool:
    """True if a setting of this name describes the training, or if the tensors show its effect."""
    return _NAMES.fullmatch(name.lower()) is not None


def unshown(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values whose effect the tensors do not show, such as the number of heads, and those that
    are not understood."""
    unknown = unknown_settings(values, by_role=True)
    return {k: v for k, v in values.items() if k.lower() in _UNSHOWN or k in unknown}


def _is_neutral(name: str, value: object) -> bool:
    """True for a setting's value that changes no logit. True is not 1."""
    neutral = _NEUTRAL.get(name)
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


def _is_usual(value: Any) -> bool:
    """True for a text that contains only words for what a GPT computes."""
    return isinstance(value, str) and _USUAL.issuperset(re.findall("[a-z0-9]+", value.lower()))


def still_unknown(
    settings: Mapping[str, Any], ignored: Collection[str], where: str
) -> dict[str, Any]:
    """The unknown settings, except those that the user has chosen to ignore. Raises ConvertError if
    a name in `ignored` is not the name of an unknown setting."""
    if wrong := sorted(set(ignored) - settings.keys()):
        raise ConvertError(
            f"--ignore-setting {wrong[0]}: {where} has no unknown setting of this name; its "
            f"unknown settings are {', '.join(settings) or 'none'}"
        )
    return {name: value for name, value in settings.items() if name not in ignored}


def question(settings: Mapping[str, Any]) -> str:
    """The question to the user about unknown settings."""
    shown = ", ".join(f"{name} {value!r}" for name, value in list(settings.items())[:12])
    flags = " ".join(f"--ignore-setting {name}" for name in list(settings)[:12])
    return (
        f"these settings are not understood, and a text cannot show their effect: {shown}. Give "
        "--code FILE.py:NAME (the owner's class) to compare logits; or, if they change no logits "
        "or only say what other flags say: "
        f"{flags}"
    )
