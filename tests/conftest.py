"""Every test starts from a cleared parameter store, validation on, and the same seed.

Tests marked ``stochastic`` check statistics, and state how often they would fail by
chance. They must pass for other seeds as well::

    make test PYTEST_ARGS="-m 'stochastic and not slow' --seed 7"

``--seed K`` is the seed that tests start from, 0 by default; it is added to those that
stochastic tests set themselves by ``torch.manual_seed`` or ``pyro.set_rng_seed``. So
that it counts, they give no ``seed=`` to what takes one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import pytest
import torch
import torch._export.utils
from torch import Tensor

from pyro_symmetric.groups import Axis, Group, Units


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed", type=int, default=0, help="start tests from this seed instead of 0"
    )


@pytest.fixture(autouse=True)
def fresh_pyro(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
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


@pytest.fixture
def generator() -> torch.Generator:
    """The generator that kernels draw from, seeded from the global generator, so that
    ``--seed`` counts.
    """
    return torch.Generator(torch.empty(0).device).manual_seed(
        int(torch.randint(2**62, ()))
    )


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device there is: what doesn't need the compiled engine, which is the CPU's
    own, is to work on all.
    """
    return torch.device(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """CUDA tests skip where there is no such device."""
    if not torch.cuda.is_available():
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def remembered_operators() -> Iterator[None]:
    """torch.export lists PyTorch's composite operators several times for each network:
    a third of the time that find_symmetry takes on a small one. Here the list is made
    again only if an operator was registered since."""
    known: dict[tuple[str, int], Any] = {}
    listed = getattr(
        torch._export.utils, "_collect_all_valid_cia_ops_for_namespace", None
    )

    def remembered(namespace: Any) -> Any:
        count = len(
            torch._C._dispatch_get_registrations_for_dispatch_key(
                "CompositeImplicitAutograd"
            )
        )
        if (namespace.name, count) not in known:
            known[namespace.name, count] = listed(namespace)
        return known[namespace.name, count]

    with pytest.MonkeyPatch.context() as patch:
        if listed is not None:
            patch.setattr(
                torch._export.utils,
                "_collect_all_valid_cia_ops_for_namespace",
                remembered,
            )
        yield


@dataclass
class Mlp:
    """A multilayer perceptron; ``activation`` "relu" has scalings, "tanh" has signs,
    both have the rest.
    """

    widths: Sequence[int]
    activation: str = "relu"
    bias: bool = True

    def __post_init__(self) -> None:
        self.depth = len(self.widths) - 1
        self.site_shapes: dict[str, torch.Size] = {}
        for l in range(self.depth):
            self.site_shapes[f"{l}.weight"] = torch.Size(
                (self.widths[l + 1], self.widths[l])
            )
            if self.bias:
                self.site_shapes[f"{l}.bias"] = torch.Size((self.widths[l + 1],))
        moves = {"permute", "scale" if self.activation == "relu" else "flip"}
        units = []
        for l in range(self.depth - 1):
            n = self.widths[l + 1]
            index = torch.arange(n)[None]
            axes = [
                (f"{l}.weight", 0, 1),
                (f"{l}.bias", 0, 1),
                (f"{l + 1}.weight", 1, -1),
            ]
            own = [
                Axis(site, dim, index, exponent)
                for site, dim, exponent in axes
                if site in self.site_shapes
            ]
            units.append(Units(f"hidden.{l}", n, tuple(own), moves=frozenset(moves)))
        if self.bias:
            last, classes = (
                f"{self.depth - 1}.bias",
                torch.arange(self.widths[-1])[:, None],
            )
            units.append(
                Units(
                    f"shift of {last}",
                    1,
                    (Axis(last, 0, classes),),
                    moves=frozenset({"shift"}),
                )
            )
        self.group = Group(units, self.site_shapes)
        self.permutations, self.scalings = self.group.permutations, self.group.scalings
        self.signs, self.shifts = self.group.signs, self.group.shifts

    def weights(
        self, *batch: int, dtype: torch.dtype = torch.float64
    ) -> dict[str, Tensor]:
        return {
            site: torch.randn(*batch, *shape, dtype=dtype)
            for site, shape in self.site_shapes.items()
        }

    def __call__(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        """Outputs before the softmax, ``batch + (len(x), outputs)``."""
        act = getattr(torch, self.activation)
        for l in range(self.depth):
            x = (x if l == 0 else act(x)) @ weights[f"{l}.weight"].mT
            if self.bias:
                x = x + weights[f"{l}.bias"].unsqueeze(-2)
        return x

    def anywhere_on_orbit(
        self, weights: dict[str, Tensor], *batch: int, spread: float = 1.0
    ) -> dict[str, Tensor]:
        """``weights`` moved by a random element of the whole group."""
        dtype = next(iter(weights.values())).dtype
        return self.group.sample(batch, spread=spread, dtype=dtype)(weights)


@pytest.fixture(scope="session")
def mlp() -> Callable[..., Mlp]:
    return Mlp
