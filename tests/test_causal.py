"""Causal attention where the queries belong to the last keys, compared with attention of all queries: values and
gradients, planted faults of the merge, calls of cuDNN's ops, choice of a backend, and callers under dispatch modes or
torch.compile.

The tests run torch's CPU kernel. A stand-in for cuDNN's ops, with the same arguments and results, calls this kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from dlp.comm.observer import Observer
from dlp.runtime import causal as module
from dlp.runtime.causal import KERNELS, Kernel, Merged, causal
from launch.training import recomputation
from tests.metrics import relative_error

CPU, CUDNN = KERNELS["cpu", SDPBackend.FLASH_ATTENTION], KERNELS["cuda", SDPBackend.CUDNN_ATTENTION]
AT_MOST = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-2}
aten = torch.ops.aten
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def inputs(chunks: int, size: int = 8, kv_heads: int = 2, length: int = 6) -> list[Tensor]:
    """Return q, k, v and dy of `chunks` chunks, in float64. q is scaled so that attention weights are far from
    uniform."""
    generator = torch.Generator().manual_seed(chunks)
    heads = (4, kv_heads, kv_heads, 4)
    q, *rest = (torch.randn(2, n, chunks * length, size, generator=generator, dtype=torch.float64) for n in heads)
    return [3 * q, *rest]


def whole(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, length: int = 6) -> list[Tensor]:
    """Compute attention of all queries; return y and dq of the last chunk, and dk and dv of all keys, as if only the
    last chunk had a gradient."""
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    y = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)[:, :, -length:]
    dq, dk, dv = torch.autograd.grad(y, leaves, dy[:, :, -length:])
    return [y, dq[:, :, -length:], dk, dv]


def last(
    attend: Attention, q: Tensor, k: Tensor, v: Tensor, dy: Tensor, dtype: torch.dtype = torch.float64, length: int = 6
) -> list[Tensor]:
    """Return the same results as `whole`, from attention `attend` of the queries of the last chunk alone."""
    leaves = [each.to(dtype, copy=True).requires_grad_() for each in (q[:, :, -length:], k, v)]
    y = attend(*leaves)
    return [y, *torch.autograd.grad(y, leaves, dy[:, :, -length:].to(dtype))]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(relative_error(mine, each) for mine, each in zip(found, expected, strict=True))


def by(kernel: Kernel) -> Attention:
    return lambda *qkv: Merged.apply(*qkv, kernel)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("size", [8, 7, 64])
@pytest.mark.parametrize("chunks", range(2, 9))
def test_the_last_chunk_gets_the_values_and_gradients_of_all_queries(chunks: int, size: int, kv_heads: int) -> None:
    made = inputs(chunks, size, kv_heads)
    with patch.object(module, "merge", wraps=module.merge) as merged:
        for dtype, at_most in AT_MOST.items():
            rounded = [each.to(dtype).double() for each in made]
            assert worst(last(causal, *rounded, dtype=dtype), whole(*rounded)) < at_most, dtype
    assert merged.call_count == len(AT_MOST)


def test_one_token_attends_to_all_tokens() -> None:
    made = inputs(5, length=1)
    assert worst(last(causal, *made, length=1), whole(*made, length=1)) < 1e-14


def test_gradients_are_differences() -> None:
    q, k, v, _ = inputs(3, size=3, kv_heads=2)
    assert torch.autograd.gradcheck(causal, [each.requires_grad_() for each in (q[:1, :, -6:].detach(), k[:1], v[:1])])


def test_inputs_need_not_be_contiguous_and_results_have_their_shapes() -> None:
    q, k, v, dy = (torch.cat([each, each]).transpose(1, 2).contiguous().transpose(1, 2)[:2] for each in inputs(3))
    found = last(causal, q, k, v, dy)
    assert [each.shape for each in found] == [q[:, :, -6:].shape, q[:, :, -6:].shape, k.shape, v.shape]
    assert worst(found, whole(q, k, v, dy)) < 1e-14


# Faults

MERGE = module.merge
FAULTS: dict[str, Callable[..., Any]] = {
    "lse is not used": lambda out_0, lse_0, out_1, lse_1: ((out_0 + out_1) / 2, MERGE(out_0, lse_0, out_1, lse_1)[1]),
    "backward reads lse of the own keys": lambda *parts: (MERGE(*parts)[0], parts[3]),
    "backward reads out of the own keys": lambda *parts: (parts[2] + 0, MERGE(*parts)[1]),
    "lse in powers of two": lambda *parts: (
        (parts[0] * parts[1].exp2()[..., None] + parts[2] * parts[3].exp2()[..., None])
        / (parts[1].exp2() + parts[3].exp2())[..., None],
        torch.logaddexp2(parts[1], parts[3]),
    ),
    "parts change places": lambda *parts: MERGE(parts[0], parts[3], parts[2], parts[1]),
    "keys before alone": lambda *parts: parts[:2],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_merge_is_noticed(fault: str) -> None:
    made = inputs(3)
    with patch.object(module, "merge", FAULTS[fault]):
        assert worst(last(causal, *made), whole(*made)) > 0.05


def test_a_wrong_backward_is_noticed() -> None:
    made = inputs(3)
    swapped = CPU._replace(backward=lambda *arguments: CPU.backward(*arguments[:-1], not arguments[-1]))
    assert worst(last(by(CPU), *made), whole(*made)) < 1e-14
    assert worst(last(by(swapped), *made), whole(*made)) > 0.05, "the mask of the other call"


# cuDNN


def _forward(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    assert attn_bias is None and compute_log_sumexp and dropout_p == 0.0 and not return_debug_mask and scale is None
    out, lse = CPU.forward(query, key, value, is_causal)
    seed, offset = torch.tensor(17), torch.tensor(23)
    empty = out.new_empty(0)  # in place of undefined tensors, which an op in Python cannot return
    return out, lse.contiguous()[..., None], empty, empty, query.shape[2], key.shape[2], seed, offset, empty


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, philox_seed: Tensor,
    philox_offset: Tensor, attn_bias: Tensor | None, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, *, scale: float | None = None,
) -> Any:  # fmt: skip
    assert (philox_seed, philox_offset) == (17, 23) and attn_bias is cum_seq_q is cum_seq_k is None
    assert (max_q, max_k) == (query.shape[2], key.shape[2]) and dropout_p == 0.0 and scale is None
    assert logsumexp.shape == (*query.shape[:3], 1) and logsumexp.is_contiguous() and logsumexp.dtype == torch.float32
    return CPU.backward(grad_out, (query, key, value), (out, logsumexp[..., 0]), is_causal)


@pytest.fixture
def cudnn() -> Iterator[None]:
    """Replace cuDNN's ops by stand-ins on the CPU."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_cudnn_attention", _forward, "CPU")
        library.impl("_scaled_dot_product_cudnn_attention_backward", _backward, "CPU")
        yield


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("chunks", [2, 5])
def test_calls_of_cudnn_give_what_the_kernel_of_cpus_gives(chunks: int) -> None:
    made = inputs(chunks)
    expected = last(by(CPU), *made, dtype=torch.float32)
    for mine, each in zip(last(by(CUDNN), *made, dtype=torch.float32), expected, strict=True):
        assert torch.equal(mine, each)


