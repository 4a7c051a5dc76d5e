"""Data sets for examples, studies and tests: tables and images, split, standardised and ready for a network.

:func:`load` reads a data set by name, :func:`ood` adds a second one as out-of-distribution inputs. Both give a
:class:`Dataset`, whose tensors hold inputs that are standardised by the statistics of its own training rows.

>>> data = ps.datasets.load("wine")
>>> data.input_shape, data.num_outputs
(torch.Size([13]), 3)
"""

from pyro_symmetric.datasets.dataset import Dataset
from pyro_symmetric.datasets.loading import KNOWN, load, ood

__all__ = ["KNOWN", "Dataset", "load", "ood"]
