"""Write tests/data/golden_rowwise.json: results of fp8_rowwise, computed from its formula with tests/table_method.py.

python -m tests.make_golden_rowwise

amax of the row -> scale_from_amax(amax, max, power of two by default, epsilon, FLT_MAX); q = enc(fl(x * scale))
D[i, j] = fl(fl(acc[i, j] * sa[i]) * sb[j])

max is the largest value of the element format, enc encodes in it, and fl rounds to fp32. In the GEMM D = A B^T, acc is the
exact product of the decoded codes, and sa and sb are scale_inv of the rows of A and of B.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.table_method import POINTS, Floats, decode, encode, scale_from_amax, to_bf16

FLT_MAX = float(np.finfo(np.float32).max)
PATH = Path(__file__).parent / "data" / "golden_rowwise.json"

ROWS: list[tuple[str, str, list[float]]] = [
    ("zero row: scale 1", "bf16", [0.0, -0.0, 0.0]),
    ("amax is the largest value", "bf16", [448.0, -224.0, 1.0, 0.001]),
    ("just above: next power of two", "bf16", [450.0, -1.0, 3.0]),
    ("ordinary", "bf16", [1.0, -0.5, 0.3, 0.1, -0.001]),
    ("ordinary", "bf16", [3.0, 1.7, -2.9, 0.02]),
    ("wide range: small elements underflow", "bf16", [100.0, 1e-3, 1e-4, -1e-5]),
    ("Inf: scale 1, Inf saturates", "bf16", [float("inf"), 1.0, -2.0]),
    ("NaN is ignored by the amax", "bf16", [float("nan"), 2.0, -1.0]),
    ("only NaN: amax 0", "bf16", [float("nan"), 0.0]),
    ("denormal amax: max/amax overflows", "bf16", [9.2e-41, -4.6e-41]),
    ("bf16 max", "bf16", [3.3895313892515355e38, 1.0]),
    ("fp32 input", "fp32", [0.3, 0.1, -0.2]),
    ("fp32 denormal", "fp32", [1e-40, 3e-41]),
    ("fp32 just above one", "fp32", [1.0000001192092896, 0.3]),
]


def bits(x: Any) -> str:
    return f"0x{int(np.float32(x).view(np.uint32)):08x}"


def row_case(note: str, dtype: str, values: list[float], element: str, pow2: bool, eps: float) -> dict[str, Any]:
    x = np.array(values, dtype=np.float32)
    x = to_bf16(x) if dtype == "bf16" else x
    amax = np.max(np.abs(np.where(np.isnan(x), 0, x)))
    scale = scale_from_amax(np.array([amax]), POINTS[element][-1], pow2, eps, FLT_MAX)[0]
    with np.errstate(invalid="ignore", over="ignore"):
        codes = encode((x * scale).astype(np.float32), element)
    return {
        "x": [bits(v) for v in x], "x_dec": [str(v) for v in x], "dtype": dtype, "format": element, "pow2": pow2,
        "eps": eps, "amax": bits(amax), "scale": bits(scale), "scale_inv": bits(np.float32(1) / scale),
        "codes": [f"0x{code:02x}" for code in codes], "note": note,
    }  # fmt: skip


def quantized(x: Floats, element: str) -> tuple[list[str], Floats, Floats]:
    """Return (codes, scale_inv, values): one hex string of codes per row, one scale_inv per row, and the decoded codes."""
    scale = scale_from_amax(np.abs(x).max(1), POINTS[element][-1], True, 0.0, FLT_MAX)
    codes = encode(x * scale[:, None], element)
    return [row.tobytes().hex() for row in codes], 1 / scale, decode(codes, element)


def gemm_case(seed: int, contraction: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    a = rng.integers(-8, 9, (4, contraction)).astype(np.float32) * 2.0 ** np.arange(4, dtype=np.float32)[:, None]
    w = rng.integers(-8, 9, (4, contraction)).astype(np.float32) / 4
    a_codes, a_scale, a_values = quantized(a, "e4m3")
    w_codes, w_scale, w_values = quantized(w, "e4m3")
    acc = a_values.astype(np.float64) @ w_values.T.astype(np.float64)
    y = acc.astype(np.float32) * a_scale[:, None] * w_scale
    return {
        "K": contraction,
        "A_bf16": [[str(v) for v in row] for row in a], "W_bf16": [[str(v) for v in row] for row in w],
        "A_codes": a_codes, "W_codes": w_codes, "A_scale_inv": [bits(v) for v in a_scale],
        "W_scale_inv": [bits(v) for v in w_scale], "y_fp32": [[bits(v) for v in row] for row in y],
    }  # fmt: skip


def group(name: str, description: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    numbered = [{**case, "id": f"{name}-{i:02d}"} for i, case in enumerate(cases)]
    return {"description": description, "oracles": ["numpy table method"], "n": len(numbered), "cases": numbered}


def main() -> None:
    settings = [("e4m3", True, 0.0), ("e4m3", False, 0.0), ("e5m2", True, 0.0), ("e4m3", True, 1e-4)]
    rows = [row_case(*row, *setting) for setting in settings for row in ROWS]
    groups = {
        "fp8_rowwise": group("fp8_rowwise", "one row: its amax, scale, scale_inv and codes", rows),
        "fp8_rowwise_gemm": group(
            "fp8_rowwise_gemm", "y = A W^T, exact in fp32 for any summation order", [gemm_case(0, 32), gemm_case(1, 64)]
        ),
    }
    total = sum(entry["n"] for entry in groups.values())
    made_with = {"numpy": np.__version__}
    PATH.write_text(
        json.dumps({"schema_version": 1, "generated_with": made_with, "total_cases": total, "groups": groups}, indent=1)
        + "\n"
    )


if __name__ == "__main__":
    main()
