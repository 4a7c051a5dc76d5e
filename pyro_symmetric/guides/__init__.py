"""Guides that know the symmetries of their model; all plug into stock :class:`~pyro.infer.SVI`.

They pickle, also to workers of process pools and dask. Several processes, each with a part of every mini-batch, train
one guide by PyTorch's own tool (start the script by ``torchrun --nproc-per-node=2``):

>>> pyro.set_rng_seed(0)  # all ranks start from the same guide
>>> guide = AutoSymmetrized(BayesianModel(net, num_data=len(x)), group).setup(x, y)
>>> loss_of = DistributedDataParallel(Trace_ELBO()(model, guide))
>>> for step, rows in enumerate(batches):
...     part = rows.tensor_split(world_size)[rank]  # of the same length on each rank
...     pyro.set_rng_seed(step)  # all ranks draw the same weights
...     optimizer.zero_grad()
...     loss_of(x[part], y[part]).backward()
...     optimizer.step()
"""

from pyro_symmetric.guides.base import WeightsGuide
from pyro_symmetric.guides.evidence import Evidence, evidence
from pyro_symmetric.guides.files import load_guide, save_guide
from pyro_symmetric.guides.fit_gaussian import fit_gaussian
from pyro_symmetric.guides.gaussian import AutoGaussian, sample_posterior
from pyro_symmetric.guides.push_forward import push_forward
from pyro_symmetric.guides.swag import swag
from pyro_symmetric.guides.symmetrize import symmetrize
from pyro_symmetric.guides.symmetrized import AutoSymmetrized
from pyro_symmetric.guides.transport import barycentre, interpolate
from pyro_symmetric.guides.unit_blocks import AutoUnitBlocks

__all__ = [
    "AutoGaussian",
    "AutoSymmetrized",
    "AutoUnitBlocks",
    "Evidence",
    "WeightsGuide",
    "barycentre",
    "evidence",
    "fit_gaussian",
    "interpolate",
    "load_guide",
    "push_forward",
    "sample_posterior",
    "save_guide",
    "swag",
    "symmetrize",
]
