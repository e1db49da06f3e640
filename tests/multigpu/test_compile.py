"""torch.compile traces a parallel linear as two opaque ops, compiled layers have the results of eager layers, and the
fake implementations are correct."""

from __future__ import annotations

from functools import partialmethod
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dlp
from dlp import ops
from dlp.parallel.linear.functional import linear_forward
from dlp.parallel.linear.modules import ColumnParallelLinear, Linear, RowParallelLinear
from dlp.parallel.linear.plan import to_save
from launch.config.run_config import Config
from launch.training import build
from tests import pool as worker
from tests import training
from tests.cases import nightly
from tests.metrics import relative_error

pytestmark = pytest.mark.slow

HIDDEN = 32


def options_of(recipe: str, sequence_parallel: bool) -> dict[str, Any]:
    return {
        "tp": worker.mesh(tp=dist.get_world_size())["tp"], "recipe": recipe, "device": worker.device(),
        "sequence_parallel": sequence_parallel, "dtype": torch.bfloat16,
    }  # fmt: skip


class Mlp(nn.Module):
    """A column-parallel layer of two siblings, and a row-parallel linear. With sequence parallelism, input and output are
    token shards."""

    def __init__(self, recipe: str, sequence_parallel: bool, features: int = 64) -> None:
        super().__init__()
        options = options_of(recipe, sequence_parallel)
        self.up = ColumnParallelLinear(HIDDEN, (features, features), True, **options)
        self.down = RowParallelLinear(features, HIDDEN, True, **options)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x)
        return x + self.down(torch.sigmoid(a) * b)


