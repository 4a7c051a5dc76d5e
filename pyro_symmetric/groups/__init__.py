"""Groups of symmetries: units, what they may do, and how it acts on weights."""

from pyro_symmetric.groups.action import Action, is_real
from pyro_symmetric.groups.axes import Axis
from pyro_symmetric.groups.elements import Element
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.groups.units import Units

__all__ = ["Action", "Axis", "Element", "Group", "Units", "group_of", "is_real"]
