"""`dlp.prove`: run the same steps on one rank and on each mesh, and compare all tensors.

In a process group of R ranks (under torchrun), a mesh of r ranks, where r must divide R, runs in R / r equal copies; the run on
one rank is repeated on every rank. Without a process group, `prove` starts processes for each number of ranks, on the GPUs of
this machine if there are enough, else on the CPU.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import pickle
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map

from dlp.comm.mesh import BACKENDS, ParallelDims, init_process_group
from dlp.parallel.linear.state import cores
from dlp.parallel.model.autocast import autocast
from dlp.parallel.model.boundary import attach, end_step
from dlp.parallel.model.grads import backward_dw
from dlp.parallel.model.session import session_of
from dlp.parallel.traffic.ledger import Ledger, LedgerError
from dlp.parallel.traffic.predict import Traffic
from dlp.parallel.weight.local import local_values
from dlp.proof.cases import MESHES, ONE, MeshCase, Place, in_equal_pieces
from dlp.proof.diagnose import Guess
from dlp.proof.follow import WHOLE, Bounds, Follower, Seen, gain_of, gradients, is_invariant
from dlp.proof.record import GRADIENT_NAMES, WEIGHT_NAMES, Key, Trace, named_parameters, recording
from dlp.proof.report import Finding, MeshResult, Report

Build = Callable[..., Any]
Loss = Callable[..., Tensor]
Wire = Callable[[nn.Module, DeviceMesh, MeshCase], Traffic]
LOG = logging.getLogger("dlp")
PATIENCE = 20.0  # seconds that a rank with an error waits for the results of other ranks before it logs the error
WARM = 2  # number of first steps whose bytes are not compared: the step boundary casts all weights only in later steps


class Program(NamedTuple):
    """Arguments of `prove`, and `pieces`: number of microbatches in a step of the run on one rank."""

    build: Build
    batch: Any
    loss: Loss
    steps: int
    exact: bool
    reduction: str
    device_type: str
    wire: Wire | None = None
    pieces: int = 1


def prove(  # noqa: PLR0913 (the subjects and the method of the comparison, all by keyword except three)
    build_model: Build, example_batch: Any, loss: Loss, *, meshes: Sequence[str] = MESHES, steps: int = 2,
    exact: bool = False, reduction: str = "mean", device_type: str | None = None, wire: Wire | None = None,
) -> Report:  # fmt: skip
    """Compare training steps on each mesh with the same steps on one rank, tensor by tensor.

    Every module without children, and the code between modules, gets the inputs that one rank computed, so that differences do
    not accumulate. Each activation, gradient, weight, delayed scale and loss is compared within a bound, which follows from
    the formats and the length of the contraction that computes this tensor.

    Args:
        build_model: `build_model(mesh, case)` returns a model, or (model, optimizer), on a mesh as of `dlp.build_mesh`:
            the model is converted and sharded, has equal weights on every mesh, and the optimizer is attached.
            `case.sequence_parallel`, `case.dp`, `case.cp` and `case.accumulate` describe the mesh. Without an optimizer, AdamW
            with lr = 1e-3 is created and attached. A tensor that `optimizer.step()` returns is compared as the gradient norm.
        example_batch: a tensor, or a tuple, list or dict of tensors, with all sequences of a step along dimension 0; or a
            function that takes the number of a step and returns such a batch.
        loss: `loss(model, batch, mesh)` returns the scalar loss of a part of the batch, equal on all tp ranks. Ranks of cp get
            complete sequences, and return the contribution of the tokens of `dlp.Context.of(mesh)`.
        meshes: names of meshes, such as "tp2", "tp2+sp", "dp2", "cp2", "hsdp2x2", "accumulate4", "tp2xdp2+sp".
        steps: number of optimizer steps. Stale weights and gradients are found only with two or more steps.
        exact: require equal bits instead of differences within bounds. The run on one rank and the runs on meshes then divide a
            step into the same number of microbatches, the largest of all meshes. Models of
            `dlp.convert(..., invariant=True)` pass.
        reduction: "mean" or "sum": reduction of `loss` over the sequences of a batch.
        wire: `wire(model, mesh, case)` returns the planned bytes of a rank in a step, a `dlp.parallel.traffic.predict.Traffic`.
            If `steps` is at least 3, the planned bytes are compared with the bytes that are counted in the last step, on
            meshes that have all ranks of the run.
        device_type: "cpu" or "cuda"; None: cuda if there is a GPU (without torchrun: a GPU for each rank).

    Returns:
        A `Report`, equal on all ranks: `print(report)`, `report.ok`, `report.first`.

    Raises:
        ValueError: for an invalid mesh name or `reduction`; for a mesh whose number of ranks does not divide the number of
            ranks of torchrun; with `exact`, for meshes that cannot have equal microbatches; and, without torchrun, for
            arguments that cannot be pickled.

    Examples:
        >>> def build_model(mesh, case):
        ...     torch.manual_seed(0)
        ...     model = nn.Sequential(nn.Linear(64, 64)).to(mesh.device_type)
        ...     plan = dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="fp8_current")], mesh)
        ...     dlp.attach(model, optimizer := torch.optim.AdamW(model.parameters()))
        ...     return model, optimizer
        >>> def loss(model, batch, mesh):
        ...     return model(batch).square().mean()
        >>> report = dlp.prove(build_model, torch.randn(4, 64), loss, meshes=["accumulate2"])
        >>> report.ok
        True
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"dlp.prove: reduction {reduction!r}: expected mean or sum")
    cases = [MeshCase.parse(name) for name in meshes]
    cases = in_equal_pieces(cases) if exact else cases
    pieces = cases[0].pieces if exact else 1
    program = Program(build_model, example_batch, loss, steps, exact, reduction, device_type or "", wire, pieces)
    if dist.is_initialized() or "RANK" in os.environ:
        return prove_here(program, cases)
    report = Report(steps, exact)
    for ranks in sorted({case.ranks for case in cases}):
        report.meshes += _in_processes(program, [case for case in cases if case.ranks == ranks], ranks).meshes
    report.meshes.sort(key=lambda mesh: list(meshes).index(mesh.name))
    return report