def results(module: nn.Module, model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = module(x)
    y.square().sum().backward()
    gradients = [getattr(p.grad, "_local_tensor", p.grad).clone() for p in model.parameters()]
    assert x.grad is not None
    return [y.detach(), x.grad, *gradients]


def graph_of(module: nn.Module, x: Tensor) -> tuple[Any, list[str]]:
    """Return the module, which compiles when it is called, and a list to which compilation appends the names of dlp's ops
    in the forward and backward graphs."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    names: list[str] = []

    def note(graph: Any, inputs: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes if str(node.target).startswith("dlp."))
        return make_boxed_func(graph.forward)

    return torch.compile(module, fullgraph=True, backend=aot_autograd(fw_compiler=note, bw_compiler=note)), names


def compiled_equals_eager(
    recipe: str, sequence_parallel: bool, features: int, kind: type[nn.Module] = Mlp
) -> tuple[list[bool], list[str]]:
    torch.manual_seed(dist.get_rank() if sequence_parallel else 0)
    x = torch.randn(48, HIDDEN, device=worker.device(), dtype=torch.bfloat16)
    torch.manual_seed(1)
    model = kind(recipe, sequence_parallel, features)
    eager = results(model, model, x)
    compiled, names = graph_of(model, x)
    traced = results(compiled, model, x)
    torch._dynamo.reset()
    return [torch.equal(a, b) for a, b in zip(eager, traced, strict=True)], names


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recipe", "features", "sequence_parallel", "kind"),
    [
        nightly("bf16", 64, False, Mlp), nightly("fp8_current", 64, True, Mlp), nightly("fp8_current", 64, False, Mlp),
        ("mxfp8", 40, True, Mlp), ("qat", 64, True, Mlp), nightly("qat", 64, False, Mlp),
    ],
)  # fmt: skip
def test_a_linear_is_two_ops_to_the_compiler(ranks, recipe, features, sequence_parallel, kind):
    for equal, names in ranks(2).run(compiled_equals_eager, recipe, sequence_parallel, features, kind):
        assert all(equal), equal
        assert sorted(names) == ["dlp.linear_bwd.default"] * 2 + ["dlp.linear_fwd.default"] * 2


class Net(nn.Module):
    """Plain modules that conversion shards: siblings, a norm, a bias under sequence parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate = nn.Linear(HIDDEN, 64, bias=False)
        self.up = nn.Linear(HIDDEN, 64, bias=False)
        self.down = nn.Linear(64, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Net(), Net()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


GROUPS = [
    {"name": "in", "match": ["blocks.*.{gate,up}"], "style": "column", "siblings": True},
    {"name": "out", "match": ["blocks.*.down"], "style": "row"},
    {"name": "sp", "match": ["**"], "sequence_parallel": True},
    {"name": "fp8", "match": ["blocks.*.{gate,up,down}"], "recipe": "fp8_current"},
]


# Settings with which inductor compiles CPU code in seconds: no vector code, no optimization, no precompiled headers
PLAIN_CODE = {
    "cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False, "aot_inductor.debug_compile": True,
    "compile_threads": 1,
}  # fmt: skip


@torch._inductor.config.patch(PLAIN_CODE)
def compiled_conversion(backend: str, whole: bool) -> tuple[list[float], int]:
    """Return the relative differences of y, dx and the gradients of a compiled model from the eager model, and the
    number of graphs. `whole`: the model is compiled as one module, and graph breaks are allowed; else each block is
    compiled without graph breaks."""
    world = dist.get_world_size()
    mesh = worker.mesh(tp=world)
    torch.manual_seed(0)
    model = Model().to(worker.device())
    dlp.convert(model, GROUPS, mesh, batch=(world, 16))
    x = torch.randn(16, HIDDEN, device=worker.device())
    eager = results(model, model, x)
    for module in [model] if whole else model.blocks:
        module.compile(fullgraph=not whole, backend=backend)
    torch._dynamo.utils.counters.clear()
    traced = results(model, model, x)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return [relative_error(a, b) for a, b in zip(traced, eager, strict=True)], graphs


@pytest.mark.parametrize(
    ("backend", "whole", "world"),
    [
        ("aot_eager", False, 1),
        nightly("aot_eager", False, 2),
        nightly("aot_eager", True, 2),
        nightly("inductor", False, 1),
    ],
)
def test_a_converted_model_compiles(ranks, backend, whole, world):
    """With aot_eager, the results have equal bits. In norms, inductor adds in another order than eager code, so the last
    bits of x of a linear may differ, and with them an FP8 code of x."""
    for errors, graphs in ranks(world).run(compiled_conversion, backend, whole):
        assert max(errors) <= (0 if backend == "aot_eager" else 0.02), errors
        assert whole or graphs == 1, "equal blocks share a graph"


class Language(nn.Module):
    """Embedding, blocks, head and loss. `borders`: the model scatters the tokens over tp before the blocks and gathers
    them after; else layer groups shard the embedding over the vocabulary."""

    def __init__(self, borders: bool) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(64, HIDDEN), nn.ModuleList([Net()])
        self.head, self.borders = nn.Linear(HIDDEN, 64, bias=False), borders

    def forward(self, tokens: Tensor, targets: Tensor, tp: Any) -> Tensor:
        x = self.embed(tokens)
        x = dlp.scatter_tokens(x, tp) if self.borders else x
        for block in self.blocks:
            x = x + block(x)
        x = dlp.gather_tokens(x, tp) if self.borders else x
        return dlp.cross_entropy(self.head(x).flatten(0, -2), targets.flatten(), tp) / targets.numel()


def whole_model(recipe: str, borders: bool) -> list[list[float]]:
    """Errors of loss and gradients of two steps of a model compiled as one graph, compared with the eager model."""
    mesh = worker.mesh(tp=2)
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1)).to(worker.device())
    vocabulary = {"name": "vocabulary", "match": ["embed"], "style": "column"}
    groups = [
        *GROUPS[:2], {"name": "sp", "match": ["blocks.**"], "sequence_parallel": True} if borders else vocabulary,
        {"name": "quantized", "match": ["blocks.*.{gate,up,down}"], "recipe": recipe},
        {"name": "head", "match": ["head"], "style": "column"},
    ]  # fmt: skip
    steps: list[list[list[Tensor]]] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Language(borders).to(worker.device())
        dlp.convert(model, groups, mesh, batch=(4, 16))
        dlp.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        steps.append([])
        for _ in range(2):
            model.zero_grad()
            loss = run(tokens, tokens.roll(1, 1), mesh)
            loss.backward()
            steps[-1].append([loss.detach(), *[getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]])
    torch._dynamo.reset()
    return [[relative_error(a, b) for a, b in zip(*step, strict=True)] for step in zip(*steps, strict=True)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("recipe", "borders"), [("nvfp4", True), ("fp8_current", False)])
@pytest.mark.full  # other tests of this file compile parts of the model, and test_embedding.py compiles the loss
def test_a_whole_model_is_one_graph(ranks, recipe, borders):
    """The model is one graph with token shards, and with an embedding that is sharded over the vocabulary. With nvfp4 the
    graph includes the counter of microbatches for stochastic rounding."""
    for steps in ranks(2).run(whole_model, recipe, borders):
        assert max(map(max, steps)) == 0, steps


