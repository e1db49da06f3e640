"""Conversion of a user's model: the converted model computes on several ranks what the plain model computes on one.

The GPT below calls dlp only to scatter and gather the tokens for sequence parallelism. It has typical features of
users' models: norms with biases, a position table, a raw parameter, a tied or untied head, frozen parameters.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import dlp
from dlp.parallel.linear.modules import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from dlp.parallel.model.embedding import VocabParallelEmbedding
from tests import pool as worker
from tests.cases import nightly
from tests.metrics import assert_all_close, relative_error
from tests.net import full
from tests.refusals import may_raise

HIDDEN, HEAD, VOCABULARY, BATCH, SEQUENCE = 32, 8, 48, 3, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.k = nn.Linear(HIDDEN, HIDDEN, bias=False)  # no bias, because its gradient would be zero up to rounding

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).view(BATCH, SEQUENCE, -1, HEAD).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attn = Attention()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        # Raw parameter of the block. `forward` multiplies x by it; with sequence parallelism, x is a token shard
        self.gain = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        x = x + self.attn(self.ln1(x))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tp: DeviceMesh | None = None
        self.recomputes = False
        self.embed, self.position = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(SEQUENCE, device=tokens.device))
        if self.tp is not None:
            x = dlp.scatter_tokens(x, self.tp)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        x = self.norm(x)
        if self.tp is not None:
            x = dlp.gather_tokens(x, self.tp).view(BATCH, SEQUENCE, -1)
        return self.head(x)


def groups(sequence_parallel: bool = False, vocabulary: bool = False, siblings: bool = True) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [
        {"name": "qkv", "match": ["blocks.*.attn.{q,k,v}"], "style": "column", "siblings": siblings},
        {"name": "up", "match": ["blocks.*.up"], "style": "column"},
        {"name": "out", "match": ["blocks.*.attn.o", "blocks.*.down"], "style": "row"},
    ]
    if sequence_parallel:
        made.append({"name": "sp", "match": ["blocks.**", "norm"], "sequence_parallel": True})
    if vocabulary:
        made.append({"name": "vocabulary", "match": ["embed", "head"], "style": "column"})
    return made


class Setup(NamedTuple):
    """A case: whether blocks run on token shards, whether the vocabulary is sharded over tp, whether the head is tied, whether
    q, k and v are siblings, whether the model is converted on the meta device, the size of dp_shard, whether blocks are
    recomputed."""

    sequence_parallel: bool = False
    vocabulary: bool = False
    tied: bool = False
    siblings: bool = True
    meta: bool = False
    dp_shard: int = 1
    recomputes: bool = False

    def __str__(self) -> str:
        chosen = [name for name, value in self._asdict().items() if value is True]
        return "-".join(["tp", *chosen, *["one by one"] * (not self.siblings), *["dp_shard"] * (self.dp_shard > 1)])


def make(tied: bool = False, device: torch.device | None = None) -> GPT:
    torch.manual_seed(11)
    model = GPT(tied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model.to(device or worker.device())


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator).to(worker.device())
    return text[:, :-1], text[:, 1:].reshape(-1)


def plain_run(tied: bool) -> tuple[float, dict[str, Tensor]]:
    model = make(tied)
    tokens, targets = batch()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def converted(setup: Setup, world: int) -> tuple[GPT, DeviceMesh, dlp.Plan]:
    mesh = worker.mesh(tp=world // setup.dp_shard, dp_shard=setup.dp_shard)
    model = make(setup.tied)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    if setup.meta:
        model = model.to("meta")
    batch_shape = (BATCH, SEQUENCE) if setup.sequence_parallel else None
    chosen = groups(setup.sequence_parallel, setup.vocabulary, setup.siblings)
    plan = dlp.convert(model, chosen, mesh, batch=batch_shape)
    if setup.dp_shard > 1:
        for block in model.blocks:
            dlp.fully_shard(block, mesh=mesh)
        dlp.fully_shard(model, mesh=mesh)
    if setup.meta:
        model.to_empty(device=worker.device())
        load(model, weights)
    model.tp = mesh["tp"] if setup.sequence_parallel else None
    model.recomputes = setup.recomputes
    return model, mesh, plan


@torch.no_grad()
def load(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        full = DTensor.from_local(
            weights[name], parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim, run_check=False
        )
        parameter.copy_(full.redistribute(placements=parameter.placements))


def converted_run(setup: Setup, world: int) -> tuple[float, dict[str, Tensor]]:
    model, mesh, _ = converted(setup, world)
    tokens, targets = batch()
    logits = model(tokens).flatten(0, 1)
    if setup.vocabulary:
        loss = dlp.cross_entropy(logits, targets, mesh) / targets.numel()
    else:
        loss = F.cross_entropy(logits, targets)
    loss.backward()
    return loss.item(), {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


SETUPS = [
    (Setup(), 2),
    (Setup(siblings=False), 2),
    (Setup(vocabulary=True, tied=True), 2),
    nightly(Setup(sequence_parallel=True), 2),
    (Setup(sequence_parallel=True, vocabulary=True, tied=True), 2),
    nightly(Setup(tied=True), 2),
    nightly(Setup(sequence_parallel=True, meta=True), 2),
    (Setup(sequence_parallel=True, recomputes=True), 2),
    nightly(Setup(), 4),
    nightly(Setup(sequence_parallel=True, vocabulary=True), 4),
    (Setup(sequence_parallel=True, vocabulary=True, tied=True, dp_shard=2), 4),
    nightly(Setup(sequence_parallel=True, dp_shard=2, recomputes=True), 4),
    (Setup(sequence_parallel=True, dp_shard=2, meta=True), 4),
]


@pytest.mark.parametrize(("setup", "world"), SETUPS, ids=str)
def test_a_converted_model_is_the_model(ranks, setup, world):
    loss, gradients = ranks(1).run(plain_run, setup.tied)[0]
    for found_loss, found in ranks(world).run(converted_run, setup, world):
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert_all_close(found, gradients, 2e-5)  # on GPUs the difference is above 1e-5


class Facts(NamedTuple):
    """Properties of a model, which the test compares before and after conversion."""

    names: list[str]
    classes: dict[str, str]
    placements: dict[str, str]
    full_equal: bool
    same_object: bool
    ties: bool
    frozen: list[str]
    modes: dict[str, bool]
    features: tuple[int, int]


def facts() -> tuple[Facts, Facts]:
    def look(model: GPT, before: dict[str, Tensor], same: bool) -> Facts:
        dtensors = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
        fulls = {name: full(p) for name, p in model.named_parameters()}
        return Facts(
            [name for name, _ in model.named_parameters()],
            {name: type(model.get_submodule(name)).__name__ for name in ("blocks.0.up", "norm", "embed", "blocks.0")},
            {name: str(p.placements[0]) for name, p in dtensors.items()},
            all(torch.equal(fulls[name], value) for name, value in before.items()),
            same,
            model.head.weight is model.embed.weight,
            [name for name, p in model.named_parameters() if not p.requires_grad],
            {name: model.get_submodule(name).training for name in ("blocks.0.up", "norm")},
            (model.blocks[0].up.out_features, model.blocks[0].up.in_features),
        )

    model = make(tied=True)
    model.blocks[0].up.weight.requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    model.blocks[0].eval()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    before = look(model, values, True)
    kept = model.blocks[1], model.norm
    dlp.convert(model, groups(vocabulary=True), worker.mesh(tp=2))
    return before, look(model, values, kept[0] is model.blocks[1] and kept[1] is model.norm)


@pytest.mark.ranks(2)
def test_conversion_is_in_place_and_keeps_names_values_ties_and_flags(ranks):
    for before, after in ranks(2).run(facts):
        assert after.names == before.names
        assert after.full_equal and after.same_object and after.ties
        assert after.frozen == before.frozen == ["blocks.0.up.weight", "norm.bias"]
        assert after.modes == before.modes == {"blocks.0.up": False, "norm": True}
        assert after.features == before.features
        assert after.placements.keys() == set(after.names), "every parameter is a DTensor"
        cut = {name: placement for name, placement in after.placements.items() if placement != str(Replicate())}
        assert cut["embed.weight"] == cut["blocks.0.up.bias"] == cut["blocks.1.attn.q.weight"] == str(Shard(0))
        assert cut["blocks.0.down.weight"] == cut["blocks.1.attn.o.weight"] == str(Shard(1))
        assert "blocks.0.down.bias" not in cut and "norm.weight" not in cut and "position.weight" not in cut


def other_weights_than_rank_0() -> float:
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.distributed.get_rank())
    dlp.convert(model, groups(), worker.mesh(tp=2))
    return max(relative_error(p.full_tensor(), q) for p, q in zip(model.parameters(), make().parameters(), strict=True))


@pytest.mark.ranks(2)
def test_the_weights_of_rank_0_count(ranks):
    assert ranks(2).run(other_weights_than_rank_0) == [0.0, 0.0]


def refused_conversions() -> dict[str, tuple[str, bool]]:
    """Return the message of each refused conversion, and whether the model is unchanged."""
    mesh, batch_shape = worker.mesh(tp=2), (BATCH, SEQUENCE)
    sp, plain = groups(sequence_parallel=True), groups()
    alone = mesh["dp_shard"].get_group()
    attempts: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
        "no batch": (sp, {}),
        "unknown amax group": (plain, {"amax_group": "everyone"}),
        "narrow amax group": (sp, {"batch": batch_shape, "amax_group": alone}),
        "indivisible": ([{"name": "head", "match": ["blocks.1.up"], "style": "column"}], {}),
        "unknown name": ([{"name": "typo", "match": ["blocks.*.atn.*"], "style": "column"}], {}),
        "norm": ([{"name": "norm", "match": ["norm"], "style": "row"}], {}),
    }
    found = {}
    for name, (chosen, options) in attempts.items():
        model = make()
        model.blocks[1].up = (
            nn.Linear(HIDDEN, 31, device=worker.device()) if name == "indivisible" else model.blocks[1].up
        )
        before = {path: (type(module), list(map(id, module.parameters()))) for path, module in model.named_modules()}
        message = may_raise(ValueError, dlp.convert, model, chosen, mesh, **options)
        after = {path: (type(module), list(map(id, module.parameters()))) for path, module in model.named_modules()}
        found[name] = message, before == after
    return found


@pytest.mark.ranks(2)
def test_what_conversion_refuses_it_leaves_alone(ranks):
    for rank, found in enumerate(ranks(2).run(refused_conversions)):
        expected = {
            "no batch": "blocks.0.attn.q: sequence parallelism needs the shape of a microbatch",
            "unknown amax group": "amax_group must be auto, tp, tp+cp, tp+dp, world or a process group; got 'everyone'",
            "narrow amax group": f"blocks.0.attn.q and siblings: the amax group has ranks [{rank}], but sequence",
            "indivisible": "blocks.1.up: COLUMN shards out_features over tp 2, which does not divide 31",
            "unknown name": "layer group 'typo': pattern 'blocks.*.atn.*' matches no layer; nearest: 'blocks.0.attn.",
            "norm": "norm: style 'row' is for linears; LayerNorm is replicated",
        }
        assert found.keys() == expected.keys()
        for name, (message, untouched) in found.items():
            assert message.startswith(expected[name]), f"{name}: {message}"
            assert untouched, name


def wrong_tokens() -> dict[str, str]:
    """Return the errors of converted models whose input differs from the layer groups and `batch` of the conversion: tokens
    are scattered or not scattered against the declaration, or belong to a microbatch of another size."""
    mesh, tokens = worker.mesh(tp=2), batch()[0]
    sp, plain = groups(sequence_parallel=True), groups()
    no_norms = {"name": "sp", "match": ["blocks.*.{up,down}", "blocks.*.attn.*"], "sequence_parallel": True}
    everything = {"name": "sp", "match": ["**"], "sequence_parallel": True}
    linears = [
        {"name": name, "match": f"blocks.*.{name}", "style": style, "sequence_parallel": True}
        for name, style in (("up", "column"), ("down", "row"))
    ]
    attempts: dict[str, tuple[list[dict[str, Any]], bool, int]] = {
        "no scatter": (sp, False, BATCH),
        "no scatter, linear": (linears, False, BATCH),
        "other batch": (sp, True, BATCH + 1),
        "norms left out": ([*plain, no_norms], True, BATCH),
        "embedding before scatter": ([*plain, everything], True, BATCH),
    }
    found = {}
    for name, (chosen, scatter, size) in attempts.items():
        model = make()
        dlp.convert(model, chosen, mesh, batch=(size, SEQUENCE))
        model.tp = mesh["tp"] if scatter else None
        found[name] = may_raise(ValueError, model, tokens)
    two = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(worker.device())
    cut = [{"name": s, "match": n, "style": s, "sequence_parallel": True} for n, s in (("0", "column"), ("1", "row"))]
    dlp.convert(two, cut, mesh, batch=(BATCH + 1, SEQUENCE))
    norm = nn.Sequential(nn.LayerNorm(8)).to(worker.device())
    torch.use_deterministic_algorithms(True)  # on GPUs a model with invariant=True requires this setting
    try:
        dlp.convert(norm, [{"name": "sp", "match": "0", "sequence_parallel": True}], mesh, batch=(3, 8), invariant=True)
        for rows in (24, 16):
            found[f"invariant, {rows} rows"] = may_raise(ValueError, norm, torch.zeros(rows, 8, device=worker.device()))
    finally:
        torch.use_deterministic_algorithms(False)
    lookup = nn.Sequential(nn.Embedding(16, 8)).to(worker.device())
    dlp.convert(lookup, [{"name": "sp", "match": "0", "sequence_parallel": True}], mesh, batch=(3, 8))
    for rows in (24, 16):
        found[f"embedding, {rows} rows"] = may_raise(ValueError, lookup, tokens.new_zeros(rows))
    found["other batch, linear"] = may_raise(ValueError, two, torch.zeros(12, 8, device=worker.device()))
    return found


@pytest.mark.ranks(2)
def test_tokens_that_are_not_scattered_are_noticed_by_name(ranks):
    expects = "sequence parallelism expects token shards"
    for found in ranks(2).run(wrong_tokens):
        assert found["no scatter"].startswith(
            f"blocks.0: {expects} [12, H]; got x of shape (3, 8, 32). Split the tokens"
        )
        assert found["no scatter, linear"].startswith(f"blocks.0.up: {expects} [12, K]; got x of shape")
        assert found["other batch"].startswith(
            f"blocks.0: {expects} [16, H]; got x of shape (12, 32). If x is a shard of a microbatch of 24 tokens: "
            f"dlp.convert was called with batch = (B, S) of 32 tokens"
        )
        assert "drop_last=True" in found["other batch"] and "drop_last" not in found["no scatter"]
        assert found["other batch, linear"].startswith(
            f"0: {expects} [16, K]; got x of shape (12, 8) with tp 2. If x is a shard of a microbatch of 24 tokens"
        )
        assert found["norms left out"].startswith(
            "blocks.0: the module is called with token shards (12, 32), so its gradients must be summed"
        )
        for name, shard, features in (("invariant", "[12, H]", ", 8"), ("embedding", "[12]", ",")):
            refused = f"0: {expects} {shard}; got x of shape"
            assert found[f"{name}, 24 rows"].startswith(f"{refused} (24{features}). Split the tokens")
            assert found[f"{name}, 16 rows"].startswith(
                f"{refused} (16{features}). If x is a shard of a microbatch of 32 tokens: "
                f"dlp.convert was called with batch = (B, S) of 24 tokens"
            )
        assert found["embedding before scatter"].startswith(f"embed: {expects} [12]; got x of shape (3, 8)")


def converted_twice() -> str:
    model, mesh, _ = converted(Setup(), 2)
    return may_raise(ValueError, dlp.convert, copy.deepcopy(model), groups(), mesh)


@pytest.mark.ranks(2)
def test_a_converted_model_and_a_copy_of_it_are_not_converted_again(ranks):
    for again in ranks(2).run(converted_twice):
        assert again.startswith("this model is converted already: convert a plain model, once and as a whole")


def different_inputs_for_siblings() -> str:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) + self.k(x + 1)

    model = Cross().to(worker.device())
    dlp.convert(model, [{"name": "qk", "match": ["q", "k"], "style": "column", "siblings": True}], worker.mesh(tp=2))
    return may_raise(ValueError, model, torch.zeros(4, 8, device=worker.device()))


@pytest.mark.ranks(2)
def test_siblings_that_read_different_tensors_are_refused(ranks):
    for message in ranks(2).run(different_inputs_for_siblings):
        assert message.startswith(
            "k: siblings must read the same tensor, but x differs from the tensor that the siblings read ('q', 'k')"
        )


class HandMade(nn.Module):
    """Model of explicitly constructed parallel layers and a plain norm; conversion changes only the norm."""

    def __init__(self, tp: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(2)
        options: dict[str, Any] = {"tp": tp, "sequence_parallel": True, "device": worker.device()}
        self.norm = nn.LayerNorm(8, device=worker.device())
        self.up = ColumnParallelLinear(8, 16, bias=True, **options)
        self.down = RowParallelLinear(16, 8, bias=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def hand_made(way: str) -> dict[str, float]:
    """Return the errors of the gradients of a model with explicitly constructed layers, compared with a model of plain
    modules. `way`: "convert": the model is converted; "attach": it is not, so the gradients of the norm remain partial,
    and the optimizer step must raise."""
    mesh = worker.mesh(tp=2)
    model = HandMade(mesh["tp"])
    plain = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to(worker.device())
    with torch.no_grad():
        for ours, theirs in zip((model.up, model.down), (plain[1], plain[3]), strict=True):
            theirs.weight.copy_(ours.weight.full_tensor())
            theirs.bias.copy_(ours.bias.full_tensor())
    if way == "convert":
        dlp.convert(model, [{"name": "sp", "match": ["norm"], "sequence_parallel": True}], mesh, batch=(1, 8))
    # foreach=False, because foreach accepts no mixture of DTensors and plain parameters
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
    dlp.attach(model, optimizer)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).to(worker.device())
    plain(x).square().sum().backward()
    model(dlp.scatter_tokens(x, mesh)).square().sum().backward()
    if way == "convert":
        optimizer.step()
    else:  # no group says that the norm reads token shards
        alone = r"^norm.weight is replicated on tp, but its gradient differs .* with sequence_parallel = True"
        with pytest.raises(RuntimeError, match=alone):
            optimizer.step()
    names = ["up.weight", "up.bias", "down.weight", "down.bias"] + ["norm.weight", "norm.bias"] * (way == "convert")
    theirs = dict(
        zip(
            ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias"],
            plain.parameters(),
            strict=True,
        )
    )
    return {name: relative_error(model.get_parameter(name).grad.full_tensor(), theirs[name].grad) for name in names}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["convert", "attach"])
def test_models_made_by_hand_sum_their_partial_gradients(ranks, way):
    for errors in ranks(2).run(hand_made, way):
        for name, error in errors.items():
            assert error <= 1e-5, f"{name}: {error}"


def classes() -> tuple[str, str, str]:
    model, _, plan = converted(Setup(vocabulary=True), 2)
    assert isinstance(model.blocks[0].up, ParallelLinear) and isinstance(model.embed, VocabParallelEmbedding)
    return str(plan), repr(model.blocks[0].up), type(model.norm).__name__


@pytest.mark.ranks(2)
def test_the_plan_and_the_modules_print_themselves(ranks):
    for plan, layer, norm in ranks(2).run(classes):
        assert "blocks.0:2.up" in plan and "COLUMN" in plan
        assert layer == "ConvertedLinear(COLUMN, tp=2, recipe=bf16)"
        assert norm == "ReplicatedLayerNorm"
