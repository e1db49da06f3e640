"""Recipe qat under tp, sequence parallelism and FSDP2, compared with one rank. Clipping must set the same elements of
gradients to zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dlp
from dlp.quant.integers import IntScaling
from tests import pool as worker
from tests import training
from tests.cases import EPSILON, STYLE_KEYS, LinearCase
from tests.metrics import assert_all_bit_equal, assert_bit_equal, relative_error
from tests.multigpu.test_linear import compare, make_full, over_ranks, sharded, unsharded
from tests.refusals import refuses
from tests.shardnet import backward, shardnet, tensors, train

STYLES = [key for key in STYLE_KEYS if key[0] != "local"]


def against_one_rank(cases: list[LinearCase]) -> list[tuple[dict[str, Any], list[str]]]:
    """Return, for each case, the errors compared with one rank, and the gradients that are zero at other elements than on one
    rank."""
    found = []
    for case in cases:
        full = make_full(case)
        actual, expected = sharded(case, full), unsharded(case, full)
        zeros = [{n: (t == 0).float() for n, t in each.items() if n[:2] in ("dx", "dw")} for each in (actual, expected)]
        assert all((expected[f"dw{i}"] == 0).any() for i in range(case.siblings)), "something is clipped"
        others = [name for name, error in compare(case, *zeros).items() if not error.equal]
        found.append((compare(case, actual, expected), others))
    return found


@pytest.mark.ranks(2)
def test_tp_computes_what_one_rank_does(ranks):
    cases = [
        LinearCase(
            key, "qat", dtype, bias=True, siblings=1 if key[0] == "row" else 2, batch=2, sequence=12, amax_scope="all"
        )
        for key in STYLES
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for case, of_ranks in zip(cases, zip(*ranks(2).run(against_one_rank, cases), strict=True), strict=True):
        for name in of_ranks[0][0]:
            error = over_ranks([errors[name] for errors, _ in of_ranks])
            assert error <= EPSILON[case.dtype], f"{case} {name}: {error:.2e}"
        assert all(not others for _, others in of_ranks), f"{case}: {of_ranks[0][1]} clipped elsewhere"


def trained(sizes: dict[str, int], steps: int, keywords: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train `steps` steps and one more microbatch; return the losses, and the unsharded parameters and gradients."""
    mesh = worker.mesh(**sizes)
    model = shardnet("qat", mesh, size=64, **keywords)
    return [*train(model, mesh, range(steps)), backward(model, mesh, 9)], tensors(model)


@pytest.mark.ranks(2)
def test_fsdp_moves_what_is_clipped_with_the_values(ranks):
    def run(steps: int, **keywords: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        return ranks(2).run(trained, {"dp_shard": 2}, steps, keywords)[0]

    found, alone = run(0)[1], ranks(1).run(trained, {}, 0, {})[0][1]
    for name in [name for name in found if name.endswith(".grad")]:
        assert relative_error(2 * found[name], alone[name]) < 2e-2, f"{name}, which ranks average"
    losses, found = run(1)
    for name in [name for name in found if name.endswith(("gate.weight", "up.weight", "down.weight"))]:
        grad, clipped = found[f"{name}.grad"], IntScaling(4, 32).clipped(found[name].bfloat16(), None)
        assert 0.003 < clipped.float().mean() < 0.03
        assert not grad[clipped].any() and (grad[~clipped] != 0).float().mean() > 0.99, name
    same, others = run(1, quantized_gather=False)
    assert same == losses
    assert_all_bit_equal(others, found)
    found = run(1, quantize_from_master=True)[1]
    for name in [name for name in found if name.endswith("down.weight")]:
        grad, clipped = found[f"{name}.grad"], IntScaling(4, 32).clipped(found[name], None)
        assert not grad[clipped].any(), f"{name}, whose codes are of values that were not rounded to bf16 first"


def launched(config: Any) -> list[list[float]]:
    """Train three steps; return the losses and the gradient norms."""
    trainer, _ = training.trainer(config)
    steps = [trainer.train_step(step).numbers.read() for step in range(3)]
    return [[numbers[i] for numbers in steps] for i in (0, 3)]


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_microbatches_of_a_run_are_one_batch(ranks, tmp_path):
    """The test uses fp32, where only the order of sums differs, which changes a few codes after the first update."""
    settings = ("--mesh.tp=1", "--train.dtype=fp32", "--recipe=qat")
    data, found = training.shards(tmp_path), []
    for own in (("4", "step"), ("2", "step"), ("2", "microbatch")):
        micro = [f"--train.micro_batch={own[0]}", f"--train.reduce_gradients={own[1]}"]
        found.append(ranks(2).run(launched, training.config(tmp_path, data, *settings, *micro))[0])
    for each in found[1:]:
        for ours, expected in zip(each, found[0], strict=True):
            assert ours[0] == pytest.approx(expected[0], rel=1e-6) and ours == pytest.approx(expected, rel=5e-3)
    losses, norms = found[0]
    assert losses[2] < losses[0] - 0.1 and norms[0] > 0.1


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64)).to(worker.device())


