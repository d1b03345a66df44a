"""Every kernel of the backward scan against the plain loop in float64."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from torchrl_copc.value import scan
from torchrl_copc.value.functional import backward_scan, copc_advantage_estimate

KERNELS = (
    "torch",
    pytest.param(
        "numba",
        marks=pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed"),
    ),
)


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let ``backward_scan`` use one kernel on CPU."""
    if request.param == "torch":
        monkeypatch.setattr(scan, "kernel_for", lambda device_type: scan.torch_scan)
    return request.param


def loop(coeff: Tensor, bias: Tensor) -> Tensor:
    """The recursion as it is written, in Python's own float64."""
    rows = []
    for coeff_row, bias_row in zip(coeff.double().tolist(), bias.double().tolist(), strict=True):
        x, row = 0.0, []
        for a, b in zip(reversed(coeff_row), reversed(bias_row), strict=True):
            x = b + a * x if a != 0 else b
            row.append(x)
        rows.append(row[::-1])
    return torch.tensor(rows, dtype=torch.float64)


def packed(
    rows: int, length: int, *, low: float = 0.7, high: float = 1.2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    coeff = low + (high - low) * torch.rand(rows, length, generator=generator, dtype=dtype)
    coeff[torch.rand(rows, length, generator=generator) < 1 / 64] = 0.0
    return coeff, torch.randn(rows, length, generator=generator, dtype=dtype)


def test_numba_is_used_when_it_is_installed() -> None:
    pytest.importorskip("numba")
    assert scan.kernel_for("cpu").__module__.endswith("numba_scan")
    assert scan.kernel_for("xpu") is scan.torch_scan


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 2), (3, 64), (5, 128), (4, 129), (7, 192), (1, 5000), (9, 4133)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_loop(kernel: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    coeff, bias = packed(*shape, dtype=dtype)
    x, expected = backward_scan(coeff, bias, time_dim=-1), loop(coeff, bias)
    assert x.dtype == dtype
    error = (x.double() - expected).abs().max() / expected.abs().max()
    assert error < (1e-6 if dtype == torch.float32 else 1e-14)


@pytest.mark.parametrize("decay", [1.0, 0.999])
def test_one_response_of_a_hundred_thousand_steps(kernel: str, decay: float) -> None:
    coeff, bias = torch.full((1, 100_000), decay), packed(1, 100_000)[1]
    expected = loop(coeff, bias)
    x = backward_scan(coeff, bias, time_dim=-1)
    assert (x - expected).abs().max() / expected.abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("high", [1.28, 50.0])
def test_a_product_that_overflows_stays_in_its_response(kernel: str, high: float, dtype: torch.dtype) -> None:
    # the second of three packed responses overflows; ends are not aligned with chunks
    coeff, bias = torch.full((2, 6000), 0.9, dtype=dtype), torch.ones(2, 6000, dtype=dtype)
    coeff[0, 200:5700] = high
    coeff[:, [199, 5699, 5999]] = 0.0
    x, alone = backward_scan(coeff, bias, time_dim=-1), loop(coeff, bias)
    assert x[0, 200].isinf()
    assert not x.isnan().any()
    for response in (slice(0, 200), slice(5700, 6000)):
        torch.testing.assert_close(x[0, response].double(), alone[0, response], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x[1].double(), alone[1], rtol=1e-6, atol=1e-6)


def test_a_product_of_coefficients_may_overflow_where_the_solution_does_not(kernel: str) -> None:
    coeff, bias = torch.full((1, 5000), 1.28), torch.zeros(1, 5000)
    bias[0, 100] = 1.0  # nothing flows into the 4,899 steps behind
    x = backward_scan(coeff, bias, time_dim=-1)
    torch.testing.assert_close(x.double(), loop(coeff, bias), rtol=2e-5, atol=0.0)
    assert x[0, 0] == pytest.approx(1.28**100, rel=1e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_value_stays_in_its_response(kernel: str, bad: float) -> None:
    coeff, bias = packed(5, 700)
    coeff[:, 299] = coeff[:, 599] = 0.0
    expected = loop(coeff, bias)
    bias[2, 450] = bad
    x = backward_scan(coeff, bias, time_dim=-1)
    assert not x[2, 450].isfinite()
    bias[2, 300:600] = expected[2, 300:600] = x[2, 300:600] = 0.0
    torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("advantage", ["full", "continuation"])
def test_the_product_trace_of_a_long_response_leaves_its_neighbours_alone(
    kernel: str, advantage: str
) -> None:
    """Responses of 400 steps whose ratios are all clipped at 1.28: the product leaves float32."""
    length, ends = 1200, [399, 799, 1199]
    log_ratio = torch.zeros(1, length, 1)
    log_ratio[:, 400:800] = 1.0
    value, reward = torch.zeros(1, length, 1), torch.ones(1, length, 1)
    done = torch.zeros(1, length, 1, dtype=torch.bool)
    done[:, ends] = True
    result, target = copc_advantage_estimate(
        1.0, 1.0, log_ratio, value, value, reward, done, trace="product", advantage=advantage
    )
    count_down = torch.arange(400.0, 0.0, -1.0)
    for x in (result[0, :, 0], target[0, :, 0]):
        assert torch.equal(x[:400], count_down)
        assert torch.equal(x[800:], count_down)
        assert x[400].isinf()


@pytest.mark.parametrize("shape", [(2, 9), (1, 150), (5, 7)])
def test_gradients_of_first_and_second_order(kernel: str, shape: tuple[int, int]) -> None:
    coeff, bias = packed(*shape, dtype=torch.float64)
    coeff[:, 3] = 0.0

    def solve(coeff: Tensor, bias: Tensor) -> Tensor:
        return backward_scan(coeff, bias, time_dim=-1)

    inputs = (coeff.requires_grad_(), bias.requires_grad_())
    assert torch.autograd.gradcheck(solve, inputs)
    assert torch.autograd.gradgradcheck(solve, [s[:, :12].detach().requires_grad_() for s in inputs])


def test_gradient_of_one_input_and_through_broadcasting(kernel: str) -> None:
    decay = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    bias = packed(3, 40, dtype=torch.float64)[1].unsqueeze(-1)
    assert torch.autograd.gradcheck(lambda decay: backward_scan(decay, bias), (decay,))
    assert not backward_scan(decay.detach(), bias).requires_grad


def test_several_features_and_any_time_dimension(kernel: str) -> None:
    coeff, bias = (s.reshape(3, 5, 150).movedim(-1, 1) for s in packed(15, 150))
    x = backward_scan(coeff, bias, time_dim=1)
    expected = loop(*(s.movedim(1, -1).reshape(15, 150) for s in (coeff, bias)))
    torch.testing.assert_close(x.movedim(1, -1).reshape(15, 150).double(), expected, rtol=1e-5, atol=1e-5)


def test_half_precision_and_empty_inputs(kernel: str) -> None:
    coeff, bias = (s.to(torch.bfloat16) for s in packed(2, 300))
    x = backward_scan(coeff, bias, time_dim=-1)
    assert x.dtype == torch.bfloat16
    torch.testing.assert_close(x.double(), loop(coeff, bias), rtol=1e-2, atol=1e-2)
    assert backward_scan(torch.ones(2, 0, 1), torch.ones(2, 0, 1)).shape == (2, 0, 1)


def run(program: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_without_numba_plain_torch_takes_over() -> None:
    program = """
import sys
sys.modules["numba"] = None  # any import of it raises ImportError
import torch
from torchrl_copc.value import scan
print(scan.backward_scan(torch.tensor([0.5, 0.0, 0.5]), torch.tensor([1.0, 2.0, 4.0]), time_dim=-1).tolist())
print(scan.kernel_for("cpu") is scan.torch_scan)
"""
    assert run(program).split("\n")[:2] == ["[2.0, 2.0, 4.0]", "True"]


TRITON_CHECK = """
import torch
from torchrl_copc.value.scan_kernels import triton_scan
from torchrl_copc.value.scan import torch_scan
triton_scan.MAX_BLOCK = 16
for shape, dtype in (((3, 5), torch.float32), ((2, 50), torch.float64), ((1, 64), torch.float32)):
    generator = torch.Generator().manual_seed(0)
    coeff = 1.3 * torch.rand(shape, generator=generator, dtype=dtype)
    coeff[coeff < 0.2] = 0.0
    bias = torch.randn(shape, generator=generator, dtype=dtype)
    torch.testing.assert_close(triton_scan.scan(coeff, bias), torch_scan(coeff, bias), rtol=1e-6, atol=1e-6)
coeff, bias = torch.full((1, 70), 1e30), torch.ones(1, 70)
coeff[0, [9, 59, 69]] = 0.0
coeff[0, :9] = coeff[0, 60:69] = 0.5
x = triton_scan.scan(coeff, bias)
assert x[0, 20].isinf() and not x.isnan().any()
torch.testing.assert_close(x[0, :10], x[0, 60:])
torch.testing.assert_close(x[0, :10], 2 - 0.5 ** torch.arange(9.0, -1.0, -1.0))
print("passed")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_triton_kernel_under_its_interpreter() -> None:
    assert "passed" in run(TRITON_CHECK, TRITON_INTERPRET="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_on_cuda(dtype: torch.dtype) -> None:
    for shape in ((1, 1), (3, 100), (1, 50_000), (17, 4133)):
        coeff, bias = packed(*shape, dtype=dtype)
        x = backward_scan(coeff.cuda(), bias.cuda(), time_dim=-1).cpu()
        expected = loop(coeff, bias)
        assert (x - expected).abs().max() / expected.abs().max() < (1e-6 if dtype == torch.float32 else 1e-14)
