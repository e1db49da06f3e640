"""What a layer's plan must say beside its row: where it does something else than its recipe's name promises.

an operand that travels in high precision      a GEMM that decodes an operand because the other one is not quantized
results that are rounded                       how the device runs the recipe
codes that depend on tp all the same
a prologue, and where it runs
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dlp.kernels.gemms import device_kind
from dlp.kernels.ops import ACTIVATION_CODES, quantizer_kernels
from dlp.parallel import fit
from dlp.parallel.linear.operands import makes
from dlp.parallel.linear.prologue import Prologue
from dlp.parallel.style import ParallelStyle
from dlp.parallel.transfer import transfer_plan
from dlp.quant.gemm import support
from dlp.quant.quantizer import caps_of
from dlp.quant.recipe import GEMM_OPERANDS, GEMMS, OPERANDS, RESULTS, Operand, Recipe

WAYS = ("rowwise", "columnwise")


def layer_notes(recipe: Recipe, style: ParallelStyle, tokens: int | None) -> tuple[str, ...]:
    """The sentences for one layer. `tokens`: of a microbatch on one rank of a sequence-parallel layer, if known."""
    return (*_travel(recipe, style, tokens), *_mixed(recipe), *_rounded(recipe))


def _travel(recipe: Recipe, style: ParallelStyle, tokens: int | None) -> Iterator[str]:
    if style.gathers is None:
        return
    plan = transfer_plan(recipe, style, 1, tokens)
    routes = (plan.x[True], plan.x_again) if style.gathers == "x" else (plan.dy(True, True),)
    whys = [(way, why) for route in routes for way, why in zip(WAYS, route.why, strict=True) if why is not None]
    if any(why == fit.ASKED for _, why in whys):
        yield f"{style.gathers} travels once, in high precision, and is quantized on arrival: {fit.ASKED}"
        return
    for way, why in whys:
        yield f"{style.gathers} {way} travels in high precision: {why}"
    twice = style.gathers == "dy" and not whys and len(routes[0].gathers) == 2
    both = _share_of_bf16(recipe.dy) if twice else 0.0
    if both > 1.0:
        yield f"dy travels in two orientations, {both:.2f}x of bf16; gather_dy = 'high_precision' sends it once as it is"


def scope_notes(recipe: Recipe, style: ParallelStyle, local: tuple[int, int], tokens: int | None) -> Iterator[str]:
    """Where `amax_scope="all"` cannot keep what it promises: tp cuts an operand inside a block, whose values then have
    other scales than on one rank. `local`: w [N, K] of a rank; `tokens`: of a rank, if known."""
    if recipe.amax_scope != "all":
        return
    features = {"x": local[1], "dy": local[0]}
    for name in OPERANDS:
        operand: Operand = getattr(recipe, name)
        cut = style.cut(name)
        if cut is None or style.gathers == name:  # what is gathered travels in whole blocks or is cast on arrival
            continue
        size = local[cut] if name == "w" else features[name] if cut else tokens
        unit = max(operand.rowwise.format.block[cut], operand.columnwise.format.block[1 - cut])
        if size is not None and unit and size % unit:
            what = "features" if name == "w" or cut else "tokens"
            yield (
                f"amax_scope = 'all' does not hold for {name}: tp cuts it inside a block of {operand.rowwise.format.name}, "
                f"{size} {what} a rank are no multiple of {unit}, so its codes depend on tp"
            )


def _share_of_bf16(operand: Operand) -> float:
    """Both orientations of a large matrix, of its bytes in bf16."""
    size = (4096, 4096)
    parts = [quantizer.format.nbytes(size, torch.bfloat16) for quantizer in (operand.rowwise, operand.columnwise)]
    return sum(parts) / (2 * size[0] * size[1])


def _mixed(recipe: Recipe) -> Iterator[str]:
    """GEMMs of which exactly one operand is in high precision."""
    for which in GEMMS:
        formats = [quantizer.format for quantizer in recipe.operands(which)]
        a, _, b, _ = GEMM_OPERANDS[which]
        kept = [fmt.keeps_source for fmt in formats]
        if kept[0] != kept[1]:
            name, fmt = ((b, formats[1]), (a, formats[0]))[kept[1]]
            yield f"{which} decodes {name} ({fmt.name}): the other operand is in high precision"


def _rounded(recipe: Recipe) -> Iterator[str]:
    for result in RESULTS:
        quantizer = getattr(recipe, result)
        if quantizer is not None:
            yield f"{result} is rounded to {quantizer.format.name} and handed on decoded"


def support_note(recipe: Recipe, device_type: str) -> str:
    """How this device runs the recipe: "fp8_current: native (torch._scaled_mm)", or GEMM by GEMM; on a GPU, too, whether
    casts have kernels: "casts by kernel", "casts by reference (native kernels need nvcc, ...)"."""
    by_gemm = {}
    for which in GEMMS:
        a, b = recipe.operands(which)
        found = support(a.format, b.format, device_kind(device_type))
        by_gemm[which] = f"{found.status} ({found.kernel})"
    same = len(set(by_gemm.values())) == 1
    text = by_gemm["fprop"] if same else ", ".join(f"{which} {found}" for which, found in by_gemm.items())
    casts = _casts(recipe, device_type) if device_type == "cuda" else ()
    return "; casts by ".join([f"{recipe} on {device_type}: {text}", *casts])


def prologue_note(prologue: Prologue | None, recipe: Recipe, device_type: str) -> tuple[str, ...]:
    """What makes x of what a layer is called with, and where: in the cast of x where a kernel does both."""
    if prologue is None:
        return ()
    x = recipe.x
    by_kernel = all(quantizer_kernels(caps_of(way).op, device_type) == "kernel" for way in (x.rowwise, x.columnwise))
    one_cast = makes(recipe, "x", fit.units(recipe)[0], True, True)
    along = all(
        way.format.block[0] <= 1 and way.format.parts[0].dtype in ACTIVATION_CODES for way in (x.rowwise, x.columnwise)
    )
    where = "in the cast of x, from bf16 activations" if by_kernel and one_cast and along else "apart, before x is cast"
    return (f"prologue {prologue.name}({', '.join(prologue.reads)}) runs {where}",)


def _casts(recipe: Recipe, device_type: str) -> tuple[str, ...]:
    """What quantizes, the same for all operands or operand by operand; nothing where the recipe quantizes nothing."""
    by_operand: dict[str, str] = {}
    for name in OPERANDS:
        operand: Operand = getattr(recipe, name)
        ops = [caps_of(q).op for q in (operand.rowwise, operand.columnwise) if not q.format.keeps_source]
        found = dict.fromkeys(quantizer_kernels(op, device_type) for op in ops)
        by_operand |= {name: " and ".join(found)} if found else {}
    same = len(set(by_operand.values())) == 1 and len(by_operand) == len(OPERANDS)
    parts = list(by_operand.values())[:1] if same else [f"{name} {found}" for name, found in by_operand.items()]
    return (", ".join(parts),) if parts else ()
