"""The plan: decisions, printed text and refusals, from a model on the meta device and without ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dlp
from dlp.parallel.model.groups import LayerGroup
from dlp.parallel.model.plan import fold, make_plan
from tests.refusals import must_raise


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 64)
        self.k_proj = nn.Linear(64, 32)
        self.v_proj = nn.Linear(64, 32, bias=False)
        self.o_proj = nn.Linear(64, 64)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.attn = Attention()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(64, 96, bias=False)


QKV = {"name": "qkv", "match": ["layers.*.attn.{q,k,v}_proj"], "style": "column", "siblings": True}
OUT = {"name": "out", "match": ["layers.*.attn.o_proj"], "style": "row"}
FP8 = {"name": "default", "match": ["layers.**"], "recipe": "fp8_current"}
EDGE = {"name": "edge", "match": ["layers.-1.attn.o_proj"], "recipe": {"name": "fp8_current", "power_of_two": True}}


def plan(*groups: Any, tp: int = 2, **options: Any) -> Any:
    with torch.device("meta"):
        model = Model()
    return make_plan(model, groups, tp, **options)


def refusal(*groups: Any, **options: Any) -> str:
    return must_raise(ValueError, plan, *groups, **options)


def test_each_layer_has_its_row():
    rows = {row.name: row for row in plan(FP8, QKV, OUT, EDGE).layers}
    assert len(rows) == 9
    q, o, head = rows["layers.0.attn.q_proj"], rows["layers.1.attn.o_proj"], rows["head"]
    assert (q.shape, q.row.name, q.parameters) == ((64, 64), "COLUMN", 32 * 64 + 32)
    assert q.siblings == tuple(f"layers.0.attn.{name}_proj" for name in "qkv")
    assert (o.row.name, o.parameters) == ("ROW", 64 * 32 + 64)
    assert str(o.recipe) == "fp8_current(power_of_two=True)" and str(q.recipe) == "fp8_current"
    assert "edge" in o.group and "default" in o.overrode
    assert (head.style, head.recipe.name, head.parameters) == ("local", "bf16", 96 * 64)


def test_defaults_are_said():
    assert "style default" in plan(FP8).layers[0].group and "recipe default" in plan(QKV, OUT).layers[0].group
    head = plan(FP8).layers[-1]
    assert head.name == "head" and "style default" in head.group and "recipe default" in head.group


def test_it_prints_every_layer_and_a_summary():
    text = str(plan(FP8, QKV, OUT, EDGE))
    lines = text.splitlines()
    assert "9 linears" in lines[0] and "per tp rank of 2" in lines[0]
    for row in ("layers.0.attn.q_proj", "layers.1.attn.o_proj", "head", "embed", "layers.0:2.norm"):
        assert any(line.startswith(row) for line in lines), row
    line = next(line for line in lines if line.startswith("layers.0.attn.q_proj"))
    for cell in ("64 x 64", "COLUMN", "q_proj,k_proj,v_proj", "fp8_current", "serial", "2,080"):
        assert cell in line
    assert all(len(line) == len(line.rstrip()) for line in lines)


def test_what_cannot_be_captured_is_said_with_its_reason():
    said = "launched one by one: casts of IntScaling are not declared native (QuantizerCaps.native)"
    on_gpu = plan({**FP8, "recipe": "int8"}, device_type="sm_90")
    assert all(any(said in note for note in row.notes) for row in on_gpu.layers if row.recipe.name == "int8")
    assert f"kernels of forward and backward are {said} [layers.0.attn.q_proj and 7 more]" in str(on_gpu)
    assert "one by one" not in str(plan(FP8, device_type="sm_90"))


def test_equal_blocks_are_one_row_whose_name_is_a_pattern():
    lines = str(plan(FP8, QKV, OUT)).splitlines()
    assert [line.split()[0] for line in lines if line.startswith("layers.")] == [
        *(f"layers.0:2.attn.{name}_proj" for name in "qkvo"), "layers.0:2.norm",
    ]  # fmt: skip
    both = plan({"name": "both", "match": ["layers.0:2.attn.q_proj"], "recipe": "fp8_current"}).layers
    assert [row.name for row in both if row.recipe.name != "bf16"] == [f"layers.{i}.attn.q_proj" for i in (0, 1)]


def test_only_neighbours_that_are_equal_in_every_row_fold():
    names = [f"a.{i}.{j}.w" for i in range(3) for j in range(2)] + ["b.9", "b.10", "b.12", "c"]
    rows = [(name, "odd" if name == "a.1.1.w" else "even") for name in names]
    assert fold(rows) == [
        ("a.0.0:2.w", "even"), ("a.1.0.w", "even"), ("a.1.1.w", "odd"), ("a.2.0:2.w", "even"),
        ("b.9:11", "even"), ("b.12", "even"), ("c", "even"),
    ]  # fmt: skip
    assert fold([("h.0", "x"), ("h.0.w", "y"), ("h.1", "x"), ("h.1.w", "y"), ("h.2", "x")]) == [
        ("h.0:2", "x"), ("h.0:2.w", "y"), ("h.2", "x"),
    ]  # fmt: skip


def test_parameters_add_up():
    model = Model()
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert plan(FP8, tp=1).parameters == whole
    biases_and_norms = 2 * (2 * 64 + 64)  # biases of o_proj and norms are replicated
    columns = {"name": "all", "match": ["head", "embed"], "style": "column"}
    assert plan(QKV, OUT, columns).parameters == (whole - biases_and_norms) // 2 + biases_and_norms


class HeadFirst(nn.Module):
    """Embeddings after the linear that has the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 96)
        self.embed, self.positions = nn.Embedding(96, 64), nn.Embedding(96, 64)
        self.embed.weight = self.positions.weight = self.head.weight


