"""Profiles of kernels: total times, time during which only one group of kernels runs, and the group of a kernel by its
name."""

from __future__ import annotations

import pytest
import torch

from bench.kernel_profile import group_of, record, show, tables
from launch.report.exposed_communication import Activity


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_qqtst_128x256_128x6_2x1_v_bz_TNT", "GEMM"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128_4x1x1", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>", "attention"),
        ("void dlp::cast_transpose_kernel<__nv_bfloat16>", "cast"),
        ("triton_red_fused__fused_rms_norm_0", "norm, rope, act"),
        ("Memcpy PtoP (Device -> Device)", "comm"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("ncclDevKernel_AllReduce_Max_f32_RING_LL", "comm"),
        ("unknown", "other"),
    ],
)
def test_kernels_are_grouped_by_name(name: str, group: str) -> None:
    assert group_of(name) == group


def test_sums_and_times_alone_are_per_iteration() -> None:
    found = tables([Activity("gemm", 0, 4000), Activity("nccl", 2000, 6000), Activity("gemm", 7000, 8000)], 2)
    assert (found.wall, found.busy) == (4.0, 3.5)
    assert [(row.name, row.ms, row.alone, row.launches) for row in found.groups] == [
        ("GEMM", 2.5, 1.5, 1.0), ("comm", 2.0, 1.0, 0.5)
    ]  # fmt: skip


def test_one_rank_records_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    def run() -> None:
        calls.append(torch.ones(256, 256) @ torch.ones(256, 256))

    assert record(run, 2, torch.device("cpu"), False) is None and len(calls) == 2
    found = record(run, 2, torch.device("cpu"), True)
    assert found is not None and len(calls) == 4
    assert next(row.launches for row in found.kernels if row.name == "aten::fill_") > 0
    show("a sum", found, top=1)
    assert capsys.readouterr().out.count("\n") == 5 + len(found.groups)
