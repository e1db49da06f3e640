"""Conversion of models with other modules than linears and norms, with attributes and hooks, and with unusual uses of
weights."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dlp
from dlp.parallel.model.convert import save_whole
from tests import pool as worker
from tests.metrics import assert_all_close, assert_close
from tests.net import full
from tests.refusals import may_raise, refuses
from tests.test_survey import LoRA, ReadsList

SIZE, HEADS, TOKENS, VOCABULARY, PAD = 16, 2, 8, 12, 3


class Scaled(nn.Embedding):
    """Embedding that scales the output, as in Gemma."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 4.0


class Mixer(nn.Module):
    """Module that reads the weight and bias of a linear without calling the linear, as Mamba does."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.out = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(x, self.proj.weight).cumsum(1)) + self.proj.bias


class Zoo(nn.Module):
    """Various modules: tokens [B, S] -> [B, S, SIZE]. One linear has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Scaled(VOCABULARY, SIZE, padding_idx=PAD)
        self.padded = nn.Embedding(VOCABULARY, SIZE, PAD, scale_grad_by_freq=True)
        self.rnn = nn.LSTM(SIZE, SIZE, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(SIZE, HEADS, 2 * SIZE, dropout=0.0, batch_first=True)
        self.listed, self.lora, self.mixer = ReadsList(), LoRA(), Mixer()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(SIZE, SIZE))
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)
        self.down_again = self.down

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layer(self.rnn(self.table(tokens) + self.padded(tokens))[0])
        x = self.mixer(self.lora(self.normed(self.listed(x))))
        return x + self.down(self.up(x)) + self.down_again(self.up(x).relu())


LEFT = {"name": "left", "match": ["{layer,listed,lora,mixer,normed}"], "convert": False}
CUT = [
    {"name": "up", "match": ["up", "table"], "style": "column"},
    {"name": "down", "match": "down_again", "style": "row"},
]


def zoo() -> Zoo:
    torch.manual_seed(3)
    return Zoo().to(worker.device())


def tokens() -> Tensor:
    drawn = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    drawn[:, 2] = PAD
    return drawn.to(worker.device())