@pytest.mark.parametrize("tp", [1, 2])
def test_tied_parameters_count_once_and_in_one_row(tp):
    with torch.device("meta"):
        found = make_plan(HeadFirst(), [{"name": "all", "match": ["**"], "style": "column"}], tp)
    assert found.parameters == sum(parameter.numel() for parameter in HeadFirst().parameters()) // tp
    assert [row.parameters for row in (*found.layers, *found.others)] == [found.parameters, 0, 0]
    report = dlp.wire_report(found, dlp.Workload({"tp": tp}, tokens=32))
    assert report.get("embed", {}) == ({"fprop": 2 * 32 * 64 // 2 * 4} if tp == 2 else {})  # an all-reduce in fp32


def test_an_embedding_is_cut_along_the_vocabulary():
    others = {row.name: row for row in plan({"name": "v", "match": ["embed"], "style": "column"}).others}
    assert (others["embed"].style, others["embed"].parameters) == ("vocab", 48 * 64)
    assert (others["layers.0.norm"].style, others["layers.0.norm"].parameters) == ("replicated", 128)


def test_sequence_parallel_layers_are_marked():
    group = {"name": "sp", "match": ["layers.**"], "sequence_parallel": True}
    made = plan(QKV, OUT, group, batch=(3, 4))
    assert {row.row.name for row in made.layers} == {"COLUMN_SP", "ROW_SP", "LOCAL"}
    norm = next(row for row in made.others if row.name == "layers.0.norm")
    assert norm.sequence_parallel and "summed at the end of backward" in str(made)


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ([QKV], {"tp": 3}, "layers.0.attn.q_proj: COLUMN shards out_features over tp 3, which does not divide 64"),
        ([OUT], {"tp": 3}, "layers.0.attn.o_proj: ROW shards in_features over tp 3, which does not divide 64"),
        (
            [{"name": "v", "match": ["embed"], "style": "column"}],
            {"tp": 5},
            "embed: the vocabulary of 96 is not divisible by tp 5; pad the vocabulary",
        ),
        (
            [{"name": "sp", "match": ["layers.*.attn.o_proj"], "style": "row", "sequence_parallel": True}],
            {},
            "layers.0.attn.o_proj: sequence parallelism needs the shape of a microbatch: pass batch=(B, S) to convert, split "
            "tokens with dlp.scatter_tokens before the first such layer and join them with dlp.gather_tokens after the last",
        ),
        (
            [{"name": "sp", "match": ["layers.**"], "sequence_parallel": True}],
            {"batch": (3, 5)},
            "layers.0.attn.q_proj: sequence parallelism needs a number of tokens divisible by tp 2; got B*S = 3*5; ",
        ),
        (
            [QKV, {"name": "odd", "match": ["layers.*.attn.k_proj"], "recipe": "fp8_current"}],
            {},
            "layers.0.attn.k_proj and layers.0.attn.q_proj are siblings and run as one layer, but differ in recipe: "
            "fp8_current and bf16; give them equal values, or set siblings = false for their group",
        ),
        (
            [QKV, {"name": "odd", "match": ["layers.*.attn.v_proj"], "style": "local"}],
            {},
            "layers.0.attn.v_proj and layers.0.attn.q_proj are siblings and run as one layer, but differ in style: LOCAL "
            "and COLUMN; give them equal values, or set siblings = false for their group",
        ),
        (
            [{"name": "rows", "match": ["layers.*.attn.{q,k}_proj"], "style": "row", "siblings": True}],
            {},
            "layers.0.attn.q_proj: siblings read the same x and are column-parallel or local; style is 'row'",
        ),
        (
            [{"name": "norms", "match": ["layers.*.norm"], "style": "row"}],
            {},
            "layers.0.norm: style 'row' is for linears; LayerNorm is replicated: set 'column' if the module reads "
            "features that are sharded over tp",
        ),
        (
            [{"name": "typo", "match": ["layers.*.atn.**"], "recipe": "bf16"}],
            {},
            "layer group 'typo': pattern 'layers.*.atn.**' matches no layer; nearest: 'layers.0.attn.",
        ),
        (
            [{"name": "lost", "match": ["head"], "recipe": "fp8_current"}, {"name": "all", "match": ["**"], "recipe": "bf16"}],
            {},
            "group 'lost' has no effect: on every matching layer, its fields are overridden by 'all'",
        ),
        ([{"name": "r", "match": ["head"], "recipe": "fp9"}], {}, "unknown recipe 'fp9': the recipes are bf16, "),
        (
            [{"name": "o", "match": ["head"], "overlap": "sereal"}],
            {},
            "unknown overlap strategy 'sereal': the strategies are ",
        ),
        (
            [{"name": "o", "match": ["head"], "overlap": {"forward": "serial"}}],
            {},
            "head: an overlap strategy is set for one of fprop, dgrad, wgrad; got 'forward'",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(groups, options, message):
    assert refusal(*groups, **options).startswith(message)


def scope(recipe: str, tp: int, scope: str = "all") -> dict[str, list[str]]:
    """Return, by layer, the notes of the plan about amax_scope. A note says that scales depend on tp."""
    found = plan({**FP8, "recipe": {"name": recipe, "amax_scope": scope}}, QKV, OUT, tp=tp)
    return {
        name: [note for note in layer.notes if "amax_scope" in note]
        for name, layer in ((layer.name, layer) for layer in found.layers)
    }


def test_layers_whose_codes_depend_on_tp_in_spite_of_amax_scope_are_named():
    notes = scope("mxfp8", 4)
    inside = (
        "amax_scope = 'all' does not hold for {}: tp splits a block of mxfp8[e4m3, 1x32], since {} features per rank"
    )
    for name, operand, size in (("q_proj", "dy", 16), ("k_proj", "w", 8), ("o_proj", "x", 16)):
        found = notes[f"layers.0.attn.{name}"]
        assert len(found) == 2 and any(note.startswith(inside.format(operand, size)) for note in found), found
    assert notes["head"] == []
    for whole in (
        scope("mxfp8", 2)["layers.0.attn.o_proj"],
        *scope("mxfp8", 1).values(),
        *scope("mxfp8", 4, "table").values(),
    ):
        assert whole == []
    assert not any(scope("fp8_current", 4).values()) and not any(scope("fp8_rowwise", 4).values())


def test_groups_may_be_typed():
    assert plan(LayerGroup("qkv", ["layers.*.attn.q_proj"], style="column"), OUT).layers[0].style == "column"


def test_an_overlap_may_be_chosen_per_gemm():
    made = plan({"name": "o", "match": ["head"], "overlap": {"dgrad": "serial"}})
    assert "serial/serial/serial" in str(made)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("matched", "styles"), [("head", "column and replicated"), ("embed", "local and vocab")], ids=["head", "embed"]
)
def test_tied_weights_must_be_cut_alike(matched, styles):
    assert must_raise(ValueError, make_plan, Tied(), [{"name": "one", "match": [matched], "style": "column"}], 2) == (
        f"head and embed share a parameter, but tp shards the parameter differently ({styles}); give both the same style"
    )
    make_plan(Tied(), [{"name": "both", "match": ["head", "embed"], "style": "column"}], 2)
    make_plan(Tied(), [{"name": "none", "match": ["head"], "recipe": "bf16"}], 2)


def test_the_reference_on_a_gpu_is_refused_unless_it_is_allowed():
    """The recipe has scales that are not powers of two, for which only Hopper has a kernel. On other GPUs the plan is
    refused without `allow_reference`, because the GEMM would run in plain torch."""
    inexact = {"name": "fp8_block", "power_of_two": False}

    def planned(recipe: Any, device: str) -> set[str]:
        name = recipe if isinstance(recipe, str) else recipe["name"]
        groups = [{"name": "all", "match": ["layers.**"], "recipe": recipe}]
        rows = plan(*groups, tp=1, device_type=device).layers
        return {kernel for row in rows for kernel in row.kernels if row.recipe.name == name}

    assert (
        planned(inexact, "sm_90")
        == planned("fp8_block", "sm_90")
        == {
            "cublaslt fp8 blocks, large: gemm_sm90",
            "cublaslt fp8 blocks",
        }
    )
    assert planned("fp8_block", "sm_100") == planned("mxfp8", "sm_100") == {"cublaslt mxfp8 block-scaled"}
    assert planned("nvfp4", "sm_100") == {"cublaslt nvfp4 block-scaled"}
    assert planned(inexact, "cpu") == planned(inexact | {"allow_reference": True}, "sm_100") == {"reference"}
    with pytest.raises(ValueError, match="fprop: sm_100 has no kernel for .*, and the plain-torch reference is slow"):
        planned(inexact, "sm_100")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)


class Deep(nn.Module):
    """Model with blocks of attention and an MLP, and a head."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.ModuleDict({"attn": Attention(), "mlp": Mlp(), "norm": nn.LayerNorm(64)}) for _ in range(2)]
        self.embed, self.layers, self.head = nn.Embedding(96, 64), nn.ModuleList(blocks), nn.Linear(64, 96, bias=False)


def parallel(sequence_parallel: bool) -> list[dict[str, Any]]:
    """Return layer groups like those of a model: the style of each linear under tp."""
    patterns = {"column": ["layers.*.attn.{q,k,v}_proj", "layers.*.mlp.up", "embed", "head"]}
    patterns["row"] = ["layers.*.attn.o_proj", "layers.*.mlp.down"]
    made = [
        {"name": style, "match": match, "style": style, "sequence_parallel": sequence_parallel}
        for style, match in patterns.items()
    ]
    return [*made, {"name": "norms", "match": "layers.*.norm", "sequence_parallel": sequence_parallel}]


def own(match: str, **fields: Any) -> dict[str, Any]:
    return {"name": "own", "match": match, **fields}


TAKES = "style 'row' expects features sharded over tp, and no"
LEAVES = "style 'column' produces features sharded over tp, and no"
BOTH = "this layer works on all tokens and layers.0.attn.o_proj in layers.0 on token shards; set the same sequence_parallel"


@pytest.mark.parametrize(
    ("sequence_parallel", "group", "layer", "message"),
    [
        (True, own("head", sequence_parallel=False), "head", "group 'column' chose sequence_parallel = True together with"),
        (True, own("layers.**", style="column"), "layers.0.attn.o_proj", "group 'row' chose style = 'row' together with"),
        (True, own("layers.**", style="local"), "layers.0.attn.q_proj", "group 'column' chose style = 'column' together"),
        (False, own("layers.0.{attn,mlp}.**", style="column"), "layers.0.attn.q_proj", LEAVES),
        (False, own("layers.0.{attn,mlp}.**", style="row"), "layers.0.attn.q_proj", TAKES),
        (True, own("layers.*.mlp.down", style="row", sequence_parallel=False), "layers.0.mlp.down", BOTH),
        (True, own("layers.*.attn.{q,k,v}_proj", style="column", sequence_parallel=False), "layers.0.attn.q_proj", BOTH),
    ],
)  # fmt: skip
def test_styles_that_do_not_fit_each_other_are_refused(sequence_parallel, group, layer, message):
    with torch.device("meta"):
        model = Deep()
    groups = [*parallel(sequence_parallel), group]
    make_plan(model, groups, 1, batch=(3, 4))
    said = must_raise(ValueError, make_plan, model, groups, 2, batch=(3, 4))
    assert said.startswith(f"{layer}: {message}")
    assert (" overrides only " in said) == ("chose" in message)


@pytest.mark.parametrize(
    ("sequence_parallel", "group"),
    [
        (True, own("layers.1.mlp.*", style="local", sequence_parallel=False)),
        (True, own("layers.*.mlp.*", style="local", sequence_parallel=True)),
        (True, own("layers.*.attn.{k,v}_proj", style="column", sequence_parallel=False)),  # as in cross-attention
        (True, own("layers.0.{attn,mlp}.**", style="local", sequence_parallel=True)),
        (True, own("head", style="column", sequence_parallel=False)),
        (False, own("head", style="local")),
        (False, own("layers.*.mlp.*", style="local")),
    ],
)
def test_styles_that_may_fit_are_not(sequence_parallel, group):
    with torch.device("meta"):
        model = Deep()
    assert make_plan(model, [*parallel(sequence_parallel), group], 2, batch=(3, 4)).layers


def test_blocks_on_token_shards_of_which_nothing_gathers_are_refused():
    with torch.device("meta"):
        model = Deep()
    groups = [own("layers.**", sequence_parallel=True)]
    assert must_raise(ValueError, make_plan, model, groups, 2, batch=(3, 4)).startswith(
        "layers.0.attn.q_proj: under sequence parallelism the tokens are sharded over tp, and no linear of layers.0 "
        "gathers them"
    )
