"""The six styles of tensor and sequence parallelism, as rows of a table.

                 shard_dim of w[N,K]   fprop                dgrad                wgrad
    LOCAL        -                     -                    -                    -
    LOCAL_SP     -                     -                    -                    reduce="all"
    COLUMN       0                     -                    reduce="all"         -
    ROW          1                     reduce="all"         -                    -
    COLUMN_SP    0                     gather="x"           reduce="scatter"     gather="x"
    ROW_SP       1                     reduce="scatter"     gather="dy"          gather="dy"

x [M, K], w [N, K], dy [M, N]. A row defines the transfers of each GEMM and the sharded dimension of each operand; the scales
on which ranks must agree follow from these.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class GemmComm:
    """Communication of one GEMM over tp.

    gather   operand that is gathered before the GEMM, "x" or "dy"; None: no gather
    reduce   reduction of the result, "all" or "scatter"; None: no reduction
    """

    gather: str | None = None
    reduce: str | None = None


@dataclass(frozen=True)
class ParallelStyle:
    """One row of the table of styles.

    shard_dim              dimension of w [N, K] that is sharded over tp; None: each rank has the full weight
    fprop, dgrad, wgrad    communication of each GEMM
    cut_x, cut_dy          dimension of x [M, K] and of dy [M, N] that is sharded over tp; None: no dimension
    """

    name: str
    shard_dim: int | None = None
    fprop: GemmComm = GemmComm()
    dgrad: GemmComm = GemmComm()
    wgrad: GemmComm = GemmComm()
    cut_x: int | None = None
    cut_dy: int | None = None

    @cached_property
    def gathers(self) -> str | None:
        """The operand that is gathered: "x", "dy" or None."""
        return self.wgrad.gather

    @property
    def sequence_parallel(self) -> bool:
        """Whether tp shards tokens in x, in dy, or in both."""
        return 0 in (self.cut_x, self.cut_dy)

    @property
    def partial_weight_grad(self) -> bool:
        """Whether dw of a rank covers only the rank's own tokens, so that dw must be summed over tp."""
        return self.wgrad.reduce == "all"

    @property
    def partial_bias_grad(self) -> bool:
        """Whether db of a rank covers only the rank's own tokens, so that db must be summed over tp."""
        return self.cut_dy == 0

    def cut(self, tensor: str) -> int | None:
        """Return the dimension of x, w, dy, y or dx, as stored, that is sharded over tp; None: no dimension."""
        cuts = {"x": self.cut_x, "w": self.shard_dim, "dy": self.cut_dy, "y": self.cut_dy, "dx": self.cut_x}
        return cuts[tensor]


_ALL, _SCATTER = GemmComm(reduce="all"), GemmComm(reduce="scatter")
_GATHER_X, _GATHER_DY = GemmComm(gather="x"), GemmComm(gather="dy")

LOCAL = ParallelStyle("LOCAL")
LOCAL_SP = ParallelStyle("LOCAL_SP", None, wgrad=_ALL, cut_x=0, cut_dy=0)
COLUMN = ParallelStyle("COLUMN", 0, dgrad=_ALL, cut_dy=1)
ROW = ParallelStyle("ROW", 1, fprop=_ALL, cut_x=1)
COLUMN_SP = ParallelStyle("COLUMN_SP", 0, _GATHER_X, _SCATTER, _GATHER_X, cut_x=0, cut_dy=1)
ROW_SP = ParallelStyle("ROW_SP", 1, _SCATTER, _GATHER_DY, _GATHER_DY, cut_x=1, cut_dy=0)

STYLES = {
    ("local", False): LOCAL, ("local", True): LOCAL_SP, ("column", False): COLUMN, ("column", True): COLUMN_SP,
    ("row", False): ROW, ("row", True): ROW_SP,
}  # fmt: skip


def style(name: str, sequence_parallel: bool) -> ParallelStyle:
    """Return the row for "local", "column" or "row". Raises ValueError for another name."""
    if (name, sequence_parallel) not in STYLES:
        raise ValueError(f"unknown parallel style {name!r:.60}: choose from local, column, row")
    return STYLES[name, sequence_parallel]


def shard_sizes(style: ParallelStyle, out_features: int, in_features: int, tp: int, layer: str) -> tuple[int, int]:
    """Return the shape of w [N, K] on one rank. Raises ValueError, with the name `layer`, if tp does not divide the sharded
    dimension."""
    sizes = [out_features, in_features]
    if style.shard_dim is not None:
        feature = ("out_features", "in_features")[style.shard_dim]
        if sizes[style.shard_dim] % tp:
            raise ValueError(
                f"{layer}: {style.name} shards {feature} over tp {tp}, which does not divide {sizes[style.shard_dim]}; "
                f"choose a tp that divides {feature}, or style = 'local' for this layer"
            )
        sizes[style.shard_dim] //= tp
    return sizes[0], sizes[1]