def results(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients, the loss, and the output in evaluation mode, for which torch's layers have separate code
    paths."""
    loss = model(tokens()).square().mean()
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None} | {"loss": loss}
    with torch.no_grad():
        found["y"] = model.eval()(tokens())
    return {name: full(t).clone() for name, t in found.items()}


def both() -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    plain, model = results(zoo()), zoo()
    dlp.convert(model, [LEFT, *CUT], worker.mesh(tp=2))
    made = results(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    dlp.attach(model, optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
    optimizer.step()
    return plain, made, norm


@pytest.mark.ranks(2)
def test_a_converted_model_of_everything_is_the_model(ranks):
    for plain, made, norm in ranks(2).run(both):
        assert norm > 0
        assert not plain["table.weight"][PAD].any() and not made["table.weight"][PAD].any()
        assert_all_close(made, plain, 1e-5)


def unknown_reader() -> list[str]:
    model = nn.Sequential(nn.Linear(SIZE, SIZE), Mixer()).to(worker.device())
    dlp.convert(model, [], worker.mesh(tp=2))
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(1, 4, SIZE, device=worker.device()))
    return error.value.__notes__


@pytest.mark.ranks(2)
def test_a_module_that_reads_another_ones_weight_is_named(ranks):
    note = (
        "1: a Mixer reads parameters of other modules, which are DTensors now: leave the module out by a layer group "
        "with convert = false"
    )
    assert ranks(2).run(unknown_reader) == [[note], [note]]


def kept() -> dict[str, Any]:
    """Convert a linear and an embedding. Return the hooks that are called after conversion, whether the modules are the same
    objects, the attributes that the user set, and the shapes of the weight shards."""
    model = nn.ModuleDict({"table": nn.Embedding(VOCABULARY, SIZE), "up": nn.Linear(SIZE, SIZE)}).to(worker.device())
    called: list[str] = []
    up, table = model["up"], model["table"]
    up.register_forward_pre_hook(lambda *_: called.append("forward pre"))
    up.register_forward_hook(lambda *_: called.append("forward"))
    up.register_full_backward_hook(lambda *_: called.append("backward"))
    up.register_state_dict_pre_hook(lambda *_: called.append("state dict pre"))
    up.register_load_state_dict_pre_hook(lambda *_: called.append("load pre"))
    up.register_load_state_dict_post_hook(lambda *_: called.append("load"))
    table.register_forward_hook(lambda *_: called.append("table"))
    up.weight.sequence_parallel, table.weight.main_grad, up.note = True, "main", "mine"
    dlp.convert(model, [{"name": "cut", "match": ["table", "up"], "style": "column"}], worker.mesh(tp=2))
    y = up(table(tokens()))
    y.sum().backward()
    model.load_state_dict(model.state_dict())
    return {
        "hooks": called, "same": model["up"] is up and model["table"] is table, "attributes":
        (up.weight.sequence_parallel, model["table"].weight.main_grad, up.note),
        "cut": [tuple(p.to_local().shape) for p in (up.weight, table.weight)],
    }  # fmt: skip


@pytest.mark.ranks(2)
def test_hooks_and_attributes_stay(ranks):
    for found in ranks(2).run(kept):
        assert found["hooks"] == [
            "table", "forward pre", "forward", "backward", "state dict pre", "load pre", "load"
        ]  # fmt: skip
        assert found["same"] and found["attributes"] == (True, "main", "mine")
        assert found["cut"] == [(SIZE // 2, SIZE), (VOCABULARY // 2, SIZE)]


def initialised(way: str) -> tuple[dict[str, Tensor], bool]:
    """Allocate a converted meta model and initialize it. `way`: "apply": nn.init functions by class of module, with equal
    random states on all ranks; "reset": `reset_parameters`, with another random state on each rank. Return the unsharded
    parameters, and whether the weight of a layer that is not sharded over tp has no NaN."""
    with torch.device("meta"):
        model = nn.ModuleDict({"table": nn.Embedding(VOCABULARY, SIZE, PAD), "up": nn.Linear(SIZE, SIZE)})
        model["local"] = nn.Linear(SIZE, SIZE)
    dlp.convert(model, [{"name": "cut", "match": ["table", "up"], "style": "column"}], worker.mesh(tp=2))
    model.to_empty(device=worker.device())
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    torch.manual_seed(7 if way == "apply" else torch.distributed.get_rank())

    def by_class(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.5)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.ones_(module.weight)

    def by_reset(module: nn.Module) -> None:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning of torch about random numbers of DTensors on CPUs
        model.apply(by_class if way == "apply" else by_reset)
    mine = model["local"].weight.to_local()
    return {name: p.full_tensor() for name, p in model.named_parameters()}, bool((mine == mine).all())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["apply", "reset"])
def test_models_without_memory_are_initialised_as_plain_ones_are(ranks, way):
    (first, _), (second, finite) = ranks(2).run(initialised, way)
    assert finite and all(torch.equal(second[name], value) for name, value in first.items())
    assert all(value.isfinite().all() for value in first.values())
    std = 0.5 if way == "apply" else SIZE**-0.5 / 3**0.5
    for name in ("up.weight", "local.weight"):
        assert 0.8 * std < first[name].std() < 1.2 * std
    if way == "reset":
        assert not torch.equal(*first["up.weight"].chunk(2)), "each rank has drawn the same"
        assert not first["table.weight"][PAD].any() and first["table.weight"][PAD + 1].any()


class ByHand(nn.Module):
    """Explicitly constructed layers of dlp among plain modules. One layer has two weights, another has no mesh."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        tp, on = worker.mesh(tp=2)["tp"], {"device": worker.device()}
        self.first = nn.Linear(SIZE, SIZE, **on)
        self.local = dlp.Linear(SIZE, SIZE, **on)
        self.both = dlp.ColumnParallelLinear(SIZE, (SIZE, SIZE), tp=tp, recipe="fp8_delayed", **on)
        self.last = nn.Linear(SIZE, SIZE, **on)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(self.local(self.first(x)))
        return self.last(gate.sigmoid() * up)


DELAYED = {"name": "all", "match": "**", "recipe": "fp8_delayed"}
ROW = {"name": "row", "match": "last", "style": "row"}


def adopted() -> dict[str, Any]:
    model, mesh = ByHand(), worker.mesh(tp=2)
    plan = dlp.convert(model, [{**DELAYED, "match": ["first", "local"]}, ROW], mesh)
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    dlp.attach(model, model.optimizer)
    for _ in range(2):
        model.optimizer.zero_grad()
        model(torch.ones(4, SIZE, device=worker.device())).square().sum().backward()
        model.optimizer.step()
    state = dlp.state_dict(model)
    return {
        "recipes": {row.name: (row.recipe.name, row.row.name) for row in plan.layers},
        "slots": {key.removeprefix("slots.").removesuffix(".scale") for key in state if key.endswith(".scale")},
        "moved": [key for key, value in state.items() if key.endswith(".w.scale") and value != 1],
        "runtimes": len({id(module.core.session) for module in model.modules() if hasattr(module, "core")}),
        "swapped": dlp.set_recipe(model, "both", "bf16").layers,
        "dtensors": all(isinstance(p, DTensor) for p in model.parameters()),
        "wires": dlp.make_plan(ByHand(), [{**DELAYED, "match": ["both"], "overlap": "chunked"}, ROW], 2)
        .layers[2]
        .overlap,
    }


@pytest.mark.ranks(2)
def test_layers_made_by_hand_join_a_converted_model(ranks):
    for found in ranks(2).run(adopted):
        assert found["recipes"] == {
            "first": ("fp8_delayed", "LOCAL"), "local": ("fp8_delayed", "LOCAL"), "last": ("bf16", "ROW"),
            "both.weight_0": ("fp8_delayed", "COLUMN"), "both.weight_1": ("fp8_delayed", "COLUMN"),
        }  # fmt: skip
        weights = {"first", "local", "both.weight_0", "both.weight_1"}
        assert {slot.removesuffix(".w") for slot in found["slots"] if slot.endswith(".w")} == weights
        assert len(found["moved"]) == len(weights) and found["runtimes"] == 1 and found["dtensors"]
        assert found["swapped"] == ("both",) and found["wires"] == "chunked"


def refused() -> list[str]:
    """Return the messages with which conversion refuses: explicitly constructed layers with another style, token
    sharding or mesh than the conversion requests (three messages); a model with a converted part; a part of a converted
    model; an FSDP module; an attached model."""
    mesh, column = worker.mesh(tp=2), {"name": "column", "match": "both", "style": "column"}
    part, within = (nn.ModuleDict({"part": nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))}) for _ in range(2))
    dlp.convert(part["part"], [], mesh)
    dlp.convert(within, [], mesh)
    alone = worker.mesh(dp_shard=2)
    sharded = nn.Sequential(nn.Linear(8, 8).to(worker.device()))
    dlp.fully_shard(sharded, mesh=alone)
    attached = nn.Sequential(ByHand())
    dlp.attach(attached, torch.optim.SGD(attached.parameters()))
    attempts = [
        (ByHand(), [column | {"style": "row"}], mesh), (ByHand(), [column | {"sequence_parallel": True}], mesh),
        (ByHand(), [], alone), (part, [], mesh), (within["part"], [], mesh), (sharded, [], alone), (attached, [], mesh),
    ]  # fmt: skip
    return [may_raise(ValueError, dlp.convert, model, groups, on) for model, groups, on in attempts]


