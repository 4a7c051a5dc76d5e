"""Samplers of many chains at once, for any Pyro model with continuous latent sites."""

from pyro_symmetric.mcmc.chees import ChEES
from pyro_symmetric.mcmc.cyclical import CyclicalSG
from pyro_symmetric.mcmc.hmc import HMC
from pyro_symmetric.mcmc.kernel import Kernel, State
from pyro_symmetric.mcmc.layout import Layout
from pyro_symmetric.mcmc.nuts import NUTS
from pyro_symmetric.mcmc.potential import Potential, log_joint
from pyro_symmetric.mcmc.psgld import pSGLD
from pyro_symmetric.mcmc.run import sample
from pyro_symmetric.mcmc.sghmc import SGHMC
from pyro_symmetric.mcmc.sgld import SGLD

__all__ = [
    "HMC",
    "NUTS",
    "SGHMC",
    "SGLD",
    "ChEES",
    "CyclicalSG",
    "Kernel",
    "Layout",
    "Potential",
    "State",
    "log_joint",
    "pSGLD",
    "sample",
]
