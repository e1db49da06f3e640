"""The rows of a plan: the conversion of each layer, decided from its module and its layer groups.

    LayerPlan       a linear of the model, or an explicitly constructed layer of dlp, which keeps its style, and keeps its
                    recipe and overlap unless a group sets them
    OtherPlan       any other module with parameters
    ParameterPlan   a parameter: the shape on a tp rank, and whether the gradient on a tp rank is partial

Most notes of a layer are about deviations from the recipe: an operand is gathered in high precision, a GEMM decodes an operand
because the other operand is not quantized, results are rounded, or codes depend on tp although `amax_scope="all"`.
`support_note` describes how the device runs a recipe.
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
from dlp.quant.gemm import check_kernel, kernel_name
from dlp.quant.quantizer import Quantizer, caps_of
from dlp.quant.recipe import GEMM_OPERANDS, GEMMS, OPERANDS, RESULTS, Operand, Recipe
from dlp.quant.siblings import together

HELD = "the weight is quantized-only (quantized_model_init)"
BY_HAND = "constructed explicitly: layer groups can change only recipe and overlap"


@dataclass(frozen=True)
class LayerPlan:
    """Row of one linear.

    name        name of the layer
    shape       (N, K) of the unsharded weight
    style       "column", "row" or "local"
    siblings    names of all siblings, including this layer; () if the layer has none
    overlap     strategy, or strategies by GEMM
    kernels     names of the kernels of fprop, dgrad, wgrad
    parameters  number of parameters on this rank, before FSDP
    group       the groups whose values are used, and their fields: "edges (recipe), qkv (style)"
    overrode    by field, the groups that a later group overrides: "recipe: all, edges; style: all"; "" if there are none
    weight      full name of the weight parameter
    notes       remarks that the columns do not show
    choices     the decisions of overlap = "auto"; () if groups set the strategies
    return_bias whether forward returns (y without bias, bias)
    one_dgrad   whether the dgrads of all siblings are one GEMM (`dlp.quant.siblings`)
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
        """Name of the module. It differs from `name` only if an explicitly constructed layer has several weights, and thus
        several rows."""
        return self.weight.rpartition(".")[0]

    @property
    def made_by_hand(self) -> bool:
        """Whether the layer was constructed explicitly, rather than by `dlp.convert`."""
        return BY_HAND in self.notes

    @property
    def row(self) -> ParallelStyle:
        """Row of this layer in the table of `dlp.parallel.style`."""
        return style(self.style, self.sequence_parallel)


@dataclass(frozen=True)
class OtherPlan:
    """Row of a module with parameters that is not converted to a parallel linear.

    name        name of the module
    kind        class name of the module
    style       "vocab" (embedding sharded along the vocabulary), "replicated" or "left out"
    parameters  number of parameters on this rank, before FSDP
    reads_cut   whether the module reads features that are sharded over tp
    """

    name: str
    kind: str
    style: str
    sequence_parallel: bool
    parameters: int
    reads_cut: bool = False

    @property
    def partial(self) -> bool:
        """Whether the gradients on a tp rank are partial sums, which must be added over tp."""
        return self.style != "vocab" and (self.sequence_parallel or self.reads_cut)


@dataclass(frozen=True)
class ParameterPlan:
    """Row of the plan for a parameter. A parameter with several names is listed under the first name.

    shape    shape on a tp rank, before FSDP
    partial  whether the gradient on a tp rank is a partial sum over the rank's tokens or features
    others   the other names of the parameter
    """

    name: str
    shape: tuple[int, ...]
    partial: bool
    others: tuple[str, ...] = ()

    @property
    def shared(self) -> bool:
        """Whether several modules have this parameter."""
        return bool(self.others)


@dataclass(frozen=True)
class Place:
    """Setting of a plan; see the arguments of `make_plan`.

    tp           number of tp ranks
    device_type  "cpu", "cuda", or a kind of `dlp.quant.gemm.DEVICES`
    batch        (B, S) of a microbatch; None: not known
    times        measured times from which overlap = "auto" is decided; None: there are none
    no_times     reason why there are no times
    transport    carrier of transfers over tp; "": not known
    """

    tp: int
    device_type: str
    batch: tuple[int, int] | None
    times: Times | None = None
    no_times: str = NO_TABLE
    transport: str = ""