@pytest.mark.ranks(2)
def test_what_is_parallel_already_is_refused_by_name(ranks):
    otherwise = (
        "both: the layer was constructed with {0} = {1}, and a layer group sets {0} = {2}; construct the layer with "
        "{0} = {2}, or "
    )
    again = " is converted already: convert a plain model, once and as a whole"
    for style, tokens, mesh, part, within, sharded, attached in ranks(2).run(refused):
        assert style.startswith(otherwise.format("style", "column", "row"))
        assert tokens.startswith(otherwise.format("sequence_parallel", False, True))
        assert (
            mesh == "both: the layer was constructed for tp 2, and the mesh has tp 1; construct the layer on this mesh"
        )
        assert part.startswith(f"module part{again}") and within.startswith(f"module 0{again}")
        assert sharded.startswith(
            "0: the weight is a DTensor already: call dlp.convert and dlp.quantize_ before fully_shard and other"
        )
        assert attached == "dlp.attach has been called on this model already: dlp.convert comes first"


class Pretrained(nn.Module):
    """Model with `save_pretrained`, as in Hugging Face models, two tied weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table, self.head = nn.Embedding(VOCABULARY, SIZE), nn.Linear(SIZE, VOCABULARY, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.ones(2))

    def save_pretrained(self, folder: str, is_main_process: bool = True, state_dict: Any = None, **_: Any) -> Any:
        return is_main_process, state_dict or self.state_dict()


def saved() -> tuple[bool, bool, bool]:
    """Return whether `save_pretrained` would write files on this rank, whether its state dict has the full values, and
    whether tied weights are one tensor in it."""
    before = Pretrained().state_dict()
    model = Pretrained().to(worker.device())
    dlp.convert(model, [{"name": "cut", "match": ["table", "head"], "style": "column"}], worker.mesh(tp=2))
    wrote, state = model.save_pretrained("folder")
    same = all(type(value) is Tensor and torch.equal(value.cpu(), before[name]) for name, value in state.items())
    return wrote, same and state.keys() == before.keys(), state["table.weight"] is state["head.weight"]


@pytest.mark.ranks(2)
def test_save_pretrained_writes_whole_tensors(ranks):
    assert ranks(2).run(saved) == [(True, True, True), (False, True, True)]


def test_an_untied_head_is_not_saved_under_a_tied_configuration(monkeypatch):
    """The save is refused, because a program that loads the folder would use the embedding as the head."""
    model = Pretrained()
    model.config = SimpleNamespace(tie_word_embeddings=True)
    model.get_input_embeddings, model.get_output_embeddings = lambda: model.table, lambda: model.head
    save_whole(model)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert model.save_pretrained("folder")[0], "tied weights are equal"
    model.head.weight = nn.Parameter(model.table.weight + 1)
    with refuses(r"save_pretrained: table.weight and head.weight differ, .* would overwrite the"):
        model.save_pretrained("folder")
    model.config.tie_word_embeddings = False
    assert torch.equal(model.save_pretrained("folder")[1]["head.weight"], model.head.weight)


def wrong_features() -> list[str]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)).to(worker.device())
    groups = [{"name": "cut", "match": "0", "style": "column"}, {"name": "row", "match": "1", "style": "row"}]
    dlp.convert(model, groups, worker.mesh(tp=2))
    nn.utils.parametrizations.weight_norm(model[2])
    calls = [(0, 4), (1, 16), (2, 8)]
    return [may_raise(ValueError, model[i], torch.ones(3, size, device=worker.device())) for i, size in calls]


@pytest.mark.ranks(2)
def test_a_layer_names_itself_where_its_x_or_its_weight_is_another(ranks):
    for column, row, normed in ranks(2).run(wrong_features):
        assert column.startswith(
            "0: x of shape (3, 4) has 4 features, and the weight takes 8; COLUMN expects unsharded features"
        )
        assert row.startswith(
            "1: x of shape (3, 16) has 16 features, and the weight takes 8, the shard of 16 on one rank; ROW expects"
        )
        assert normed == (
            "2: weight is no longer a parameter of the module (weight_norm and FSDP1 of torch remove parameters); "
            "parametrize linears before dlp.convert and leave them out by a layer group with convert = false; use "
            "dlp.fully_shard instead of FSDP1"
        )


class Relative(nn.Module):
    """Relative positions as in DeBERTa-v2: the outer module reads the table of an embedding, and passes the table on to
    other modules."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.relative, self.proj = nn.Embedding(8, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16) if normed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(x) + self.proj(self.norm(self.relative.weight))
        return y


