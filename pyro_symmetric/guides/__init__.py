"""Guides that know the symmetries of their model; all plug into stock :class:`~pyro.infer.SVI`."""

from pyro_symmetric.guides.aligned import AutoAligned, AutoMeanField, interpolate
from pyro_symmetric.guides.base import WeightsGuide, distinct, sample_posterior
from pyro_symmetric.guides.bounds import Evidence, evidence
from pyro_symmetric.guides.files import load_guide, save_guide
from pyro_symmetric.guides.symmetrized import AutoSymmetrized

__all__ = [
    "AutoAligned",
    "AutoMeanField",
    "AutoSymmetrized",
    "Evidence",
    "WeightsGuide",
    "distinct",
    "evidence",
    "interpolate",
    "load_guide",
    "sample_posterior",
    "save_guide",
]
