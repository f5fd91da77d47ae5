"""While ranks run on a GPU torch's deterministic algorithms are on; on one they are tried in `test_gpu`."""

import os
import warnings

import pytest
import torch

from harness.torch_internals.modes import deterministic_on


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


@pytest.mark.parametrize("before", [False, True])
def test_a_gpu_adds_up_in_a_fixed_order_and_the_switch_is_put_back(before: bool) -> None:
    torch.use_deterministic_algorithms(before)
    try:
        with deterministic_on(torch.device("cuda")):
            assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"]
            warnings.warn("cumsum does not have a deterministic implementation", UserWarning, stacklevel=1)
        assert torch.are_deterministic_algorithms_enabled() is before
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_cpu_is_left_alone() -> None:
    with deterministic_on(torch.device("cpu")):
        assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
