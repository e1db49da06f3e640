"""Write tests/data/golden_tile.json: results of NVFP4 with one scale per 16x16 tile, computed from the formula with
tests/table_method.py.

python -m tests.make_golden_tile

The elements of a case are a formula of i and j, written as in golden_formats.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.make_golden_rowwise import bits, group
from tests.table_method import Codes, Floats, decode, encode, to_bf16

PATH = Path(__file__).parent / "data" / "golden_tile.json"
CASES = [
    ("(i-15.5)(j-15.5)/16", (32, 32), lambda i, j: (i - 15.5) * (j - 15.5) / 16),
    ("(i-15.5)(j-15.5)/16", (16, 48), lambda i, j: (i - 15.5) * (j - 15.5) / 16),
    ("2^(i/16)(7j%31-15)", (48, 32), lambda i, j: 2.0 ** (i / 16) * (7 * j % 31 - 15)),
]


def packed(codes: Codes) -> list[str]:
    """Pack a row into a hex string with two codes per byte, the even column in the low nibble."""
    return [(row[::2] | row[1::2] << 4).astype(np.uint8).tobytes().hex() for row in codes]


def quantized(x: Floats, amax: np.float32) -> tuple[Codes, Codes]:
    """Return (codes, scales): the codes of x, one per byte, and the E4M3 code of each tile's scale."""
    rows, columns = x.shape
    tiles = x.reshape(rows // 16, 16, columns // 16, 16).swapaxes(1, 2)
    encode_scale = np.float32(2688) / amax
    decode_scale, sixth = np.float32(1) / encode_scale, np.float32(1) / np.float32(6)
    scale = encode(np.abs(tiles).max((2, 3)) * (encode_scale * sixth), "e4m3")
    multiplier = np.float32(1) / (decode(scale, "e4m3") * decode_scale)
    codes = encode((tiles * multiplier[..., None, None]).astype(np.float32), "e2m1")
    return codes.swapaxes(1, 2).reshape(x.shape), scale


def case(formula: str, shape: tuple[int, int], entry: Any) -> dict[str, Any]:
    x = to_bf16(np.array([[entry(i, j) for j in range(shape[1])] for i in range(shape[0])], dtype=np.float32))
    codes, scale = quantized(x, np.abs(x).max())
    return {
        "formula": formula, "shape": list(shape), "dtype": "bf16 (round the formula value RNE)",
        "tensor_amax": bits(np.abs(x).max()), "tile_scales_e4m3": [[f"0x{code:02x}" for code in row] for row in scale],
        "row_packed": packed(codes), "col_packed": packed(codes.T),
    }  # fmt: skip


def main() -> None:
    groups = {"nvfp4_2d": group("nvfp4_2d", "a matrix by tiles of 16x16", [case(*each) for each in CASES])}
    content = {"schema_version": 1, "generated_with": {"numpy": np.__version__}, "total_cases": len(CASES)}
    PATH.write_text(json.dumps(content | {"groups": groups}, indent=1) + "\n")


if __name__ == "__main__":
    main()
