"""Cases of the tests. Recipes are read from the folder of recipes, so a new recipe is tested without a change to this
file.

There are two kinds of data. `gauss` is similar to tensors of training: results of a sharded and an unsharded layer
differ by the rounding of sums over ranks, and by scales that are computed from a shard instead of the full tensor. The
bound on this difference is the error of the recipe against high precision, measured in the same test. `lattice` holds
only +-1 and +-2, in a checkerboard of both magnitudes, so that the scales do not depend on the sharding, and every
product and sum is exact. Results that are not sums over ranks must therefore have equal bits.
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

# All recipes except qat: it multiplies decoded values in high precision, and test_qat.py tests it.
RECIPES = [name for name in recipes.names() if name != "qat"]
# int8 has one scale per row, like fp8_rowwise, and casts without kernels. In tests of the granularity of scales or of
# captured launches, fp8_rowwise therefore represents int8.
BY_SCALES = [name for name in RECIPES if name != "int8"]
# On 4 ranks, one recipe of each granularity of scales (per tensor, per block, two levels) represents the others.
FOUR = ("fp8_current", "fp8_block", "nvfp4")
KINDS = ("bf16", *FOUR)


def few(cases: Iterable[Any], kinds: Sequence[str] = KINDS) -> list[Any]:
    """Mark the cases that only `--all-cases` runs: cases that name recipes, but no recipe in `kinds`."""
    found = []
    for case in cases:
        if isinstance(case, ParameterSet):  # made by `nightly`, and marked already
            found.append(case)
            continue
        values = case if isinstance(case, tuple) else (case,)
        mine = [value for value in values if isinstance(value, str) and value in RECIPES]
        found.append(pytest.param(*values, marks=[] if not mine or set(mine) & set(kinds) else [pytest.mark.full]))
    return found


def nightly(*values: Any, id: str | None = None) -> Any:
    """Case that only `--all-cases` runs, because another case of the same test covers the same code."""
    return pytest.param(*values, marks=pytest.mark.full, id=id)


def of_these(names: Sequence[str], cases: Iterable[str]) -> list[Any]:
    """Mark the cases that only `--all-cases` runs: cases that are not in `names`."""
    assert not set(names) - set(cases := list(cases)), "a name without a case"
    return [name if name in names else nightly(name) for name in cases]


ON_RANKS = [(world, recipe) for world in (2, 4) for recipe in BY_SCALES if world < 4 or recipe in FOUR]
STYLE_KEYS = list(STYLES)  # (name, sequence_parallel)
# On 2 ranks, every recipe of BY_SCALES runs in every style. On 4 ranks, where only sizes differ, FOUR run in the column and
# row styles with sequence parallelism, and the first of FOUR in the column and row styles without it.
IN_STYLES = [
    (world, recipe, key)
    for world, recipe in ON_RANKS
    for key in STYLE_KEYS
    if world < 4 or (key[0] != "local" and (key[1] or recipe == FOUR[0]))
]


def in_styles(cases: Iterable[tuple[int, str, tuple[str, bool]]]) -> list[Any]:
    """Mark the cases of IN_STYLES that only `--all-cases` runs. Without the option, on 2 ranks, recipes of KINDS
    run in COLUMN_SP and ROW_SP, and every recipe runs in one style, chosen by the index of the recipe; on 4 ranks, only
    fp8_block in ROW_SP runs."""
    found = []
    for world, recipe, key in cases:
        number = BY_SCALES.index(recipe)
        if world == 4:
            runs = recipe == "fp8_block" and key == ("row", True)
        else:
            in_tp = recipe in KINDS and key in (("column", True), ("row", True))
            runs = in_tp or (number + STYLE_KEYS.index(key)) % len(STYLE_KEYS) == 0
        found.append((world, recipe, key) if runs else nightly(world, recipe, key))
    return found


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EPSILON = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # relative Frobenius error that a few roundings cause


def style_id(key: Any) -> str:
    """Test id of a parameter: the name of the style, such as COLUMN_SP, or the parameter itself if it is not a
    style."""
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
        """Load the recipe with the amax scope of the case. Stochastic rounding stays on."""
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
    """Variants of one style and recipe for both kinds of data. Every two values of different options (siblings, bias,
    dtype, token counts that are not multiples of a block) occur together in some variant, except bf16 without siblings
    in styles other than row."""
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
    """Whether the recipe transforms some operand before quantization, which destroys the properties of `lattice`
    data."""
    loaded = recipes.load(recipe)
    return any(quantizer.format.basis for which in GEMMS for quantizer in loaded.operands(which))


def rounds_by_chance(recipe: str) -> bool:
    """Whether the recipe rounds some operand stochastically, so that codes depend on the position of a shard."""
    loaded = recipes.load(recipe)
    return any(caps_of(quantizer).origin for which in GEMMS for quantizer in loaded.operands(which))


def matrix(data: str, rows: int, columns: int, seed: int) -> Tensor:
    """Return an fp32 matrix [rows, columns] on the CPU, equal on all ranks. The rows of `gauss` data grow towards the
    end, so that shards have very different amaxes."""
    generator = torch.Generator().manual_seed(seed)
    if data == "lattice":
        signs = torch.randint(0, 2, (rows, columns), generator=generator) * 2 - 1
        return (signs * (1 + (torch.arange(rows)[:, None] + torch.arange(columns)) % 2)).float()
    return torch.randn(rows, columns, generator=generator) * torch.linspace(0, 4, rows).exp2()[:, None]
