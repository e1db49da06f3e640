"""Format bytes and seconds with three digits and a unit, for plans and messages."""

from __future__ import annotations


def said_bytes(nbytes: float) -> str:
    """Format a number of bytes in powers of ten: "31.2 GB", "3.86 kB", "12 B"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * size:
            return f"{_three(nbytes / size)} {unit}"
    return f"{nbytes:.0f} B"


def said_seconds(seconds: float) -> str:
    """Format seconds: "1.33 s", "64.2 ms", "2.10 us", "<1 us"."""
    if seconds < 1e-6:
        return "<1 us"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds / 1e-6)} us"


def _three(value: float) -> str:
    """Format a number with three digits in total; a number >= 1000 keeps all its integer digits."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