def _in_processes(program: Program, cases: list[MeshCase], ranks: int) -> Report:
    """Run `prove_here` in `ranks` new processes."""
    device = program.device_type or ("cuda" if torch.cuda.device_count() >= ranks else "cpu")
    try:
        job = pickle.dumps((program._replace(device_type=device), cases))
    except Exception as error:
        raise ValueError(
            f"dlp.prove starts ranks as separate processes and sends build_model, example_batch and loss by pickle, "
            f"which failed: {error}. Define the functions at the top level of a file, or start the script by torchrun"
        ) from error
    with tempfile.TemporaryDirectory(prefix="dlp-prove-") as folder:
        try:
            mp.start_processes(_rank, (ranks, device, folder, job), ranks, start_method="spawn")
        except (mp.ProcessRaisedException, mp.ProcessExitedException):
            # Raise the ValueError of a rank rather than the lost connections of other ranks
            refused = sorted(Path(folder).glob("refused-*"))
            if refused:
                raise pickle.loads(refused[0].read_bytes()) from None
            raise
        report: Report = pickle.loads((Path(folder) / "report").read_bytes())
    return report


def _rank(rank: int, ranks: int, device: str, folder: str, job: bytes) -> None:
    """Main function of the processes that `_in_processes` starts."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    else:
        torch.cuda.set_device(rank)
    dist.init_process_group(BACKENDS[device], init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    program, cases = pickle.loads(job)
    if program.exact:
        torch.set_num_threads(1)  # sums of torch depend on the number of threads
    try:
        report = prove_here(program, cases)
    except ValueError as error:  # for example an unsupported setting in `build_model`
        error.add_note(traceback.format_exc())
        part = Path(folder) / f"part-{rank}"
        part.write_bytes(pickle.dumps(error))
        part.replace(Path(folder) / f"refused-{rank}")  # atomic: no incomplete file has this name
        raise
    if rank == 0:
        (Path(folder) / "report").write_bytes(pickle.dumps(report))
    dist.destroy_process_group()


def prove_here(program: Program, cases: Sequence[MeshCase]) -> Report:
    """Run `prove` in the existing process group, or in a new one of torchrun's ranks. All ranks call this function."""
    device = program.device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    program = program._replace(device_type=device)
    init_process_group(device)
    world = dist.get_world_size()
    for case in cases:
        if world % case.ranks:
            raise ValueError(
                f"mesh {case.name!r} has {case.ranks} ranks, which do not divide the {world} ranks of this run: start "
                f"a multiple of {case.ranks} ranks, or leave the mesh out"
            )
    report, trace = Report(program.steps, program.exact), one_rank(program)
    bounds = Bounds(trace)
    for case in cases:
        report.meshes.append(on_mesh(program, bounds, case))
    return report