def changed_weights() -> list[str]:
    """Return the results of forwards of a compiled model after changes of weights: "" or the message of the error."""
    torch.manual_seed(0)
    model = Net().to(worker.device())
    dlp.convert(model, [{"name": "fp8", "match": ["**"], "recipe": "fp8_current"}], worker.mesh(tp=1))
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    dlp.attach(model, optimizer)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, found = torch.randn(16, HIDDEN, device=worker.device()), list[str]()

    def forward() -> Tensor:
        try:
            y: Tensor = compiled(x)
        except RuntimeError as error:
            found.append(str(error))
            dlp.end_step(model)
            y = compiled(x)
        else:
            found.append("")
        assert torch.equal(y, model(x))
        return y

    for _ in range(2):
        forward().square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        model.up.weight.mul_(2)
    forward()
    other.step()
    with torch.no_grad():
        forward()
        model.up.weight.data.mul_(2)
        forward()
    torch._dynamo.reset()
    return found


@pytest.mark.ranks(1)
def test_a_whole_compiled_model_refuses_casts_of_old_weights(ranks):
    (found,) = ranks(1).run(changed_weights)
    assert found[:2] == ["", ""]
    for message in found[2:4]:
        assert (
            "was changed outside of the step of an attached optimizer, and a model that is compiled as a whole"
            in message
        )
    assert "was changed without torch's version counter" in found[4]


def out_of_range() -> bool:
    compiled = torch.compile(dlp.cross_entropy, fullgraph=True, backend="aot_eager")
    loss = compiled(torch.zeros(4, 8, device=worker.device()), torch.tensor([1, 2, 16, 3], device=worker.device()),
                    dist.group.WORLD)  # fmt: skip
    torch._dynamo.reset()
    return bool(loss.isnan())


@pytest.mark.ranks(2)
def test_a_target_outside_of_the_vocabulary_makes_a_compiled_loss_nan(ranks):
    assert ranks(2).run(out_of_range) == [True, True]


def moved(kind: type[ops.BasicOperation], fullgraph: bool) -> list[Tensor]:
    """Return y and dx of an ops.Sequential: a linear, GELU, an op that communicates (`kind`), and GELU. `fullgraph`:
    torch.compile compiles the ops.Sequential."""
    torch.manual_seed(0)
    rows = (1, 2) if kind is ops.AllGather else (2, 1) if kind is ops.ReduceScatter else (1, 1)
    model = ops.Sequential(ops.Linear(HIDDEN, HIDDEN), ops.GELU(), kind(dist.group.WORLD), ops.GELU())
    x = torch.randn(8 * rows[0], HIDDEN, device=worker.device(), requires_grad=True)
    model.to(worker.device())
    y = (torch.compile(model, fullgraph=True, backend="aot_eager") if fullgraph else model)(x)
    assert len(y) == 8 * rows[1]
    y.square().sum().backward()
    torch._dynamo.reset()
    assert x.grad is not None
    return [y.detach(), x.grad]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [ops.AllGather, nightly(ops.ReduceScatter), nightly(ops.AllReduce)])
def test_ops_that_communicate_compile(ranks, kind):
    for eager, compiled in zip(ranks(2).run(moved, kind, False), ranks(2).run(moved, kind, True), strict=True):
        for a, b in zip(eager, compiled, strict=True):
            assert relative_error(a, b) < 1e-6


def graphs_of_blocks(config: Config) -> list[int]:
    """Number of graphs after two steps with one compiled block, and after two more steps with two compiled blocks."""
    trainer, _ = training.trainer(config)
    torch._dynamo.utils.counters.clear()
    graphs = []
    for i, block in enumerate(trainer.built.model.model.layers):
        block.compile(backend="eager", fullgraph=True)
        for step in (2 * i, 2 * i + 1):
            trainer.train_step(step)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    return graphs


@pytest.mark.ranks(1)
@pytest.mark.full  # test_a_converted_model_compiles counts the graphs of equal blocks
def test_more_blocks_of_a_model_make_no_more_graphs(ranks, tmp_path):
    """torch compiles at most eight graphs of a function. If each block had a graph, the remaining blocks of a deep model
    would run eagerly."""
    settings = ("--mesh.tp=1", "--model.layers=2", "--train.deterministic=false")
    (graphs,) = ranks(1).run(graphs_of_blocks, training.config(tmp_path, training.shards(tmp_path), *settings))
    assert 0 < graphs[0] == graphs[1] <= 4, graphs


