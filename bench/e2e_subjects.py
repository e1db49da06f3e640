"""What `bench.e2e` can measure, by name: a peer, or a recipe of dlp with suffixes. Checked before anything runs."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from dlp.quant.recipe import names as recipe_names
from launch.schema import ConfigError

BASELINE = "peer_bf16"
PEERS = {BASELINE: None, "peer_tensorwise": "tensorwise", "peer_rowwise": "rowwise"}  # the recipe of torchao's float8
HP_GATHER, GRAPH = ":hp_gather", ":graph"
SUFFIXES = (HP_GATHER, GRAPH)


@dataclass(frozen=True)
class Subject:
    """A name in parts: that of a peer or a recipe, and what stands behind it."""

    base: str
    suffixes: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.base + "".join(self.suffixes)


def subjects_of(text: str, world: int, device: str) -> list[Subject]:
    """All subjects of a comma-separated list. Raises ConfigError for one that ranks like these cannot run."""
    subjects = [_parsed(name) for name in text.split(",")]
    for subject in subjects:
        _check(subject, world, device)
    return subjects


def _parsed(name: str) -> Subject:
    base, *suffixes = name.split(":")
    return Subject(base, tuple(f":{suffix}" for suffix in suffixes))


def _check(subject: Subject, world: int, device: str) -> None:
    name, base = subject.name, subject.base
    if base not in PEERS and base not in recipe_names():
        raise ConfigError(
            f"--subjects {name}: {base!r} is no peer, which are {', '.join(PEERS)}, "
            f"and no recipe, which are {', '.join(recipe_names())}"
        )
    allowed = () if base in PEERS else SUFFIXES
    if wrong := [suffix for suffix in subject.suffixes if suffix not in allowed]:
        raise ConfigError(
            f"--subjects {name}: unknown suffix {wrong[0]}; a recipe takes {', '.join(SUFFIXES)}, a peer none"
        )
    if GRAPH in subject.suffixes and (world > 1 or device != "cuda"):
        raise ConfigError(
            f"--subjects {name}: a graph is of one rank on a GPU, and ranks here are {world} on a {device.upper()}; "
            f"leave {GRAPH} away"
        )
    if PEERS.get(base) and importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"--subjects {name}: torchao is not installed; install it, or leave this subject away")
