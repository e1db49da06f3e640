"""The report of `dlp.prove`: a line for each mesh, a table of differences, and the result as one sentence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dlp.parallel.model.plan import table
from dlp.proof.diagnose import KINDS, Guess
from dlp.proof.record import Key, is_activation_gradient, is_parameter_gradient

SHOWN = 6  # largest number of differences that are printed for a mesh
_MESH_HEADER = ("mesh", "ranks", "tensors", "bit-equal", "largest / bound", "of", "result")
_FINDING_HEADER = ("step", "pass", "layer", "tensor", "differs by", "/ bound", "ranks", "where", "kind")


class Finding(NamedTuple):
    """Tensor that differs from the tensor of one rank.

    key      step, layer and tensor
    ratio    difference divided by the bound, on the rank with the largest ratio
    error    relative difference in the 2-norm, on the same rank
    ranks    the ranks on which the tensor differs
    world    number of ranks of the mesh
    where    differing rows and columns on the first of `ranks`, as text
    guess    likely kind of mistake
    """

    key: Key
    ratio: float
    error: float
    ranks: tuple[int, ...]
    world: int
    where: str
    guess: Guess

    @property
    def layer(self) -> str:
        return self.key.layer

    @property
    def kind(self) -> str:
        return self.guess.kind

    @property
    def pass_name(self) -> str:
        return pass_name(self.key)

    def __str__(self) -> str:
        kind = f"{self.guess.kind} ({self.guess.detail})" if self.guess.detail else self.guess.kind
        times = f"{self.ratio:.3g} times the bound" if self.ratio > 0 else "not bit-equal"
        return (
            f"{self.key.tensor} of {self.key.layer or 'the model'} in {self.pass_name} of step {self.key.step} differs by "
            f"{self.error:.2g} ({times}) on rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))} of "
            f"{self.world}, {self.where}: {kind}: {KINDS[self.guess.kind]}"
        )


def pass_name(key: Key) -> str:
    """Return the part of the step in which a tensor is computed: "forward", "backward", "the update", ... ."""
    if key.step < 0:
        return "the start"
    if is_activation_gradient(key) or is_parameter_gradient(key):
        return "backward"
    if key.tensor == "wire":
        return "all passes"
    forward = ("x", "y", "loss", "codes of w", "scales of fprop")
    if key.tensor.startswith("scales of"):
        return "forward" if key.tensor in forward else "backward"
    return "forward" if key.tensor in forward or key.tensor[:1] in ("x", "y") else "the update"


@dataclass
class MeshResult:
    """Findings on one mesh.

    name, ranks     name of the mesh, and number of its ranks
    compared        number of comparisons, summed over ranks
    equal           number of comparisons with equal bits
    worst           largest ratio of difference to bound
    worst_key       tensor with this ratio; None: all bits were equal
    findings        differing tensors, in the order of forward and backward
    error           error that stopped the run; "": none
    remarks         further lines for the report
    """

    name: str
    ranks: int
    compared: int = 0
    equal: int = 0
    worst: float = 0.0
    worst_key: Key | None = None
    findings: list[Finding] = field(default_factory=list)
    error: str = ""
    remarks: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.findings and not self.error

    @property
    def verdict(self) -> str:
        if self.error:
            return "stopped"
        return "as one rank" if self.ok else "differs"


@dataclass
class Report:
    """Results of all meshes, shown by `print(report)`.

    steps    number of compared steps
    exact    whether tensors had to have equal bits
    meshes   one result for each mesh
    ok       whether no tensor differs and no run stopped
    first    first difference of the first mesh with a difference; None: no differences
    """

    steps: int
    exact: bool
    meshes: list[MeshResult] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(mesh.ok for mesh in self.meshes)

    @property
    def first(self) -> Finding | None:
        return next((mesh.findings[0] for mesh in self.meshes if mesh.findings), None)

    def __str__(self) -> str:
        measure = "bit for bit" if self.exact else "within the bounds of formats and contraction lengths"
        rows = []
        for mesh in self.meshes:
            share = f"{mesh.equal / mesh.compared:.1%}" if mesh.compared else "-"
            of = "-" if mesh.worst_key is None else f"{mesh.worst_key.tensor} {mesh.worst_key.layer}".strip()
            count = f"{mesh.compared:,}"
            rows.append((mesh.name, str(mesh.ranks), count, share, f"{mesh.worst:.3g}", of, mesh.verdict))
        steps = f"{self.steps} step{'s' * (self.steps != 1)}"
        lines = [f"compared with one rank over {steps}, {measure}", "", *table(_MESH_HEADER, rows)]
        for mesh in self.meshes:
            lines += [f"{mesh.name}: {remark}" for remark in mesh.remarks]
            if mesh.findings:
                title = f"{mesh.name}, in the order of forward and backward:"
                lines += ["", title, "", *table(_FINDING_HEADER, _rows(mesh.findings))]
            if mesh.error:
                lines += ["", f"{mesh.name}: the run stopped: {mesh.error}"]
        return "\n".join([*lines, "", self.sentence()])

    def sentence(self) -> str:
        """Return the result as one sentence."""
        if self.first is not None:
            mesh = next(mesh for mesh in self.meshes if mesh.findings)
            return f"FIRST DIFFERENCE on {mesh.name}: {self.first}."
        stopped = [mesh.name for mesh in self.meshes if mesh.error]
        if stopped:
            return f"NOT PROVED: the run stopped on {', '.join(stopped)}."
        names = ", ".join(mesh.name for mesh in self.meshes)
        return f"PROVED: {names} compute{'s' * (len(self.meshes) == 1)} what one rank computes."


def _rows(findings: list[Finding]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for each in findings[:SHOWN]:
        ranks = "all" if len(each.ranks) == each.world else ", ".join(map(str, each.ranks))
        ratio = f"{each.ratio:.3g}" if each.ratio else "-"
        rows.append(
            (
                str(each.key.step), each.pass_name.removeprefix("the "), each.key.layer or "-", each.key.tensor,
                f"{each.error:.2g}", ratio, ranks, each.where, each.guess.kind,
            )
        )  # fmt: skip
    return rows


def places(indices: list[int], count: int, word: str) -> str:
    """Describe indices of rows or columns: "rows 0-3, 8 of 64", or "all rows" if all or none are listed. `count`: number
    of all rows or columns."""
    if not indices or len(indices) == count:
        return f"all {word}"
    runs: list[list[int]] = []
    for i in indices:
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    said = [f"{first}-{last}" if last > first else str(first) for first, last in runs]
    if len(said) > 3:
        said = [*said[:2], f"{len(indices)} in all up to {runs[-1][1]}"]
    return f"{word} {', '.join(said)} of {count}"
