"""The rows of a plan: the conversion of each layer, decided from its module and its layer groups.

    LayerPlan       a linear of the model, or an explicitly constructed layer of dlp, which keeps its style, and keeps its
                    recipe and overlap unless a group sets them
    OtherPlan       any other module with parameters
    ParameterPlan   a parameter: the shape on a tp rank, and whether the gradient is partial there

The notes of a layer tell where the layer deviates from the name of its recipe: an operand is gathered in high precision, a GEMM
decodes an operand because the other operand is not quantized, results are rounded, codes depend on tp although
`amax_scope="all"`. A note also tells how the device runs the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dlp.comm.mesh import NCCL
from dlp.kernels.table import cast_kernel, device_kind
from dlp.parallel import overlap as overlaps
from dlp.parallel.auto import AUTO, NO_TABLE, NO_TOKENS, NOTHING, SERIAL, Asked, Choice, Problem, Times, choose
from dlp.parallel.linear.plan import ASKED, linear_plan
from dlp.parallel.linear.spec import LayerOptions, check_blocks, check_extras, check_recipe
from dlp.parallel.model.groups import Resolved
from dlp.parallel.style import STYLES, ParallelStyle, shard_sizes, style
from dlp.parallel.weight.parameters import default_recipe, holds
from dlp.quant import recipe as recipes
from dlp.quant.gemm import check_kernel, kernel_name, support
from dlp.quant.quantizer import Quantizer, caps_of
from dlp.quant.recipe import GEMM_OPERANDS, GEMMS, OPERANDS, RESULTS, Operand, Recipe
from dlp.quant.siblings import together

HELD = "the weight is quantized-only (quantized_model_init)"
BY_HAND = "constructed explicitly: layer groups can change only recipe and overlap"


@dataclass(frozen=True)
class LayerPlan:
    """Row of one linear.

    shape       (N, K) of the unsharded weight
    siblings    names of all siblings, including this layer
    kernels     kernels of fprop, dgrad, wgrad
    parameters  number of parameters on this rank, before FSDP
    group       field -> the group whose value is used
    overrode    field -> the groups whose values are overridden
    weight      name of the parameter
    notes       remarks that the columns do not show
    choices     strategies that "auto" chose in `overlap`
    one_dgrad   the dgrads of all siblings are one GEMM (`dlp.quant.siblings`)
    """

    name: str
    shape: tuple[int, int]
    style: str
    sequence_parallel: bool
    siblings: tuple[str, ...]
    recipe: Recipe
    overlap: Asked
    options: LayerOptions
    kernels: tuple[str, str, str]
    parameters: int
    group: str
    overrode: str
    weight: str
    notes: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()
    return_bias: bool = False
    one_dgrad: bool = False

    @property
    def module(self) -> str:
        """Name of the module. It equals the name of the row, except for an explicitly constructed layer with several
        weights."""
        return self.weight.rpartition(".")[0]

    @property
    def made_by_hand(self) -> bool:
        return BY_HAND in self.notes

    @property
    def row(self) -> ParallelStyle:
        return style(self.style, self.sequence_parallel)


@dataclass(frozen=True)
class OtherPlan:
    """Row of a module with parameters that does not become a linear, with style "vocab", "replicated" or "left out".

    `reads_cut`: the module reads features that tp shards."""

    name: str
    kind: str
    style: str
    sequence_parallel: bool
    parameters: int
    reads_cut: bool = False

    @property
    def partial(self) -> bool:
        """Whether gradients on a tp rank are partial sums."""
        return self.style != "vocab" and (self.sequence_parallel or self.reads_cut)


@dataclass(frozen=True)
class ParameterPlan:
    """Row of the plan for a parameter. A parameter with several names is listed under the first name.

    shape: on a tp rank, before FSDP. partial: the gradient on a tp rank covers only the rank's own tokens. shared: several
    modules have the parameter."""

    name: str
    shape: tuple[int, ...]
    partial: bool
    shared: bool = False


@dataclass(frozen=True)
class Place:
    """The setting of a plan: the number of tp ranks, the device type, (B, S) of a microbatch, the times for choosing strategies
    or the reason why there are none, and the carrier of transfers over tp, as in `make_plan`."""

    tp: int
    device_type: str
    batch: tuple[int, int] | None
    times: Times | None = None
    no_times: str = NO_TABLE
    transport: str = ""


def plan_linear(name: str, module: nn.Linear, chosen: Resolved, place: Place) -> LayerPlan:
    """Row of an nn.Linear. Raises ValueError for options of its groups that the linear cannot have."""
    if chosen.sequence_parallel and place.batch is None:
        raise ValueError(
            f"{name}: sequence parallelism needs the shape of a microbatch: pass batch=(B, S) to convert, split tokens with "
            f"dlp.scatter_tokens before the first such layer and join them with dlp.gather_tokens after the last"
        )
    if chosen.recipe is None and default_recipe() is not None:
        chosen = replace(chosen, recipe=default_recipe(), won={**chosen.won, "recipe": "quantized_model_init"})
    shape = (module.out_features, module.in_features)
    row = _row(name, f"{name}.weight", shape, module.bias is not None, chosen, place)
    return replace(row, notes=(*row.notes, HELD)) if holds(row.recipe) else row


def plan_made(name: str, module: nn.Module, chosen: Resolved, place: Place) -> Iterator[LayerPlan]:
    """Rows of an explicitly constructed layer, one for each weight."""
    core: Any = module.core
    spec, members = core.spec, core.members
    style_name, sequence_parallel = next(key for key, row in STYLES.items() if row is spec.style)
    for what, asked, its in (
        ("style", chosen.style, style_name), ("sequence_parallel", chosen.sequence_parallel, sequence_parallel),
        ("return_bias", chosen.return_bias, spec.return_bias),
    ):  # fmt: skip
        if asked is not None and asked != its:
            raise ValueError(
                f"{name}: the layer was constructed with {what} = {its}, and a layer group sets {what} = {asked}; "
                f"construct the layer with {what} = {asked}, or remove {what} from its groups"
            )
    if spec.group is not None and spec.tp != place.tp:
        raise ValueError(
            f"{name}: the layer was constructed for tp {spec.tp}, and the mesh has tp {place.tp}; construct the layer "
            f"on this mesh"
        )
    own = {gemm: getattr(spec.overlap, gemm).name for gemm in GEMMS}
    constructed = own if len(set(own.values())) > 1 else own[GEMMS[0]]
    chosen = replace(
        chosen, style=style_name, sequence_parallel=sequence_parallel, recipe=chosen.recipe or spec.recipe,
        overlap=chosen.overlap or (AUTO if module.overlap == AUTO else constructed), return_bias=spec.return_bias,
        **{name: value for name, value in vars(spec.options).items() if getattr(chosen, name) is None},
    )  # fmt: skip
    names = [name if len(members) == 1 else f"{name}.{member.weight}" for member in members]
    for row_name, member in zip(names, members, strict=True):
        n, k = module.get_parameter(member.weight).shape
        bias = module._parameters[member.bias] is not None
        row = _row(row_name, f"{name}.{member.weight}", (n, k), bias, chosen, place)
        yield replace(row, siblings=tuple(names) if len(names) > 1 else (), notes=(*row.notes, BY_HAND))


def _row(name: str, weight: str, shape: tuple[int, int], has_bias: bool, chosen: Resolved, place: Place) -> LayerPlan:
    batch, tp = place.batch, place.tp
    sequence_parallel = bool(chosen.sequence_parallel)
    if sequence_parallel and batch is not None and batch[0] * batch[1] % tp:
        raise ValueError(
            f"{name}: sequence parallelism needs a number of tokens divisible by tp {tp}; got B*S = "
            f"{batch[0]}*{batch[1]}; choose another batch or sequence length"
        )
    tokens = batch[0] * batch[1] // tp if batch is not None else None

    # the chosen value, or the default; each lookup rejects a value that does not fit
    style_name = chosen.style or "local"
    row = style(style_name, sequence_parallel)
    local = shard_sizes(row, *shape, tp, name)
    recipe = recipes.as_recipe(chosen.recipe or "bf16").for_layer(name)
    check_recipe(name, row.gathers, recipe)
    check_blocks(name, recipe, row, shape, tp)

    options, return_bias = chosen.settled(row), bool(chosen.return_bias)
    check_extras(name, recipe, options, return_bias)

    # groups that set a field: "edges (recipe), qkv (style)"; fields that no group sets keep their default
    fields_of = {group: [f for f, winner in chosen.won.items() if winner == group] for group in chosen.won.values()}
    winners = [f"{group} ({', '.join(fields)})" for group, fields in fields_of.items()]
    winners += [f"{field} default" for field in ("style", "recipe") if field not in chosen.won]
    overrode = [f"{f}: {', '.join(lost)}" for f, lost in chosen.overrode.items() if lost]
    notes = (
        *layer_notes(recipe, row, tokens),
        *chosen.notes(row),
        *_kept_note(recipe, row, options, tokens),
        *(["bias is returned, not added (return_bias)"] if return_bias else ()),
        *(scope_notes(recipe, row, local, tokens) if tp > 1 else ()),
        *capture_note(recipe, place.device_type),
    )
    return LayerPlan(
        name=name, shape=shape, style=style_name, sequence_parallel=sequence_parallel, siblings=(), recipe=recipe,
        overlap=_overlap(chosen.overlap, name), options=options, return_bias=return_bias,
        kernels=_kernels(recipe, place.device_type, name), parameters=local[0] * local[1] + has_bias * local[0],
        group=", ".join(winners), overrode="; ".join(overrode), weight=weight, notes=notes,
    )  # fmt: skip


def _overlap(value: str | Mapping[str, str] | None, layer: str) -> Asked:
    """Strategies chosen by groups, with each name checked. Raises ValueError for an unknown strategy."""
    chosen = dict(value) if isinstance(value, Mapping) else value or AUTO
    for gemm, strategy in chosen.items() if isinstance(chosen, dict) else [(GEMMS[0], chosen)]:
        if gemm not in GEMMS:
            raise ValueError(f"{layer}: an overlap strategy is set for one of {', '.join(GEMMS)}; got {gemm!r}")
        if strategy != AUTO:
            overlaps.load(strategy)
    return chosen


def with_strategies(rows: Sequence[LayerPlan], place: Place) -> list[LayerPlan]:
    """The rows, in which "auto" is replaced by the chosen strategies."""
    by_name, found = {row.name: row for row in rows}, dict[str, tuple[Asked, tuple[Choice, ...]]]()
    for row in rows:
        names = row.siblings or (row.name,)
        if place.tp == 1 or row.style == "local":
            found[row.name] = choose(row.overlap, None, None, NOTHING)
        elif names[0] not in found or names[0] == row.name:
            problem = None
            if place.times is not None and place.batch is not None:
                outs = tuple(by_name[name].shape[0] for name in names)
                problem = Problem(row.row, place.batch[0] * place.batch[1], row.shape[1], outs, row.recipe)
            why = NO_TOKENS if place.times is not None else place.no_times
            found |= dict.fromkeys(names, choose(row.overlap, problem, place.times, why))
    chosen = [replace(row, overlap=found[row.name][0], choices=found[row.name][1]) for row in rows]
    return [replace(row, notes=(*row.notes, *_by_nccl(asked, place))) for row, asked in zip(chosen, rows, strict=True)]


def _by_nccl(row: LayerPlan, place: Place) -> Iterator[str]:
    """Note for a strategy that overlaps transfers with GEMMs while transfers over tp use NCCL."""
    asked = row.overlap.values() if isinstance(row.overlap, dict) else [row.overlap]
    names = sorted({*asked} - {AUTO, SERIAL})
    if names and place.transport == NCCL and place.tp > 1 and row.style != "local":
        yield (
            f"{' and '.join(names)} uses NCCL, whose kernels take SMs from the concurrent GEMM; within one host, "
            f"transport = 'mapped' uses copy engines instead"
        )


def _kernels(recipe: Recipe, device_type: str, layer: str) -> tuple[str, str, str]:
    names = []
    for gemm in GEMMS:
        a, b = (quantizer.format for quantizer in recipe.operands(gemm))
        check_kernel(f"{layer}: {gemm}", a, b, device_type, getattr(recipe, gemm))
        names.append(kernel_name(a, b, device_type))
    return names[0], names[1], names[2]


def with_siblings(row: LayerPlan, names: tuple[str, ...], device_type: str) -> LayerPlan:
    """The row of a layer with these siblings (itself included; none: the layer is alone), whose dgrads may be one GEMM."""
    fprop, dgrad, wgrad = row.kernels
    a, b = (quantizer.format for quantizer in row.recipe.operands("dgrad"))
    formats = together(a, b, len(names), device_kind(device_type))
    if formats:
        dgrad = kernel_name(*formats, device_type)
    return replace(row, siblings=names, kernels=(fprop, dgrad, wgrad), one_dgrad=formats is not None)


def plan_other(name: str, module: nn.Module, chosen: Resolved, tp: int) -> OtherPlan:
    """Row of a module that is not a linear, or is left out."""
    count = sum(p.numel() for p in module._parameters.values() if p is not None)
    sequence_parallel = bool(chosen.sequence_parallel)
    if chosen.convert is not False and isinstance(module, nn.Embedding) and chosen.style == "column":
        _check_vocabulary(name, module, tp)
        return OtherPlan(name, type(module).__name__, "vocab", sequence_parallel, count // tp)
    if chosen.style == "row" or (isinstance(module, nn.EmbeddingBag) and chosen.style == "column"):
        raise ValueError(
            f"{name}: style {chosen.style!r} is for linears; {type(module).__name__} is replicated: set 'column' if "
            f"the module reads features that are sharded over tp, else 'local'"
        )
    reads_cut = chosen.style == "column"  # after a column-parallel linear every rank has all tokens
    style = "left out" if chosen.convert is False else "replicated"
    return OtherPlan(name, type(module).__name__, style, sequence_parallel and not reads_cut, count, reads_cut)


def _check_vocabulary(name: str, module: nn.Embedding, tp: int) -> None:
    """Raise ValueError for an embedding that cannot be sharded along the vocabulary without changing its results."""
    if module.num_embeddings % tp:
        raise ValueError(
            f"{name}: the vocabulary of {module.num_embeddings} is not divisible by tp {tp}; pad the vocabulary"
        )
    more = ["scale_grad_by_freq"] * module.scale_grad_by_freq
    more += [key for key, _ in module.named_parameters() if key != "weight"]
    if more:
        raise ValueError(
            f"{name}: an embedding with {more[0]} cannot be sharded along the vocabulary; set style = 'local' for this "
            f"module"
        )


def plan_parameters(
    modules: Mapping[str, nn.Module], linears: Mapping[str, ParallelStyle], vocabulary: set[str], partial: set[str],
    tp: int,
) -> tuple[ParameterPlan, ...]:  # fmt: skip
    """Each parameter of these modules once.

    linears: style of each linear. vocabulary: embeddings that tp shards. partial: other modules whose gradients on a tp rank
    are partial sums."""
    found: dict[int, ParameterPlan] = {}
    for name, module in modules.items():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            cut, in_parts = _treatment(name, key, linears.get(name), vocabulary, partial)
            shape = tuple(size // tp if dim == cut else size for dim, size in enumerate(parameter.shape))
            first = found.get(id(parameter))
            found[id(parameter)] = (
                ParameterPlan(f"{name}.{key}", shape, in_parts)
                if first is None
                else replace(first, partial=first.partial or in_parts, shared=True)
            )
    return tuple(found.values())


def _treatment(
    name: str, key: str, style: ParallelStyle | None, vocabulary: set[str], partial: set[str]
) -> tuple[int | None, bool]:
    """The dimension of a parameter that tp shards, and whether the gradient is partial."""
    if style is None:
        return (0, False) if name in vocabulary else (None, name in partial)
    if key.startswith("weight"):  # a layer with several weights numbers them
        return style.shard_dim, style.partial_weight_grad
    return (0 if style.shard_dim == 0 else None), style.partial_bias_grad


ORIENTATIONS = ("rowwise", "columnwise")


def layer_notes(recipe: Recipe, style: ParallelStyle, tokens: int | None) -> tuple[str, ...]:
    """Notes of one layer. `tokens`: tokens of a microbatch on one rank of a sequence-parallel layer; None if not known."""
    return (*_travel(recipe, style, tokens), *_mixed(recipe), *_rounded(recipe))


def _travel(recipe: Recipe, style: ParallelStyle, tokens: int | None) -> Iterator[str]:
    if style.gathers is None:
        return
    plan = linear_plan(recipe, style, 1, tokens)
    routes = (plan.x[True], plan.x_again) if style.gathers == "x" else (plan.dys[True, True],)
    whys = [
        (orientation, why)
        for route in routes
        for orientation, why in zip(ORIENTATIONS, route.reasons, strict=True)
        if why is not None
    ]
    if any(why == ASKED for _, why in whys):
        yield f"{style.gathers} is gathered once, in high precision, and quantized after the gather: {ASKED}"
        return
    for orientation, why in whys:
        yield f"{style.gathers} {orientation} is gathered in high precision: {why}"
    twice = style.gathers == "dy" and not whys and len(routes[0].gathers) == 2
    both = _share_of_bf16(recipe.dy.rowwise, recipe.dy.columnwise) if twice else 0.0
    if both > 1.0:
        yield (
            f"dy is gathered in two orientations, {both:.2f}x the bytes of bf16; gather_dy = 'high_precision' gathers "
            f"dy once, unquantized"
        )


def scope_notes(recipe: Recipe, style: ParallelStyle, local: tuple[int, int], tokens: int | None) -> Iterator[str]:
    """Notes on codes that depend on tp although `amax_scope="all"`: blocks that tp splits get other scales than on one
    rank.

    local: w [N, K] of a rank. tokens: tokens of a rank; None if not known."""
    if recipe.amax_scope != "all":
        return
    features = {"x": local[1], "dy": local[0]}
    for name in OPERANDS:
        operand: Operand = getattr(recipe, name)
        cut = style.cut(name)
        # a gathered operand consists of complete blocks, or is cast after the gather
        if cut is None or style.gathers == name:
            continue
        size = local[cut] if name == "w" else features[name] if cut else tokens
        unit = max(operand.rowwise.format.block[cut], operand.columnwise.format.block[1 - cut])
        if size is not None and unit and size % unit:
            what = "features" if name == "w" or cut else "tokens"
            yield (
                f"amax_scope = 'all' does not hold for {name}: tp splits a block of {operand.rowwise.format.name}, "
                f"since {size} {what} per rank are not a multiple of {unit}, so the codes of {name} depend on tp"
            )


def _kept_note(recipe: Recipe, style: ParallelStyle, options: LayerOptions, tokens: int | None) -> tuple[str, ...]:
    """Note on the memory that `save_original_input` costs a layer whose x no other module saves."""
    own, chosen = linear_plan(recipe, style, 1, tokens), linear_plan(recipe, style, 1, tokens, kept=options.keeps)
    if own.kept == chosen.kept:
        return ()
    operand = 2 * _share_of_bf16(recipe.x.columnwise)
    return (
        f"x takes 2.00 bytes per element in bf16, or 0 if another module keeps x; the quantized operand would take "
        f"{operand:.2f}",
    )


def _share_of_bf16(*quantizers: Quantizer) -> float:
    """Size of an operand of these quantizers, for a large matrix, relative to bf16."""
    size = (4096, 4096)
    return sum(each.format.nbytes(size, torch.bfloat16) for each in quantizers) / (2 * size[0] * size[1])


def _mixed(recipe: Recipe) -> Iterator[str]:
    """GEMMs with exactly one operand in high precision."""
    for which in GEMMS:
        formats = [quantizer.format for quantizer in recipe.operands(which)]
        a, _, b, _ = GEMM_OPERANDS[which]
        kept = [fmt.gemm_kind == "hp" for fmt in formats]
        if kept[0] != kept[1]:
            name, fmt = ((b, formats[1]), (a, formats[0]))[kept[1]]
            yield f"{which} decodes {name} ({fmt.name}): the other operand is in high precision"


def _rounded(recipe: Recipe) -> Iterator[str]:
    for result in RESULTS:
        quantizer = getattr(recipe, result)
        if quantizer is not None:
            yield f"{result} is rounded to {quantizer.format.name} and returned decoded"


def support_note(recipe: Recipe, device_type: str) -> str:
    """Describe how this device runs the recipe: "fp8_current: native (torch._scaled_mm)", or one entry per GEMM.

    On a GPU the note also tells how casts run: "casts by kernel", "casts by reference (native kernels need nvcc, ...)".
    """
    by_gemm = {}
    for which in GEMMS:
        a, b = recipe.operands(which)
        found = support(a.format, b.format, device_kind(device_type))
        by_gemm[which] = f"{found.status} ({found.kernel})"
    same = len(set(by_gemm.values())) == 1
    text = by_gemm["fprop"] if same else ", ".join(f"{which} {found}" for which, found in by_gemm.items())
    casts = _casts(recipe, device_type) if device_type == "cuda" else ()
    return "; casts by ".join([f"{recipe} on {device_type}: {text}", *casts])


def capture_note(recipe: Recipe, device_type: str) -> tuple[str, ...]:
    """The reason why no pass of a layer with this recipe is captured on GPUs, for any transport; "" if passes
    may be captured."""
    if device_type == "cpu" or not recipe.beyond_launches:
        return ()
    return (f"forward and backward are launched kernel by kernel: {recipe.beyond_launches}",)


def _casts(recipe: Recipe, device_type: str) -> tuple[str, ...]:
    """The implementation of casts, once if all operands have the same, else per operand; "" if the recipe quantizes
    nothing."""
    by_operand: dict[str, str] = {}
    for name in OPERANDS:
        operand: Operand = getattr(recipe, name)
        ops = [caps_of(q).op for q in (operand.rowwise, operand.columnwise) if not q.format.keeps_source]
        found = dict.fromkeys(cast_kernel(op, device_type) for op in ops)
        by_operand |= {name: " and ".join(found)} if found else {}
    same = len(set(by_operand.values())) == 1 and len(by_operand) == len(OPERANDS)
    parts = list(by_operand.values())[:1] if same else [f"{name} {found}" for name, found in by_operand.items()]
    return (", ".join(parts),) if parts else ()
