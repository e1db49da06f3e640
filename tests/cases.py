"""Cases of the tests. Recipes are found by listing the folder of recipes, so a new recipe is tested without a change here.

Two kinds of data. `gauss` is what training looks like: results of a sharded and an unsharded layer differ by the rounding
of sums that cross ranks, and by scales that belong to other shards; the bound is the recipe's own error, measured on
the spot, so it needs no table. `lattice` holds only +-1 and +-2, one of each in every 2 x 2 square: every scale is the
same wherever a shard is cut, and every product and sum is exact, so where no sum crosses ranks the bits must be equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import Tensor

from dlp.parallel.style import STYLES, ParallelStyle, style
from dlp.quant import recipe as recipes
from dlp.quant.quantizer import caps_of
from dlp.quant.recipe import GEMMS, Recipe

RECIPES = [name for name in recipes.names() if name != "qat"]  # that makes nothing smaller: test_qat.py
# int8 has a scale a row, as fp8_rowwise, and casts without kernels: where only places of scales count, or what is captured,
# that one stands for it
BY_SCALES = [name for name in RECIPES if name != "int8"]
# a recipe of each kind of scale (shared, in blocks, of two levels) stands for the others on 4 ranks
FOUR = ("fp8_current", "fp8_block", "nvfp4")
KINDS = ("bf16", *FOUR)


def few(cases: Iterable[Any], kinds: Sequence[str] = KINDS) -> list[Any]:
    """Cases of which, without `--all-cases`, those run whose recipe (the case, or the name of a recipe in the case) is of
    `kinds`, or is no name of a recipe."""
    found = []
    for case in cases:
        if isinstance(case, ParameterSet):  # `nightly`
            found.append(case)
            continue
        values = case if isinstance(case, tuple) else (case,)
        mine = [value for value in values if isinstance(value, str) and value in RECIPES]
        found.append(pytest.param(*values, marks=[] if not mine or set(mine) & set(kinds) else [pytest.mark.full]))
    return found


def nightly(*values: Any, id: str | None = None) -> Any:
    """Case that only `--all-cases` runs, because another case of the same test stands for this case."""
    return pytest.param(*values, marks=pytest.mark.full, id=id)


def of_these(names: Sequence[str], cases: Iterable[str]) -> list[Any]:
    """All cases by name; without `--all-cases` only the cases of `names` run."""
    assert not set(names) - set(cases := list(cases)), "a name without a case"
    return [name if name in names else nightly(name) for name in cases]


ON_RANKS = [(world, recipe) for world in (2, 4) for recipe in BY_SCALES if world < 4 or recipe in FOUR]
STYLE_KEYS = list(STYLES)  # (name, sequence_parallel)
# every recipe in every style on 2 ranks; on 4, where only sizes differ, each of FOUR where tokens are cut, else one
IN_STYLES = [
    (world, recipe, key)
    for world, recipe in ON_RANKS
    for key in STYLE_KEYS
    if world < 4 or (key[0] != "local" and (key[1] or recipe == FOUR[0]))
]


def in_styles(cases: Iterable[tuple[int, str, tuple[str, bool]]]) -> list[Any]:
    """Cases of IN_STYLES. Without `--all-cases` recipes of KINDS run in the sequence-parallel styles of TP on 2 ranks and in
    one of these styles on 4 ranks; every recipe runs in one more style."""
    found = []
    for world, recipe, key in cases:
        number = BY_SCALES.index(recipe)
        if world == 4:
            runs = key == ("row" if number % 2 else "column", True)
        else:
            in_tp = recipe in KINDS and key in (("column", True), ("row", True))
            runs = in_tp or (number + STYLE_KEYS.index(key)) % len(STYLE_KEYS) == 0
        found.append((world, recipe, key) if runs else nightly(world, recipe, key))
    return found


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EPSILON = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # relative Frobenius error of a few roundings


def style_id(key: Any) -> str:
    """COLUMN_SP and so on; of other parameters of a test, what they are."""
    return style(*key).name if isinstance(key, tuple) else str(key)


@dataclass(frozen=True)
class LinearCase:
    """A linear K -> N (one N per sibling) on [batch, sequence] tokens."""

    style_key: tuple[str, bool]
    recipe: str
    dtype: torch.dtype = torch.float32
    bias: bool = False
    siblings: int = 1
    batch: int = 2
    sequence: int = 64
    data: str = "gauss"
    amax_scope: str = "table"

    in_features = 64

    def load(self) -> Recipe:
        """The recipe with its amax scope; stochastic rounding, where there is some, stays on."""
        return recipes.load(self.recipe, amax_scope=self.amax_scope)

    @property
    def style(self) -> ParallelStyle:
        return style(*self.style_key)

    @property
    def out_features(self) -> tuple[int, ...]:
        return (96, 64, 128)[: self.siblings]

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.style.name}-{self.recipe}-{dtype}{'-bias' * self.bias}-{self.siblings}w"
            f"-{self.batch}x{self.sequence}-{self.data}-{self.amax_scope}"
        )


def linear_cases(style_key: tuple[str, bool], recipe: str) -> Iterator[LinearCase]:
    """Variants of one style and recipe in which every two of these meet: siblings, bias, dtype, token counts off every
    block size; on both data."""
    many = 1 if style_key[0] == "row" else 3
    lattice_scope = "all" if transforms(recipe) else "table"
    yield LinearCase(style_key, recipe, torch.float32, bias=True)
    yield LinearCase(style_key, recipe, torch.bfloat16, siblings=many)
    yield LinearCase(style_key, recipe, torch.bfloat16, bias=True, siblings=many, batch=3, sequence=20)
    yield LinearCase(
        style_key, recipe, torch.float32, bias=True, siblings=many, data="lattice", amax_scope=lattice_scope
    )
    yield LinearCase(style_key, recipe, torch.float32, batch=3, sequence=12, data="lattice", amax_scope="all")


def transforms(recipe: str) -> bool:
    """Whether some operand is transformed before it is quantized: a lattice does not stay one then."""
    loaded = recipes.load(recipe)
    return any(quantizer.format.basis for which in GEMMS for quantizer in loaded.operands(which))


def rounds_by_chance(recipe: str) -> bool:
    """Whether some operand is rounded stochastically: its codes depend on where a shard lies."""
    loaded = recipes.load(recipe)
    return any(caps_of(quantizer).origin for which in GEMMS for quantizer in loaded.operands(which))


def matrix(data: str, rows: int, columns: int, seed: int) -> Tensor:
    """fp32 [rows, columns] on the CPU, the same wherever it is made. Rows of gauss grow towards the end, so that shards
    have very different amaxes."""
    generator = torch.Generator().manual_seed(seed)
    if data == "lattice":
        signs = torch.randint(0, 2, (rows, columns), generator=generator) * 2 - 1
        return (signs * (1 + (torch.arange(rows)[:, None] + torch.arange(columns)) % 2)).float()
    return torch.randn(rows, columns, generator=generator) * torch.linspace(0, 4, rows).exp2()[:, None]
