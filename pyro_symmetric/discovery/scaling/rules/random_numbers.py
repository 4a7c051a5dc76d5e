"""Operators that draw random numbers.

A network that draws is taken as a function of its weights with these numbers fixed, so every entry meets a number of
its own, and entries can't be exchanged, even if they are exchangeable in law. Masks that drop all entries with one
probability count as their mean, as dropout does.
"""

from __future__ import annotations

from pyro_symmetric.discovery.scaling.labeller import Labeller
from pyro_symmetric.discovery.scaling.labels import Value, opaque
from pyro_symmetric.discovery.scaling.rules.registry import Call, as_value, register_rule

# Draws that depend on the shape of their operand alone.
OF_A_SHAPE = """rand rand_like randn randn_like randint randint_like randperm normal.float_float normal_functional
    uniform exponential cauchy log_normal geometric random"""
# Draws from distributions that their operands describe.
OF_PARAMETERS = """bernoulli.default normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor multinomial poisson
    binomial _standard_gamma _sample_dirichlet"""
RANDOM = frozenset(name.partition(".")[0] for name in f"{OF_A_SHAPE} {OF_PARAMETERS}".split())


@register_rule(*OF_A_SHAPE.split())
def noise(labeller: Labeller, call: Call) -> Value:
    return opaque(call.shape)


@register_rule(*OF_PARAMETERS.split())
def drawn(labeller: Labeller, call: Call) -> Value:
    """Each entry depends on its parameters and on a random number of its own."""
    for value in call.operands:
        labeller.pin(value)
    return opaque(call.shape)


@register_rule("bernoulli.p")
def mask(labeller: Labeller, call: Call) -> Value:
    """A mask of dropout, as its mean."""
    return labeller.expand(as_value(call["p"]), call.shape)
