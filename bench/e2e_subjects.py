"""Names of the subjects of `bench.e2e`: a peer or a recipe of dlp, with suffixes. Names are checked before anything runs."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from dlp.quant.recipe import names as recipe_names
from launch.settings.schema import ConfigError

BASELINE = "peer_bf16"
# peer -> recipe of torchao's float8
PEERS = {BASELINE: None, "peer_tensorwise": "tensorwise", "peer_rowwise": "rowwise"}
HP_GATHER, EAGER, GRAPH = ":hp_gather", ":eager", ":graph"
OURS, THEIRS = (HP_GATHER, EAGER), (GRAPH,)  # suffixes of dlp's recipes, and suffixes of peers


@dataclass(frozen=True)
class Subject:
    """Subject of `bench.e2e`: `base` is a peer or a recipe, `suffixes` are suffixes such as ":eager"."""

    base: str
    suffixes: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.base + "".join(self.suffixes)


def subjects_of(text: str, device: str) -> list[Subject]:
    """Parse a comma-separated list of subjects. Raises ConfigError for a subject that is unknown or cannot run on
    `device`."""
    subjects = [_parsed(name) for name in text.split(",")]
    for subject in subjects:
        _check(subject, device)
    return subjects


def _parsed(name: str) -> Subject:
    base, *suffixes = name.split(":")
    return Subject(base, tuple(f":{suffix}" for suffix in suffixes))


def _check(subject: Subject, device: str) -> None:
    name, base = subject.name, subject.base
    if base not in PEERS and base not in recipe_names():
        raise ConfigError(
            f"--subjects {name}: {base!r} is neither a peer nor a recipe; choose a peer ({', '.join(PEERS)}) "
            f"or a recipe ({', '.join(recipe_names())})"
        )
    if wrong := [suffix for suffix in subject.suffixes if suffix not in (THEIRS if base in PEERS else OURS)]:
        raise ConfigError(
            f"--subjects {name}: unknown suffix {wrong[0]}; a recipe takes {', '.join(OURS)}, a peer {', '.join(THEIRS)}"
        )
    if GRAPH in subject.suffixes and device != "cuda":
        raise ConfigError(f"--subjects {name}: a CUDA graph needs GPUs, and the ranks are on CPUs; leave {GRAPH} out")
    if PEERS.get(base) and importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"--subjects {name}: torchao is not installed; install torchao, or leave this subject out")
