"""Hand-overs of quantized tensors, for every recipe: within one `ops.Sequential` and between two, eager and compiled.

A hand-over means: the producer returns x or dy quantized, and the linear that reads the tensor casts nothing. Results
and gradients are bitwise equal to the same model without hand-over. Where nothing is handed over, the plan states the
reason.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import dlp
from dlp import ops
from dlp.parallel.linear import codes
from dlp.parallel.linear import quantize as quantization
from launch.training.recomputation import _contexts
from tests.cases import RECIPES, nightly
from tests.metrics import assert_bit_equal
from tests.ops_models import values
from tests.refusals import refuses
from tests.test_ops_handed import Halved

C, TOKENS = 64, 48  # mxfp8 pads 48 tokens
QUANTIZING = [recipe for recipe in RECIPES if recipe != "bf16"]
DRAWN = "stochastic rounding depends on the layer that reads the tensor"
DELAYED = "delayed scales belong to the layer that reads the tensor"
PADDED = "pads [48, 64] to complete blocks"


class TwoLinears(nn.Module):
    """Two linears, and between them the ops that hand over x of `last` and dy of `first`.

    where    "one sequence": a user-defined op between the linears quantizes x and dy. "by recipe" and "by reader": a Quantize
             at the end of a first `ops.Sequential` quantizes x, and a Quantize at the start of a second `ops.Sequential`
             quantizes dy. The Quantize gets the recipe or the reading linear
    handed   False: the same ops return high precision
    """

    def __init__(self, recipe: str, where: str, handed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        first, last = (ops.Linear(C, C, bias=False, recipe=recipe) for _ in range(2))
        if where == "one sequence":
            self.parts = nn.ModuleList([ops.Sequential(first, Halved(handed), last)])
        else:
            told = [{"recipe": recipe}] * 2 if where == "by recipe" else [{"reader": last}, {"reader": first}]
            behind = ops.Quantize(handed, False, **told[0])  # type: ignore[arg-type]
            before = ops.Quantize(False, handed, **told[1])  # type: ignore[arg-type]
            self.parts = nn.ModuleList([ops.Sequential(first, behind), ops.Sequential(before, last)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x

    def plans(self) -> str:
        return "\n".join(str(part.plan()) for part in self.parts)  # type: ignore[operator]


class Found(NamedTuple):
    """Results of three steps, casts of x and dy that the linears ran, and plans. A cast is ("x" or "dy", "first" or
    "last")."""

    tensors: list[Tensor]
    casts: set[tuple[str, str]]
    plans: str


def trained(model: TwoLinears, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> Found:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dlp.attach(model, optimizer)
    names = {op.core.spec.members[0]: end for end, op in _linears(model)}
    casts: set[tuple[str, str]] = set()
    engine = quantization.cast

    def recorded(plan: Any, asked: Any, given: Any, members: Any, *rest: Any, **options: Any) -> Any:
        casts.add((plan.tensor, names[members[0]]))
        return engine(plan, asked, given, members, *rest, **options)

    monkeypatch.setattr(quantization, "cast", recorded)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    tensors: list[Tensor] = []
    for step in range(3):  # fp8_delayed reads scales of earlier steps from the second on
        x = values(step, TOKENS, C).requires_grad_()
        y = run(x)
        y.backward(values(9 + step, TOKENS, C))
        tensors += [y.detach(), x.grad, *[p.grad for p in model.parameters()]]  # type: ignore[list-item]
        optimizer.step()
        optimizer.zero_grad()
    monkeypatch.undo()
    return Found(tensors, {each for each in casts if each[0] in ("x", "dy")}, model.plans())


def _linears(model: TwoLinears) -> list[tuple[str, Any]]:
    linears = [op for part in model.parts for op in part if isinstance(op, ops.Linear)]  # type: ignore[attr-defined]
    return list(zip(("first", "last"), linears, strict=True))


# where -> function from a recipe to the expected reasons, for each of x and dy that is not handed over
REASONS: dict[str, Callable[[str], dict[str, str]]] = {
    "one sequence": lambda recipe: {"dy": DRAWN} if recipe == "nvfp4" else {},
    "by reader": lambda recipe: {"dy": DRAWN} if recipe == "nvfp4" else {},
    "by recipe": lambda recipe: {
        "fp8_delayed": {"x": DELAYED, "dy": DELAYED},
        "mxfp8": {"x": PADDED, "dy": PADDED},
        "nvfp4": {"dy": DRAWN},
    }.get(recipe, {}),
}
EVERY = {("x", "first"), ("x", "last"), ("dy", "first"), ("dy", "last")}
READ = {"x": ("x", "last"), "dy": ("dy", "first")}  # the casts that a hand-over saves


@pytest.mark.parametrize("where", REASONS)
@pytest.mark.parametrize("recipe", QUANTIZING)
def test_codes_are_handed_over_or_the_plan_says_why(recipe: str, where: str, monkeypatch: pytest.MonkeyPatch):
    found, plain = (trained(TwoLinears(recipe, where, handed), False, monkeypatch) for handed in (True, False))
    for i, (mine, expected) in enumerate(zip(found.tensors, plain.tensors, strict=True)):
        assert_bit_equal(mine, expected, f"{i}")
    reasons = REASONS[where](recipe)
    assert found.casts == EVERY - {READ[tensor] for tensor in {"x", "dy"} - reasons.keys()}
    assert plain.casts == EVERY
    for reason in reasons.values():
        assert reason in found.plans
    assert ("in high precision: " in found.plans) == bool(reasons)


DENSE_DY = "passes dense dy: autograd passes dense gradients between traced ops"
COMPILED = {"one sequence": f"under torch.compile or a dispatch mode, 1 (Halved) {DENSE_DY}"} | dict.fromkeys(
    ("by recipe", "by reader"), f"under torch.compile or a dispatch mode, 0 (Quantize) {DENSE_DY}"
)
BY_DAY = [
    ("fp8_current", "by recipe"), ("fp8_delayed", "one sequence"), ("mxfp8", "by reader"), ("nvfp4", "one sequence"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "where"),
    [each if each in BY_DAY else nightly(*each) for each in itertools.product(QUANTIZING, COMPILED)],
)
def test_compiled_code_hands_over_x_and_the_plan_says_why_not_dy(
    recipe: str, where: str, monkeypatch: pytest.MonkeyPatch
):
    """Compiled code with hand-over has the bits of eager code with and without hand-over. x of `last` is cast by the
    op before `last`, and not by `last`, except for fp8_delayed by recipe, where `last` casts x."""
    torch._dynamo.reset()
    found = trained(TwoLinears(recipe, where, True), True, monkeypatch)
    for handed in (True, False):
        eager = trained(TwoLinears(recipe, where, handed), False, monkeypatch)
        for i, (mine, expected) in enumerate(zip(found.tensors, eager.tensors, strict=True)):
            assert_bit_equal(mine, expected, f"{i}")
    saved = set() if (recipe, where) == ("fp8_delayed", "by recipe") else {READ["x"]}
    assert found.casts == EVERY - saved
    assert COMPILED[where] in found.plans


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "operation": lambda x: x.mul(3.0), "write": lambda x: x.mul_(3.0), "write to a view": lambda x: x.detach()[:].mul_(3.0)
}  # fmt: skip


class Changed(nn.Module):
    """Module that modifies the tensor that Quantize returned, by the function `CHANGES[how]`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y = CHANGES[self.how](x)
        return y if self.how == "operation" else x  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("grad", [True, nightly(False)])
