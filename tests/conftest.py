"""Every test starts from a cleared parameter store, validation on, and the same seed."""

from collections.abc import Iterator

import pyro
import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_pyro() -> Iterator[None]:
    pyro.clear_param_store()
    pyro.enable_validation(True)
    pyro.set_rng_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    pyro.clear_param_store()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """CUDA tests skip where there is no such device."""
    if not torch.cuda.is_available():
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
