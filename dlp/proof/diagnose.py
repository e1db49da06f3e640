"""Find the kind of mistake that makes a tensor differ. A hypothesis is the tensor that a known mistake would give; hypotheses
are tried in order, and the first that explains the difference is reported.

Most mistakes concern sums over ranks. The terms of a contraction are divided among ranks of tp (features, or tokens under
sequence parallelism), ranks of cp, and microbatches. Share P_q is the sum of the terms of rank and microbatch q. Coefficients
c_q are fitted to the tensor of this rank, found = sum c_q P_q:

    c = 1 for all shares                        correct
    c = 1 for the shares of this rank, else 0   missing sum: over tp, cp, dp, or over several of these
    c = 0 for the shares of one microbatch      missing microbatch
    c = 0 for the shares of some other rank     missing part
    c = 2, or the number of ranks               summed twice
    c = 1/2, or 1 / ranks                       divided twice

The other hypotheses: the part of another rank, the tensor of the previous step, the result with the weights before the last
update, the sum with the gradient of the previous step, a bias that is added several times, rows or columns with another scale,
and coarser rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import combinations, product, starmap
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dlp.comm.mesh import CP, TP
from dlp.proof.bounds import EVERYTHING, Part, Terms, is_weight, rows_of, terms
from dlp.proof.cases import MeshCase, Place, tokens_of
from dlp.proof.record import Key, Trace, is_parameter_gradient

EXPLAINED = 0.05  # share of the squared difference that a hypothesis may leave unexplained
KINDS = {
    "missing sum": "the tensor is this rank's share of a sum that was not computed",
    "missing microbatch": "the share of a microbatch is not in the sum",
    "missing part": "the shares of some ranks are not in the sum",
    "summed twice": "the sum, or a share of the sum, is counted several times",
    "divided twice": "the tensor is divided once too often",
    "wrong group": "the sum was made over ranks that hold other data",
    "stale weight": "the layer computed with the weights before the last update",
    "stale value": "the tensor is the tensor of the previous step",
    "not cleared": "the gradient of the previous step was added",
    "another rank's part": "the tensor, or a block of its rows or columns, is the part of another rank",
    "another scale": "rows or columns are multiplied by the scale of other rows or columns",
    "bias": "the bias is added several times or not at all",
    "randomness": "random numbers are equal where they must differ, or differ where they must be equal",
    "some ranks": "only some ranks have different values, so they computed something else",
    "amax": "the scale was computed from the amax of ranks that do not hold the tensor",
    "wire": "the bytes sent differ from the plan: a transfer is missing, repeated, or in another precision",
    "coarser rounding": "the values are right but rounded more coarsely than the formats allow",
    "zero": "the tensor is zero or missing",
    "not finite": "values are NaN or infinite",
    "shape": "no sharding by dp, cp and tp gives this shape",
    "values": "the values differ, and no known mistake explains the difference",
}


class Guess(NamedTuple):
    """Likely mistake. `kind`: key of KINDS; `detail`: numbers or ranks, for the report."""

    kind: str
    detail: str = ""


class Cut(Protocol):
    """Function that returns the part of a full tensor on this rank, or on the rank `at`; None: there is no such part."""

    def __call__(self, whole: Tensor, at: Place | None = None) -> Tensor | None: ...


class Case(NamedTuple):
    """Tensor that differs on this rank.

    trace     tensors of one rank
    key       step, layer and tensor
    place     coordinates of this rank
    found     the tensor of this rank, fp32 [rows, columns]
    expected  this rank's part of the trace's tensor, fp32 [rows, columns]
    cut       function that returns a rank's part of a full tensor
    """

    trace: Trace
    key: Key
    place: Place
    found: Tensor
    expected: Tensor
    cut: Cut

    @property
    def missing(self) -> float:
        """Squared norm of the difference."""
        return float((self.found - self.expected).square().sum())

    def explained(self, by: Tensor | None) -> bool:
        """Whether the tensor of a hypothesis is so close to `found` that it explains almost all of the difference."""
        if by is None or by.numel() != self.found.numel():
            return False
        return float((self.found - by.reshape(self.found.shape)).square().sum()) <= EXPLAINED * self.missing


def diagnose(case: Case) -> Guess:
    """Return the kind of the first hypothesis that explains the difference."""
    bias = bias_of(case)
    if bias is not None:
        case = case._replace(found=case.found - bias, expected=case.expected - bias)
    if not bool(case.found.isfinite().all()):
        return Guess("not finite")
    if case.key.tensor.startswith("scale"):
        return Guess("amax", f"{float(case.found / case.expected):.4g} times the scale of one rank")
    if not case.found.any():
        return Guess("zero", "all values are 0")
    for hypothesis in (
        _norm,
        _other_part,
        _stale,
        _terms,
        _shares,
        _factor,
        _order,
        _wrong_group,
        _bias,
        _scales,
        _rounding,
    ):
        guess = hypothesis(case)
        if guess is not None:
            return guess
    return Guess("values")


def _norm(case: Case) -> Guess | None:
    """Diagnose the gradient norm, the root of a sum over ranks."""
    if case.key.tensor != "gradient norm":
        return None
    smaller = float(case.found) < float(case.expected)
    return Guess(
        "missing sum" if smaller else "summed twice", f"{float(case.found / case.expected):.4g} times the norm"
    )


def bias_of(case: Case) -> Tensor | None:
    """Return this rank's part of the bias in y, [rows, columns]; None: the tensor is not y, or the bias is zero or missing."""
    bias = case.trace.weight(case.key.step, case.key.layer, "bias")
    if case.key.tensor != "y" or bias is None:
        return None
    part = case.cut(bias.float().expand_as(case.trace.values[case.key]).contiguous())
    return None if part is None or not part.any() else rows_of(part)