@pytest.mark.parametrize("how", CHANGES)
def test_compiled_code_casts_what_was_changed_after_the_cast(how: str, grad: bool):
    torch._dynamo.reset()
    linear = ops.Linear(C, C, bias=False, recipe="fp8_current")
    norm = ops.Sequential(ops.RMSNorm(C), ops.Quantize(recipe="fp8_current"))
    model = nn.Sequential(norm, Changed(how), linear)
    x = values(1, TOKENS, C)
    with torch.set_grad_enabled(grad):
        y = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        assert_bit_equal(y, linear(norm[0](x) * 3.0))


@pytest.fixture
def casts_of_x(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets an entry for each cast of x: "quantize" if the linear that reads x casts; "codes" if the op
    before it casts (Quantize, or a linear with output="quantized")."""
    found: list[str] = []

    def recorded(engine: Any, name: str, plan: Any, *args: Any, **options: Any) -> Any:
        found.extend([name] * (plan.tensor == "x"))
        return engine(plan, *args, **options)

    monkeypatch.setattr(codes, "cast", partial(recorded, codes.cast, "codes"))
    monkeypatch.setattr(quantization, "cast", partial(recorded, quantization.cast, "quantize"))
    return found


@pytest.mark.slow
def test_two_linears_read_one_cast_in_compiled_code(casts_of_x: list[str]):
    """In one graph, linears of the same recipe read the codes that `Linear(output="quantized")` returns. A linear of another
    recipe casts x itself, as does a linear that runs in another graph."""
    torch._dynamo.reset()
    first = ops.Sequential(ops.Linear(C, C, recipe="fp8_block", output="quantized"))
    readers = [ops.Linear(C, C, recipe=recipe) for recipe in ("fp8_block", "fp8_block", "fp8_current")]

    def run(x: Tensor) -> list[Tensor]:
        y = first(x)
        return [reader(y) for reader in readers]

    x = values(1, TOKENS, C)
    expected = [reader(first(x).tensor()) for reader in readers[:2]]  # type: ignore[union-attr]
    casts_of_x.clear()
    with torch.no_grad():
        found = torch.compile(run, backend="aot_eager", fullgraph=True)(x)
        assert casts_of_x == ["quantize", "codes", "quantize"], "first, its output, and the reader with another recipe"
        for mine, other in zip(found, expected, strict=False):
            assert_bit_equal(mine, other)
        casts_of_x.clear()
        y = torch.compile(first, backend="aot_eager", fullgraph=True)(x)
        torch.compile(readers[0], backend="aot_eager", fullgraph=True)(y)
        assert casts_of_x == ["quantize", "codes", "quantize"]


class Block(nn.Module):
    def __init__(self, reader: nn.Module, linear: nn.Module) -> None:
        super().__init__()
        self.quantize, self.linear = ops.Quantize(reader=reader), linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.quantize(x))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mxfp8", *map(nightly, ("fp8_current", "fp8_delayed", "fp8_block"))])
def test_compiled_code_hands_over_any_number_of_tokens(recipe: str, casts_of_x: list[str]):
    """Compiled with dynamic shapes, a Quantize and its linear have the bits of the eager linear without Quantize."""
    torch._dynamo.reset()
    linear = ops.Linear(C, C, recipe=recipe)
    dlp.attach(linear, torch.optim.SGD(linear.parameters(), 0.1))
    run = torch.compile(Block(linear, linear), backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (32, 5, 48, 1, 0):
        results: list[tuple[Any, ...]] = []
        for call in (run, linear):
            x = values(1, tokens, C).requires_grad_()
            linear.zero_grad()
            y = call(x)
            y.backward(values(2, tokens, C))
            results.append((y.detach(), x.grad, linear.weight.grad))
        for mine, expected in zip(*results, strict=True):
            assert_bit_equal(mine, expected, f"{tokens} tokens")
    assert casts_of_x == ["codes", "quantize"] * 5


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "casts"), [(0, ["codes"] * 3), (1, ["quantize"] * 3)])
def test_equal_blocks_share_a_graph_and_only_the_reader_reads_codes(
    shift: int, casts: list[str], casts_of_x: list[str]
):
    """Equal compiled blocks share a graph, whichever reader their Quantize has. The reader in block i is the linear of
    block i + shift, so only with shift 0 does it get the codes."""
    torch._dynamo.reset()
    linears = [ops.Linear(C, C, recipe="fp8_current") for _ in range(3)]
    compiled, x = CompileCounterWithBackend("aot_eager"), values(1, TOKENS, C)
    expected = [linear(x) for linear in linears]
    casts_of_x.clear()
    for i, linear in enumerate(linears):
        block = Block(linears[(i + shift) % 3], linear)
        block.compile(backend=compiled, fullgraph=True)
        assert_bit_equal(block(x), expected[i])
    assert casts_of_x == casts and compiled.frame_count == 1


def test_selective_recomputation_keeps_quantized_x(casts_of_x: list[str]):
    linear = ops.Linear(C, C, recipe="fp8_current")
    checkpoint(Block(linear, linear), values(1, TOKENS, C), use_reentrant=False, context_fn=_contexts).sum().backward()
    assert casts_of_x == ["codes"]


@pytest.mark.parametrize("layer", [True, False])
@pytest.mark.parametrize("recipe", QUANTIZING)
def test_the_fake_version_of_the_cast_has_the_layouts_of_the_cast(recipe: str, layer: bool):
    bound = ops.Linear(C, C, recipe=recipe).core.bound
    for wgrad in (True, False):
        given = values(1, TOKENS, C), bound.spec_id if layer else None, bound.trace_id, wgrad, True
        torch.library.opcheck(torch.ops.dlp.quantize_x.default, given, test_utils=("test_schema", "test_faketensor"))


def test_a_reader_that_cannot_be_handed_codes_is_named():
    """The plan names the reason: a delayed layer without `dlp.attach` computes its scales when it reads x; and a
    gradient of a bias needs dy in high precision."""
    x = values(1, TOKENS, C)
    delayed = ops.Quantize(reader=ops.Linear(C, C, recipe="fp8_delayed"))
    assert type(delayed(x)) is Tensor
    assert delayed.plan_notes == [
        "returns y in high precision: fp8_delayed: delayed scales without dlp.attach belong to the layer that reads the tensor"
    ]
    first = ops.Linear(C, C, recipe="fp8_current")
    second = ops.Quantize(False, True, reader=first)
    second(first(x)).sum().backward()
    assert second.plan_notes == ["returns dx in high precision: fp8_current: the bias sums dy"]
    siblings = ops.Linear(C, (C, C), bias=False, recipe="fp8_current")
    assert isinstance(ops.Quantize(reader=siblings)(x), ops.Handed)
    with refuses(r"Quantize\(strict=True\): bf16: the recipe does not quantize; leave strict out"):
        ops.Quantize(reader=ops.Linear(C, C), strict=True)(x)


def test_a_reader_replaces_recipe_and_ranks():
    linear = ops.Linear(C, C, recipe="fp8_current")
    for wrong in ({"recipe": "fp8_block"}, {"backward": True}):
        with pytest.raises(ValueError, match="takes recipe and ranks from the reader"):
            ops.Quantize(reader=linear, **wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="reader must be a linear of dlp; got Linear: pass the layer"):
        ops.Quantize(reader=nn.Linear(C, C))(values(1, TOKENS, C))
    assert not list(ops.Quantize(reader=linear).parameters())


def test_a_reader_casts_by_the_region_around_it():
    """In an autocast region Quantize casts for the recipe of the region. Only the reader itself accepts the codes.
    Another layer, or a copy of the reader, refuses them, because it would quantize x a second time."""
    layer, x = dlp.Linear(C, C, recipe="fp8_current"), values(1, TOKENS, C)
    quantize = ops.Quantize(reader=layer, strict=True)
    with dlp.autocast(recipe="fp8_block"):
        handed = quantize(x)
        assert "fp8_block" in str(handed)
        assert_bit_equal(layer(handed), layer(x))
    assert "fp8_tensor" in str(quantize(x))
    for other in (dlp.Linear(C, C, recipe="fp8_current"), copy.deepcopy(layer)):
        with pytest.raises(ValueError, match="x is quantized twice"):
            other(quantize(x))