def passed_on() -> list[tuple[str, list[str]]]:
    found = []
    for normed in (True, False):
        model = nn.Sequential(Relative(normed)).to(worker.device())
        dlp.convert(model, [{"name": "all", "match": ["0.proj"], "recipe": "fp8_current"}], worker.mesh(tp=2))
        with pytest.raises(TypeError) as error:
            model(torch.ones(8, 16, device=worker.device()))
        found.append((str(error.value), error.value.__notes__))
    return found


@pytest.mark.ranks(2)
def test_who_reads_a_parameter_and_passes_it_on_is_named(ranks):
    note = (
        "0: a Relative reads parameters of other modules, which are DTensors now: leave the module out by a layer group"
    )
    for (norm, first), (linear, second) in ranks(2).run(passed_on):
        assert norm.startswith("0.norm: the module is called with a DTensor, made from a parameter of another module")
        assert linear.startswith("0.proj: x is a DTensor, but layers read plain local tensors")
        assert len(first) == len(second) == 1 and first[0].startswith(note) and second[0].startswith(note)


def loaded_whole() -> list[bool]:
    """Load plain unsharded tensors into a converted and attached model, with tp, and with tp and FSDP. Return whether each
    tensor has the loaded values. The model has a tied embedding and head, a buffer, a norm and a row-parallel linear."""
    found = []
    for fsdp in (False, True):
        torch.manual_seed(3)
        plain = Pretrained()
        plain.add_module("norm", nn.LayerNorm(SIZE))
        plain.add_module("row", nn.Linear(SIZE, SIZE))
        values = {name: value.clone() for name, value in plain.state_dict().items()}
        for value in values.values():
            value.copy_(torch.randn_like(value))
        values["head.weight"] = values["table.weight"]
        mesh, model = worker.mesh(tp=2), plain.to(worker.device())
        groups = [{"name": "cut", "match": ["table", "head"], "style": "column"}]
        dlp.convert(model, [*groups, {"name": "row", "match": ["row"], "recipe": "fp8_current", "style": "row"}], mesh)
        if fsdp:
            dlp.fully_shard(model, mesh=mesh)
        dlp.attach(model, torch.optim.SGD(model.parameters(), 0.1))
        model.load_state_dict(values)
        whole = {name: full(value) for name, value in model.state_dict().items()}
        found += [torch.equal(whole[name].cpu(), value) for name, value in values.items()]
    return found


