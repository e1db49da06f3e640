"""Predict the time of a training step: seconds, tokens per second, shares of device time, largest costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from dlp.parallel.model.plan import table
from launch.common.devices import BOARDS
from launch.common.units import said_seconds
from launch.config.run_config import Config
from launch.estimate.memory_check import Planned
from launch.estimate.rates import boards, rates_of
from launch.estimate.step_work import ATTENTION, BOUNDARY, CAST, COPIES, LOSS, OPTIMIZER, POINTWISE, SUMS, StepWork
from launch.estimate.timeline import EXPOSED, Timeline, schedule
from launch.report.metrics import peak_of
from launch.training.cuda_graph import replays_steps

LARGEST = 3  # number of costs that are listed with a remedy
REPLAYS = "between replays"  # kind of device time: gaps between two replays of a CUDA graph
HOST = "host launches"  # kind of device time: the device waits for launches by the host
# Kind of device time -> settings that reduce it
REMEDIES = {
    "GEMMs, bf16": "an FP8 recipe for the layers that run in bf16 (--recipe fp8_current, layer groups)",
    ATTENTION: "attention costs in proportion to the sequence length: --train.sequence",
    POINTWISE: "--train.compile true fuses these kernels; recomputation runs them twice (--train.checkpointing)",
    CAST: "fp8_delayed reads each tensor once less than fp8_current; larger layers cast less per GEMM",
    LOSS: "a smaller vocabulary, or more tp ranks, which shard the vocabulary",
    OPTIMIZER: "a larger --train.global_batch updates less often; more dp_shard ranks share the update",
    BOUNDARY: "a larger --train.global_batch casts weights less often",
    SUMS: "fewer tp ranks; a larger --train.micro_batch reduces gradients less often",
    COPIES: "--mesh.reshard_after_forward false gathers each block once; a larger --train.micro_batch",
    EXPOSED: "overlap = auto or chunked; fewer tp ranks; a larger --train.micro_batch",
    HOST: "--train.cuda_graph auto, so that steps are replayed; --train.compile true",
    REPLAYS: "a larger --train.global_batch",
}


@dataclass(frozen=True)
class Forecast:
    """Predicted step of one rank.

    seconds             seconds per optimizer step
    tokens              tokens per step over all ranks
    world               number of ranks
    mfu                 model FLOP/s of a rank divided by the dense bf16 peak of the board
    shares              seconds per step by kind of device time; the sum is `seconds`
    transfers           seconds per step in which a link is busy, by link
    host                seconds per step that the host needs to launch forward and backward of all microbatches; 0 if steps are
                        replayed as a CUDA graph
    slowest             seconds per step with the slowest measured host
    microbatch          schedule of the last microbatch of the step
    board               key of `launch.common.devices.BOARDS`
    measured            device, date and torch version of the measured rates
    """

    seconds: float
    tokens: int
    world: int
    mfu: float
    shares: Mapping[str, float]
    transfers: Mapping[str, float]
    host: float
    slowest: float
    microbatch: Timeline
    board: str
    measured: str

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def costs(self) -> list[tuple[str, float]]:
        """Return (kind, seconds) of each kind of device time, largest first."""
        return sorted(self.shares.items(), key=lambda item: -item[1])

    def describe(self) -> list[str]:
        """Return the lines of the plan: seconds of a step, a table of shares, the largest costs with a remedy for each."""
        rate = self.tokens_per_second
        lines = [
            f"time: {said_seconds(self.seconds)} a step predicted on {self.board}, {rate:,.0f} tokens/s "
            f"({rate / self.world:,.0f} per GPU), MFU {self.mfu:.1%}; rates: {self.measured}",
            "",
            *table(
                ("device time", "per step", "share"),
                [(kind, said_seconds(seconds), f"{seconds / self.seconds:.1%}") for kind, seconds in self.costs()],
            ),
            "",
        ]
        if self.slowest > self.seconds:
            lines.append(
                f"up to {said_seconds(self.slowest)} a step with the slowest measured host, {self.slowest / self.seconds:.2g} "
                f"times as long: no CUDA graph hides the host"
            )
        links = ", ".join(f"{lane} {said_seconds(seconds)}" for lane, seconds in self.transfers.items())
        lines += [f"links busy: {links}"] if links else []
        for kind, seconds in [cost for cost in self.costs() if cost[0] in REMEDIES][:LARGEST]:
            lines.append(f"{kind} ({seconds / self.seconds:.0%}): {REMEDIES[kind]}")
        return lines


def forecast_or_reason(config: Config, world: int, device: str, found: Planned) -> Forecast | str:
    """Return the forecast, or the reason why there is none. `device`: a kind of device or a board; only boards have rates."""
    if device not in BOARDS:
        return f"name a board that has a table of rates: --device {' or '.join(boards())}"
    try:
        return forecast(config, world, device, found)
    except ValueError as error:
        return str(error)


def waits_for_host(host: float, device: float) -> dict[str, float]:
    """Return {HOST: seconds in which the device waits for the host}; empty if the device needs more seconds than the host."""
    return {HOST: host - device} if host > device else {}


def forecast(config: Config, world: int, board: str, found: Planned) -> Forecast:
    """Predict the time of a step.

    Args:
        config: The config.
        world: Number of ranks.
        board: Board with a table of rates (`launch.estimate.rates.boards`).
        found: Result of `planned` for this config, `world` and board.

    Raises:
        ValueError: There is no table of this board, the table lacks GEMMs of a recipe in the plan, or `[train] invariant` is
            set.
    """
    if config.train.invariant:
        raise ValueError("[train] invariant = true: sums of segments have no table of rates; leave invariant out")
    rates = rates_of(board)
    work = StepWork(config, found, rates, board)
    last = schedule(work.microbatch(last=True), rates.nccl_slowdown)
    host = 0.0 if replays_steps(config, found.plan.device_type) else work.host_seconds() * found.load.microbatches
    parts = [(last, 1)]
    if found.load.microbatches > 1:
        earlier = schedule(work.microbatch(last=False), rates.nccl_slowdown)
        parts.append((earlier, found.load.microbatches - 1))
    parts.append((schedule(work.boundary()), 1))
    shares: defaultdict[str, float] = defaultdict(float)
    transfers: defaultdict[str, float] = defaultdict(float)
    for timeline, times in parts:
        for total, its in ((shares, timeline.shares()), (transfers, timeline.transfers())):
            for kind, seconds in its.items():
                total[kind] += seconds * times
    device = sum(shares.values())
    if not host:
        shares[REPLAYS] = rates.replay
    shares |= waits_for_host(host, device)
    seconds = sum(shares.values())
    slowest = max(seconds, host * rates.host_spread)
    tokens = config.train.global_batch * config.train.sequence
    flops = config.architecture.flops_per_token(config.train.sequence) * tokens / world
    about = rates.about
    peak = peak_of(about["device"]) or float("nan")
    return Forecast(
        seconds, tokens, world, flops / seconds / peak, dict(shares), dict(transfers), host, slowest, last, board,
        f"{about['device']}, {about['date']}, torch {about['torch']}",
    )  # fmt: skip