def mesh_of(case: MeshCase, device: str) -> DeviceMesh:
    """Return the mesh of a case. If the run has more ranks than the case, several copies of the mesh are built."""
    copies = dist.get_world_size() // case.ranks
    sizes = ParallelDims(case.dp_replicate, case.dp_shard, case.tp, case.cp).sizes
    return init_device_mesh(device, (copies, *sizes.values()), mesh_dim_names=("copies", *sizes))[tuple(sizes)]


def one_rank(program: Program) -> Trace:
    """Return the trace of one rank, which every rank of the run computes."""
    case = replace(ONE, accumulate=program.pieces)
    mesh = mesh_of(case, program.device_type)
    model, optimizer = _built(program, mesh, case)
    trace = Trace(model)
    with recording(trace.recorder):
        _run(program, model, optimizer, mesh, case, trace)
    return trace


def on_mesh(program: Program, bounds: Bounds, case: MeshCase) -> MeshResult:
    """Run one mesh and return the comparison. All ranks call this function and get the same result."""
    result, error, follower = MeshResult(case.name, case.ranks), "", None
    mesh = mesh_of(case, program.device_type)
    try:
        tensors = (each for each in tree_leaves(_batch(program, 0)) if isinstance(each, Tensor) and each.dim())
        case = replace(case, sequences=len(next(tensors, ())))
        model, optimizer = _built(program, mesh, case)
        place = Place.of(case, ParallelDims.from_mesh(mesh))
        follower = Follower(model, bounds, place, program.exact)
        with recording(follower.recorder):
            _run(program, model, optimizer, mesh, case, follower)
    except (RuntimeError, ValueError) as stopped:  # raised by checks of dlp on all ranks
        error = f"{type(stopped).__name__}: {stopped}"
    told = _of_all_ranks((error, None if follower is None else _told(follower)), case.name)
    result.error = next((each for each, _ in told if each), "")
    told = [each for _, each in told[: case.ranks]]
    if all(each is not None for each in told):
        _summarize(result, bounds.trace, case, told)
    return result


def _of_all_ranks(mine: tuple[str, Told | None], mesh: str) -> list[Any]:
    """Return the pairs of error and result of all ranks; `mine` is the pair of this rank. Raises RuntimeError if the exchange
    fails.

    While this rank has an error, other ranks may wait in a collective of the mesh, up to a timeout of torch. The error is
    logged after `PATIENCE` seconds, and is part of the RuntimeError."""
    told: list[Any] = [None] * dist.get_world_size()
    stopped = (
        f"prove, mesh {mesh!r}: rank {dist.get_rank()} stopped, and results of other ranks did not arrive: {mine[0]}"
    )
    waiting = threading.Timer(PATIENCE, LOG.error, (stopped,))
    if mine[0]:
        waiting.start()
    try:
        dist.all_gather_object(told, mine)
    except RuntimeError as failed:
        raise RuntimeError(stopped if mine[0] else f"prove, mesh {mesh!r}: a rank sent no result") from failed
    finally:
        waiting.cancel()
    return told


class Told(NamedTuple):
    """Result of the comparison on one rank, sent to all ranks; see `Follower` for the attributes."""

    compared: int
    equal: int
    worst: tuple[float, Key | None]
    failed: list[Seen]
    masks: dict[tuple[Key, int], tuple[bool, str]]
    remarks: list[str]


def _told(follower: Follower) -> Told:
    failed = sorted(follower.failed, key=lambda seen: follower.trace.order(seen.key))[:32]
    return Told(follower.compared, follower.equal, follower.worst, failed, follower.masks, follower.remarks)


def _summarize(result: MeshResult, trace: Trace, case: MeshCase, told: Sequence[Told]) -> None:
    """Combine the results of all ranks of a mesh. `told`: results by rank."""
    result.remarks = list(told[0].remarks)
    result.compared, result.equal = sum(each.compared for each in told), sum(each.equal for each in told)
    result.worst, result.worst_key = max((each.worst for each in told), key=lambda worst: worst[0])
    by_key: dict[Key, list[tuple[int, Seen]]] = {}
    for rank, each in enumerate(told):
        for seen in each.failed:
            by_key.setdefault(seen.key, []).append((rank, seen))
    found = [_finding(key, case, its) for key, its in by_key.items()]
    found += _random_findings(case, told)
    result.findings = sorted(found, key=lambda finding: trace.order(finding.key))