def _value(case: Case, key: Key) -> Tensor | None:
    """Return this rank's part of the trace's tensor `key`, y without bias; None: there is no such tensor."""
    whole = case.trace.values.get(key)
    part = None if whole is None else case.cut(whole.float())
    if part is None:
        return None
    bias = bias_of(case._replace(key=key))
    return rows_of(part) if bias is None else rows_of(part) - bias


def _other_part(case: Case) -> Guess | None:
    """Check whether the tensor is the part of another rank or microbatch."""
    whole, place, bias = case.trace.values[case.key].float(), case.place, bias_of(case)
    for other in _places(place):
        part = case.cut(whole, other) if other != place else None
        if part is not None and case.explained(rows_of(part) - (0 if bias is None else bias)):
            return Guess("another rank's part", f"the part of {other.name}")
    return None


def _places(place: Place) -> Iterator[Place]:
    """Yield the places of all ranks and microbatches of a mesh."""
    case = place.case
    for dp, cp, tp, micro in product(*map(range, (case.dp, case.cp, case.tp, case.accumulate))):
        there = Place(case, tp, dp, cp=cp)
        yield there if place.piece is None else there.at(micro)


def _stale(case: Case) -> Guess | None:
    """Check whether the tensor is the tensor of the previous step, is the sum with the gradient of the previous step, or is y
    computed with the weights before the last update."""
    key = case.key
    before = _value(case, key._replace(step=key.step - 1))
    if before is not None and not torch.equal(before, case.expected):
        if case.explained(before):
            return Guess("stale value")
        if is_parameter_gradient(key) and case.explained(case.expected + before):
            return Guess("not cleared")
    if key.tensor == "y" and key.step > 0:
        old = terms(case.trace, key, weights_of=key.step - 1)
        if old:
            if case.explained(case.cut(sum_of(old).reshape(case.trace.values[key].shape))):
                return Guess("stale weight", f"the weights of step {key.step - 1}")
    return None


def sum_of(found: list[Terms], part: Part = EVERYTHING) -> Tensor:
    """Return the sum of several contractions, or of a part of their terms."""
    total = found[0].product(part)
    for each in found[1:]:
        total = total + each.product(part)
    return total


def _terms(case: Case) -> Guess | None:
    """Check for a missing contraction if the tensor sums several: of siblings, of calls, or of modules with a tied weight."""
    found = terms(case.trace, case.key)
    shape = case.trace.values[case.key].shape
    for i in range(len(found)) if len(found) > 1 else ():
        part = case.cut(found[i].product().reshape(shape))
        if part is not None and case.explained(case.expected - rows_of(part)):
            return Guess("missing part", f"number {i} of {len(found)} contractions, counted from 0")
    return None


class Share(NamedTuple):
    """Name of a share: piece (microbatch of the global batch), cp rank and tp rank; -1: all pieces or all ranks."""

    piece: int
    cp: int
    tp: int


def _cuts(case: Case, found: list[Terms]) -> dict[Share, Part]:
    """Return the terms of the contractions that belong to each share; {} if the mesh does not divide the terms."""
    mesh, length = case.place.case, min(each.length for each in found)
    if found[0].over == "features":
        if mesh.tp == 1 or length % mesh.tp:
            return {}
        size = length // mesh.tp
        return {Share(-1, -1, tp): slice(tp * size, (tp + 1) * size) for tp in range(mesh.tp)}
    chunks = 2 * mesh.cp * mesh.sequences if mesh.cp > 1 else 1  # chunks of all sequences; 0: the batch has no tensors
    if not chunks or length % chunks or length % (mesh.pieces * mesh.tp):
        return {}
    shares = starmap(Share, product(*map(range, (mesh.pieces, mesh.cp, mesh.tp))))
    return {share: tokens_of(mesh, length, *share) for share in shares}


