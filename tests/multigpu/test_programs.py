"""Captured launches give the bits of layers without captured launches: in layers whose weights FSDP gathers, and in
passes that communicate over tp. On the CPU the device is emulated."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dlp
from dlp.comm import transport
from dlp.comm.mapped import Transport
from dlp.parallel.linear.capture import describe, obstacle
from dlp.parallel.linear.spec import LayerOptions
from dlp.parallel.overlap.chunked import Chunked
from tests import pool as worker
from tests.cases import nightly
from tests.emulated import emulation
from tests.launch_order import in_order
from tests.metrics import assert_all_bit_equal, assert_bit_equal
from tests.paired_models import K, M, N, compiles, forward_backward, of_any_size, programs, values, without_programs
from tests.shardnet import shardnet, tensors, train
from tests.simulated_transport import SimulatedLane, SimulatedSlot

pytestmark = pytest.mark.ranks(2)
RECIPES = ["bf16", "fp8_current", "fp8_delayed", "fp8_block"]
Trained = tuple[list[float], dict[str, Tensor], dict[str, int]]


def count(model: torch.nn.Module) -> dict[str, int]:
    """Return the number of captures of each pass."""
    return {way: sum(not isinstance(made, str) for made in found) for way, found in programs(model).items()}


def device() -> object:
    return emulation() if worker.device().type == "cpu" else nullcontext()


def trained(recipe: str, quantized: bool) -> list[Trained]:
    """Run two steps of two microbatches, with captured launches and without; return (losses, parameters and gradients,
    number of captures of each pass) of both runs."""
    mesh, found = worker.mesh(dp_shard=2), []
    for off in (nullcontext(), without_programs()):
        with device(), off:  # type: ignore[attr-defined]
            size = 512 if recipe == "fp8_block" else 128  # with size 512, GEMMs read tile scales without a copy
            model = shardnet(recipe, mesh, size=size, quantized_gather=quantized)
            losses = train(model, mesh, range(2), microbatches=2)
            found.append((losses, tensors(model), count(model)))
    return found


@pytest.mark.parametrize(
    ("recipe", "quantized"),
    [
        nightly("bf16", True),
        nightly("fp8_current", True),
        ("fp8_delayed", True),
        nightly("fp8_block", True),
        nightly("fp8_delayed", False),
        nightly("fp8_block", False),
    ],
)
def test_weights_that_are_gathered(ranks, recipe: str, quantized: bool):
    for (losses, found, made), (expected_losses, expected, none) in ranks(2).run(trained, recipe, quantized):
        assert losses == expected_losses
        assert_all_bit_equal(found, expected)
        assert min(made.values()) > 0 and not any(none.values())


@contextmanager
def moved_by(group: dist.ProcessGroup, mapped: bool, late: float = 0.0) -> Iterator[None]:
    """Set the transport of a group: mapped memory, which CPU ranks simulate, or collectives. `late`: seconds by which
    the simulated side stream delays its work. On CPU ranks, also search for races."""
    lane, on_gpu = SimulatedLane(late), worker.device().type == "cuda"
    moves = [Transport(group, worker.device(), SimulatedSlot, lane)] if mapped and not on_gpu else []
    if mapped and on_gpu:
        transport.ask_for(group, "cuda")
    else:
        transport.use(group, moves[0] if moves else None)
    try:
        with nullcontext() if on_gpu else in_order(*moves):
            yield
    finally:
        transport.destroy()
        lane.end()


def over_two_ranks(
    kind: str,
    recipe: str,
    sequence_parallel: bool,
    codec: str = "hp",
    overlap: str = "serial",
    late: float = 0.0,
    delay: bool = False,
) -> tuple[dict[str, int], dict[str, int], list[tuple[Tensor, Tensor]]]:
    """Run a layer on two tp ranks: through mapped memory, by collectives, and by collectives without captured launches.
    Return the number of captures of each pass in the first and in the second run, and pairs: a result of the first or
    second run with the same result of the third run. `delay`: delay wgrads."""
    mesh, found, said = worker.mesh(tp=2), [], list[list[str]]()
    for mapped, off in ((True, nullcontext()), (False, nullcontext()), (False, without_programs())):
        with device(), off, moved_by(mesh["tp"].get_group(), mapped, late):  # type: ignore[attr-defined]
            torch.manual_seed(0)
            made_with = {"tp": mesh["tp"], "recipe": recipe, "sequence_parallel": sequence_parallel,
                         "overlap": overlap}  # fmt: skip
            sizes = (N, K) if kind == "siblings" else N
            made = dlp.RowParallelLinear if kind == "row" else dlp.ColumnParallelLinear
            layer = made(2 * K, sizes, dtype=torch.bfloat16, **made_with).to(worker.device())
            spec = layer.core.spec
            carried = {gemm: replace(getattr(spec.recipe, gemm), wire=codec) for gemm in ("fprop", "dgrad")}
            own, options = replace(spec.recipe, **carried), LayerOptions(delay_wgrad=delay)
            layer.core.set_spec(replace(spec, recipe=own, options=options))
            results = []
            for seed in range(3):
                columns = 2 * K // (1 + (kind == "row"))
                tokens = 2 * M if kind == "row" or not sequence_parallel else M
                x = values(10 * seed + dist.get_rank(), tokens, columns).to(worker.device()).requires_grad_()
                ys = layer(x) if kind == "siblings" else (layer(x),)
                dys = [values(100 + 10 * seed + dist.get_rank(), *y.shape).to(worker.device()) for y in ys]
                torch.autograd.backward(ys, dys)
                if delay:
                    # `backward_dw` expects the attribute that an explicitly constructed layer has
                    vars(layer)["dlp_session"] = layer.core.session
                    assert dlp.backward_dw(layer) == len(ys)
                results += [*(y.detach() for y in ys), x.grad]
                results += [weight.grad._local_tensor for weight in layer.parameters()]
                layer.zero_grad()
            found.append((count(layer), results))
            said.append(describe(layer))
    (captured, through_memory), (calling, by_calls), (none, expected) = found
    assert not [line for line in (*said[0], *said[1]) if "one by one" in line] and not any(none.values())
    return captured, calling, [*zip(through_memory, expected, strict=True), *zip(by_calls, expected, strict=True)]


Results = list[Tensor]


def alone(kind: str, sizes: int | tuple[int, ...], compiled: bool) -> tuple[dict[str, int], Results, Results]:
    """Run a parallel layer on one rank with captured launches (compiled if `compiled`), and an uncompiled layer without
    captured launches. Return the number of captures of each pass, and the results of both layers."""
    mesh, found = worker.mesh(tp=1), []
    for off in (nullcontext(), without_programs()):
        with device(), off:  # type: ignore[attr-defined]
            torch.manual_seed(0)
            layer = getattr(dlp, kind)(K, sizes, True, tp=mesh["tp"], recipe="fp8_current", dtype=torch.bfloat16)
            layer = layer.to(worker.device())
            if compiled and not found:
                compiles(layer)
            results = [list(forward_backward(layer, seed).values()) for seed in range(4)]
            found.append((count(layer), [getattr(t, "_local_tensor", t) for result in results for t in result]))
    (made, with_programs), (_, without) = found
    return made, with_programs, without


@pytest.mark.parametrize(
    ("kind", "sizes", "compiled"),
    [
        nightly("ColumnParallelLinear", N, False), ("ColumnParallelLinear", (N, K), False), ("RowParallelLinear", N, False),
        nightly("ColumnParallelLinear", (N, K), True), nightly("RowParallelLinear", N, True),
    ],
    ids=["column", "siblings", "row", "compiled siblings", "compiled row"],
)  # fmt: skip
def test_a_rank_alone_communicates_nothing(ranks, kind: str, sizes: int | tuple[int, ...], compiled: bool):
    for made, results, expected in ranks(2).run(alone, kind, sizes, compiled):
        assert min(made.values()) > 0, made
        for result, wanted in zip(results, expected, strict=True):
            assert_bit_equal(result, wanted)


# (kind, recipe) of cases with sequence parallelism that run only with a late side stream -> overlap strategy of the case
# without `--all-cases`; "": the case runs only with `--all-cases`
LATE = {
    ("siblings", "fp8_current"): "serial", ("column", "bf16"): "", ("column", "fp8_delayed"): "",
    ("column", "fp8_block"): "chunked:2", ("column", "nvfp4"): "serial", ("siblings", "mxfp8"): "", ("row", "bf16"): "",
    ("row", "fp8_current"): "chunked:2", ("row", "fp8_block"): "", ("row", "fp8_rowwise"): "serial", ("row", "mxfp8"): "",
    ("row", "nvfp4"): "",
}  # fmt: skip
PASSES = [(kind, recipe, sp) for kind in ("column", "siblings", "row") for recipe in RECIPES for sp in (False, True)]


@pytest.mark.parametrize(
    ("kind", "recipe", "sequence_parallel"),
    [
        each if each[1] == ("fp8_delayed" if each[0] == "column" else "fp8_block") else nightly(*each)
        for each in PASSES
        if not (each[2] and each[:2] in LATE)
    ],
)
def test_directions_that_communicate(ranks, kind: str, sequence_parallel: bool, recipe: str):
    """Through mapped memory, transfers, agreements and sums are launches, so each pass is replayed as one call. With
    collectives, a pass is replayed as several native calls, with the collectives in between. Both have the bits of
    layers without captured launches."""
    for mapped, plain, pairs in ranks(2).run(over_two_ranks, kind, recipe, sequence_parallel):
        assert min(mapped.values()) > 0, mapped
        assert min(plain.values()) > 0, plain
        for result, expected in pairs:
            assert_bit_equal(result, expected)


def in_a_graph(kind: str, recipe: str, overlap: str) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of y, dx and dw of a layer on two tp ranks: from replays of a CUDA graph and from eager calls on the
    same values. Replays and eager calls alternate, on the same mapped memory."""
    mesh, found = worker.mesh(tp=2), list[tuple[Tensor, Tensor]]()
    with moved_by(mesh["tp"].get_group(), True), of_any_size():
        torch.manual_seed(0)
        made = dlp.RowParallelLinear if kind == "row" else dlp.ColumnParallelLinear
        layer = made(2 * K, N, dtype=torch.bfloat16, tp=mesh["tp"], recipe=recipe, sequence_parallel=True,
                     overlap=overlap).to(worker.device())  # fmt: skip
        (weight,) = layer.parameters()
        x = torch.zeros((2 * M, K) if kind == "row" else (M, 2 * K), device="cuda").bfloat16().requires_grad_()
        dy = torch.zeros((M, N) if kind == "row" else (2 * M, N // 2), device="cuda").bfloat16()

        def step() -> list[Tensor]:
            x.grad = weight.grad = None
            y = layer(x)
            y.backward(dy)
            return [y.detach(), x.grad, weight.grad._local_tensor]  # type: ignore[list-item,union-attr]

        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
            torch.cuda.synchronize()
            dist.barrier()
            with torch.cuda.graph(graph, stream=stream):
                results = step()
            for seed in range(6):
                with torch.no_grad():
                    x.copy_(values(10 * seed + dist.get_rank(), *x.shape))
                    dy.copy_(values(100 + 10 * seed + dist.get_rank(), *dy.shape))
                graph.replay()
                replayed = [result.clone() for result in results]
                found += zip(replayed, [result.clone() for result in step()], strict=True)
            torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("overlap", ["serial", "chunked", "chunked:2"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_block"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_directions_in_a_cuda_graph(ranks, device_type: str, kind: str, recipe: str, overlap: str):
    """A graph contains the signals between ranks. A replay works after any number of eager launches, and vice versa."""
    if device_type != "cuda":
        pytest.skip("needs GPUs: CUDA graphs")
    for pairs in ranks(2).run(in_a_graph, kind, recipe, overlap):
        assert len(pairs) == 18
        for replayed, launched in pairs:
            assert_bit_equal(replayed, launched)


PACKAGE = f"{Path(dlp.__file__).parent}{os.sep}"


def made_of(recipe: str, overlap: str) -> tuple[list[str], dict[str, Counter[str]]]:
    """Run a column and a row layer with collectives. Return the captured passes as strings (L: launches, C: start of a
    collective, A: wait for the collective), and the calls of dlp's functions in the step with the fewest calls, with
    and without capture."""
    mesh, calls, found = worker.mesh(tp=2), dict[str, Counter[str]](), list[str]()
    for name, off in (("captured", nullcontext()), ("not", without_programs())):
        with device(), off, moved_by(mesh["tp"].get_group(), False):  # type: ignore[attr-defined]
            options = {"dtype": torch.bfloat16, "tp": mesh["tp"], "recipe": recipe, "sequence_parallel": True,
                       "overlap": overlap}  # fmt: skip
            layers = dlp.ColumnParallelLinear(K, 2 * N, **options), dlp.RowParallelLinear(2 * N, K, **options)
            pair = torch.nn.Sequential(*layers).to(worker.device())
            steps = []

            def count(frame: Any, event: str, argument: Any, steps: list[Counter[str]] = steps) -> None:
                code = frame.f_code
                if event == "call" and code.co_filename.startswith(PACKAGE):
                    steps[-1][f"{Path(code.co_filename).stem}.{code.co_qualname}"] += 1

            for seed in range(5):
                steps.append(Counter())
                sys.setprofile(count)
                pair(values(seed, M, K).to(worker.device()).requires_grad_()).backward(
                    values(seed + 1, M, K).to(worker.device())
                )
                sys.setprofile(None)
            calls[name] = min(steps[2:], key=Counter.total)
        for way in (way for layer in layers for way in programs(layer).values()):
            found += ["".join(map(str, made.segments)) for made in way if not isinstance(made, str)]
    return sorted(set(found)), calls


@pytest.mark.parametrize(("overlap", "segments"), [
    # Three for four passes: the backward of the row layer has the segments of the forward of the column layer
    nightly("serial", ["CLCALAL", "LCAL", "LCALCLAL"]),
    ("chunked", ["LCALCLAL", "LCLAL", "LCLCLALAL"]),
])  # fmt: skip
def test_collectives_are_called_between_launches(ranks, overlap: str, segments: list[str]):
    """Column layer: forward has an agreement on x and a gather of x before the GEMM; backward gathers x during dgrad,
    and reduces dx during wgrad. With `chunked`, a GEMM of the first rows runs during the transfer of the next rows."""
    for made, calls in ranks(2).run(made_of, "fp8_current", overlap):
        assert made == segments
        totals = {name: each.total() for name, each in calls.items()}
        assert totals["captured"] < 0.3 * totals["not"], (totals, calls["captured"].most_common(40))


def why_not_captured() -> str:
    options: Any = {"tp": worker.mesh(tp=2)["tp"], "sequence_parallel": True, "overlap": "chunked"}
    with patch.object(Chunked, "calls_only", False):
        return obstacle(dlp.ColumnParallelLinear(K, N, **options).core.bound, "forward")


def test_a_strategy_that_sends_otherwise_is_not_captured(ranks, device_type, share_gpu):
    by = "nccl" if device_type == "cuda" and not share_gpu else "gloo"
    said = f"fprop is chunked, whose transfers are issued one by one by {by}, since transport = 'nccl', or the "
    said += "mesh was not made by dlp.build_mesh"
    assert ranks(2).run(why_not_captured) == [said] * 2


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_block"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_wgrads_that_wait_keep_what_came(ranks, kind: str, recipe: str):
    """Delayed wgrads read copies of received operands: a captured launch copies the operands from peer buffers before
    the pass ends."""
    for mapped, _, pairs in ranks(2).run(over_two_ranks, kind, recipe, True, "hp", "serial", 0.0, True):
        assert min(mapped.values()) > 0, mapped
        for result, expected in pairs:
            assert_bit_equal(result, expected)


@pytest.mark.parametrize("codec", ["bf16", "fp8"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_sums_are_packed_and_unpacked_inside(ranks, kind: str, codec: str):
    for mapped, _, pairs in ranks(2).run(over_two_ranks, kind, "fp8_current", True, codec):
        assert min(mapped.values()) > 0, mapped
        for result, expected in pairs:
            assert_bit_equal(result, expected)


@pytest.mark.parametrize(
    ("kind", "recipe", "overlap"),
    [
        (*each, overlap) if overlap == way else nightly(*each, overlap)
        for overlap in ("serial", "chunked:2")
        for each, way in LATE.items()
    ]
    + [("column", "bf16", "chunked")],
)
def test_a_lane_that_is_late_reads_what_was_there(ranks, kind: str, recipe: str, overlap: str):
    """A side stream that runs its work as late as possible must read memory that is not yet overwritten, both in
    launched and in replayed passes. The results have the bits of collectives without capture."""
    for mapped, plain, pairs in ranks(2).run(over_two_ranks, kind, recipe, True, "hp", overlap, 0.01):
        assert min(mapped.values()) > 0 and min(plain.values()) > 0, (mapped, plain)
        for result, expected in pairs:
            assert_bit_equal(result, expected)
