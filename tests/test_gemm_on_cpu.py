"""The text of our own Hopper GEMM (csrc/gemm_sm90.cu) on a CPU that plays its clusters, barriers, copies and products.

Rows of other ranks come while the kernel runs as late as they may: one piece whenever no thread can do anything else
(tests/cuda_on_cpu/emulator.h). A thread that reads one too early, or does not know that it has come, ends the launch. Rows that
go to other ranks are looked for in the memory of each, with a margin around them.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.cuda_on_cpu import build
from tests.metrics import assert_bit_equal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("nvcc") and shutil.which("c++")), reason="needs c++, and CUDA's headers, which nvcc knows"
    ),
]
CALLED = """
#include <stdexcept>

#include "kernels.h"

namespace dlp {

void await_mark(int64_t, Stream) {}

}  // namespace dlp

using namespace dlp;

template <class Run>
const char* said_by(Run run) {
    static std::string said;
    said = "";
    try {
        run();
    } catch (const std::runtime_error& error) {
        said = error.what();
    }
    return said.c_str();
}

Code code_of(int e5m2) { return e5m2 ? Code::kE5m2 : Code::kE4m3; }

// What went wrong; empty: nothing.
extern "C" __attribute__((visibility("default"))) const char* multiply(const BlockGemmJob* job, const ArrivingRows* rows,
                                                                       const Waiting* waiting, int e5m2, int wide) {
    const Input out = wide ? Input::kFp32 : Input::kBf16;
    return said_by([&] {
        if (rows == nullptr) gemm_fp8_blocks(*job, code_of(e5m2), out, 0);
        else gemm_fp8_arriving(*job, *rows, *waiting, code_of(e5m2), out, 0);
    });
}

