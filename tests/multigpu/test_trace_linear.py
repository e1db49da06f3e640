"""The number of functions that a warm linear calls is at most the number in docs/architecture.md."""

from __future__ import annotations

import pytest
import torch

from tools import trace_linear
from tools.trace_linear import Figures


@pytest.mark.ranks(2)
def test_a_warm_linear_passes_no_more_code_than_the_page_says(ranks):
    measured, limits = ranks(2).run(trace_linear.measured)[0], trace_linear.limits()
    assert measured.keys() == limits.keys(), "python -m tools.trace_linear --write renews the table"
    longer = [
        f"{name}: {field} {found} > {limit}"
        for name in limits
        for field, found, limit in zip(Figures._fields, measured[name], limits[name], strict=True)
        if found > limit
    ]
    assert not longer, "\n".join(longer)
    assert measured["forward"].calls > 20 and measured["forward + backward"].lines > measured["forward"].lines
    assert trace_linear.table(limits).count("\n") == len(limits) + 1


def test_functions_of_other_packages_and_comprehensions_do_not_count():
    def run() -> None:
        torch.nn.functional.pad(torch.ones(1), (0, 1))
        trace_linear.dlp.recipe("bf16")

    found = trace_linear.trace_of(run)
    assert found and all("/dlp/" in code.co_filename for code in found)
    assert not any(code.co_name in trace_linear.COMPREHENSIONS for code in found)
    owners = {trace_linear.class_of(code) for code in found}
    assert "" in owners and trace_linear.figures(found).classes == len(owners - {""})
