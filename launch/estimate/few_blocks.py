"""Memory and time of a model, extrapolated from plans of the same model with fewer blocks: both are linear in the number of
equal blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dlp import Plan
from dlp.parallel.traffic.predict import Unpredictable
from dlp.quant.patterns import indices_in
from launch.common.devices import BOARDS, kind_of
from launch.config.rules import validate_world
from launch.config.run_config import Config, parallel_dims
from launch.estimate.memory import MOMENTS, Memory
from launch.estimate.memory_check import Planned, planned
from launch.estimate.step_time import HOST, forecast, waits_for_host
from launch.training.build import plan_for
from launch.training.gradient_accumulation import accumulation

FEW = 3  # smallest number of planned blocks: the first, a middle and the last block


def with_blocks(config: Config, layers: int) -> Config:
    """Return the config with `layers` blocks."""
    return replace(config, model=replace(config.family, layers=layers))


def planned_sizes(config: Config) -> list[int]:
    """Return two numbers of blocks such that any further block of the config equals a middle block of the larger model; only
    the number of blocks of the config, if no smaller model has all kinds of blocks.

    Layer groups may treat blocks at both ends differently ("layers.0", "layers.-4:"). Every n-th block may be recomputed
    (`[train] recompute_every`): then both numbers differ from the number of the config by multiples of n."""
    layers, every = config.family.layers, config.train.recompute_every
    found = [indices_in(pattern, layers) for group in config.groups for pattern in group.match]
    indices = [index for each in found for index in each or ()]
    few = max(FEW, max([*indices, -1]) + 1 - min([*indices, 0]) + 1)
    few += (layers - few) % every
    return [few, few + every] if None not in found and few + every <= layers else [layers]


class Extended:
    """Predictions for a config on `world` GPUs of one board, extrapolated from plans with the numbers of blocks of
    `planned_sizes`."""

    def __init__(self, config: Config, world: int, board: str) -> None:
        self.config, self.world, self.board = config, world, board
        sizes = planned_sizes(config)
        configs = [with_blocks(config, layers) for layers in sizes]
        plans = [plan_for(each, world, kind_of(board), board) for each in configs]
        # number of differences between the two plans that the config has beyond the smaller plan
        self.more = (config.family.layers - sizes[0]) // (sizes[-1] - sizes[0] or 1)
        if not self._reduces_once(plans):
            configs = [replace(each, train=replace(each.train, reduce_gradients="microbatch")) for each in configs]
        self.configs = configs
        self.found: list[Planned] = [
            planned(each, world, board, plan) for each, plan in zip(self.configs, plans, strict=True)
        ]

    def _reduces_once(self, plans: Sequence[Plan]) -> bool:
        """Return whether FSDP reduces gradients once per step, as decided by the parameters of all blocks."""
        few = plans[0].weights
        names = {parameter.name for parameter in few}
        added = [parameter for parameter in plans[-1].weights if parameter.name not in names]
        whole = replace(plans[0], weights=(*few, *added * self.more))
        batch, dims = validate_world(self.config, self.world), parallel_dims(self.config, self.world)
        return accumulation(self.config, whole, batch, dims.shards, BOARDS[self.board].memory).reductions == 1

    def _all_blocks(self, values: Sequence[float]) -> float:
        return values[0] + self.more * (values[-1] - values[0])

    def peak(self) -> float:
        """Return the peak bytes of tensors per GPU.

        Raises:
            Unpredictable: A user-defined format or strategy does not state sizes.
        """
        held = [each.memory for each in self.found]
        for each in held:
            if isinstance(each, Unpredictable):
                raise each
        totals = [[each.total(moment) for each in held if isinstance(each, Memory)] for moment in MOMENTS]
        # the moment of the peak may depend on the number of blocks
        return max(self._all_blocks(each) for each in totals)

    def seconds(self) -> tuple[float, dict[str, float]]:
        """Return the seconds per step, and the seconds by kind of device time."""
        both = [
            forecast(config, self.world, self.board, found)
            for config, found in zip(self.configs, self.found, strict=True)
        ]
        kinds = dict.fromkeys(kind for each in both for kind in each.shares if kind != HOST)
        shares = {kind: self._all_blocks([each.shares.get(kind, 0.0) for each in both]) for kind in kinds}
        shares |= waits_for_host(self._all_blocks([each.host for each in both]), sum(shares.values()))
        return sum(shares.values()), shares
