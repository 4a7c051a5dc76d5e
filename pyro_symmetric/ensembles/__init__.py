"""Many independent networks, trained at once."""

from pyro_symmetric.ensembles.members import fresh_members, fresh_starts, initialised_by
from pyro_symmetric.ensembles.training import ensemble

__all__ = ["ensemble", "fresh_members", "fresh_starts", "initialised_by"]
