r"""A Gaussian guide fitted to chains, wherever in the orbit of a mode they lie.

Its mean and covariance are those of the draws, aligned. Correlations are shrunk by the factor :math:`S / (S + D)` of
``S`` draws in ``D`` dimensions, so that the covariance has full rank.
"""

from __future__ import annotations

import torch
from pyro.distributions import MultivariateNormal
from pyro.infer.autoguide import AutoDiagonalNormal
from pyro.infer.autoguide.initialization import init_to_value

from pyro_symmetric import arguments
from pyro_symmetric.alignment.many import align_many
from pyro_symmetric.distributions import usual_estimator
from pyro_symmetric.groups import Group
from pyro_symmetric.guides.base import action_on, layout_of
from pyro_symmetric.guides.gaussian import AutoGaussian
from pyro_symmetric.guides.symmetrized import AutoSymmetrized
from pyro_symmetric.posterior.posterior import Posterior


def fit_gaussian(posterior: Posterior, group: Group) -> AutoSymmetrized:
    """Fit a Gaussian of full rank to a posterior's draws, modulo a group, and symmetrise it.

    For :func:`~pyro_symmetric.evidence`, fit one half of each chain, and let the other, which knows nothing of the fit,
    be the ``posterior``:

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> posterior = ps.Posterior({"w": torch.randn(2, 100, 3)}, kind="chains").attach(model)  # as ps.sample does
    >>> first, second = (posterior.select(draws=half) for half in (slice(0, 50), slice(50, None)))
    >>> guide = ps.guides.fit_gaussian(first, ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)}))
    >>> abs(ps.evidence(guide, posterior=second).best.log_evidence) < 0.5
    True

    :param posterior: draws that know their model, as those of :func:`~pyro_symmetric.sample` do.
    :param group: the finite group of the model.
    :raises ValueError: if the posterior doesn't remember its model; ``posterior.attach(model, *args)`` tells it.
    """
    arguments.instance("posterior", posterior, Posterior, "a Posterior")
    if posterior.source is None:
        raise ValueError("posterior doesn't know its model; say it by posterior.attach(model, *args)")
    # At a draw of the posterior: priors may be improper.
    first = init_to_value(values={site: draws[0, 0] for site, draws in posterior.samples.items()})
    model, args, kwargs = posterior.source[:3]
    sketch = AutoDiagonalNormal(model, init_loc_fn=first)
    sketch._setup_prototype(*args, **kwargs)
    layout, aligned = layout_of(sketch), align_many(posterior, group, progress=False).posterior
    vectors = layout.unconstrain({site: aligned.samples[site].flatten(0, 1) for site in layout.site_shapes})
    count, dim = vectors.shape
    covariance = vectors.double().mT.cov()
    shrunk = torch.lerp(covariance.diagonal().diag_embed(), covariance, count / (count + dim))
    tril = torch.linalg.cholesky(shrunk).to(vectors.dtype)
    gaussian = AutoGaussian(sketch, MultivariateNormal(vectors.mean(0), scale_tril=tril))
    estimator = usual_estimator(sketch.get_posterior(), action_on(sketch, group))
    return AutoSymmetrized(model, group, gaussian, estimator).setup(*args, **kwargs)
