"""Decision whether the steps of a run are replayed as a CUDA graph (`dlp.parallel.model.graph`), with the reason."""

from __future__ import annotations

from dlp.parallel.model.graph import WARM_UP
from launch.config.rules import cannot_capture
from launch.config.run_config import Config
from launch.settings.schema import ConfigError


def replays_steps(config: Config, device_type: str) -> bool:
    """Return whether steps are captured and replayed. Raises ConfigError if `[train] cuda_graph = true` and the device is a
    CPU."""
    asked = config.train.cuda_graph
    if asked is True and device_type == "cpu":
        raise ConfigError(
            f"{config.source}: [train] cuda_graph = true: expected a GPU, got a CPU; set it to auto or false"
        )
    return bool(asked) and device_type != "cpu" and not cannot_capture(config)


def describe_graph(config: Config, device_type: str) -> str:
    """Return the line of the plan about CUDA graphs."""
    if replays_steps(config, device_type):
        return f"cuda graph: steps are captured after {WARM_UP} eager steps and replayed"
    why = "[train] cuda_graph = false" if config.train.cuda_graph is False else cannot_capture(config)
    return f"cuda graph: steps are launched one by one ({why or 'the ranks are on CPUs'})"
