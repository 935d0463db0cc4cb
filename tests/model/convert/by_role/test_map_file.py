"""Map files: drafts are completed and read again; errors name the key."""

import re
from pathlib import Path

import pytest
import torch

from logitd.model.convert.by_role.build import Built
from logitd.model.convert.by_role.map_file import (
    MapFile,
    check_answers,
    draft,
    read_map_file,
    tensor_map,
)
from logitd.model.convert.by_role.read import RoleOptions, read_by_role, recognize_file
from logitd.model.convert.by_role.resolution import OpenQuestions
from logitd.model.convert.foreign import ConvertError, ForeignModel
from logitd.model.convert.state_file import StateFile
from tests.model.convert.by_role.scheme import (
    Scheme,
    findings,
    given_logits,
    largest_difference,
    mapped,
    our_logits,
    some_ids,
    state,
    state_file,
)
from tests.model.convert.by_role.schemes import SCHEMES


def completed(text: str, scheme: Scheme) -> str:
    """A draft with the right answer in every line of [computation]."""
    lines = []
    for line in text.splitlines():
        if field := re.fullmatch(r"# (\w+) = .*(# (open|assumed).*)", line):
            value = getattr(scheme.computation, field[1])
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            line = f"{field[1]} = {shown}"
        lines.append(line)
    return "\n".join(lines)


def logits_of(file: StateFile, map_file: Path) -> torch.Tensor:
    options = RoleOptions(map_file=read_map_file(map_file))
    model = read_by_role(recognize_file(file, options))
    return our_logits(Built(model.config, model.weights, ()), some_ids())


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_completed_draft_imports_the_model(scheme: Scheme, tmp_path: Path) -> None:
    model, path = scheme.model(), tmp_path / "draft.toml"
    file = state_file(model, settings=scheme.settings)
    with pytest.raises(OpenQuestions):
        read_by_role(recognize_file(file, RoleOptions(draft=path)))
    path.write_text(completed(path.read_text(encoding="utf-8"), scheme), encoding="utf-8")
    read = read_map_file(path)
    assert dict(read.names) == scheme.names()
    assert (read.transposed or frozenset()) == scheme.transposed
    difference = largest_difference(logits_of(file, path), given_logits(scheme, model, some_ids()))
    assert difference < 1e-5


def test_draft_names_the_state_dict() -> None:
    tensors = mapped(SCHEMES["book"].model())
    assert 'state = "a.model"' in draft("a.model", tensors.map, findings(tensors))
    assert "state =" not in draft(None, tensors.map, findings(tensors))


STRANGE = """
state = "inner"

[tensors]
token_embedding.weight = "t"
positions.weight = "p"
attention_norm.weight = "l{N}.n"
attention_norm.bias = "l{N}.nb"
mlp_norm.weight = "l{N}.n"
mlp_norm.bias = "l{N}.nb"
query.weight = "l{N}.h{M}.a"
key.weight = "l{N}.h{M}.b"
value.weight = "l{N}.h{M}.c"
attention_out.weight = "identity"
mlp_up.weight = "l{N}.x"
mlp_down.weight = "l{N}.y"
head.weight = "o"

[computation]
n_head = 2
norm = "layernorm"
norm_position = "pre"
final_norm = false
activation = "relu"
score_scale = "head_dim"
residual = "parallel"

[files]
ignore = ["junk.*", "l{N}.noise"]
transposed = ["mlp_up", "mlp_down"]
"""


