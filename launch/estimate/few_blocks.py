"""Memory and time of a model, extrapolated from plans of the same model with fewer blocks: both are linear in the number of
equal blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dlp.parallel.traffic.predict import Unpredictable
from launch.config.run_config import Config
from launch.estimate.memory import MOMENTS, Memory
from launch.estimate.memory_check import Planned, planned
from launch.estimate.step_time import HOST, forecast, waits_for_host

FEW = 3  # number of planned blocks: the first, a middle and the last block, which layer groups may treat differently


def with_blocks(config: Config, layers: int) -> Config:
    """Return the config with `layers` blocks."""
    return replace(config, model=replace(config.family, layers=layers))


class Extended:
    """Predictions for a config on `world` GPUs of one board, extrapolated from plans with `FEW` and `FEW` + 1 blocks."""

    def __init__(self, config: Config, world: int, board: str) -> None:
        self.config, self.world, self.board = config, world, board
        few = min(FEW, config.family.layers)
        sizes = [few] if config.family.layers == few else [few, few + 1]
        self.configs = [with_blocks(config, layers) for layers in sizes]
        self.more = config.family.layers - few
        self.found: list[Planned] = [planned(each, world, board) for each in self.configs]

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
