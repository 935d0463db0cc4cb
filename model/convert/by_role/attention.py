"""Questions about attention: its heads, norms of queries and keys, order of a fused matrix, scale
of scores and mask."""

from typing import get_args

from logitd.model.convert.by_role import names as words
from logitd.model.convert.by_role.build import qk_norms_commute, query_rows
from logitd.model.convert.by_role.computation import QkvLayout, ScoreScale
from logitd.model.convert.by_role.evidence import NOT_SAID, Evidence
from logitd.model.convert.by_role.finding import ANY_ORDER, CONVENTION, UNUSED, Finding
from logitd.model.convert.by_role.left_out import is_trained
from logitd.model.convert.by_role.positions import WHOLE_WIDTH
from logitd.model.convert.by_role.recognize import is_causal_mask
from logitd.model.convert.by_role.stated import is_off, is_on, read_count, read_eps, setting
from logitd.model.convert.foreign import ConvertError

MAX_HEADS = 64


def n_head(file: Evidence) -> Finding:
    tensors, mapped = file.tensors, file.tensors.map
    queries, keys = query_rows(tensors)
    if mapped.n_head:
        return Finding((mapped.n_head,), "each head has separate tensors")
    name = mapped.of("query" if mapped.has("query") else "qkv", "weight")[0]
    if (weight := tensors.tensors[name]).dim() == 3:
        return Finding((len(weight),), "the first axis of the query's tensor")

    def fits(heads: int) -> bool:
        return queries % heads == 0 and keys % (queries // heads) == 0

    if mapped.has("query_norm") and (size := tensors.shape("query_norm")[0]) < queries:
        return Finding((queries // size,), f"query norms are {size} wide")
    if (said := file.said("n_head", read_count)) is not None:
        if reason := _contradicts_heads(file, said.values[0], fits(said.values[0])):
            options = [n for n in range(1, min(queries, MAX_HEADS) + 1) if fits(n)]
            origin = f"n_head is {said.values[0]} according to {said.origin}, but {reason}"
            return Finding(tuple(options), origin, True)
        return said
    if (dim := file.said("head_dim", read_count)) and queries % dim.values[0] == 0:
        return Finding((queries // dim.values[0],), f"{dim.origin}, {dim.values[0]}")
    if (groups := file.said("n_kv_head", read_count)) and keys % groups.values[0] == 0:
        size = keys // groups.values[0]
        if keys < queries and queries % size == 0:
            return Finding((queries // size,), f"{groups.origin}, {size} channels each")
    if file.tables and queries % (width := file.tables[0].width) == 0 and fits(queries // width):
        origin = f"its rotary table rotates {width} channels of a head"
        if width < queries:
            wider = [n for n in range(queries // width, 0, -1) if fits(n)]
            return Finding(tuple(wider), f"{origin}: the whole head, or a part of it", True)
        return Finding((1,), f"{origin}: one head, or {WHOLE_WIDTH}", True)
    options = [heads for heads in range(1, min(queries, MAX_HEADS) + 1) if fits(heads)]
    # Likely numbers first: heads of 16 to 128 channels, then the others.
    options.sort(key=lambda heads: (not 16 <= queries // heads <= 128, abs(queries // heads - 64)))
    return Finding(tuple(options), "neither a setting nor a shape shows it", True)


def _contradicts_heads(file: Evidence, heads: int, fits: bool) -> str:
    """The reason why shapes or other settings contradict this number of heads; "" if nothing
    does."""
    queries, keys = query_rows(file.tensors)
    if not fits:
        return f"{queries} query rows and {keys} key rows cannot be divided among that many heads"
    size = queries // heads
    found = {"head_dim": size, "n_kv_head": keys // size}
    for field, number in found.items():
        said = file.said(field, read_count)
        if said is not None and said.values[0] != number:
            return f"{said.origin} is {said.values[0]}, which would be {number}"
    return ""


def score_scale(file: Evidence) -> Finding:
    if file.tensors.map.name("qkv").endswith("in_proj_weight"):
        return Finding(("head_dim",), "torch's MultiheadAttention divides by it")
    return Finding(get_args(ScoreScale), NOT_SAID, True)


def qkv_layout(file: Evidence) -> Finding:
    mapped = file.tensors.map
    if not mapped.has("qkv"):
        return Finding(("qkv",), UNUSED)
    name = mapped.name("qkv")
    if mapped.n_head:
        return Finding(("per_head",), "each head has a separate matrix")
    if name.endswith("in_proj_weight"):
        return Finding(("qkv",), "torch's MultiheadAttention stores them this way")
    queries, keys = query_rows(file.tensors)
    layouts: tuple[QkvLayout, ...] = ("qkv", "per_head", "kqv")
    if "kqv" in name.lower():
        layouts = ("kqv", "qkv", "per_head")
    if queries != keys:
        layouts = tuple(layout for layout in layouts if layout != "per_head")
    elif "query_key_value" in name.lower():
        origin = "GPT-NeoX and BLOOM store it head by head, others one kind after the other"
        return Finding(layouts, origin, True)
    return Finding(layouts, CONVENTION)


def qk_norm(file: Evidence) -> Finding:
    mapped, (value, key) = file.tensors.map, setting(file.settings, "qk_norm")
    if value is None:
        texts = ((v, k) for k, v in file.settings.items() if words.matches(words.QK_NORM_TEXT, k))
        value, key = next(((v, k) for v, k in texts if isinstance(v, str)), (None, ""))
    if mapped.has("query_norm") != mapped.has("key_norm"):
        name = mapped.name("query_norm") or mapped.name("key_norm")
        raise ConvertError(
            f"{file.tensors.where}: {name} is a norm of only queries or only keys, which a "
            "GPTConfig cannot express. Serve the owner's class with --code FILE:NAME --run-code"
        )
    rms = isinstance(value, str) and words.names_rms(value)
    if mapped.has("query_norm"):
        origin = "norms of query and key are in the file"
        if value is not None and is_off(value):
            return Finding(("learned", "none"), f"{origin}, but {key} is {value!r}", True)
        if rms or words.names_rms(mapped.name("query_norm")):
            return Finding(("learned",), origin)
        if file.found["norm"].values == ("rmsnorm",) and key.lower() != "qk_layernorm":
            return Finding(("learned",), origin)
        used = is_trained(file.tensors, "query_norm", "key_norm")
        origin = f"{origin}; they can be imported if they are RMS norms"
        return Finding(("learned",) if used else ("learned", "none"), origin, True)
    if value is not None and is_off(value):
        return Finding(("none",), f"{key} of its settings")
    if value is not None:
        known = (rms or is_on(value)) and key.lower() != "qk_layernorm"
        origin = f"{key} of its settings is {value!r}, without weights"
        return Finding(("unit",) if known else ("unit", "none"), origin, not known)
    if setting(file.settings, "qk_norm_eps")[1]:
        return Finding(
            ("unit", "none"),
            "the settings have qk_norm_eps, but the norms have no weights",
            True,
        )
    return Finding(("none", "unit"), CONVENTION)


def qk_norm_eps(file: Evidence) -> Finding:
    usual = file.found["norm_eps"]
    if not usual.resolved:
        usual = Finding((1e-6, 1e-5, 1e-8, 2**-23), CONVENTION)
    return file.said_or("qk_norm_eps", read_eps, usual)


def qk_norm_position(file: Evidence) -> Finding:
    before = tuple(ANY_ORDER.values())
    learned = "learned" in file.found["qk_norm"].values
    if not learned or "rotary" not in file.found["positions"].values:
        return Finding(before, UNUSED)
    if qk_norms_commute(file.tensors):
        return Finding(before, "either order: the norms of query and key have equal weights")
    origin = "the norms of query and key have weights; after_rotary cannot be imported"
    return Finding(before, origin, True)


def causal(file: Evidence) -> Finding:
    for name, tensor in file.ignored.items():
        if is_causal_mask(tensor):
            return Finding((True,), f"{name} is a causal mask")
    return Finding((True, False), CONVENTION)