def test_the_ops_of_this_torch_take_and_return_what_the_table_says() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(2, heads, 16, 8, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
        out, lse, *results = CUDNN.forward(q, k, v, True)
        assert (out.shape, out.dtype, lse.dtype, len(results)) == (q.shape, q.dtype, torch.float32, 2)
        assert lse.shape in ((2, 4, 16), (2, 4, 16, 1)) and results[0] is not None and results[1] is not None
        gradients = CUDNN.backward(torch.empty_like(q), (q, k, v), (out, lse, *results), True)
        assert [each.shape for each in gradients] == [q.shape, k.shape, v.shape]


# The choice of a backend


class Calls(TorchDispatchMode):
    """Dispatch mode that records the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function._schema.name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))

    @property
    def attention(self) -> list[str]:
        return [name for name in self.names if name.startswith("_scaled_dot_product")]


def test_the_backend_is_the_backend_of_the_square() -> None:
    made = inputs(3)
    forward, backward = (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    )
    with Calls() as calls:
        last(causal, *made)
    assert calls.attention == [forward, forward, backward, backward]
    with Calls() as calls, sdpa_kernel([SDPBackend.MATH]):
        assert worst(last(causal, *made), whole(*made)) < 1e-14
    assert forward not in calls.names, "a mask, since this backend returns no lse"


def test_memory_is_estimated_with_the_op_that_the_estimate_counts() -> None:
    q, k, v = (torch.empty(2, n, s, 8, device="meta") for n, s in ((4, 6), (2, 18), (2, 18)))
    with patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as counted:
        assert causal(q, k, v).is_meta and counted.call_count == 1


# Dispatch modes and torch.compile


@pytest.mark.parametrize(
    "watch", [lambda: FlopCounterMode(display=False), lambda: Observer({})], ids=["flops", "observer"]
)
def test_dispatch_modes_change_no_bit(watch: Callable[..., Any]) -> None:
    made = inputs(3)
    expected = last(causal, *made)
    with watch():
        found = last(causal, *made)
    assert all(torch.equal(mine, each) for mine, each in zip(found, expected, strict=True))


@pytest.mark.usefixtures("cudnn")
def test_two_calls_count_the_operations_of_one() -> None:
    made = inputs(3, kv_heads=4)  # the counter of torch 2.11 refuses grouped heads
    with FlopCounterMode(display=False) as counter:
        last(by(CUDNN), *made, dtype=torch.float32)
    scores = 2 * 4 * 6 * 18  # B, heads, queries, keys
    assert counter.get_total_flops() == (2 + 5) * 2 * scores * 8  # two GEMMs forward, five backward


def test_autocast_casts_as_for_the_square() -> None:
    made = [each.float() for each in inputs(3)]
    expected = last(causal, *made, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = last(causal, *made[:3], made[3].bfloat16().float(), dtype=torch.float32)
    assert found[0].dtype == torch.bfloat16
    assert all(torch.equal(mine.to(each.dtype), each) for mine, each in zip(found, expected, strict=True))


def test_compiled_code_is_one_graph_with_equal_bits() -> None:
    q, k, v, dy = inputs(3)
    seen: list[str] = []

    def watch(graph: torch.fx.GraphModule, example: Any) -> Any:
        seen.append(graph.print_readable(print_output=False))
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=watch, bw_compiler=watch)
    for order, calls in (([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], 2), ([SDPBackend.MATH], 0)):

        def attend(*qkv: Tensor, order: list[SDPBackend] = order) -> Tensor:
            with sdpa_kernel(order, set_priority=True):
                return causal(*qkv)

        torch._dynamo.reset()
        seen.clear()
        torch.compiler.allow_in_graph(causal)  # a `dlp.Context` of several ranks does the same
        compiled = torch.compile(attend, backend=backend, fullgraph=True)
        for mine, each in zip(last(compiled, q, k, v, dy), last(attend, q, k, v, dy), strict=True):
            assert torch.equal(mine, each)
        for graph, op in zip(seen, ("cpu.default(", "cpu_backward.default("), strict=True):
            assert graph.count(f"_scaled_dot_product_flash_attention_for_{op}") == calls


def test_selective_recomputation_keeps_both_calls() -> None:
    made = inputs(3)

    def block(*qkv: Tensor) -> Tensor:
        return causal(*qkv).cos()

    def recomputed(*qkv: Tensor) -> Tensor:
        y: Tensor = checkpoint(block, *qkv, use_reentrant=False, context_fn=recomputation._contexts)
        return y

    expected = last(block, *made)
    with patch.object(module, "merge", wraps=MERGE) as merged, Calls() as calls:
        found = last(recomputed, *made)
    assert all(torch.equal(mine, each) for mine, each in zip(found, expected, strict=True))
    assert merged.call_count == 2, "the merge ran again"
    assert calls.attention.count("_scaled_dot_product_flash_attention_for_cpu") == 2