extern "C" __attribute__((visibility("default"))) const char* multiply_and_send(const BlockGemmJob* job, const SlotBases* slots,
                                                                                const SentRows* to, int e5m2) {
    return said_by([&] { gemm_fp8_sending(*job, *slots, *to, code_of(e5m2), 0); });
}
"""
SLOT_RANKS = 32  # kSlotRanks
ORDERS = ("forward", "backward", "3")  # in which threads run
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Case(NamedTuple):
    rows: int
    cols: int
    contraction: int
    code: torch.dtype = E4M3
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    adds: bool = False


class Problem:
    """Operands of a case; `scales` of A [rows, blocks], as they are sent, of B as the kernel reads them."""

    def __init__(self, case: Case) -> None:
        rows, cols, along, code, dtype, bias, self.adds = case
        generator = torch.Generator().manual_seed(rows + cols + along)
        blocks, tiles = -(-along // 128), -(-cols // 128)
        self.a, self.b = (
            torch.randn(n, along, generator=generator).to(kind) for n, kind in ((rows, code), (cols, E4M3))
        )
        self.scales = torch.rand(rows, blocks, generator=generator) + 0.5
        self.b_scales = torch.rand(tiles, blocks + -blocks % 4, generator=generator) + 0.5
        self.bias = torch.randn(cols, generator=generator).to(dtype) if bias else None
        self.into = (
            torch.randn(rows, cols, generator=generator)
            if self.adds
            else torch.full((rows, cols), torch.nan, dtype=dtype)
        )
        left = self.a.double() * self.scales.repeat_interleave(128, 1)[:, :along]
        right = self.b.double() * self.b_scales.repeat_interleave(128, 0)[:cols].repeat_interleave(128, 1)[:, :along]
        self.exact, self.sums = left @ right.t(), left.abs() @ right.abs().t()
        self.exact += sum(term.double() for term in (self.bias, self.into if self.adds else None) if term is not None)

    def laid_scales(self) -> Tensor:
        """Of A, as a kernel reads them whose rows are all here."""
        rows, blocks = self.scales.shape
        lies = torch.full((blocks, rows + -rows % 4), torch.nan)
        lies[:, :rows] = self.scales.t()
        return lies

    def words(self, a: Tensor, scales: Tensor, d: Tensor) -> ctypes.Array[ctypes.c_int64]:
        """`BlockGemmJob` of csrc/kernels.h."""
        (rows, along), cols = a.shape, len(self.b)
        bias = 0 if self.bias is None else self.bias.data_ptr()
        words = [
            *(each.data_ptr() for each in (a, self.b, d, scales, self.b_scales)), bias, rows, cols, along, a.stride(0),
            self.b.stride(0), d.stride(0), rows + -rows % 4, scales.stride(0), len(self.b_scales), self.b_scales.stride(0),
            self.adds,
        ]  # fmt: skip
        return numbers(*words)


def numbers(*words: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(words))(*words)


class Library:
    def __init__(self) -> None:
        found = ctypes.CDLL(str(build.build(("gemm_sm90.cu",), CALLED)))
        self._multiply, self._later = found.multiply, found.emulator_later
        self._send = found.multiply_and_send
        self._multiply.restype = self._send.restype = ctypes.c_char_p

    def later(self, to: Tensor, value: Tensor) -> None:
        """What another rank writes while the next kernel runs."""
        assert to.is_contiguous() and value.is_contiguous() and to.nbytes == value.nbytes
        self._later(*(ctypes.c_void_p(each.data_ptr()) for each in (to, value)), ctypes.c_size_t(to.nbytes))

    def product(self, problem: Problem) -> Tensor:
        """By the kernel that finds all rows."""
        return self._run(problem, problem.a, problem.laid_scales())

    def _run(self, problem: Problem, a: Tensor, scales: Tensor, *waiting: ctypes.Array[ctypes.c_int64]) -> Tensor:
        made = self.left = problem.into.clone()
        how = int(problem.a.dtype == E5M2), int(made.dtype == torch.float32)
        said = self._multiply(problem.words(a, scales, made), *(waiting or (None, None)), *how)
        if said:
            raise RuntimeError(said.decode())
        return made

    def awaited(
        self, problem: Problem, world: int, rank: int, came: Sequence[int], report: Tensor, began: int = 0, use: int = 7,
        spare: int = 0,
    ) -> Tensor:  # fmt: skip
        """By the kernel that waits: of A only the rows of `rank` are here, those of others come in this order. `began` and
        `use`: the word of a rank before and then; `spare`: multiprocessors of six that are left to others."""
        each = len(problem.a) // world
        rows = [slice(other * each, (other + 1) * each) for other in range(world)]
        codes, scales = torch.full_like(problem.a.view(torch.uint8), 0xFF), torch.full_like(problem.scales, torch.nan)
        pairs = ((codes, problem.a.view(torch.uint8)), (scales, problem.scales))
        words, then = (torch.tensor([word], dtype=torch.int64).to(torch.int32) for word in (began, use))
        words = words.repeat(world)
        for to, value in pairs:
            to[rows[rank]] = value[rows[rank]]
        for other in came:
            for to, value in pairs:
                self.later(to[rows[other]], value[rows[other]])
            self.later(words[other : other + 1], then)
        said = torch.zeros(1, dtype=torch.int32)
        of_rows = numbers(words.data_ptr(), each, 0, spare)
        return self._run(
            problem, codes.view(problem.a.dtype), scales, of_rows,
            numbers(3000, report.data_ptr(), said.data_ptr(), rank, world, use),
        )  # fmt: skip

    def send(self, problem: Problem, rank: int, places: Sequence[Tensor]) -> None:
        """By the kernel that stores rows of each rank in that rank's place, [rows, cols]."""
        offset, world = 64, len(places)
        bases = [place.data_ptr() - offset for place in places] + [0] * (SLOT_RANKS - world)
        scales = problem.laid_scales()
        job = problem.words(problem.a, scales, problem.into)
        job[2] = problem.into.data_ptr() if problem.adds else 0
        to = numbers(offset, len(problem.a) // world)
        said = self._send(job, numbers(*bases, rank, world), to, int(problem.a.dtype == E5M2))
        if said:
            raise RuntimeError(said.decode())


@pytest.fixture(scope="module")
def library() -> Library:
    return Library()


@pytest.fixture(params=ORDERS)
def order(request, monkeypatch) -> str:
    monkeypatch.setenv("EMULATOR_ORDER", request.param)
    return request.param


def assert_near(made: Tensor, problem: Problem) -> None:
    """Sums of fp32, rounded once."""
    rounding = problem.exact.abs() * (2.0**-8 if made.dtype == torch.bfloat16 else 2.0**-22)
    assert ((made.double() - problem.exact).abs() <= 2.0**-18 * problem.sums + rounding).all()


CASES = [
    Case(128, 256, 128), Case(1, 128, 256), Case(257, 200, 384, dtype=torch.float32), Case(130, 8, 16, bias=True),
    Case(1000, 104, 1040, adds=True, bias=True, dtype=torch.float32), Case(640, 264, 144, E5M2),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_product(library, order, case):
    problem = Problem(case)
    assert_near(library.product(problem), problem)


# The case; ranks, this one, whose rows come first, and the word before and then.
ARRIVALS: list[tuple[Case, int, int, Sequence[int], tuple[int, int]]] = [
    (Case(512, 200, 512), 2, 0, (1,), (0, 7)), (Case(512, 200, 512), 2, 1, (0,), (-3, 5)),
    (Case(768, 264, 400), 3, 2, (1, 0), (0x7FFFFFFF, 0x80000001)), (Case(768, 72, 400), 3, 1, (2, 0), (0, 1)),
    (Case(1024, 72, 1008, E5M2, torch.float32, True, True), 4, 1, (0, 3, 2), (0, 2**30 - 1)),
    (Case(1024, 8, 1424), 2, 0, (1,), (0, 1)),
]  # fmt: skip


@pytest.mark.parametrize("given", ARRIVALS, ids=str)
def test_rows_that_come_meanwhile_are_awaited(library, order, given):
    case, world, rank, came, (began, use) = given
    problem, report = Problem(case), torch.zeros(8, dtype=torch.int32)
    made = library.awaited(problem, world, rank, came, report, began, use)
    assert_bit_equal(made, library.product(problem))
    assert not report.any()


def test_a_wait_in_vain_says_for_whom_before_it_ends(library, order):
    """Of all threads that wait in vain one writes the report, whole, and none ends the program before."""
    problem = Problem(Case(768, 264, 400))
    for rank, came, peer in ((0, (1,), 2), (1, (2,), 0), (2, (), 1)):
        report = torch.zeros(8, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="a kernel trapped"):
            library.awaited(problem, 3, rank, came, report, began=3)
        assert report.tolist() == [1, rank, peer, 1, 7, 3, 7, 0]


def test_tiles_come_in_the_order_in_which_ranks_send(library, order):
    """On one pair of multiprocessors: this rank's, then those of the rank behind it, which sends to it first, and so on."""
    problem, report = Problem(Case(1024, 200, 400)), torch.zeros(8, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="a kernel trapped"):
        library.awaited(problem, 4, 1, (0, 3), report, spare=4)
    made = library.left.view(4, 256, 200).isfinite().flatten(1).all(1)
    assert made.tolist() == [True, True, False, True] and report[2] == 2


SENT: list[tuple[Case, int, int]] = [  # the case; ranks, and this one
    (Case(512, 200, 256), 2, 0), (Case(512, 200, 256, bias=True), 2, 1), (Case(768, 264, 144, E5M2), 3, 2),
    (Case(2048, 72, 528, dtype=torch.float32, adds=True), 4, 1), (Case(1024, 8, 1040), 2, 1), (Case(512, 1000, 128), 2, 0),
]  # fmt: skip
MARGIN = 256  # lines before and behind a place: a pair of tiles


@pytest.mark.parametrize("given", SENT, ids=str)
def test_rows_are_stored_in_the_memory_of_their_rank_and_nowhere_else(library, order, given):
    case, world, rank = given
    problem, size = Problem(case), (case.rows // world + 2 * MARGIN, case.cols)
    memory = [torch.full(size, torch.nan, dtype=torch.bfloat16) for _ in range(world)]
    places = [each[MARGIN:-MARGIN] for each in memory]
    before, made = problem.into.clone(), library.product(problem).bfloat16()
    library.send(problem, rank, places)
    assert_bit_equal(problem.into, before)
    for place, expected in zip(places, made.chunk(world), strict=True):
        assert_bit_equal(place, expected)
    for each in memory:
        assert each[:MARGIN].isnan().all() and each[-MARGIN:].isnan().all()


@pytest.mark.parametrize("rank", range(3))
def test_rows_of_the_next_rank_are_stored_first_and_own_ones_last(library, order, rank):
    """Of ranks with one place, in which whoever stores last is seen. Each of three clusters has one pair of tiles a rank."""
    problem = Problem(Case(3 * 256, 3 * 192, 128))
    shards = library.product(problem).chunk(3)
    for shared in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):  # distances of the ranks that share it
        one = torch.full_like(shards[0], torch.nan)
        places = [one if (other - rank) % 3 in shared else torch.empty_like(one) for other in range(3)]
        library.send(problem, rank, places)
        last = rank if 0 in shared else (rank + 2) % 3
        assert_bit_equal(one, shards[last])


def test_what_cannot_be_sent_is_refused(library):
    problem = Problem(Case(384, 8, 128))
    with pytest.raises(RuntimeError, match=r"to\.rows % \(kCluster \* kTileM\)"):
        library.send(problem, 0, [torch.empty(128, 8, dtype=torch.bfloat16)] * 3)
    problem = Problem(Case(512, 8, 128, dtype=torch.float32, adds=True))
    problem.into = torch.zeros(512, 16)[:, :8]
    with pytest.raises(RuntimeError, match="job.d_stride"):
        library.send(problem, 0, [torch.empty(256, 8, dtype=torch.bfloat16)] * 2)


def test_rows_of_a_rank_that_are_no_whole_pairs_of_tiles_are_refused(library):
    with pytest.raises(RuntimeError, match=r"from\.rows % \(kCluster \* kTileM\)"):
        library.awaited(Problem(Case(384, 8, 512)), 3, 0, (), torch.zeros(8, dtype=torch.int32))
