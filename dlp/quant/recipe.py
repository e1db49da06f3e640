"""Recipes: quantizers for the three operands x, w, dy in both orientations, and the options of the three GEMMs.

    fprop   y  = x.rowwise     @ w.rowwise.T        contraction K
    dgrad   dx = dy.rowwise    @ w.columnwise.T     contraction N
    wgrad   dw = dy.columnwise @ x.columnwise.T     contraction M (tokens)

A recipe is a frozen dataclass that does not depend on the mesh. `load("fp8_current", power_of_two=True)` imports
`dlp/quant/recipes/fp8_current.py` and calls the function `recipe` of fp8_current.py with the options. A new recipe is one new
file; the signature of its function `recipe` lists the options. `load` applies the options that all recipes share
(`SHARED_OPTIONS`) to the result of the function.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, cached_property
from math import lcm
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_type_hints

import torch

from dlp.quant import recipes
from dlp.quant.gemm import GemmOptions, check_pair, own_gemm, support
from dlp.quant.options import check_option, freeze
from dlp.quant.quantizer import KeepHighPrecision, Quantizer, caps_of, check_caps

OPERANDS = ("x", "w", "dy")
RESULTS = ("y", "dx")
GEMMS = ("fprop", "dgrad", "wgrad")
GEMM_OPERANDS = {"fprop": ("x", "rowwise", "w", "rowwise"), "dgrad": ("dy", "rowwise", "w", "columnwise"),
                 "wgrad": ("dy", "columnwise", "x", "columnwise")}  # fmt: skip
DIMENSIONS = {"x": ("M", "K"), "w": ("N", "K"), "dy": ("M", "N")}
CHOICES = {"amax_scope": ("table", "all"), "gather_dy": ("quantized", "high_precision")}  # fields of `Recipe`
OUT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

GemmName = Literal["fprop", "dgrad", "wgrad"]


@dataclass(frozen=True)
class Operand:
    """Pair of quantizers for x, w or dy: one for each orientation.

    Args:
        rowwise: quantizer along the last dimension.
        columnwise: quantizer along the first dimension; it is applied to the transpose.

    Examples:
        >>> from dlp.quant.fp8 import CurrentScaling
        >>> from dlp.quant.mxfp8 import MxScaling
        >>> operand = dlp.quant.recipe.Operand(rowwise=CurrentScaling(), columnwise=MxScaling())
    """

    rowwise: Quantizer
    columnwise: Quantizer

    @property
    def derived(self) -> bool:
        """Whether the columnwise operand is the transposed rowwise operand, without a second cast: the quantizers are equal,
        and their format is transposable."""
        return self.rowwise == self.columnwise and self.rowwise.format.transposable

    @cached_property
    def clips(self) -> bool:
        """Whether both formats have a mask of clipped values (`Format.clips`). The gradient of clipped values is 0."""
        return self.rowwise.format.clips and self.columnwise.format.clips

    @property
    def keeps_source(self) -> bool:
        """Whether the operand stays in high precision in both orientations."""
        return self.rowwise.format.keeps_source and self.columnwise.format.keeps_source

    def mapped(self, change: Callable[[Quantizer], Quantizer]) -> Operand:
        """Return an operand whose quantizers are the results of `change`."""
        return Operand(change(self.rowwise), change(self.columnwise))


def both(quantizer: Quantizer) -> Operand:
    """Return an operand with the same quantizer in both orientations.

    Args:
        quantizer: the quantizer.

    Returns:
        The operand.

    Examples:
        >>> from dlp.quant.mxfp8 import MxScaling
        >>> dlp.quant.recipe.both(MxScaling()).columnwise == MxScaling()
        True
    """
    return Operand(quantizer, quantizer)


@dataclass(frozen=True)
class Recipe:
    """Quantizers of x, w and dy, and options of the GEMMs fprop, dgrad and wgrad.

    `dlp.recipe(name)` returns a shipped recipe.

    Args:
        name: name in plans and checkpoints.
        x: quantizers of x: rowwise for fprop, columnwise for wgrad.
        w: quantizers of the weight: rowwise for fprop, columnwise for dgrad.
        dy: quantizers of the gradient of y: rowwise for dgrad, columnwise for wgrad.
        fprop: options of the fprop GEMM.
        dgrad: options of the dgrad GEMM.
        wgrad: options of the wgrad GEMM.
        amax_scope: operands on whose amax tp ranks agree, if tp shards a dimension that a scale spans. "table": operands that
            are gathered; "all": all operands.
        reduce_amax: whether ranks agree on the amaxes of delayed scaling at the step boundary.
        y: quantizer by which y is cast and decoded; None: y is not rounded.
        dx: quantizer by which dx is cast and decoded; None: dx is not rounded.
        gather_dy: how dy is gathered. "quantized": as codes; "high_precision": in the dtype of dy, and quantized afterwards.
        options: (name, value) of the options that `load` was called with, for printing; options of the recipe itself only if
            their values differ from the defaults.

    Raises:
        ValueError: for two operands that a GEMM cannot multiply (the message names the GEMM), for a quantizer that lacks a
            method or argument that it declares, and for an unknown amax_scope or gather_dy.

    Examples:
        >>> dlp.recipe("fp8_block").name
        'fp8_block'
    """

    name: str
    x: Operand
    w: Operand
    dy: Operand
    fprop: GemmOptions = GemmOptions()
    dgrad: GemmOptions = GemmOptions()
    wgrad: GemmOptions = GemmOptions()
    amax_scope: str = "table"
    reduce_amax: bool = True
    y: Quantizer | None = None
    dx: Quantizer | None = None
    gather_dy: str = "quantized"
    options: tuple[tuple[str, Any], ...] = field(default=())

    def __post_init__(self) -> None:
        for name, values in CHOICES.items():
            if getattr(self, name) not in values:
                found = getattr(self, name)
                raise ValueError(f"recipe {self.name}: {name} must be one of {', '.join(values)}; got {found!r}")
        for which in GEMMS:
            a, b = self.operands(which)
            check_pair(which, a.format, b.format)
        for quantizer in self.quantizers():
            check_caps(quantizer)

    def operands(self, which: str) -> tuple[Quantizer, Quantizer]:
        """Return the quantizers of the operands A and B of the GEMM `which`, one of GEMMS."""
        a, a_orientation, b, b_orientation = GEMM_OPERANDS[which]
        return getattr(getattr(self, a), a_orientation), getattr(getattr(self, b), b_orientation)

    def quantizers(self) -> list[Quantizer]:
        """Return the quantizers of x, w and dy, rowwise and columnwise, then the quantizers of y and dx."""
        operands = (getattr(self, name) for name in OPERANDS)
        results = [quantizer for name in RESULTS if (quantizer := getattr(self, name)) is not None]
        return [quantizer for operand in operands for quantizer in (operand.rowwise, operand.columnwise)] + results

    @cached_property
    def beyond_launches(self) -> str:
        """Reason why passes of layers with this recipe cannot be captured: the cast or GEMM that may do more than launch
        kernels of dlp. "" if passes can be captured."""
        for quantizer in self.quantizers():
            if not caps_of(quantizer).native:
                return f"casts of {type(quantizer).__name__} are not declared native (QuantizerCaps.native)"
        for which in GEMMS:
            a, b = (quantizer.format for quantizer in self.operands(which))
            if own_gemm(a, b) is not None:
                return f"{which} is multiplied by {type(a if hasattr(a, 'gemm') else b).__name__}.gemm"
        return ""

    def support(self, device: str) -> str:
        """Describe the kernels of the GEMMs on `device`, one of `dlp.quant.gemm.DEVICES`: "native (torch._scaled_mm)", or one
        entry for each GEMM if the GEMMs differ."""
        texts = {}
        for which in GEMMS:
            a, b = self.operands(which)
            kernels = support(a.format, b.format, device)
            texts[which] = f"{kernels.status} ({kernels.kernel})"
        if len(set(texts.values())) == 1:
            return texts[GEMMS[0]]
        return ", ".join(f"{which} {text}" for which, text in texts.items())

    def of(self, tensor: str) -> Operand | None:
        """Return the quantizers of `tensor`: "x", "w", "dy", "y" or "dx"; None for y or dx without quantizer."""
        if tensor in OPERANDS:
            operand: Operand = getattr(self, tensor)
            return operand
        quantizer = getattr(self, tensor)
        return None if quantizer is None else both(quantizer)

    @cached_property
    def units(self) -> tuple[int, int, int]:
        """Multiples to which M, N and K are zero-padded for the formats. M is padded only for wgrad, which contracts M."""
        found = {"M": 1, "N": 1, "K": 1}
        for name, (first, last) in DIMENSIONS.items():
            operand: Operand = getattr(self, name)
            for quantizer, rows, contraction in ((operand.rowwise, first, last), (operand.columnwise, last, first)):
                down, across = quantizer.format.multiple
                found[contraction] = lcm(found[contraction], across)
                if (
                    rows != "M"
                ):  # M as rows is not padded: formats with blocks of several tokens raise for partial blocks
                    found[rows] = lcm(found[rows], down)
        return found["M"], found["N"], found["K"]

    def derives(self, name: str, tokens: int) -> bool:
        """Return whether the columnwise operand of `name`, "x", "w" or "dy", is the transposed rowwise operand
        (`Operand.derived`). For x and dy, the number of tokens `tokens` must also need no padding."""
        operand: Operand = getattr(self, name)
        return operand.derived and (name == "w" or tokens % self.units[0] == 0)

    def for_layer(self, layer: str) -> Recipe:
        """Return the recipe of the layer with this name: always this recipe. A `CustomRecipe` may return different recipes."""
        return self

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value}" for key, value in self.options)
        return f"{self.name}({options})" if options else self.name


def _accumulation(recipe: Recipe, value: Mapping[GemmName, Literal["fast", "split"]]) -> Recipe:
    """Accumulation of FP8 products, for each GEMM: "fast" sums in the tensor core, with about 14 bits; "split" adds partial
    sums in fp32 registers."""
    return _with_gemm_options(recipe, {which: {"fast_accumulation": how == "fast"} for which, how in value.items()})


def _out_dtype(recipe: Recipe, value: Mapping[GemmName, Literal["bf16", "fp32"]]) -> Recipe:
    """Dtype of the result, for each GEMM."""
    return _with_gemm_options(recipe, {which: {"out_dtype": OUT_DTYPES[name]} for which, name in value.items()})


def _wire(recipe: Recipe, value: Mapping[Literal["fprop", "dgrad"], Literal["hp", "bf16", "fp8"]]) -> Recipe:
    """Format in which tp ranks send their contributions to the sum of the result, for fprop and dgrad: "hp" (the dtype of the
    result), "bf16" or "fp8"."""
    return _with_gemm_options(recipe, {which: {"wire": name} for which, name in value.items()})


def _with_gemm_options(recipe: Recipe, changes: dict[Any, dict[str, Any]]) -> Recipe:
    return replace(recipe, **{which: replace(getattr(recipe, which), **change) for which, change in changes.items()})


def _tuned(recipe: Recipe, value: bool) -> Recipe:
    """Algorithm of GEMMs. true: the algorithm that `dlp.kernels.tune` measured as the fastest on this GPU, if measured; false:
    always the first algorithm of cuBLASLt, so that the bits do not depend on measurements."""
    return _with_gemm_options(recipe, {which: {"tuned": value} for which in GEMMS})


def _allow_reference(recipe: Recipe, value: bool) -> Recipe:
    """Allow the plain-torch reference, which is slow, for GEMMs without a kernel on the GPU; else such a GEMM raises."""
    return _with_gemm_options(recipe, {which: {"allow_reference": value} for which in GEMMS})


def _high_precision(recipe: Recipe, value: Sequence[GemmName]) -> Recipe:
    """GEMMs whose operands stay unquantized."""
    operands = {name: getattr(recipe, name) for name in OPERANDS}
    for which in value:
        a, a_orientation, b, b_orientation = GEMM_OPERANDS[which]
        operands[a] = replace(operands[a], **{a_orientation: KeepHighPrecision()})
        operands[b] = replace(operands[b], **{b_orientation: KeepHighPrecision()})
    return replace(recipe, **operands)


def _amax_scope(recipe: Recipe, value: Literal["table", "all"]) -> Recipe:
    """Operands on whose amax tp ranks agree, if tp shards a dimension that a scale spans: operands that are gathered ("table"),
    or all operands ("all")."""
    return replace(recipe, amax_scope=value)


def _gather_dy(recipe: Recipe, value: Literal["quantized", "high_precision"]) -> Recipe:
    """How dy is gathered over tp: as codes, in each orientation that a GEMM reads ("quantized"), or once in high precision,
    with the cast after the gather ("high_precision")."""
    return replace(recipe, gather_dy=value)


SHARED_OPTIONS: dict[str, Callable[[Recipe, Any], Recipe]] = {
    "accumulation": _accumulation,
    "out_dtype": _out_dtype,
    "wire": _wire,
    "high_precision": _high_precision,
    "amax_scope": _amax_scope,
    "gather_dy": _gather_dy,
    "tuned": _tuned,
    "allow_reference": _allow_reference,
}


@cache
def _shipped() -> frozenset[str]:
    """Return the names of the recipes of dlp. Cached, because every constructed layer looks up a recipe."""
    return frozenset(module.name for module in pkgutil.iter_modules(recipes.__path__))


def names(recipes_path: str | Path | None = None) -> list[str]:
    """Return the sorted names of all recipes: of dlp, and of the Python files in the folder `recipes_path` if given.

    Raises ValueError for a `recipes_path` that is no folder, or that has a file with the name of a recipe of dlp.
    """
    own = _shipped()
    if recipes_path is None:
        return sorted(own)
    if not isinstance(recipes_path, str | Path):
        raise ValueError(f"recipes_path must be the path of a folder; got {recipes_path!r}")
    if not Path(recipes_path).is_dir():
        raise ValueError(f"recipes path {str(recipes_path)!r} is not a folder")
    more = {module.name for module in pkgutil.iter_modules([str(recipes_path)])}
    if taken := sorted(own & more):
        raise ValueError(f"{recipes_path}: recipe {taken[0]!r} exists already; rename the file")
    return sorted(own | more)


def factory(name: str, recipes_path: str | Path | None = None) -> Callable[..., Recipe]:
    """Return the function that builds recipe `name`, whose signature lists the options. Raises ValueError for an unknown
    name."""
    known = names(recipes_path)
    if name not in known:
        close = [each for each in known if each.startswith(f"{name}_")] or get_close_matches(name, known, n=1)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise ValueError(f"unknown recipe {name!r:.60}: the recipes are {', '.join(known)}{hint}")
    if name in _shipped():
        return importlib.import_module(f"{recipes.__name__}.{name}").recipe
    return _import_file(_file(name, recipes_path)).recipe


def _file(name: str, recipes_path: str | Path | None) -> Path:
    return Path(str(recipes_path), f"{name}.py").resolve()


def source(value: Any) -> Path | None:
    """Return the path NAME.py in the `recipes_path` of `value`, a mapping for `as_recipe`. None for a name, a recipe object, a
    mapping without `recipes_path`, and the name of a recipe of dlp, because these import no file of the user."""
    if not isinstance(value, Mapping) or value.get("recipes_path") is None or value.get("name") in _shipped():
        return None
    return _file(str(value.get("name")), value["recipes_path"])


@cache
def _import_file(path: Path) -> ModuleType:
    """Import a Python file and return the module. Cached: a second execution of the file would define its quantizer classes
    again, and equal quantizers would not compare equal."""
    name = f"{path.stem} of {path.parent}"  # differs from the names of other modules
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"{path} is no Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up the module of a class there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def as_recipe(value: Any) -> Any:
    """Return the recipe for a name or for a mapping {"name": ..., option: value}; a recipe is returned unchanged.

    Raises ValueError for any other value."""
    if isinstance(value, str):
        return load(value)
    if isinstance(value, Mapping):
        return load(**value)
    if not hasattr(value, "for_layer"):
        raise ValueError(f'a recipe must be a name, a dict {{"name": ..., option: value}} or a recipe; got {value!r}')
    return value


@cache
def _options(build: Callable[..., Recipe]) -> tuple[Mapping[str, inspect.Parameter], Mapping[str, Any]]:
    """Return the parameters of the function `build` of a recipe, and the type hints of these parameters and of
    SHARED_OPTIONS."""
    shared = {key: get_type_hints(use)["value"] for key, use in SHARED_OPTIONS.items()}
    return inspect.signature(build).parameters, {**shared, **get_type_hints(build)}


def load(name: str, *, recipes_path: str | Path | None = None, **options: Any) -> Recipe:
    """Return the recipe with this name and these options.

    Args:
        name: "bf16", "fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "int8", "mxfp8", "nvfp4", "qat", or the name of
            a file in `recipes_path`, without ".py".
        recipes_path: folder of Python files with further recipes.
        **options: options of the recipe, and options that all recipes share.

    Returns:
        The `Recipe`.

    Raises:
        ValueError: for an unknown name or option, a value that the option does not allow, and a file whose function returns no
            `Recipe`.

    Examples:
        >>> layer = dlp.Linear(64, 64, recipe=dlp.recipe("fp8_block", power_of_two=True))
    """
    build = factory(name, recipes_path)
    own, hints = _options(build)
    for key, value in options.items():
        if key not in (*own, *SHARED_OPTIONS):
            known = ", ".join((*own, *SHARED_OPTIONS))
            raise ValueError(f"recipe {name} has no option {key!r}; the options are {known}")
        if key in hints:  # a parameter without annotation takes any value
            check_option(f"recipe {name}: {key}", value, hints[key])
    recipe = build(**{key: value for key, value in options.items() if key in own})
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"recipe {name}: the function recipe must return a Recipe; got {type(recipe).__name__}: call "
            f'custom.for_layer("{name}") on a CustomRecipe'
        )
    for key, apply in SHARED_OPTIONS.items():
        recipe = apply(recipe, options[key]) if key in options else recipe
    chosen = {key: value for key, value in options.items() if key not in own or value != own[key].default}
    return replace(recipe, options=tuple((key, freeze(value)) for key, value in chosen.items()))
