r"""A door for those who come from ``pyro.infer``: change the import, keep the rest.

>>> from pyro_symmetric.infer import MCMC, NUTS  # instead of: from pyro.infer import MCMC, NUTS
>>> mcmc = MCMC(NUTS(model), num_samples=500, warmup_steps=500, num_chains=4)
>>> mcmc.run(y)
>>> mcmc.summary()

:class:`MCMC` runs the chains by :func:`~pyro_symmetric.sample`, all in one batch of this process, and takes this
library's kernels as well. :func:`HMC` and :func:`NUTS` take the arguments of Pyro 1.9's kernels and make ours of them.

What those arguments ask for is done, or said not to be done. One that would change what is drawn is refused
(``transforms`` of a model, ``disable_validation=False``). One that would change the cost only is warned of by name
(``mp_context``, ``jit_options``, blocks of ``full_mass``, slice sampling, bounds of the step size). Others have nothing
left to say and hold whatever is passed: ``jit_compile`` (``engine="auto"`` compiles if the run is long enough for it to
pay), ``ignore_jit_warnings`` (there are none) and ``max_plate_nesting`` (plates are counted when the model is traced).
"""

from pyro_symmetric.infer.chains import MCMC
from pyro_symmetric.infer.kernels import HMC, NUTS, PyroKernel

__all__ = ["HMC", "MCMC", "NUTS", "PyroKernel"]
