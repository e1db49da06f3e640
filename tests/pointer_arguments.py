"""The arguments of a kernel that are pointers, read from the types in csrc. A replay of captured launches replaces only
pointers."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import dlp.kernels

CSRC = Path(dlp.kernels.__file__).parent / "csrc"
Kind = bool | frozenset[int]  # whether an argument is an address; for packed arguments, the indices that are addresses
_STRUCT = re.compile(r"struct (\w+)[^{]*\{(?:(?!\nstruct).)*?static constexpr uint32_t addresses = ([^;]+);", re.DOTALL)
_STEP = re.compile(r'bind_step\(m, "(\w+)",\s*\[\w*\]\(([^)]*)\)')
TRANSPOSE = (frozenset({0, 5}), False)  # bindings.cpp binds transposes by a function, which `_STEP` does not match


def words(said: str, agreed: int = 8) -> frozenset[int]:
    """Return the indices of packed arguments that are addresses, from the C++ expression `said`: `words(0, 5)`, or a
    mask of the first `2 * kAgreed`. Other expressions have no addresses."""
    if said.startswith("words"):
        return frozenset(map(int, re.findall(r"\d+", said)))
    return frozenset(range(2 * agreed)) if "kAgreed" in said else frozenset()


@functools.cache
def addresses() -> dict[str, tuple[Kind, ...]]:
    """Return the kinds of the arguments of each step of captured launches, by name, without the stream."""
    sources = [(CSRC / name).read_text() for name in ("kernels.h", "steps.h")]
    masks = {name: words(said) for source in sources for name, said in _STRUCT.findall(source)}
    found: dict[str, tuple[Kind, ...]] = {"transpose_bytes": TRANSPOSE, "transpose_nibbles": TRANSPOSE}
    for name, arguments in _STEP.findall((CSRC / "bindings.cpp").read_text()):
        types = [re.sub(r"const |&| \w+$", "", each.strip()) for each in arguments.split(",")]
        assert types[-1] == "Stream", f"{name}: {types}"
        jobs = [masks.get(re.sub(r"Words<(\w+)>", r"\1", each)) for each in types[:-1]]
        found[name] = tuple(
            each == "uintptr_t" if job is None else job for each, job in zip(types[:-1], jobs, strict=True)
        )
    return found
