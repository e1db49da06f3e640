"""Meshes by name, and the part of a one-rank tensor that a rank of a mesh holds.

tp2        tensor parallel over 2 ranks              dp2        FSDP over 2 ranks
tp2+sp     tp2 with sequence parallelism             hsdp2x2    2 replicas of FSDP over 2 ranks
cp2        context parallel over 2 ranks             cp2xtp2    context and tensor parallel
accumulate4    4 microbatches                        tp2xdp2+sp+accumulate2    several of these
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlp.comm.mesh import CP, DP_REPLICATE, DP_SHARD, DP_SHARD_CP, TP, ParallelDims, placement_on
from dlp.parallel.model.context import Context

MESHES = ("tp2", "tp2+sp", "dp2", "accumulate2", "hsdp2x2", "tp2xdp2", "tp2xdp2+sp+accumulate2")
_PART = re.compile(r"hsdp(\d+)x(\d+)|(tp|dp|cp|accumulate)(\d+)|(sp)")


@dataclass(frozen=True)
class MeshCase:
    """One mesh that is compared with one rank.

    name                                the user's name of the mesh
    dp_replicate, dp_shard, cp, tp      numbers of ranks on the mesh axes
    sequence_parallel                   whether tp shards tokens between layers
    accumulate                          number of microbatches of a rank in a step
    sequences                           number of sequences in the global batch; 0: not known
    """

    name: str
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    accumulate: int = 1
    cp: int = 1
    sequences: int = 0

    @classmethod
    def parse(cls, text: str) -> MeshCase:
        """Parse the name of a mesh. Raises ValueError for an invalid name."""
        fields: dict[str, int | bool] = {}
        rest = text
        while match := _PART.match(rest):
            replicate, shard, axis, size, _ = match.groups()
            if replicate:
                given: dict[str, int | bool] = {DP_REPLICATE: int(replicate), DP_SHARD: int(shard)}
            elif axis:
                given = {{"dp": DP_SHARD}.get(axis, axis): int(size)}
            else:
                given = {"sequence_parallel": True}
            if fields.keys() & given.keys() or 0 in given.values():
                break
            fields |= given
            rest = rest[match.end() :]
            if not rest:
                return cls(text, **fields)  # type: ignore[arg-type]
            if rest[0] not in "x+":
                break
            rest = rest[1:]
        raise ValueError(
            f"mesh {text!r}: expected tpN, dpN, cpN, hsdpNxM, accumulateN and sp, joined by x or +, as in "
            f"tp2xdp2+sp+accumulate2"
        )

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks(self) -> int:
        return self.dp * self.cp * self.tp

    @property
    def pieces(self) -> int:
        """Number of microbatches of a step over all data-parallel ranks."""
        return self.dp * self.accumulate


ONE = MeshCase("one rank")


def in_equal_pieces(cases: Sequence[MeshCase]) -> list[MeshCase]:
    """Return the cases with `accumulate` changed such that all meshes use microbatches of equal size, as equal bits require.

    Raises ValueError if the number of data-parallel ranks of a mesh does not divide the largest number of microbatches."""
    pieces = max(case.pieces for case in cases)
    odd = next((case for case in cases if pieces % case.dp), None)
    if odd is not None:
        raise ValueError(
            f"mesh {odd.name!r}: bits can be equal only for microbatches of equal size, and {odd.dp} data-parallel ranks "
            f"cannot share {pieces}; prove this mesh alone"
        )
    return [replace(case, accumulate=pieces // case.dp) for case in cases]


@dataclass(frozen=True)
class Place:
    """Coordinates of a rank in a `MeshCase`.

    case         the mesh
    tp, dp, cp   indices on the axes; dp: among all data-parallel ranks
    piece        index of a microbatch of this rank among all microbatches of the global batch; None: all tokens
    """

    case: MeshCase
    tp: int = 0
    dp: int = 0
    piece: int | None = None
    cp: int = 0

    @classmethod
    def of(cls, case: MeshCase, dims: ParallelDims) -> Place:
        """Return the coordinates of this rank in the mesh of `case`, with `piece` None. `dims`: sizes of the mesh."""
        return cls(case, dims.rank(TP), dims.dp_rank, cp=0 if dims.cp == 1 else dims.rank(CP))

    def at(self, micro: int) -> Place:
        """Return this place with `piece` set for microbatch number `micro` of the rank. Data-parallel ranks run consecutive
        pieces at the same time."""
        return replace(self, piece=micro * self.case.dp + self.dp)

    @property
    def shard(self) -> int:
        """Index of this rank among the ranks over which FSDP shards parameters."""
        return self.dp % self.case.dp_shard * self.case.cp + self.cp

    @property
    def name(self) -> str:
        """Coordinates of the rank, for reports."""
        return f"tp rank {self.tp}, {f'cp rank {self.cp}, ' * (self.case.cp > 1)}dp rank {self.dp}"

    def part(self, whole: Tensor, shape: torch.Size) -> Tensor | None:
        """Return the part of the one-rank tensor `whole` that a rank at this place holds as an activation of `shape`; None: no
        sharding by dp, cp and tp gives this shape."""
        case = self.case
        candidates = [whole]
        if self.piece is not None and case.pieces > 1 and whole.dim() and whole.shape[0] % case.pieces == 0:
            candidates.insert(0, whole.chunk(case.pieces)[self.piece])
        for given in map(self._of_context, candidates):
            if given.numel() == shape.numel() and _folds(given, shape):
                return given.reshape(shape)
            if given.numel() != shape.numel() * case.tp or not given.dim():
                continue
            rows = given.reshape(-1, given.shape[-1])
            options = [(rows, 0)] if len(shape) != given.dim() else []
            options += [(given, dim) for dim in (given.dim() - 1, *range(given.dim() - 1))]
            options += [(rows, 0), (rows, 1)]
            for tensor, dim in options:
                cut = tensor.chunk(case.tp, dim)[self.tp] if tensor.shape[dim] % case.tp == 0 else tensor
                if cut.numel() == shape.numel() and _folds(cut, shape):
                    return cut.reshape(shape)
        return None

    def _of_context(self, given: Tensor) -> Tensor:
        """Return the tokens of this rank of cp in a tensor [sequences, S, ...] or [sequences * S, ...] of one piece or of all
        pieces, where S is the length of a sequence. A tensor without such dimensions is returned unchanged."""
        case, context = self.case, Context(self.case.cp, self.cp)
        if case.cp == 1 or not given.dim() or not case.sequences:
            return given
        for sequences in (case.sequences // case.pieces, case.sequences):
            length, rest = divmod(given.shape[0], sequences)
            if length == 1 and not rest and given.dim() > 1 and given.shape[1] % (2 * case.cp) == 0:
                return context.split(given)
            if not rest and length and length % (2 * case.cp) == 0:
                return context.split(given.unflatten(0, (sequences, length))).flatten(0, 1)
        return given


def _folds(tensor: Tensor, shape: torch.Size) -> bool:
    """Whether the tensor has `shape`, or another number of dimensions and the same last dimension."""
    last = tensor.dim() == 0 or (len(shape) > 0 and tensor.shape[-1] == shape[-1])
    return tensor.shape == shape or (last and (len(shape) != tensor.dim()))


def tokens_of(case: MeshCase, tokens: int, piece: int, cp: int, tp: int) -> Tensor:
    """Return the tokens of a piece that a rank of cp and tp holds under sequence parallelism, as indices in the global batch.
    `tokens`: number of tokens of the global batch."""
    mine = torch.arange(tokens).chunk(case.pieces)[piece]
    if case.cp > 1:
        mine = Context(case.cp, cp).split(mine.view(case.sequences // case.pieces, -1)).flatten()
    return mine.chunk(case.tp)[tp]


def parameter_part(full: Tensor, parameter: Tensor, place: Place | None = None) -> Tensor:
    """Return the shard of a full parameter or gradient on this rank, or on the rank at `place`: sharded by tp, then by
    dp_shard, or by dp_shard and cp together. `parameter`: the DTensor that defines the sharding."""
    if not isinstance(parameter, DTensor):
        return full
    for axis in (TP, DP_SHARD, DP_SHARD_CP):
        dim = getattr(placement_on(axis, parameter), "dim", None)
        if dim is not None:
            group = parameter.device_mesh.get_group(axis)
            rank = group.rank() if place is None else place.tp if axis == TP else place.shard
            chunks = full.chunk(group.size(), dim)
            full = chunks[rank] if rank < len(chunks) else full.narrow(dim, 0, 0)
    return full
