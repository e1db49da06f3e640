"""overlap = "auto": choose the strategy of each GEMM of a layer when a plan is made.

    python -m dlp.parallel.tune CONFIG ──► Times, a table (JSON) ──► `choose` ──► names of strategies in the rows of the plan

A table contains the times of forward and backward of layers under each strategy, measured on one GPU model with one number
of tp ranks and one transport. For a layer in the table, `choose` takes the strategy with the lowest measured time; for another
layer, the strategy with the lowest time that is predicted from the measured rates of GEMMs and of the link. A strategy other
than `serial` must be faster than `serial` by a margin, and a measured difference must exceed the noise.

dlp ships tables (`dlp/parallel/tables`). `shipped` finds the table of a GPU; from a table for another number of ranks only the
rates are used. Without a table of this GPU "auto" chooses `serial` for every GEMM, and the plan states the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from hashlib import sha256
from math import exp, log, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dlp.comm.mesh import NCCL
from dlp.comm.transport import transport_of
from dlp.kernels.table import device_kind
from dlp.parallel import overlap as overlaps
from dlp.parallel.linear.plan import WIRES, LinearPlan, linear_plan
from dlp.parallel.overlap import Work
from dlp.parallel.style import ParallelStyle, shard_sizes
from dlp.quant.recipe import GEMMS, Recipe
from dlp.quant.siblings import together

AUTO, SERIAL = "auto", "serial"
CANDIDATES = (SERIAL, "chunked", "chunked:2", "chunked:4")
# A strategy other than serial can be chosen only if its time is less than this fraction of the time of serial: the fractions
# for measured and for predicted times
MEASURED, MODELLED = 0.98, 0.95
VERSION = 1  # raise the number when strategies, transports or kernels change so that older tables no longer apply
TABLES = Path(__file__).parent / "tables"
NOMINAL = 8192  # number of tokens M, of all tp ranks, for which an explicitly constructed layer chooses strategies
Sizes = tuple[int, int, int]  # M, N, K


class Problem(NamedTuple):
    """A linear, or siblings, for which strategies are chosen.

    tokens         M, the tokens of all tp ranks together
    in_features    K, before tp shards the weights
    out_features   N_i of each member, before tp shards the weights
    """

    style: ParallelStyle
    tokens: int
    in_features: int
    out_features: tuple[int, ...]
    recipe: Recipe

    @property
    def key(self) -> tuple[Any, ...]:
        return self.style.name, self.tokens, self.in_features, self.out_features, str(self.recipe)

    def local(self, tp: int) -> list[tuple[int, int]]:
        """Return the shapes [N_i, K] of the weights on one rank."""
        return [shard_sizes(self.style, out, self.in_features, tp, "") for out in self.out_features]

    def sizes(self, tp: int) -> Sizes:
        """Return (M, N, K) of the GEMM of one rank: M is the number of tokens of all ranks, N is summed over the members."""
        shapes = self.local(tp)
        return self.tokens, sum(n for n, _ in shapes), shapes[0][1]

    def plan(self, tp: int) -> LinearPlan:
        return linear_plan(self.recipe, self.style, tp, self.tokens // (tp if self.style.cut_x == 0 else 1))


class Choice(NamedTuple):
    """The strategy that "auto" chose for one GEMM of a layer. All times are in seconds; None: not known.

    measured    measured time of the forward (fprop) or the backward (dgrad) under the strategy; `measured_serial`: under serial
    predicted   predicted time of the GEMM and its transfer under the strategy; `predicted_serial`: under serial
    why         reason why serial was chosen without a comparison of times; "": times were compared
    """

    gemm: str
    strategy: str
    measured: float | None = None
    measured_serial: float | None = None
    predicted: float | None = None
    predicted_serial: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Row:
    """The measured times of one problem.

    key      `Problem.key`
    sizes    `Problem.sizes`: M, N, K of the GEMM of one rank
    passes   GEMM -> strategy -> seconds: the forward for "fprop", the backward for "dgrad"
    noise    uncertainty of `passes` in seconds, with the same keys
    gemms    GEMM -> seconds of the GEMM without a transfer, for all members
    """

    key: tuple[Any, ...]
    sizes: Sizes
    passes: Mapping[str, Mapping[str, float]]
    noise: Mapping[str, Mapping[str, float]]
    gemms: Mapping[str, float]

    def fastest(self, gemm: str) -> str | None:
        """Return the fastest strategy of the pass of this GEMM, or serial if that strategy is not faster than serial both by a
        margin (`MEASURED`) and by more than the noise of both times. None: serial was not measured."""
        times, noise = self.passes.get(gemm, {}), self.noise.get(gemm, {})
        if SERIAL not in times:
            return None
        best, serial = min(times, key=lambda name: times[name]), times[SERIAL]
        sure = serial - times[best] > noise[best] + noise[SERIAL]
        return best if sure and times[best] < MEASURED * serial else SERIAL


class Machine(NamedTuple):
    """The machine on which times are measured, or for which a plan is made.

    kind      one of `dlp.quant.gemm.DEVICES`
    device    name of the device, or one word of the name; "": not known
    torch     version of torch; "": not known
    version   `VERSION` of this module; None: not known
    """

    kind: str
    device: str = ""
    torch: str = ""
    version: int | None = None


def gemm_rate(measured: Sequence[tuple[Sizes, float]], sizes: Sizes, *, neighbors: int = 1) -> float | None:
    """Return the operations per second of a GEMM, estimated from rates that were measured at other sizes; None without rates.

    Args:
        measured: pairs of sizes and rate (operations per second).
        sizes: M, N, K of the GEMM.
        neighbors: number of nearest sizes whose rates are averaged: geometric mean, weighted by inverse distances.
    """
    if not measured:
        return None
    distances = [(sum(abs(log(a / b)) for a, b in zip(size, sizes, strict=True)), rate) for size, rate in measured]
    nearest = sorted(distances, key=lambda each: each[0])[:neighbors]
    if len(nearest) == 1 or nearest[0][0] == 0:
        return nearest[0][1]
    weights = [(1 / distance, rate) for distance, rate in nearest]
    return exp(sum(weight * log(rate) for weight, rate in weights) / sum(weight for weight, _ in weights))


def machine(device_type: str, board: str = "") -> Machine:
    """Return this machine if `device_type` is "cpu" or "cuda". Any other value is the kind of another machine, which is
    known only by `board`, a word of the device's name."""
    if device_type == "cpu":
        return Machine(device_type, "CPU", torch.__version__, VERSION)
    if device_type == "cuda":
        return Machine(device_kind(device_type), torch.cuda.get_device_name(), torch.__version__, VERSION)
    return Machine(device_type, board)