def _shares(case: Case) -> Guess | None:
    """Fit the coefficients c_q of the shares to the tensor of this rank, and return the mistake that gives these coefficients;
    see the module docstring."""
    found = terms(case.trace, case.key)
    cuts = _cuts(case, found) if found and len({each.length for each in found}) == 1 else {}
    shape, parts = case.trace.values[case.key].shape, {}
    for share, where in cuts.items():
        part = case.cut(sum_of(found, where).reshape(shape))
        if part is not None:
            parts[share] = part.reshape(-1)
    if len(parts) < 2:
        return None
    matrix = torch.stack(list(parts.values()), 1).double()
    found_too = case.found.double().reshape(-1, 1)
    solved = torch.linalg.pinv(matrix.t() @ matrix, rcond=1e-9, hermitian=True) @ (matrix.t() @ found_too)
    c = {share: _simple(float(each)) for share, each in zip(parts, solved.flatten(), strict=True)}
    if any(each is None for each in c.values()):
        return None
    fitted = matrix @ matrix.new_tensor([[float(each or 0)] for each in c.values()])
    if not case.explained(fitted.float()):
        return None
    return _pattern(case.place, {share: each for share, each in c.items() if each is not None})


def _simple(number: float) -> Fraction | None:
    """Return the simple ratio (0, 1 to 8, 1/2 to 1/8) near a coefficient; None: no simple ratio is near."""
    options = [Fraction(0), *(Fraction(n) for n in range(1, 9)), *(Fraction(1, n) for n in range(2, 9))]
    near = min(options, key=lambda each: abs(float(each) - number))
    return near if abs(float(near) - number) <= 0.15 * max(float(near), 0.5) else None