def plan_linear(name: str, module: nn.Linear, chosen: Resolved, place: Place) -> LayerPlan:
    """Return the row of an nn.Linear. Raises ValueError for group options that this linear does not support."""
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
    """Yield the rows of an explicitly constructed layer, one for each weight. Raises ValueError if layer groups or the mesh
    differ from the construction in style, sequence_parallel, return_bias or tp."""
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

    # the value that a group set, or the default; each lookup raises ValueError for an unsupported value
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
    """Return the overlap strategies that groups set; "auto" if no group sets any. Raises ValueError for an unknown strategy or
    GEMM."""
    chosen = dict(value) if isinstance(value, Mapping) else value or AUTO
    for gemm, strategy in chosen.items() if isinstance(chosen, dict) else [(GEMMS[0], chosen)]:
        if gemm not in GEMMS:
            raise ValueError(f"{layer}: an overlap strategy is set for one of {', '.join(GEMMS)}; got {gemm!r}")
        if strategy != AUTO:
            overlaps.load(strategy)
    return chosen


def with_strategies(rows: Sequence[LayerPlan], place: Place) -> list[LayerPlan]:
    """Return the rows, with "auto" in `overlap` replaced by the chosen strategies, and with the notes of `_by_nccl`."""
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
    """Yield a note if a layer group sets a strategy that overlaps transfers with GEMMs, and the transfers use NCCL."""
    asked = row.overlap.values() if isinstance(row.overlap, dict) else [row.overlap]
    names = sorted({*asked} - {AUTO, SERIAL})
    if names and place.transport == NCCL and place.tp > 1 and row.style != "local":
        yield (
            f"{' and '.join(names)} uses NCCL, whose kernels take SMs from the concurrent GEMM; within one host, "
            f"transport = 'mapped' uses copy engines instead"
        )


def _kernels(recipe: Recipe, device_type: str, layer: str) -> tuple[str, str, str]:
    """Return the names of the kernels of fprop, dgrad and wgrad. Raises ValueError if a GEMM has no kernel on the GPU and the
    recipe does not allow the plain-torch reference."""
    names = []
    for gemm in GEMMS:
        a, b = (quantizer.format for quantizer in recipe.operands(gemm))
        check_kernel(f"{layer}: {gemm}", a, b, device_type, getattr(recipe, gemm))
        names.append(kernel_name(a, b, device_type))
    return names[0], names[1], names[2]


def with_siblings(row: LayerPlan, names: tuple[str, ...], device_type: str) -> LayerPlan:
    """Return the row with `names` as siblings: all siblings including this layer; () if the layer has none. If the dgrads of
    the siblings run as one GEMM, the row names the kernel of this GEMM."""
    fprop, dgrad, wgrad = row.kernels
    a, b = (quantizer.format for quantizer in row.recipe.operands("dgrad"))
    formats = together(a, b, len(names), device_kind(device_type))
    if formats:
        dgrad = kernel_name(*formats, device_type)
    return replace(row, siblings=names, kernels=(fprop, dgrad, wgrad), one_dgrad=formats is not None)


def plan_other(name: str, module: nn.Module, chosen: Resolved, tp: int) -> OtherPlan:
    """Return the row of a module that is not a linear, or is left out of the conversion. Raises ValueError for a style that the
    module does not support."""
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
    reads_cut = chosen.style == "column"  # x of this module: all tokens, with features sharded over tp
    style = "left out" if chosen.convert is False else "replicated"
    return OtherPlan(name, type(module).__name__, style, sequence_parallel and not reads_cut, count, reads_cut)


def _check_vocabulary(name: str, module: nn.Embedding, tp: int) -> None:
    """Raise ValueError for an embedding that cannot be sharded along the vocabulary: its size is not divisible by tp, or it has
    `scale_grad_by_freq` or parameters other than `weight`."""
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
    """Return one row for each parameter of `modules`; a shared parameter has one row.

    linears     name of each linear -> its style
    vocabulary  names of embeddings that are sharded over tp
    partial     names of other modules whose gradients on a tp rank are partial sums
    """
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
                else replace(first, partial=first.partial or in_parts, others=(*first.others, f"{name}.{key}"))
            )
    return tuple(found.values())


def _treatment(
    name: str, key: str, style: ParallelStyle | None, vocabulary: set[str], partial: set[str]
) -> tuple[int | None, bool]:
    """Return the dimension of a parameter that is sharded over tp (None: replicated), and whether the gradient is a partial
    sum."""
    if style is None:
        return (0, False) if name in vocabulary else (None, name in partial)
    if key.startswith("weight"):  # a layer with several weights has weight_0, weight_1, ...
        return style.shard_dim, style.partial_weight_grad
    return (0 if style.shard_dim == 0 else None), style.partial_bias_grad


ORIENTATIONS = ("rowwise", "columnwise")


