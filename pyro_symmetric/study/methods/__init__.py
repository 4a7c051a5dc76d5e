"""The methods of a study, by name."""

from pyro_symmetric.study.methods import chains, laplace, networks, variational  # noqa: F401 (each registers its own)
from pyro_symmetric.study.methods.base import METHODS, Fit, Method, TooLarge, list_methods, make_method, register

__all__ = ["METHODS", "Fit", "Method", "TooLarge", "list_methods", "make_method", "register"]