@pytest.mark.ranks(2)
def test_whole_plain_tensors_are_loaded(ranks):
    for found in ranks(2).run(loaded_whole):
        assert len(found) == 14 and all(found)


def with_a_head() -> list[str]:
    """Return the logged differences from the plan after two forwards: of a model to which a head was added after
    conversion, and of a model to which a head was added before conversion."""
    said = []
    for late in (True, False):
        model, head = nn.Sequential(nn.Linear(SIZE, SIZE)).to(worker.device()), nn.Linear(SIZE, 4).to(worker.device())
        if not late:
            model.append(head)
        dlp.convert(model, [{"name": "up", "match": ["0"], "recipe": "bf16"}], worker.mesh(tp=2))
        if late:
            model.append(head)
        for _ in range(2):
            model(torch.ones(8, SIZE, device=worker.device()))
        said.append(" ".join(model.dlp_session.noted))
    return said


@pytest.mark.ranks(2)
def test_a_head_that_was_added_is_named_with_what_will_fail(ranks):
    for late, early in ranks(2).run(with_a_head):
        assert late.startswith(
            "2 parameters (1.weight, ...) were added after dlp.convert and are not DTensors, so that torch's clip_grad"
        )
        assert late.endswith("clip with dlp.optim.clip_grad_norm_, or add modules before dlp.convert")
        assert "added after" not in early


def clipped(mesh: Any) -> tuple[list[float], list[Tensor], str]:
    """Clip the gradients of a model of DTensors with a head of plain tensors. Return the norms from both clip functions of
    dlp, the clipped gradients, and the error of torch's clip function. If `mesh` is None, the model is plain torch: the
    only norm is from torch's function, and the error is ""."""
    torch.manual_seed(4)
    model, head = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)), nn.Linear(SIZE, 4)
    model, head = model.to(worker.device()), head.to(worker.device())
    if mesh is not None:
        groups = [{"name": name, "match": [each], "style": name} for name, each in (("column", "0"), ("row", "1"))]
        dlp.convert(model, groups, mesh)
    model.append(head)
    x = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(5)).to(worker.device())
    model(x).square().sum().backward()
    if mesh is None:
        norms, error = [nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()], ""
    else:
        with pytest.raises(RuntimeError) as raised:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        error = str(raised.value)
        optimizer = dlp.optim.InvariantAdamW(model.parameters(), lr=1e-3)
        norms = [dlp.optim.clip_(optimizer, 0.5).item(), dlp.optim.clip_grad_norm_(model, 0.5).item()]
    grads = [p.grad for p in model.parameters()]
    return norms, [full(grad) for grad in grads], error


def clipped_both() -> tuple[Any, Any]:
    return clipped(None), clipped(worker.mesh(tp=2))


@pytest.mark.ranks(2)
def test_gradients_of_a_head_that_was_added_are_clipped_with_the_others(ranks):
    for ((norm,), plain, _), (norms, made, error) in ranks(2).run(clipped_both):
        assert "got mixed torch.Tensor and DTensor" in error
        assert norm > 1 and norms == pytest.approx([norm] * 2, rel=1e-6)
        for one, other in zip(plain, made, strict=True):
            assert_close(other, one, 1e-6)