def layer_notes(recipe: Recipe, style: ParallelStyle, tokens: int | None) -> tuple[str, ...]:
    """Return the notes of one layer. `tokens`: tokens of a microbatch on a rank under sequence parallelism; None: not known."""
    return (*_travel(recipe, style, tokens), *_mixed(recipe), *_rounded(recipe))


def _travel(recipe: Recipe, style: ParallelStyle, tokens: int | None) -> Iterator[str]:
    """Yield notes if the gathered operand is sent in high precision, or in more bytes than bf16."""
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
    """Yield a note for each operand whose codes depend on tp although `amax_scope="all"`: a scaling block that tp splits gets
    other scales than on one rank.

    local: (N, K) of w on a rank. tokens: number of tokens on a rank; None: not known."""
    if recipe.amax_scope != "all":
        return
    features = {"x": local[1], "dy": local[0]}
    for name in OPERANDS:
        operand: Operand = getattr(recipe, name)
        cut = style.cut(name)
        # shards of a gathered operand consist of complete blocks, or the operand is cast after the gather
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
    """Return a note that compares the saved bytes of x with and without `save_original_input`; () if x is saved in the same
    form in both cases."""
    own, chosen = linear_plan(recipe, style, 1, tokens), linear_plan(recipe, style, 1, tokens, kept=options.keeps)
    if own.kept == chosen.kept:
        return ()
    operand = 2 * _share_of_bf16(recipe.x.columnwise)
    return (
        f"save_original_input: x is saved in bf16, 2.00 bytes per element, or 0 if another module saves the same tensor; the "
        f"quantized operand would take {operand:.2f}",
    )


def _share_of_bf16(*quantizers: Quantizer) -> float:
    """Return the bytes of a large matrix that is quantized by all of `quantizers`, divided by the bytes in bf16."""
    size = (4096, 4096)
    return sum(each.format.nbytes(size, torch.bfloat16) for each in quantizers) / (2 * size[0] * size[1])


def _mixed(recipe: Recipe) -> Iterator[str]:
    """Yield a note for each GEMM with exactly one operand in high precision: the other operand is decoded."""
    for which in GEMMS:
        formats = [quantizer.format for quantizer in recipe.operands(which)]
        a, _, b, _ = GEMM_OPERANDS[which]
        kept = [fmt.gemm_kind == "hp" for fmt in formats]
        if kept[0] != kept[1]:
            name, fmt = ((b, formats[1]), (a, formats[0]))[kept[1]]
            yield f"{which} decodes {name} ({fmt.name}): the other operand is in high precision"


def _rounded(recipe: Recipe) -> Iterator[str]:
    """Yield a note for each result (y, dx) that the recipe rounds to a low-precision format."""
    for result in RESULTS:
        quantizer = getattr(recipe, result)
        if quantizer is not None:
            yield f"{result} is rounded to {quantizer.format.name} and returned decoded"


def support_note(recipe: Recipe, device_type: str) -> str:
    """Describe how this device runs the recipe: "fp8_current on cuda: native (torch._scaled_mm)", or one entry
    for each GEMM if the GEMMs differ.

    On a GPU the note also names the implementation of casts: "casts by kernel", "casts by reference (native kernels need
    nvcc, ...)".
    """
    text = recipe.support(device_kind(device_type))
    casts = _casts(recipe, device_type) if device_type == "cuda" else ()
    return "; casts by ".join([f"{recipe} on {device_type}: {text}", *casts])


def capture_note(recipe: Recipe, device_type: str) -> tuple[str, ...]:
    """Return a note with the reason why forward and backward under this recipe cannot be captured on GPUs; () if they can, and
    on CPUs."""
    if device_type == "cpu" or not recipe.beyond_launches:
        return ()
    return (f"kernels of forward and backward are launched one by one: {recipe.beyond_launches}",)


def _casts(recipe: Recipe, device_type: str) -> tuple[str, ...]:
    """Return one text about the implementation of casts: one name if all operands use the same, else a name for each
    operand. Return () if the recipe quantizes nothing."""
    by_operand: dict[str, str] = {}
    for name in OPERANDS:
        operand: Operand = getattr(recipe, name)
        ops = [caps_of(q).op for q in (operand.rowwise, operand.columnwise) if not q.format.keeps_source]
        found = dict.fromkeys(cast_kernel(op, device_type) for op in ops)
        by_operand |= {name: " and ".join(found)} if found else {}
    same = len(set(by_operand.values())) == 1 and len(by_operand) == len(OPERANDS)
    parts = list(by_operand.values())[:1] if same else [f"{name} {found}" for name, found in by_operand.items()]
    return (", ".join(parts),) if parts else ()