def _pattern(place: Place, c: dict[Share, Fraction]) -> Guess | None:
    """Return the kind of mistake that gives the coefficients `c` of the shares; None: all coefficients are 1."""
    values, mesh = set(c.values()), place.case
    if len(values) == 1:
        return _multiple(values.pop())
    own_tp = {share for share in c if share.tp == place.tp}
    own_cp = {share for share in c if share.cp in (place.cp, -1)}
    own_dp = {share for share in c if share.piece % mesh.dp == place.dp or share.piece == -1}
    ones, zeros = ({share for share, each in c.items() if each == value} for value in (1, 0))
    if len(ones) + len(zeros) < len(c):
        if mesh.tp > 1 and {share for share, each in c.items() if each} == own_tp and len(values) == 2:
            return Guess(
                "wrong group", f"{max(values)} times the share of this tp rank, and nothing of the other tp ranks"
            )
        rest = {share: each for share, each in c.items() if each not in (0, 1)}
        many = max(rest.values()) > 1
        return Guess("summed twice" if many else "divided twice", f"{_named(rest, mesh)}, {max(rest.values())} times")
    own = {TP: (mesh.tp, own_tp), CP: (mesh.cp, own_cp), "dp": (mesh.dp, own_dp)}
    wide = {axis: shares for axis, (size, shares) in own.items() if size > 1}
    for axes in (axes for count in range(len(wide), 0, -1) for axes in combinations(wide, count)):
        if ones == set.intersection(*(wide[axis] for axis in axes)):
            return Guess("missing sum", f"over {' and '.join(axes)}")
    micros = {share.piece // mesh.dp for share in zeros}
    if mesh.accumulate > 1 and len(micros) == 1 and not {share for share in ones if share.piece // mesh.dp in micros}:
        return Guess("missing microbatch", f"number {micros.pop()} of {mesh.accumulate}, counted from 0")
    return Guess("missing part", _named(zeros, mesh))


def _named(shares: set[Share] | dict[Share, Fraction], mesh: MeshCase) -> str:
    """Describe shares by the first: "the share of dp rank 0, microbatch 1, tp rank 1 and 2 more"."""
    first = min(shares)
    data = "" if first.piece < 0 else f"dp rank {first.piece % mesh.dp}, microbatch {first.piece // mesh.dp}, "
    data += f"cp rank {first.cp}, " * (mesh.cp > 1 and first.cp >= 0)
    more = f" and {len(shares) - 1} more" if len(shares) > 1 else ""
    return f"the share of {data}tp rank {first.tp}{more}"


def _multiple(ratio: Fraction) -> Guess | None:
    """Diagnose a tensor that is `ratio` times the tensor of one rank."""
    if ratio == 1:
        return None
    return Guess("summed twice" if ratio > 1 else "divided twice", f"{ratio} of the tensor of one rank")


def _factor(case: Case) -> Guess | None:
    """Check for one factor on all values."""
    want = case.expected.double()
    gain = _simple(float((case.found.double() * want).sum() / want.square().sum().clamp(min=1e-300)))
    return _multiple(gain) if gain and case.explained(case.expected * float(gain)) else None


def _order(case: Case) -> Guess | None:
    """Check for blocks of rows or columns in another order, with one block for each rank of an axis."""
    mesh = case.place.case
    for count in dict.fromkeys((mesh.tp, mesh.cp, mesh.dp)):
        for dim in (0, 1):
            if count == 1 or case.found.shape[dim] % count:
                continue
            blocks, given = case.expected.chunk(count, dim), case.found.chunk(count, dim)
            near = [min(blocks, key=partial(_distance, got)) for got in given]
            if case.explained(torch.cat(near, dim)):
                return Guess("another rank's part", f"{count} blocks of {('rows', 'columns')[dim]} in another order")
    return None


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm())


def _wrong_group(case: Case) -> Guess | None:
    """Check for a sum over dp of the shares of this tp rank, instead of a sum over tp."""
    found, mesh = terms(case.trace, case.key), case.place.case
    cuts = _cuts(case, found) if found and found[0].over == "features" else {}
    if not cuts or mesh.dp == 1 or case.place.piece is None:
        return None
    whole = sum_of(found, cuts[Share(-1, -1, case.place.tp)]).reshape(case.trace.values[case.key].shape)
    micro = case.place.piece // mesh.dp
    parts = [case.cut(whole, replace(case.place, dp=dp).at(micro)) for dp in range(mesh.dp)]
    if any(part is None for part in parts):
        return None
    total = torch.stack([part for part in parts if part is not None]).sum(0)
    return Guess("wrong group", "a sum over dp instead of tp") if case.explained(total) else None


def _bias(case: Case) -> Guess | None:
    """Check for a bias that was added several times or not at all."""
    part = bias_of(case)
    if part is None:
        return None
    times = float(((case.found - case.expected) * part).sum() / part.square().sum())
    near = round(times)
    if near and case.explained(case.expected + near * part):
        return Guess("bias", f"added {near + 1} times")
    return None


def _scales(case: Case) -> Guess | None:
    """Check for one factor on each block of rows or columns, with one block for each rank of an axis or of the mesh, or with 8
    blocks."""
    mesh = case.place.case
    for count in dict.fromkeys((mesh.tp, mesh.cp, mesh.dp, mesh.ranks, 8)):
        for dim, word in enumerate(("rows", "columns")):
            if count == 1 or case.found.shape[dim] % count:
                continue
            gains, parts = [], []
            for got, want in zip(case.found.chunk(count, dim), case.expected.chunk(count, dim), strict=True):
                gains.append(float((got * want).sum() / want.square().sum().clamp(min=1e-30)))
                parts.append(want * gains[-1])
            if case.explained(torch.cat(parts, dim)):
                said = ", ".join(f"{gain:.4g}" for gain in gains)
                return Guess("another scale", f"factors {said} for {count} blocks of {word}")
    return None


def _rounding(case: Case) -> Guess | None:
    """Check for coarser rounding: errors with mean 0 that do not correlate with the values and are about equally large in all
    rows; in a weight, values that are exact in bf16 or fp16."""
    delta, want = case.found - case.expected, case.expected
    norm = want.norm().clamp(min=1e-30)
    gain, error = float((delta * want).sum() / norm.square()), float(delta.norm() / norm)
    if is_weight(case.key):
        coarse = any(torch.equal(case.found, case.found.to(dtype).float()) for dtype in (torch.bfloat16, torch.float16))
        return Guess("coarser rounding", f"a relative error of {error:.2g}") if coarse else None
    by_row = delta.norm(dim=1)
    alike = float(by_row.amin()) > 0.2 * float(by_row.mean())
    mean = abs(float(delta.mean())) / (float(delta.square().mean().sqrt()) + 1e-30)
    if error < 0.2 and abs(gain) < 0.3 * error and alike and mean < 4 / delta.numel() ** 0.5 + 0.02:
        return Guess("coarser rounding", f"a relative error of {error:.2g}")
    return None