def _finding(key: Key, case: MeshCase, seen: list[tuple[int, Seen]]) -> Finding:
    """Combine the comparisons of a tensor on all ranks on which the tensor differs. The most frequent specific guess wins."""
    ranks = tuple(dict.fromkeys(rank for rank, _ in seen))
    guesses = [each.guess for _, each in seen if each.guess is not None]
    known = [guess for guess in guesses if guess.kind != "values"] or guesses or [Guess("values")]
    guess = max(known, key=lambda each: (sum(other.kind == each.kind for other in known), -known.index(each)))
    if guess.kind == "values" and len(ranks) < case.ranks:
        guess = Guess("some ranks", f"{len(ranks)} of {case.ranks} ranks")
    worst = max(seen, key=lambda each: each[1].measured.ratio)[1]
    return Finding(key, worst.measured.ratio, worst.measured.error, ranks, case.ranks, seen[0][1].where(), guess)


def _random_findings(case: MeshCase, told: Sequence[Told]) -> list[Finding]:
    """Return findings about dropout masks, which must be equal on tp ranks that hold the same values, and must
    differ between all other ranks."""
    found = []
    for key, micro in told[0].masks:
        hashes = [each.masks[key, micro] for each in told if (key, micro) in each.masks]
        cut = hashes[0][0]
        for i, (_, one) in enumerate(hashes):
            wrong = [
                j for j, (_, other) in enumerate(hashes)
                if j > i and (one == other) == (i // case.tp != j // case.tp or cut)
            ]  # fmt: skip
            if wrong:
                same = i // case.tp == wrong[0] // case.tp and not cut
                said = (
                    "masks differ between tp ranks that hold the same values"
                    if same
                    else "equal masks for other tokens"
                )
                ranks = (i, *wrong)
                found.append(Finding(key, float("inf"), 1.0, ranks, case.ranks, "all rows", Guess("randomness", said)))
                break
    return found


def _batch(program: Program, step: int) -> Any:
    """Return the global batch of a step."""
    return program.batch(step) if callable(program.batch) else program.batch


def _built(program: Program, mesh: DeviceMesh, case: MeshCase) -> tuple[nn.Module, Any]:
    """Build model and optimizer of a mesh. Without an optimizer, AdamW is created and attached."""
    torch.manual_seed(0)
    built = program.build(mesh, case)
    model, optimizer = built if isinstance(built, tuple) else (built, None)
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        attach(model, optimizer)
    return model, optimizer


def _run(
    program: Program, model: nn.Module, optimizer: Any, mesh: DeviceMesh, case: MeshCase, run: Trace | Follower
) -> None:
    """Run all steps under a trace or follower."""
    named = named_parameters(model)
    run.recorder.step = -1
    _weights(run, named, -1)
    if _has_slots(model):  # delayed scales start from the amaxes of a forward and backward without quantization
        with autocast(enabled=False, calibrating=True):
            total = _forward_backward(program, model, mesh, case, run, 0)
        run.add(Key(-1, "", "loss"), _total(total, case))
        optimizer.zero_grad(set_to_none=True)
        end_step(model)
        _scales(run, model, case, -1)
    if isinstance(run, Follower) and any(True for _ in cores(model)):
        session_of(model).before_gather = run.gathered
    for step in range(program.steps):
        run.recorder.step = step
        if isinstance(run, Follower):
            run.codes(model)
        with _counted(program, model, mesh, case, run):
            total = _forward_backward(program, model, mesh, case, run, step)
            gradients(model, run, dict(named), lambda own: GRADIENT_NAMES.get(own, f"d{own}"))
            norm = optimizer.step()
        run.add(Key(step, "", "loss"), _total(total, case))
        if isinstance(norm, Tensor):
            run.add(Key(step, "", "gradient norm"), norm.detach())
        optimizer.zero_grad(set_to_none=True)
        _weights(run, named, step)
        _scales(run, model, case, step)


def _forward_backward(
    program: Program, model: nn.Module, mesh: DeviceMesh, case: MeshCase, run: Trace | Follower, step: int
) -> Tensor:
    """Run the microbatches of a step, and return the contribution of each to the loss."""
    batch = _batch(program, step)
    place, device = Place.of(case, ParallelDims.from_mesh(mesh)), torch.device(program.device_type)
    losses: list[Tensor] = []
    mean, invariant = program.reduction == "mean", is_invariant(model)
    gain = gain_of(model, case) / (case.pieces if mean else 1)
    for micro in range(case.accumulate):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(invariant or micro == case.accumulate - 1)
        run.recorder.microbatch()
        if isinstance(run, Follower):
            run.micro = micro
        piece = place.at(micro).piece
        part = tree_map(lambda each, i=piece: _piece(each, case, i, device), batch)
        args = (model, part, mesh)[: len(inspect.signature(program.loss).parameters)]
        loss = program.loss(*args)
        run.begin(Key(run.recorder.step, "", "loss"), loss)
        (loss * gain).backward()
        backward_dw(model)
        losses.append(loss.detach())
    return torch.stack(losses) / (case.pieces if mean else 1)


@contextmanager
def _counted(
    program: Program, model: nn.Module, mesh: DeviceMesh, case: MeshCase, run: Trace | Follower
) -> Iterator[None]:
    """Compare the bytes that are sent in a `with` block with the plan. Bytes are compared only in the last of
    more than WARM steps, if `prove` got `wire` and the mesh has all ranks of the run."""
    step = run.recorder.step
    last = step == program.steps - 1 >= WARM and case.ranks == dist.get_world_size() > 1
    if program.wire is None or not last or not isinstance(run, Follower):
        yield
        return
    session, ledger = session_of(model), Ledger(mesh)
    watch, session.before_gather = session.before_gather, None  # off: `before_gather` sends bytes itself
    try:
        with ledger.step(program.wire(model, mesh, case)) as seen:
            yield
        run.remarks.append(f"each rank sent {sum(seen.sent.values()):,} bytes in step {step}, as planned")
    except LedgerError as error:
        run.failed.append(Seen(Key(step, "", "wire"), WHOLE, (1, 1), Guess("wire", str(error))))
    session.before_gather = watch


def _piece(each: Any, case: MeshCase, piece: int, device: torch.device) -> Any:
    """Return piece number `piece` of a tensor of the global batch. Scalars and other objects are returned unchanged. Raises
    ValueError if the batch cannot be divided into pieces of equal size."""
    if not isinstance(each, Tensor) or not each.dim():
        return each
    if len(each) % case.pieces:
        raise ValueError(
            f"mesh {case.name!r} cuts a batch of {len(each)} sequences into {case.pieces} pieces, which do not divide "
            f"the batch: pass an example_batch whose number of sequences is a multiple of {case.pieces}"
        )
    return each.chunk(case.pieces)[piece].to(device)


def _total(own: Tensor, case: MeshCase) -> Tensor:
    """Return the loss summed over all ranks of dp and cp. If the sums differ between tp ranks, the first sum that
    differs from the sum of tp rank 0 is returned, so that the comparison fails.

    own: contributions of the microbatches of this rank to the loss."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own.tolist())
    first = dist.get_rank() // case.ranks * case.ranks
    mine = told[first : first + case.ranks]
    by_tp = [math.fsum(loss for each in mine[tp :: case.tp] for loss in each) for tp in range(case.tp)]
    odd = next((each for each in by_tp if each != by_tp[0]), by_tp[0])
    return own.new_tensor(odd)


def _weights(run: Trace | Follower, named: Any, step: int) -> None:
    """Pass the parameters after a step to a trace or follower."""
    for (layer, own), parameter in named.items():
        run.parameter(Key(step, layer, WEIGHT_NAMES.get(own, own)), local_values(parameter), parameter)


def _has_slots(model: nn.Module) -> bool:
    """Whether a layer uses delayed scaling."""
    return any(True for _ in cores(model)) and session_of(model).has_slots()


def _scales(run: Trace | Follower, model: nn.Module, case: MeshCase, step: int) -> None:
    """Pass the delayed scales after a step to a trace or follower.

    On a mesh, dy is larger by the factor `gain_of`, so scales of dy are smaller by this factor. They are multiplied by the
    factor for the comparison."""
    if not _has_slots(model):
        return
    table = session_of(model).scaling.table
    for name, scale in zip(table.names, table.scale, strict=True):
        layer, _, tensor = name.rpartition(".")
        larger = gain_of(model, case) if tensor.startswith("dy") else 1
        run.add(Key(step, layer, f"scale of {tensor}"), scale * larger)
