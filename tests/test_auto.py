"""overlap = "auto": tables of times, chosen strategies, and the plan. Only tests that measure, or that compare the
choices of ranks, use ranks."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dlp
from dlp.parallel import auto, tune
from dlp.parallel.auto import CANDIDATES, Problem, Row, Times
from dlp.parallel.linear.state import cores
from dlp.parallel.style import COLUMN_SP, ROW_SP
from dlp.quant import recipe as recipes
from launch.config.run_config import load
from launch.train import plan_text
from tests import pool as worker
from tests.refusals import may_raise

FP8 = recipes.load("fp8_current")
UP, DOWN = Problem(COLUMN_SP, 4096, 1024, (2048,), FP8), Problem(ROW_SP, 4096, 2048, (1024,), FP8)


NOISE = 2.5e-5  # seconds


def row(problem: Problem, fprop: tuple[float, ...], dgrad: tuple[float, ...]) -> Row:
    """Return a row of the table. fprop, dgrad: the time of each strategy in CANDIDATES, in milliseconds. A GEMM alone
    takes 1 ms."""
    both = {"fprop": fprop, "dgrad": dgrad}
    passes = {gemm: dict(zip(CANDIDATES, (1e-3 * t for t in times), strict=True)) for gemm, times in both.items()}
    noise = {gemm: dict.fromkeys(CANDIDATES, NOISE) for gemm in both}
    return Row(problem.key, problem.sizes(2), passes, noise, dict.fromkeys(("fprop", "dgrad", "wgrad"), 1e-3))


def table(*rows: Row, speed: float = 4e9, meeting: float = 5e-6, **others: Any) -> Times:
    head = {"kind": "cpu", "device": "CPU", "ranks": 2, "transport": "gloo", "processors": 0, **others}
    about = {"date": "2026-11-23", "dtype": "bfloat16", "torch": torch.__version__, "version": auto.VERSION}
    return Times(**head, speed=speed, meeting=meeting, rows=rows, about=about)


MEASURED = table(
    row(UP, (2.0, 1.9, 1.8, 1.85), (3.0, 3.0, 2.99, 3.1)), row(DOWN, (2.0, 1.99, 2.0, 2.0), (3.0, 2.5, 2.6, 2.7))
)


class MLP(nn.Module):
    def __init__(self, features: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(features, inner, bias=False), nn.Linear(inner, features, bias=False)


GROUPS: list[Any] = [
    {"name": "all", "match": ["**"], "recipe": "fp8_current", "sequence_parallel": True},
    {"name": "up", "match": ["up"], "style": "column"},
    {"name": "down", "match": ["down"], "style": "row"},
]


def planned(times: Times | None, *groups: Any, sizes: tuple[int, int] = (1024, 2048), **options: Any) -> Any:
    with torch.device("meta"):
        model = MLP(*sizes)
    return dlp.make_plan(model, [*GROUPS, *groups], 2, **{"batch": (2, 2048), **options}, overlap_table=times)


def overlaps_of(plan: Any) -> list[Any]:
    return [layer.overlap for layer in plan.layers]


def named(fprop: str, dgrad: str) -> dict[str, str]:
    return {"fprop": fprop, "dgrad": dgrad, "wgrad": "serial"}


def test_a_table_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "overlap.json"
    file.write_text(MEASURED.text([{"layer": "up"}]))
    assert json.loads(file.read_text())["choices"] == [{"layer": "up"}]
    again = auto.load(file)
    assert again.text() == MEASURED.text() and again.row(UP) is not None and again.about == MEASURED.about


def test_a_run_on_another_number_of_ranks_writes_the_rates_of_its_table() -> None:
    """A run of four ranks that used a table of two ranks writes an `overlap.json` without measured strategies, but with
    the times of GEMMs and the rates of the table."""
    again = auto.read(MEASURED.for_ranks(4).text(), "overlap.json")
    assert again.ranks == 4 and [row.gemms for row in again.rows] == [row.gemms for row in MEASURED.rows]
    assert not any(row.passes for row in again.rows) and again.rate(UP, "fprop")


UNKNOWN = MEASURED.text([]).replace('"chunked:4"', '"fused"')  # a strategy that does not exist


def changed(key: str, value: Any, row: bool = False) -> Any:
    """Return the text of a table with another value of one entry of the file, of its link, or of its first row."""
    table = json.loads(MEASURED.text([]))
    entries = table["rows"][0] if row else table["link"] if key in table["link"] else table
    entries[key] = value
    return pytest.param(json.dumps(table), id=f"{key} = {value!r}")


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"rows": [{}]}', '{"rows": [], "link": 3}', pytest.param(UNKNOWN, id="unknown strategy"),
        changed("bytes_per_second", 0), changed("bytes_per_second", "fast"), changed("meeting_us", float("nan")),
        changed("ranks", "2"), changed("processors", None), changed("dtype", "bfloat17"),
        changed("sizes", [0, 1, 1], row=True), changed("noise_us", {}, row=True),
    ],
)  # fmt: skip
def test_a_file_that_is_no_table(text: str, tmp_path: Path) -> None:
    file = tmp_path / "overlap.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"^{file}: not a table of overlap times \(.*; create a table with torchrun"):
        auto.load(file)
    with pytest.raises(ValueError, match=rf"^{file}.gone: cannot be read \(.*; create a table with "):
        auto.load(f"{file}.gone")


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (changed("ranks", 0), "expected bytes_per_second > 0, meeting_us >= 0, ranks >= 1"),
        (changed("dtype", "bfloat17"), "expected a dtype of torch, got 'bfloat17'"),
        (changed("sizes", [0, 1, 1], row=True), "expected sizes >= 1, got"),
        (changed("noise_us", {}, row=True), "pass_us, noise_us: expected equal strategies"),
    ],
)
def test_a_table_with_a_number_that_cannot_be_used(case: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        auto.read(case.values[0], "overlap.json")


def test_measured_layers_have_what_was_fastest_and_by_a_margin() -> None:
    plan = planned(MEASURED)
    assert overlaps_of(plan) == [named("chunked:2", "serial"), named("serial", "chunked")]
    said = str(plan).splitlines()
    head = next(
        i
        for i, line in enumerate(said)
        if line.startswith("overlap chosen by the times of 2 x CPU by gloo at 4 GB/s, 2 layers measured")
    )
    cells = [line.split() for line in said[head + 3 : head + 7]]
    assert [line[:5] for line in cells] == [
        ["up", "fprop", "chunked:2", "1.800", "2.000"], ["up", "dgrad", "serial", "3.000", "3.000"],
        ["down", "fprop", "serial", "2.000", "2.000"], ["down", "dgrad", "chunked", "2.500", "3.000"],
    ]  # fmt: skip
    assert all(float(line[5]) >= 1.0 for line in cells), "the model also predicts a time"


@pytest.mark.parametrize(("noise", "chosen"), [(0.0, "chunked:2"), (9e-5, "chunked:2"), (1.1e-4, "serial")])
def test_what_is_faster_by_less_than_the_noise_is_not_chosen(noise: float, chosen: str) -> None:
    """chunked:2 takes 1.8 ms and serial 2.0 ms, each with an uncertainty of `noise` seconds."""
    with patch(f"{__name__}.NOISE", noise):
        times = table(row(UP, (2.0, 1.9, 1.8, 1.85), (3.0,) * 4))
    assert overlaps_of(planned(times))[0] == (named("chunked:2", "serial") if chosen != "serial" else "serial")


def test_noise_is_the_median_of_what_rounds_are_off() -> None:
    assert tune.Timed.of([3.0, 1.0, 2.0, 9.0, 2.5]) == (2.5, 0.5)


H100 = table(
    row(UP, (2.0, 1.0, 1.0, 1.0), (3.0,) * 4), kind="sm_90", device="NVIDIA H100 80GB HBM3", transport="mapped"
)


@pytest.mark.parametrize(
    ("here", "why"),
    [
        (auto.Machine("sm_90"), None),
        (auto.Machine("sm_90", "h100"), None),
        (auto.Machine("sm_90", "NVIDIA H100 80GB HBM3", torch.__version__, auto.VERSION), None),
        (auto.Machine("sm_90", "h200"), "the table is for NVIDIA H100 80GB HBM3, and this device is h200"),
        (
            auto.Machine("sm_90", "NVIDIA H200"),
            "the table is for NVIDIA H100 80GB HBM3, and this device is NVIDIA H200",
        ),
        (
            auto.Machine("sm_90", "NVIDIA H100"),
            "the table is for NVIDIA H100 80GB HBM3, and this device is NVIDIA H100",
        ),
        (
            auto.Machine("sm_90", "h100", "2.1"),
            f"the table was measured with torch {torch.__version__}, and this is torch 2.1: measure again",
        ),
        (
            auto.Machine("sm_90", "h100", version=9),
            "the table was measured with version 1, and this is version 9: measure again",
        ),
    ],
)
def test_a_table_holds_for_the_machine_and_the_versions_it_was_measured_under(here: Any, why: str | None) -> None:
    assert H100.obstacle(here, 2, "mapped") == why


def test_a_plan_for_another_board_does_not_use_a_table_and_says_so(tmp_path: Path) -> None:
    on, why = (
        {"device_type": "sm_90", "transport": "mapped"},
        "the table is for NVIDIA H100 80GB HBM3, and this device is h200",
    )
    assert overlaps_of(planned(H100, **on, board="h100"))[0] == named("chunked", "serial")
    plan = planned(H100, **on, board="h200")
    assert overlaps_of(plan) == ["serial"] * 2 and why in str(plan)
    (tmp_path / "h100.json").write_text(H100.text())
    config = load("tiny", [f"--mesh.overlap_table={tmp_path}/h100.json", "--mesh.transport=mapped"])
    assert why in plan_text(config, 2, "h200") and why not in plan_text(config, 2, "h100")


def test_what_a_group_names_stands() -> None:
    plan = planned(MEASURED, {"name": "own", "match": ["up"], "overlap": {"fprop": "auto", "dgrad": "chunked:4"}})
    assert overlaps_of(plan)[0] == named("chunked:2", "chunked:4")
    assert [choice.gemm for choice in plan.layers[0].choices] == ["fprop"]
    assert overlaps_of(planned(MEASURED, {"name": "own", "match": ["**"], "overlap": "chunked"})) == ["chunked"] * 2


def test_dgrads_of_siblings_are_modelled_as_the_kernels_run_them() -> None:
    """On Hopper the dgrads of siblings are one GEMM. Elsewhere they are separate GEMMs, and rows can be sent only while
    the last one runs."""
    gate_up = Problem(COLUMN_SP, 4096, 1024, (2048, 1024), FP8)
    for kind, columns in (("sm_90", (1024,)), ("cpu", (1024, 1024))):
        work = auto.work_of("dgrad", gate_up, table(row(UP, (1,) * 4, (1,) * 4), kind=kind))
        assert not isinstance(work, str) and work.columns == columns and sum(work.gemms) == pytest.approx(1.5e-3)
        assert len(work.gemms) == len(columns)


def test_other_sizes_go_by_the_model() -> None:
    """The table has no layer of this size, so the times come from a model. The model predicts 4 ms for a GEMM with four
    times the FLOPs and bytes of the 1 ms GEMM in the table. Overlap is chosen for a transfer of 2 ms, but not for 0.02 ms."""
    slow, fast = (table(row(UP, (1,) * 4, (1,) * 4), speed=speed) for speed in (4 * 2**20 / 2e-3, 4 * 2**20 / 2e-5))
    assert overlaps_of(planned(slow, sizes=(2048, 4096)))[0]["fprop"].startswith("chunked")
    assert overlaps_of(planned(fast, sizes=(2048, 4096))) == ["serial", "serial"]
    (choice, *_) = planned(slow, sizes=(2048, 4096)).layers[0].choices
    assert choice.measured is None and choice.predicted_serial == pytest.approx(4e-3 + 2e-3, rel=0.01)
    assert choice.predicted == pytest.approx(4e-3, rel=0.01), "the GEMM of this rank's rows hides the transfer"
    by_nccl = {"kind": "sm_90", "device": "NVIDIA H200", "transport": "nccl", "speed": 4 * 2**20 / 2e-3}
    there = {"sizes": (2048, 4096), "device_type": "sm_90", "transport": "nccl"}
    chosen = overlaps_of(planned(table(row(UP, (1,) * 4, (1,) * 4), **by_nccl), **there))
    assert chosen == ["serial"] * 2, "no prediction for GEMMs that run together with NCCL's kernels"
    fast = table(row(UP, (2, 1, 1, 1), (3,) * 4), **by_nccl)
    assert overlaps_of(planned(fast, **there | {"sizes": (1024, 2048)}))[0] == named("chunked", "serial"), "as measured"
    meetings = table(row(UP, (1,) * 4, (1,) * 4), speed=4 * 2**20 / 2e-3, meeting=3e-3)
    assert overlaps_of(planned(meetings, sizes=(2048, 4096)))[0]["fprop"] == "chunked", (
        "each piece would need a barrier"
    )


@pytest.mark.parametrize(
    ("times", "options", "why"),
    [
        (None, {}, "there is no table of times of CPU by any transport; dlp ships tables of "),
        (MEASURED, {"batch": (2, 2048), "device_type": "sm_90", "transport": "mapped"},
         "the table is for 2 cpu ranks by gloo, and this group has 2 sm_90 ranks by mapped"),
        (table(row(DOWN._replace(recipe=recipes.load("bf16")), (1,) * 4, (1,) * 4)), {},
         "the table has no times of fp8_current"),
    ],
)  # fmt: skip
def test_without_times_all_is_serial_and_the_plan_says_why(times: Any, options: dict[str, Any], why: str) -> None:
    plan = planned(times, **options)
    assert overlaps_of(plan) == ["serial"] * 2
    assert str(plan).count(f"overlap: serial for layers without a strategy from a group: {why}") == 1


@pytest.fixture
def tables(tmp_path: Path) -> Iterator[Path]:
    """Folder that replaces the tables of dlp, with tables of H100 for 2 and for 4 ranks."""
    (tmp_path / "h100-2.json").write_text(H100.text())
    (tmp_path / "h100-4.json").write_text(replace(H100, ranks=4).text())
    with patch.object(auto, "TABLES", tmp_path):
        yield tmp_path


def test_shipped_tables_are_found_by_the_gpu_and_the_nearest_number_of_ranks(tables: Path) -> None:
    here = auto.Machine("sm_90", "NVIDIA H100 80GB HBM3", "1.0", auto.VERSION)  # not the torch version of the tables
    two, four, eight = (auto.shipped(here, ranks, "mapped")[0] for ranks in (2, 4, 8))
    assert two and four and eight and two.row(UP) is not None and four.row(UP) is not None
    assert eight.ranks == 8 and eight.row(UP) is None and eight.rate(UP, "fprop") == four.rate(UP, "fprop")
    assert "4 x NVIDIA H100 80GB HBM3" in str(eight) and "(rates only; groups of 8 are predicted by the model)" in str(
        eight
    )
    none, why = auto.shipped(here._replace(device="NVIDIA B200"), 2, "mapped")
    assert none is None and why.endswith("of NVIDIA B200 by mapped; dlp ships tables of NVIDIA H100 80GB HBM3")


def test_a_plan_without_a_table_takes_the_shipped_one(tables: Path) -> None:
    assert overlaps_of(planned(None, device_type="sm_90", transport="mapped", board="h100"))[0] == named(
        "chunked", "serial"
    )
    plan = planned(None, device_type="sm_90", transport="mapped", board="h200")
    assert overlaps_of(plan) == ["serial"] * 2 and "there is no table of times of h200 by mapped" in str(plan)


def test_every_shipped_table_is_of_this_version() -> None:
    for path in sorted(auto.TABLES.glob("*.json")):
        times = auto.load(path)
        assert times.about["version"] == auto.VERSION and times.rows and times.transport == "mapped", path


def constructed(tables: Path) -> list[str]:
    """Return the strategies for fprop and dgrad of two layers that are constructed with overlap = "auto", first with tp,
    then without, given a table of this machine for auto.NOMINAL tokens."""
    tp = worker.mesh(tp=2)["tp"]
    here, by = auto.machine(tp.device_type), auto.transport_name(tp.get_group(), tp.device_type)
    problem = Problem(COLUMN_SP, auto.NOMINAL, 32, (64,), FP8)
    own = {"kind": here.kind, "device": here.device, "transport": by}
    (tables / "own.json").write_text(table(row(problem, (2.0, 1.0, 3.0, 3.0), (3.0,) * 4), **own).text())
    dist.barrier()
    with patch.object(auto, "TABLES", tables):
        made = dlp.ColumnParallelLinear(
            32, 64, tp=tp, sequence_parallel=True, recipe="fp8_current", device=tp.device_type
        )
    alone = dlp.ColumnParallelLinear(32, 64, recipe="fp8_current")
    names = [[getattr(layer.core.spec.overlap, gemm).name for gemm in ("fprop", "dgrad")] for layer in (made, alone)]
    return [*names[0], *names[1]]


@pytest.mark.ranks(2)
def test_layers_that_are_constructed_take_auto(ranks, tmp_path: Path) -> None:
    assert ranks(2).run(constructed, tmp_path) == [["chunked", "serial", "serial", "serial"]] * 2


def converted(folder: Path) -> tuple[str, list[Any], str]:
    """Convert with a different table on each rank. Return (choices, names, message): the choices in the plan, the strategies
    of the layers, and the message of `auto.check_together` for values that differ between ranks ("" without an error)."""
    mesh = worker.mesh(tp=2)
    problems = Problem(COLUMN_SP, 64, 32, (64,), FP8), Problem(ROW_SP, 64, 64, (32,), FP8)
    faster = [(2.0, 1.0, 3.0, 3.0), (2.0, 3.0, 1.0, 3.0)][dist.get_rank()]
    here = auto.machine(worker.device().type)
    kind = {"kind": here.kind, "device": here.device, "transport": "nccl"} if here.device != "CPU" else {}
    file = folder / f"{dist.get_rank()}.json"
    file.write_text(table(*(row(problem, faster, faster) for problem in problems), **kind).text())
    model = MLP(32, 64).to(worker.device())
    plan = dlp.convert(model, GROUPS, mesh, batch=(1, 64), overlap_table=file)
    names = [[getattr(core.spec.overlap, gemm).name for gemm in ("fprop", "dgrad", "wgrad")] for core in cores(model)]
    return repr(plan.choices()), names, may_raise(ValueError, auto.check_together, [dist.get_rank()])


@pytest.mark.ranks(2)
def test_all_ranks_choose_by_the_table_of_rank_0(ranks, tmp_path: Path) -> None:
    (choices, names, said), other = ranks(2).run(converted, tmp_path)
    assert (choices, names, said) == other
    assert names == [["chunked", "chunked", "serial"]] * 2
    assert said.startswith(
        "overlap = 'auto' chose different strategies on ranks 1 and on rank 0, from the same table: "
    )


def measured() -> tuple[Row, float, float]:
    tp = worker.mesh(tp=2)["tp"]
    problem = Problem(COLUMN_SP, 32, 16, (32, 16), FP8)
    return tune.measure(problem, ["serial", "chunked:2"], tp, torch.bfloat16, 1), *tune.links(
        tp.get_group(), worker.device(), 1
    )


@pytest.mark.ranks(2)
def test_tuning_measures_each_direction_under_each_strategy(ranks) -> None:
    (first, speed, meeting), second = ranks(2).run(measured)
    assert (first, speed, meeting) == second, "all ranks use the times of the slowest rank"
    assert first.key == ("COLUMN_SP", 32, 16, (32, 16), "fp8_current") and first.sizes == (32, 24, 16)
    assert list(first.passes) == ["fprop", "dgrad"] and list(first.gemms) == ["fprop", "dgrad", "wgrad"]
    assert all(list(of) == ["serial", "chunked:2"] for of in first.passes.values())
    assert min(*first.passes["fprop"].values(), *first.gemms.values(), speed) > 0 and meeting >= 0


def tuned(out: Path, ranks: int) -> tuple[int, str]:
    """Run the measuring program for a config with one layer that communicates and one that does not; return exit code
    and output."""
    layer = {"style": "row", "sequence_parallel": True, "tokens": 32, "in_features": 32, "out_features": [16],
             "recipe": {"name": "fp8_current"}}  # fmt: skip
    found = {"ranks": ranks, "transport": "nccl", "dtype": "float32", "layers": [layer, {**layer, "style": "local"}]}
    said = io.StringIO()
    with ExitStack() as stack:
        for name, value in {"init_process_group": id, "shutdown": lambda: None, "layers_of": lambda _: found}.items():
            stack.enter_context(patch.object(tune, name, value))
        stack.enter_context(contextlib.redirect_stdout(said))
        code = tune.main(["tiny", "--out", str(out), "--rounds", "1", "--recipes", "bf16", "--strategies", "chunked:2"])
    return code, said.getvalue()


@pytest.mark.ranks(2)
def test_the_program_writes_a_table_that_plans_read(ranks, device_type: str, tmp_path: Path) -> None:
    file = tmp_path / "overlap.json"
    (code, said), (other, silent) = ranks(2).run(tuned, file, 2)
    assert (code, other, silent) == (0, 0, "")
    times = auto.load(file)
    assert (times.ranks, times.kind == "cpu", times.about["dtype"]) == (2, device_type == "cpu", "float32")
    assert times.about["torch"] == torch.__version__ and times.obstacle(auto.machine(device_type), 2, "") is None
    assert times.about["command"] == f"torchrun --nproc-per-node 2 -m dlp.parallel.tune tiny --out {file} --rounds 1 " \
                                     "--recipes bf16 --strategies chunked:2"  # fmt: skip
    (row,) = times.rows
    assert row.key == ("ROW_SP", 32, 32, (16,), "bf16") and row.sizes == (32, 16, 16)
    assert list(row.passes["fprop"]) == ["serial", "chunked:2"]
    progress = said.splitlines()
    assert progress[1].startswith("1/1  ROW_SP 32 x 32 -> 16 bf16: fprop serial ") and "| dgrad serial " in progress[1]
    assert progress[-1] == f"written to {file}: [mesh] overlap_table = '{file}'"
    (refused, _) = ranks(2).run(tuned, tmp_path / "none", 1)
    assert refused == (2, "tp is 1: no layer of tiny communicates over tp; set --mesh.tp\n")
    assert not (tmp_path / "none").exists()