def strange_tensors() -> dict[str, torch.Tensor]:
    """Tensors with meaningless names, in two layers numbered from 1, with separate tensors for each
    head."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {"t": drawn(11, 8), "p": drawn(6, 8), "o": drawn(11, 8), "junk.a": drawn(3)}
    for layer in (1, 2):
        tensors |= {f"l{layer}.n": drawn(8), f"l{layer}.nb": drawn(8), f"l{layer}.noise": drawn(1)}
        tensors |= {f"l{layer}.h{head}.{k}": drawn(4, 8) for head in (0, 1) for k in "abc"}
        tensors |= {f"l{layer}.x": drawn(8, 20), f"l{layer}.y": drawn(20, 8)}
    return tensors


def strange_map(folder: Path, text: str = STRANGE) -> MapFile:
    path = folder / "strange.toml"
    path.write_text(text, encoding="utf-8")
    return read_map_file(path)


def read_strange(given: MapFile, tensors: dict[str, torch.Tensor]) -> ForeignModel:
    file = StateFile(Path("s.pt"), "s.pt", tensors)
    return read_by_role(recognize_file(file, RoleOptions(map_file=given)))


def test_map_file_names_meaningless_tensors(tmp_path: Path) -> None:
    given, tensors = strange_map(tmp_path), strange_tensors()
    assert given.state == "inner"
    model = read_strange(given, tensors)
    assert (model.config.n_layer, model.config.n_head, model.config.head_dim) == (2, 2, 4)
    weights = model.weights
    queries = torch.cat([tensors["l2.h0.a"], tensors["l2.h1.a"]])
    assert torch.equal(weights["blocks.1.qkv.weight"][:8], queries)
    assert torch.equal(weights["blocks.0.mlp_up.weight"], tensors["l1.x"].T)
    assert torch.equal(weights["blocks.0.mlp_norm.bias"], tensors["l1.nb"])
    assert torch.equal(weights["blocks.1.attention_out.weight"], torch.eye(8))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (('ignore = ["junk.*", "l{N}.noise"]', 'ignore = ["junk.*"]'), r"2 tensors .* l1\.noise"),
        (('ignore = ["junk.*", "l{N}.noise"]', ""), r"3 tensors without a known role"),
        (('"l{N}.x"', '"l{N}.z"'), r"mlp_up\.weight is 'l\{N\}\.z', but no tensor has such a name"),
        (('"t"', '"tt"'), r"lacks 1 tensor that the map names; the first is tt"),
    ],
)
def test_map_that_does_not_fit_the_file_is_refused(
    change: tuple[str, str], sentence: str, tmp_path: Path
) -> None:
    assert STRANGE.replace(*change) != STRANGE
    with pytest.raises(ConvertError, match=sentence):
        read_strange(strange_map(tmp_path, STRANGE.replace(*change)), strange_tensors())


@pytest.mark.parametrize(
    ("role", "name"),
    [
        ("token_embedding", "t"), ("key", "l{N}.h{M}.b"), ("mlp_up", "l{N}.x"),
        ("attention_norm", "l{N}.n"), ("mlp_norm", "l{N}.n"),
    ],
)  # fmt: skip
def test_map_without_a_role_that_every_gpt_has_is_refused(
    role: str, name: str, tmp_path: Path
) -> None:
    less = STRANGE.replace(f'{role}.weight = "{name}"\n', "")
    assert less != STRANGE
    given = strange_map(tmp_path, less.replace('["junk.*"', f'["junk.*", "{name}"'))
    with pytest.raises(ConvertError, match=rf"lacks {role}, and not all"):
        read_strange(given, strange_tensors())


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [("l2.h1.c", "junk.c", r"lacks 1 tensor .* l2\.h1\.c"), ("l2.", "l3.", r"l2\.|l3\.")],
    ids=["a layer lacks a tensor", "a layer is missing"],
)
def test_incomplete_layers_are_refused(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    tensors = {name.replace(old, new): tensor for name, tensor in strange_tensors().items()}
    with pytest.raises(ConvertError, match=sentence):
        read_strange(strange_map(tmp_path), tensors)


def test_map_without_tensors_answers_and_ignores(tmp_path: Path) -> None:
    """The map file answers questions and lists tensors to ignore. It states no roles, so the roles
    are recognized from the names."""
    path = tmp_path / "few.toml"
    path.write_text(
        '[computation]\nn_head = 4\nactivation = "gelu"\nscore_scale = "head_dim"\n'
        'norm_position = "pre"\nfinal_norm = true\n[files]\nignore = ["gadget.*"]\n',
        encoding="utf-8",
    )
    scheme = SCHEMES["nanoGPT"]
    model = scheme.model()
    file = StateFile(Path("m.pt"), "m.pt", state(model) | {"gadget.weight": torch.ones(7, 5)})
    difference = largest_difference(logits_of(file, path), given_logits(scheme, model, some_ids()))
    assert difference < 1e-5
    recognized = recognize_file(file, RoleOptions(map_file=read_map_file(path)))
    assert recognized.findings["n_head"].origin == "n_head in few.toml"


def test_flags_come_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "few.toml"
    path.write_text("[computation]\nn_head = 4\n", encoding="utf-8")
    options = RoleOptions(map_file=read_map_file(path), answers={"n_head": 2})
    recognized = recognize_file(state_file(SCHEMES["nanoGPT"].model()), options)
    assert recognized.findings["n_head"].values == (2,)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("n_head = 4", "n_head is unknown"),
        ("tensors = 3", "tensors is 3"),
        ("state = 3", "state is 3"),
        ("[tensors]\nembeding.weight = 'x'", r"tensors\.embeding .*token_embedding"),
        ("[tensors]\nhead = 'x'", r"tensors\.head is 'x'"),
        ("[tensors]\nhead.wait = 'x'", r"tensors\.head\.wait .*weight.*bias"),
        ("[tensors]\nhead.weight = 3", r"tensors\.head\.weight is 3"),
        ("[tensors]\nhead.weight = ''", r"tensors\.head\.weight is ''"),
        ("[tensors]\nkey.weight = 'a.{K}'", r"key\.weight .*\['\{K\}'\].*\{N\}.*\{M\}"),
        ("[tensors]\nhead.weight = 'a.{N}'", r"head\.weight .*\['\{N\}'\]"),
        ("[computation]\nheads = 4", "computation.heads is unknown; the fields are n_head, "),
        ("[computation]\nactivation = 'mish'", "activation is 'mish'.*'relu'"),
        ("[computation]\nn_head = 4.0", r"n_head is 4\.0"),
        ("[computation]\nn_head = 0", "n_head is 0"),
        ("[computation]\nn_head = true", "n_head is True"),
        ("[computation]\nfinal_norm = 'yes'", "final_norm is 'yes'"),
        ("[computation]\nnorm_eps = -1", "norm_eps is -1"),
        ("[files]\nignore = 'x'", r"files\.ignore is 'x'"),
        ("[files]\nskip = []", r"files\.skip"),
        ("[files]\ntransposed = ['up']", r"files\.transposed.* is 'up'.*mlp_up"),
        ("[tensors", "TOML"),
        ("a = " + "9" * 50_000, "TOML"),
        ("a = " + "[" * 50_000, "nested too deeply"),
        (f"a = 1\nb{'.b' * 50_000} = 1", r"50,000 dots; the limit is 100"),
        ("x = 1\n[a" + ".'b'" * 50_000 + "]", r"50,000 dots; the limit is 100"),
    ],
)
def test_broken_map_file_names_its_key(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConvertError, match=rf"wrong\.toml.*{sentence}"):
        read_map_file(path)


def test_file_that_is_missing_or_not_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"none\.toml does not exist"):
        read_map_file(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConvertError, match=r"bytes\.toml is not UTF-8 text"):
        read_map_file(tmp_path / "bytes.toml")


def test_map_without_names_sets_the_orientation(tmp_path: Path) -> None:
    path = tmp_path / "turned.toml"
    path.write_text("[files]\ntransposed = ['attention_out']", encoding="utf-8")
    options = RoleOptions(map_file=read_map_file(path))
    recognized = recognize_file(state_file(SCHEMES["book"].model()), options)
    assert recognized.tensors.map.transposed == {"attention_out"}


def test_integer_answers_become_floats() -> None:
    assert check_answers("flags", {"rope_theta": 10_000}) == {"rope_theta": 10_000.0}


def test_masks_are_left_out_unless_they_are_named(tmp_path: Path) -> None:
    roles = tensor_map(strange_map(tmp_path), strange_tensors(), ["t", "extra.mask"])
    assert set(roles.ignored) == {"extra.mask", "junk.a", "l1.noise", "l2.noise"}
    assert (roles.first_layer, roles.n_layer, roles.n_head) == (1, 2, 2)


def test_byte_order_mark_before_a_map_file_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "map.toml"
    path.write_text("[computation]\nn_head = 4\n", encoding="utf-8-sig")
    assert read_map_file(path).answers == {"n_head": 4}