def exported(sizes: dict[str, int], sequence_parallel: bool) -> str:
    """Train with QAT on a mesh, export the values to a plain model, and quantize this model: y must be unchanged (under tp,
    up to the order of sums). Then load the codes of this unsharded model into a frozen model on the mesh: y must be
    unchanged again. Return "0.weight.codes" if these codes have two values per byte, else "?"."""
    mesh, model = worker.mesh(**sizes), mlp()
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(worker.device())
    styles, options = (("up", "0", "column"), ("down", "2", "row")), {"sequence_parallel": sequence_parallel}
    groups = [dlp.LayerGroup(name, match, style=style, **options) for name, match, style in styles]
    dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="qat"), *groups], mesh, batch=(1, 32))
    dlp.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dlp.attach(model, optimizer)
    mine = dlp.scatter_tokens(x, mesh["tp"]) if sequence_parallel else x
    model(mine).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        y = model(mine)
        y = dlp.gather_tokens(y, mesh["tp"]) if sequence_parallel else y
        plain = dlp.export(model, mlp())
        assert type(plain[0]) is nn.Linear and not torch.equal(plain[0].weight, mlp()[0].weight)
        dlp.quantize_(plain, "qat", mode="dynamic")
        found = plain(x)
        if "tp" not in sizes:
            assert_bit_equal(found, y)
        assert relative_error(found, y) < 2e-6
        state, other = dlp.quantized_state_dict(plain), mlp()
        dlp.convert(other, [dlp.LayerGroup("all", "**", recipe="qat"), *groups], mesh, batch=(1, 32))
        dlp.freeze(other, "**", "qat", mode="dynamic")  # codes of the model's initial values
        dlp.load_quantized_state_dict(other, state)
        y = other(mine)
        assert relative_error(dlp.gather_tokens(y, mesh["tp"]) if sequence_parallel else y, found) < 2e-6
        with pytest.raises(ValueError, match="export: 0 holds codes and no values"):
            dlp.export(other, mlp())
    return "0.weight.codes" if state["0.weight.codes"].shape == (128, 32) else "?"


@pytest.mark.ranks(2)
def test_training_export_and_codes_have_one_y(ranks):
    for sizes, sequence_parallel in (({"tp": 2}, True), ({"tp": 2}, False), ({"dp_shard": 2}, False)):
        assert ranks(2).run(exported, sizes, sequence_parallel) == ["0.weight.codes"] * 2


def cut_groups() -> str:
    tp = worker.mesh(tp=2)["tp"]
    dlp.ColumnParallelLinear(96, 96, tp=tp, recipe="qat")
    with pytest.raises(ValueError, match="qat trains for the codes of the unsharded tensor, and ROW gives each of"):
        dlp.RowParallelLinear(96, 96, tp=tp, recipe="qat")
    layer = dlp.RowParallelLinear(96, 96, tp=tp, recipe="mxfp8")
    with pytest.raises(ValueError, match="ROW gives each of 2 ranks 48 in_features of w"):
        dlp.set_recipe(layer, "**", "qat")
    group = dlp.LayerGroup("all", "**", style="row", recipe={"name": "qat", "weight": "none", "activation": "mxfp8"})
    with refuses(r"0: qat.* ROW gives each of 2 ranks 48 in_features of x, .* the 32 in a block"):
        dlp.make_plan(nn.Sequential(nn.Linear(96, 96)), [group], tp=2)
    return "refused"


@pytest.mark.ranks(2)
def test_tp_does_not_cut_groups(ranks):
    assert ranks(2).run(cut_groups) == ["refused"] * 2


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.full  # test_compile.py compiles linears with qat, test_fsdp_gather.py compiles blocks that FSDP shards
def test_compiled_blocks_compute_the_same_bits(ranks):
    (losses, found), (same, others) = (
        ranks(2).run(trained, {"dp_shard": 2}, 1, {"compiled": how})[0] for how in ("", "aot_eager")
    )
    assert same == losses
    assert_all_bit_equal(others, found)
