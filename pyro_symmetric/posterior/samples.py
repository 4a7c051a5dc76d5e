"""Draws as functions take them: a :class:`~pyro_symmetric.Posterior`, or a dictionary from site to tensor.

One convention for every function:

* Functions of samples (``mmd``, ``common_frame``, ``invariance_tests``, ``align_many`` ...) see the draws of a
  posterior chain after chain, as ``posterior.get_samples()`` gives them. A dictionary is taken as independent samples
  ``(samples, *site_shape)``; one of chains is refused wherever a group or the other side knows the sites' shapes.
* Functions of chains (``diagnose``, ``summary``, ``relabel``) take a dictionary as successive states of Markov chains,
  ``(chains, draws, *site_shape)``.
* Functions of each draw by itself (``canonicalize``, ``minimal_mass``, ``predict``) take a dictionary
  of any batch shape, which their results keep; of a posterior they return a number for each draw, chain after chain.
* What are draws again is a posterior, if one was given, and a dictionary otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.arguments import described
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.weights import Shapes, Weights

Draws = Mapping[str, Tensor] | Posterior


def samples_of(draws: Any, name: str = "weights", shapes: Shapes | None = None) -> Mapping[str, Tensor]:
    """Samples ``(samples, *site_shape)``: of a posterior all draws, chain after chain.

    :param name: what messages call them.
    :param shapes: the shapes of the sites, as far as they are known.
    """
    if isinstance(draws, Posterior):
        draws = draws.get_samples()
    elif not isinstance(draws, Mapping):
        raise TypeError(
            f"{name} are {described(draws)}; they must be a Posterior, or map each site to its samples (of a guide, "
            "take draws: Predictive(model, guide=guide, num_samples=1000))"
        )
    _require_shapes(arguments.weights(name, draws), name, shapes, ("samples",))
    return draws


def chains_of(draws: Any, name: str = "posterior", shapes: Shapes | None = None) -> Posterior:
    """A posterior: a dictionary holds Markov chains ``(chains, draws, *site_shape)``."""
    if isinstance(draws, Posterior):
        return draws
    _require_shapes(arguments.weights(name, draws, "a Posterior"), name, shapes, ("chains", "draws"))
    return Posterior(dict(draws), kind="chains")


def as_given(given: Any, moved: Weights) -> Any:
    """Samples that were moved, ``(samples, *site_shape)``, in the form in which :func:`samples_of` was given them."""
    if not isinstance(given, Posterior):
        return moved
    batch = (given.num_chains, given.num_samples)
    return given.map(lambda _: {site: value.unflatten(0, batch) for site, value in moved.items()})


def _require_shapes(weights: Mapping[str, Tensor], name: str, shapes: Shapes | None, leading: tuple[str, ...]) -> None:
    for site, shape in (shapes or {}).items():
        found = tuple(weights[site].shape) if site in weights else None
        if found is not None and (len(found) != len(leading) + len(shape) or found[len(leading) :] != tuple(shape)):
            raise ValueError(
                f"{name}[{site!r}] has shape {found}; it must be ({', '.join(map(str, (*leading, *shape)))}), or pass "
                "a Posterior, which says what its axes are"
            )