@dataclass(frozen=True)
class Times:
    """Table of measured times.

    kind, device       kind of device, one of `dlp.quant.gemm.DEVICES`, and name of the device
    ranks, transport   number of tp ranks; "mapped", "nccl" or "gloo"
    processors         number of SMs of the device; 0 for a CPU
    speed, meeting     bytes per second that a rank sends in a gather; latency of a transfer in seconds
    rows               the measured problems
    about              further entries of the file: date, command, dtype and versions of the measurement
    """

    kind: str
    device: str
    ranks: int
    transport: str
    processors: int
    speed: float
    meeting: float
    rows: tuple[Row, ...]
    about: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def _by_key(self) -> dict[tuple[Any, ...], Row]:
        return {row.key: row for row in self.rows if row.passes}

    def row(self, problem: Problem) -> Row | None:
        return self._by_key.get(problem.key)

    def obstacle(self, here: Machine, ranks: int, transport: str) -> str | None:
        """Return the reason why this table does not apply to a tp group of `ranks` ranks on machine `here`; None if it applies.
        Fields of `here` that are not known, and the transport "", are not compared."""
        this, its = (here.kind, ranks, transport or self.transport), (self.kind, self.ranks, self.transport)
        said = [f"{count} {kind} ranks by {by}" for kind, count, by in (its, this)]
        if this != its:
            return f"the table is for {said[0]}, and this group has {said[1]}"
        if here.device not in ("", self.device) and here.device.lower() not in self.device.lower().split():
            return f"the table is for {self.device}, and this device is {here.device}"
        for name, mine in (("torch", here.torch), ("version", here.version)):
            if mine and self.about.get(name) != mine:
                return f"the table was measured with {name} {self.about.get(name)}, and this is {name} {mine}: measure again"
        return None

    def for_ranks(self, ranks: int) -> Times:
        """Return the table for groups of this number of ranks. For a number that was not measured, the table contains only the
        rates of GEMMs and of the link."""
        if ranks == self.ranks:
            return self
        rates = tuple(replace(row, passes={}, noise={}) for row in self.rows)
        return replace(self, ranks=ranks, rows=rates, about={**self.about, "from_ranks": self.ranks})

    def rate(self, problem: Problem, gemm: str) -> float | None:
        """Return the operations per second of a GEMM without a transfer, measured under this recipe at the nearest sizes; None:
        the table has no such measurement."""
        sizes, recipe = problem.sizes(self.ranks), str(problem.recipe)
        rows = [row for row in self.rows if row.key[-1] == recipe and row.gemms.get(gemm)]
        return gemm_rate([(row.sizes, 2.0 * prod(row.sizes) / row.gemms[gemm]) for row in rows], sizes)

    def __str__(self) -> str:
        date = self.about.get("date", "no date")
        link = f"{self.transport} at {self.speed / 1e9:.3g} GB/s"
        measured = self.about.get("from_ranks", self.ranks)
        rates = "" if measured == self.ranks else f" (rates only; groups of {self.ranks} are predicted by the model)"
        return f"{measured} x {self.device} by {link}, {len(self.rows)} layers measured, {date}{rates}"

    def text(self, choices: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the table as JSON text, which `read` parses. `choices`: strategies chosen by this table, for information."""
        rows = [
            {**dict(zip(("style", "tokens", "in_features", "out_features", "recipe"), row.key, strict=True)),
             "sizes": row.sizes, "pass_us": {g: _microseconds(of) for g, of in row.passes.items()},
             "noise_us": {g: _microseconds(of) for g, of in row.noise.items()}, "gemm_us": _microseconds(row.gemms)}
            for row in self.rows
        ]  # fmt: skip
        head = {name: getattr(self, name) for name in ("kind", "device", "ranks", "transport", "processors")}
        link = {"bytes_per_second": round(self.speed), "meeting_us": round(self.meeting * 1e6, 3)}
        entries = [
            f"{json.dumps(key)}: {json.dumps(value)}" for key, value in {**self.about, **head, "link": link}.items()
        ]
        lists = {"rows": rows, **({"choices": choices} if choices else {})}
        entries += [
            f"{json.dumps(key)}: [\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]" for key, value in lists.items()
        ]
        return "{\n " + ",\n ".join(entries) + "\n}\n"


def _microseconds(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value * 1e6, 3) for name, value in values.items()}


def _seconds(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value * 1e-6 for name, value in values.items()}


def _row(
    style: str, tokens: int, in_features: int, out_features: Sequence[int], recipe: str, sizes: Sequence[int],
    **us: Any,
) -> Row:  # fmt: skip
    """Parse one entry of `rows` in the file. Raises KeyError, TypeError, AttributeError or ValueError for a malformed entry."""
    passes, noise = ({gemm: _seconds(of) for gemm, of in us[by].items()} for by in ("pass_us", "noise_us"))
    for name in {name for of in passes.values() for name in of}:
        overlaps.load(name)  # ValueError for an unknown strategy
    if any(by.keys() != noise.get(gemm, {}).keys() for gemm, by in passes.items()):
        raise ValueError("pass_us, noise_us: expected equal strategies")
    m, n, k = sizes
    if min(m, n, k) < 1:
        raise ValueError(f"expected sizes >= 1, got {sizes}")
    return Row(
        (style, tokens, in_features, tuple(out_features), recipe), (m, n, k), passes, noise, _seconds(us["gemm_us"])
    )


def read(text: str, name: str) -> Times:
    """Parse the text of the table file `name`. Raises ValueError for a malformed text."""
    try:
        found = json.loads(text)
        rows = tuple(_row(**row) for row in found.pop("rows"))
        link, head = (
            found.pop("link"),
            [found.pop(key) for key in ("kind", "device", "ranks", "transport", "processors")],
        )
        found.pop("choices", None)
        kind, device, ranks, transport, processors = head
        speed, meeting = link["bytes_per_second"], link["meeting_us"] * 1e-6
        if not (speed > 0 and meeting >= 0 and ranks >= 1 and processors >= 0):
            raise ValueError(
                f"expected bytes_per_second > 0, meeting_us >= 0, ranks >= 1 and processors >= 0, got {speed}, "
                f"{link['meeting_us']}, {ranks} and {processors}"
            )
        if not isinstance(getattr(torch, found.get("dtype", "bfloat16"), None), torch.dtype):
            raise ValueError(f"expected a dtype of torch, got {found['dtype']!r}")
        return Times(kind, device, ranks, transport, processors, speed, meeting, rows, found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: not a table of overlap times ({type(error).__name__}: {error}); create a table with torchrun -m "
            f"dlp.parallel.tune "
            f"CONFIG"
        ) from None


def load(path: str | Path, *, together: bool = False) -> Times:
    """Load a table from a file. `together`: all ranks call this function, rank 0 reads the file and broadcasts the text. Raises
    ValueError if the file cannot be read or parsed, with `together` on all ranks."""
    said = ["", ""]
    if not together or dist.get_rank() == 0:
        try:
            said = [Path(path).read_text(), ""]
        except (OSError, UnicodeDecodeError) as error:
            said = ["", f"{path}: cannot be read ({error}); create a table with torchrun -m dlp.parallel.tune CONFIG"]
    if together:
        dist.broadcast_object_list(said, 0)
    if said[1]:
        raise ValueError(said[1])
    return read(said[0], str(path))


@cache
def _tables(folder: Path) -> tuple[Times, ...]:
    """Load all tables of a folder. The result is cached, because every plan, and every layer constructed with "auto", reads the
    tables."""
    return tuple(load(path) for path in sorted(folder.glob("*.json")))


def shipped(here: Machine, ranks: int, transport: str) -> tuple[Times | None, str]:
    """Return the table that dlp ships for this device and transport, or None with the reason.

    A table for the same number of ranks is preferred, then the table for the nearest number. A table that was measured with
    another version of torch is accepted."""
    tables = _tables(TABLES)
    own = here._replace(torch="")
    fit = [times for times in tables if times.obstacle(own, times.ranks, transport) is None]
    if not fit:
        known = ", ".join(dict.fromkeys(times.device for times in tables)) or "no GPU"
        return (
            None,
            f"{NO_TABLE} of {here.device or here.kind} by {transport or 'any transport'}; dlp ships tables of {known}",
        )
    nearest = min(fit, key=lambda times: (times.ranks != ranks, abs(times.ranks - ranks)))
    return nearest.for_ranks(ranks), ""


def at_construction(asked: Asked, problem: Problem, group: ProcessGroup | None, device_type: str) -> Asked:
    """Return the strategies of an explicitly constructed layer: the strategies in `asked`, where "auto" is replaced by the
    choice from the shipped table for `problem`, or by "serial" if tp has one rank."""
    if group is None or group.size() == 1:
        return choose(asked, None, None, NOTHING)[0]
    if AUTO not in ([asked] if isinstance(asked, str) else asked.values()):
        return asked
    times, why = shipped(machine(device_type), group.size(), transport_name(group, device_type))
    return choose(asked, problem, times, why)[0]


def transport_name(group: ProcessGroup, device_type: str) -> str:
    """Return the transport of a group: "mapped", "nccl" or "gloo"."""
    return "mapped" if transport_of(group) is not None else "nccl" if device_type == "cuda" else "gloo"


# Choices

ONE_GEMM = "the GEMM contracts tokens, and runs as one GEMM under every strategy"
NOTHING = "the GEMM has no transfer"
ON_ARRIVAL = "the operand is cast after the gather"
NO_TABLE = "there is no table of times"
NO_TOKENS = "the tokens of a microbatch are not known: pass batch=(B, S)"
Asked = str | dict[str, str]


def choose(asked: Asked, problem: Problem | None, times: Times | None, why: str) -> tuple[Asked, tuple[Choice, ...]]:
    """Return the strategies of a layer's GEMMs, as one name or by GEMM, and the choices that replace "auto".

    asked     strategies that the layer groups set
    problem   None: the layer has no transfer, or its tokens are not known
    times     the table; None: there is no table
    why       reason why `problem` or `times` is None
    """
    names = dict.fromkeys(GEMMS, asked) if isinstance(asked, str) else {gemm: asked.get(gemm, SERIAL) for gemm in GEMMS}
    open_ones = [gemm for gemm in GEMMS if names[gemm] == AUTO]
    if not open_ones:
        return asked, ()
    if problem is None or times is None:
        found = [Choice(gemm, SERIAL, why=why) for gemm in open_ones]
    else:
        found = [_choice(gemm, problem, times) for gemm in open_ones]
    names |= {choice.gemm: choice.strategy for choice in found}
    return names[GEMMS[0]] if len(set(names.values())) == 1 else names, tuple(found)


def _choice(gemm: str, problem: Problem, times: Times) -> Choice:
    work = work_of(gemm, problem, times)
    if isinstance(work, str):
        return Choice(gemm, SERIAL, why=work)
    row = times.row(problem)
    measured = {} if row is None else row.passes.get(gemm, {})
    # With NCCL only serial is predicted: NCCL's kernels slow a concurrent GEMM down, which `seconds` does not model
    modelled = (SERIAL,) if times.transport == NCCL else CANDIDATES
    predicted = {name: overlaps.load(name).seconds(work) for name in modelled} if work.gemms else {}
    best = None if row is None else row.fastest(gemm)
    if best is None and not predicted:
        return Choice(gemm, SERIAL, why=f"the table has no times of {problem.recipe}")
    if best is None:
        best = min(predicted, key=lambda name: predicted[name])
        best = best if predicted[best] < MODELLED * predicted[SERIAL] else SERIAL
    return Choice(gemm, best, measured.get(best), measured.get(SERIAL), predicted.get(best), predicted.get(SERIAL))


def work_of(gemm: str, problem: Problem, times: Times) -> Work | str:
    """Return the GEMM and its transfer as `Work`, whose `gemms` are empty if the table has no rate for the GEMM. If the
    strategy makes no difference, return the reason instead."""
    if gemm == "wgrad":
        return ONE_GEMM
    tp, plan = times.ranks, problem.plan(times.ranks)
    route = plan.x[True] if gemm == "fprop" else plan.dys[True, True]
    shapes, dtype = problem.local(tp), getattr(torch, times.about.get("dtype", "bfloat16"))
    reads = [k for _, k in shapes] if gemm == "fprop" else [n for n, _ in shapes]
    columns = [n for n, _ in shapes] if gemm == "fprop" else [k for _, k in shapes]
    gathers, reduction = [each for each in route.gathers if each.gemm == gemm], getattr(plan, gemm)
    if gathers and gathers[0].columnwise is None:
        return ON_ARRIVAL
    if gathers:
        nbytes = (tp - 1) * sum(plan.sends(route, each, reads[0], dtype) for each in gathers if not each.columnwise)
    elif reduction is not None:
        part = torch.empty(
            *plan.contribution(gemm, columns[0], dtype)[0], dtype=plan.result_dtype(gemm, dtype), device="meta"
        )
        sent = overlaps.load(SERIAL).sent(part, tp, reduce=reduction.how, codec=WIRES[reduction.codec])
        nbytes = sum(count for _, count in sent)
    else:
        return NOTHING
    rate, next_rate = times.rate(problem, gemm), times.rate(problem, "wgrad") if gemm == "dgrad" else None
    work = [2.0 * problem.tokens * n * k for n, k in shapes]
    a, b = (quantizer.format for quantizer in problem.recipe.operands(gemm))
    if gemm == "dgrad" and together(a, b, len(shapes), times.kind):
        work, columns = [sum(work)], columns[:1]
    seconds = tuple(each / rate for each in work) if rate else ()
    behind = sum(work) / next_rate if next_rate else 0.0
    rows = -(-problem.tokens // tp)
    return Work(
        bool(gathers),
        seconds,
        tuple(columns),
        rows,
        a,
        tp,
        nbytes / times.speed,
        times.meeting,
        times.processors,
        behind,
    )


def check_together(choices: Sequence[object]) -> None:
    """Raise ValueError on all ranks if any rank has chosen other strategies than rank 0."""
    mine = sha256(repr(choices).encode()).hexdigest()
    all_of: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(all_of, mine)
    others = [rank for rank, its in enumerate(all_of) if its != all_of[0]]
    if others:
        raise ValueError(
            f"overlap = 'auto' chose different strategies on ranks {', '.join(map(str, others))} and on rank 0, from "
            f"the same table: their devices or versions differ; set strategies in the layer groups, or run on "
            f"identical machines"
        )


def cells(name: str, choice: Choice) -> tuple[str, ...]:
    """Format a row of the plan's table of choices."""
    times = (choice.measured, choice.measured_serial, choice.predicted, choice.predicted_serial)
    return (
        name,
        choice.gemm,
        choice.strategy,
        *("-" if t is None else f"{t * 1e3:.3f}" for t in times),
        choice.why or "-",
    )


HEADER = (
    "layer", "GEMM", "overlap", "measured ms", "serial", "predicted ms", "serial", "why",
)  # fmt: skip