def steps_within(config: Config, graphs: int) -> str:
    """Train two steps with compiled blocks, for which torch may compile at most `graphs` graphs. Return the message of
    FailOnRecompileLimitHit, or "" if there is no error."""
    eager = partialmethod(nn.Module.compile, backend="eager")
    with (
        torch._dynamo.config.patch({}),
        patch.object(build, "GRAPHS", graphs),
        patch.object(nn.Module, "compile", eager),
    ):
        try:
            trainer, _ = training.trainer(config)  # on a GPU, this already runs microbatches, so it can raise the error
            for step in range(2):
                trainer.train_step(step)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            return str(error)
        finally:
            torch._dynamo.reset()
    return ""


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("graphs", "said"), [(1, "recompile_limit"), nightly(64, "")])
def test_a_block_that_torch_would_no_longer_compile_ends_the_run(ranks, tmp_path, graphs, said):
    config = training.config(tmp_path, training.shards(tmp_path), "--mesh.tp=1", "--train.compile=true")
    (refused,) = ranks(1).run(steps_within, config, graphs)
    assert said in refused and bool(refused) == bool(said)


def check_ops(recipe: str, style: type[Linear], sequence_parallel: bool, features: int) -> None:
    """Run torch.library.opcheck on both ops: schema, aliasing, and the shapes of the fake versions. Backward is checked
    without schema and aliasing if forward saves a part with one byte per element."""
    tp = worker.mesh(tp=dist.get_world_size())["tp"]
    layer = style(
        HIDDEN, features, True, tp=tp, sequence_parallel=sequence_parallel, recipe=recipe, device=worker.device(),
        dtype=torch.bfloat16,
    )  # fmt: skip
    bound = layer.core.bound
    weights = [w.detach() for w in layer.core.weight_tensors()]
    biases = [b.detach() for b in layer.core.biases() if b is not None]
    x = torch.randn(24, weights[0].shape[1], device=worker.device(), dtype=torch.bfloat16)
    forward = (x, weights, biases, [], bound.spec_id, bound.trace_id, True, True, [])
    (y,), kept = torch.ops.dlp.linear_fwd(*forward)
    backward = (
        [torch.randn_like(y)], to_save(x, kept, True), weights, [], bound.spec_id, bound.trace_id, x.dtype, [1, 7],
    )  # fmt: skip
    torch.library.opcheck(torch.ops.dlp.linear_fwd.default, forward)
    readable = all(part.itemsize > 1 for part in backward[1])  # opcheck's test of aliases cannot compare fp8 inputs
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.dlp.linear_bwd.default, backward, test_utils=("test_schema",) * readable + checks)


COLUMN, ROW = ColumnParallelLinear, RowParallelLinear
OPS = [  # column and row with and without token shards; each style in at least two recipes; mxfp8 with partial scaling blocks
    (Linear, False, "bf16", 64), (Linear, False, "mxfp8", 40), (COLUMN, False, "fp8_current", 64),
    (COLUMN, False, "mxfp8", 40), (COLUMN, True, "bf16", 64), (COLUMN, True, "mxfp8", 40), (ROW, False, "bf16", 64),
    (ROW, False, "fp8_current", 64), (ROW, True, "fp8_current", 64), (ROW, True, "mxfp8", 40), (Linear, False, "qat", 64),
    (COLUMN, True, "qat", 64),
]  # fmt: skip
# Cases without `--all-cases`: a gather of tokens, a reduce-scatter, and qat
CHOSEN = [(COLUMN, True, "mxfp8", 40), (ROW, True, "mxfp8", 40), (COLUMN, True, "qat", 64)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("style", "sequence_parallel", "recipe", "features"), [each if each in CHOSEN else nightly(*each) for each in OPS]
)
def test_the_ops_pass_opcheck(ranks, recipe, features, style, sequence_parallel):
    ranks(2).run(check_ops, recipe, style, sequence_parallel, features)


def kept_and_promised(recipe: str) -> tuple[list[Any], list[Any]]:
    """Return (shape, dtype, stride) of the tensors that forward saves for a gathered x, and of the same tensors in the
    plan, with the scale layout of Hopper."""
    with patch("dlp.kernels.registry.kind_of", lambda device: "sm_90"):
        layer = ColumnParallelLinear(160, 64, **options_of(recipe, True)).to(worker.device())
        x = torch.randn(128, 160, device=worker.device()).bfloat16()
        _, kept = linear_forward(layer.core.bound, x, [layer.weight.detach().to_local()], [None], (), True, True)
        promised = layer.core.bound.plan(len(x)).saved(x)
        return tuple([(each.shape, each.dtype, each.stride()) for each in given] for given in (kept, promised))


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 2)])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8"])
def test_what_is_kept_of_an_x_that_is_sent_lies_as_the_plan_promised(ranks, world, recipe):
    """Compiled code requires the strides that the plan states. They depend on the recipe: scales are contiguous if one
    kernel casts both the saved and the sent operand."""
    for kept, promised in ranks(world).run(kept_and_promised, recipe):
        assert kept == promised
