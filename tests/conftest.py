"""Every test starts from a cleared parameter store, validation on, and the same seed.

Tests marked ``stochastic`` check statistics, and state how often they would fail by chance. They must pass for other
seeds as well::

    make test PYTEST_ARGS="-m 'stochastic and not slow' --seed 7"

``--seed K`` is the seed that tests start from, 0 by default; it is added to those that stochastic tests set themselves
by ``torch.manual_seed`` or ``pyro.set_rng_seed``. So that it counts, they give no ``seed=`` to what takes one.
"""

from collections.abc import Iterator
from typing import Any

import pyro
import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="start tests from this seed instead of 0")


@pytest.fixture(autouse=True)
def fresh_pyro(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    first = request.config.getoption("seed")
    pyro.clear_param_store()
    pyro.enable_validation(True)
    pyro.set_rng_seed(first)
    if "stochastic" in request.keywords:
        manual_seed = torch.manual_seed

        def moved(own: int) -> Any:
            return manual_seed(own + first)

        monkeypatch.setattr(torch, "manual_seed", moved)
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
