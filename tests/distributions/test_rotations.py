"""Averages over rotations: against quadrature over O(2), Haar draws over O(3), and the
normaliser of the matrix Fisher distribution, a determinant of Bessel functions.

Stochastic checks fail by chance in less than one run of ten thousand.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.special import iv
from torch import Tensor

import pyro_symmetric as ps
from pyro_symmetric.distributions import (
    ExactOrbit,
    RotationImportance,
    SinkhornImportance,
    UnitBlocks,
    rotations,
    usual_estimator,
)
from pyro_symmetric.distributions.estimators import log_mean_exp
from pyro_symmetric.distributions.rotations import (
    log_rotation_weights,
    plan,
    rotation_remarks,
)
from pyro_symmetric.groups import Action, Axis, Group, Units

ROTATE = frozenset({"rotate"})


def factors(entries: int, size: int) -> Action:
    shapes = {"w": torch.Size([entries, size])}
    return Action(Group.declare({"w": (None, "f")}, shapes, "rotate"), ["w"])


def moments(entries: int, size: int, signal: float, spread: float) -> Any:
    shape = entries * size
    loc = signal * torch.randn(shape, dtype=torch.float64)
    scale = (spread * torch.randn(shape, dtype=torch.float64)).exp()
    return loc.requires_grad_(), scale.requires_grad_()


def independent(loc: Tensor, scale: Tensor) -> Any:
    return dist.Normal(loc, scale).to_event(1)


def correlated(loc: Tensor, scale: Tensor) -> Any:
    torch.manual_seed(len(loc))
    lower = 0.3 * torch.randn(len(loc), len(loc), dtype=torch.float64).tril(-1)
    still = torch.eye(len(loc), dtype=torch.float64)
    return dist.MultivariateNormal(loc, scale_tril=scale.diag() @ (still + lower))


def in_rows(loc: Tensor, scale: Tensor) -> Any:
    """A block for each entry of all units, but for the last."""
    rows = torch.arange(len(loc)).view(-1, 2)[:-1]
    lower = torch.tensor([[1.0, 0.0], [0.5, 1.0]], dtype=torch.float64)
    return UnitBlocks(loc, [rows], [scale[rows].unsqueeze(-1) * lower], scale)


def circle(points: int = 1000) -> Tensor:
    """Evenly spaced matrices of O(2), of both determinants."""
    angles = torch.arange(points, dtype=torch.float64) * 2 * math.pi / points
    rows = [torch.stack([angles.cos(), -angles.sin()], -1)]
    rows.append(torch.stack([angles.sin(), angles.cos()], -1))
    turns = torch.stack(rows, -2)
    return torch.cat([turns, turns * torch.tensor([1.0, -1.0], dtype=torch.float64)])


def averaged(base: Any, value: Tensor, matrices: Tensor) -> Tensor:
    """The log of the mean density of values turned by each of some matrices."""
    units = value.unflatten(-1, (-1, matrices.shape[-1]))
    turned = (units @ matrices.to(value).mT.unsqueeze(1)).flatten(-2)
    return base.log_prob(turned).logsumexp(0) - math.log(len(matrices))


@pytest.mark.parametrize("law", [independent, correlated, in_rows])
@pytest.mark.parametrize("case", [(3, 0.3, 0.3), (6, 1.0, 0.0), (5, 2.0, 1.0)])
def test_values_and_gradients_are_those_of_quadrature(law, case):
    torch.manual_seed(0)
    entries, signal, spread = case
    loc, scale = moments(entries, 2, signal, spread)
    base, action = law(loc, scale), factors(entries, 2)
    value = law(loc, scale).sample((4,)).requires_grad_()
    exact = averaged(base, value, circle())
    part = plan(base, action).parts[0]
    estimate = log_mean_exp(log_rotation_weights(base, part, value, 4000)[..., 0, 0, 0])
    found = base.log_prob(value) + estimate
    torch.testing.assert_close(found, exact, atol=0.1, rtol=0)
    leaves = (loc, scale, value)
    gradients = [
        torch.autograd.grad(v.sum(), leaves, retain_graph=True) for v in (found, exact)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).norm() < 0.1 * theirs.norm() + 0.1


@pytest.mark.parametrize("law", [independent, correlated])
def test_few_proposals_bound_the_density_and_have_its_gradient(law):
    """With four proposals, in the mean over draws of the base."""
    torch.manual_seed(1)
    loc, scale = moments(4, 2, 0.7, 0.5)
    base, action = law(loc, scale), factors(4, 2)
    estimator, above, ratios, gradients = RotationImportance(4), [], [], []
    for _ in range(40):
        value = base.rsample((25,))
        exact = averaged(base, value, circle(100))
        excess = estimator.log_prob(base, action, value) - exact
        gradients.append(torch.autograd.grad(excess.mean(), loc, retain_graph=True)[0])
        elsewhere = estimator.log_prob_elsewhere(base, action, value)
        above.append(excess.detach())
        ratios.append((elsewhere - exact).detach().exp())
    assert _deviations(torch.cat(above), 0.0) > -4.5
    assert float(torch.cat(above).mean()) < 0.12
    assert abs(_deviations(torch.cat(ratios), 1.0)) < 4.5
    assert bool((_deviations(torch.stack(gradients), 0.0).abs() < 6).all())


def _deviations(values: Tensor, expected: float) -> Any:
    """Return the standard errors by which a mean lies above what is expected."""
    return (values.mean(0) - expected) / values.std(0) * len(values) ** 0.5


def test_average_over_three_units_is_that_of_haar_draws():
    torch.manual_seed(2)
    loc, scale = moments(3, 3, 0.5, 0.3)
    base, action = independent(loc.detach(), scale.detach()), factors(3, 3)
    value = base.sample((3,))
    draws = action.group.sample((20_000,), dtype=torch.float64).rotations["f"]
    exact = averaged(base, value, draws)
    found = RotationImportance(2000).log_prob_elsewhere(base, action, value)
    torch.testing.assert_close(found, exact, atol=0.15, rtol=0)


def fisher_normaliser(n: int, s: float) -> float:
    r"""Return :math:`\int_{O(n)} e^{s \operatorname{tr} R} dR` (Baik & Rains 2001)."""
    half = n // 2
    j, k = np.arange(half)[:, None], np.arange(half)[None]

    def determinant(sign: int, step: int, count: int) -> float:
        entries = iv(j - k, 2 * s) + sign * iv(j + k + step, 2 * s)
        return float(np.linalg.det(entries[:count, :count])) if count else 1.0

    if n % 2:
        proper = math.exp(s) * determinant(-1, 1, half)
        return (proper + math.exp(-s) * determinant(1, 1, half)) / 2
    return (determinant(1, 0, half) / 2 + determinant(-1, 2, half - 1)) / 2


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("s", [0.7, 20.0])
def test_average_has_the_normaliser_of_the_matrix_fisher_distribution(n, s):
    torch.manual_seed(n)
    still = torch.eye(n, dtype=torch.float64).flatten()
    base, action = dist.Normal(still, 1.0).to_event(1), factors(n, n)
    found = RotationImportance(1000).log_prob_elsewhere(base, action, s * still)
    constant = -0.5 * n * (s**2 + 1) - 0.5 * n**2 * math.log(2 * math.pi)
    exact = constant + math.log(fisher_normaliser(n, s))
    assert float(found) == pytest.approx(exact, abs=0.25)


def nats_claimed_too_many(monkeypatch: Any, turned: bool) -> float:
    """The nats above the truth, over the error, of proposals around the mode that a
    climb from the identity finds.
    """
    torch.manual_seed(3)
    loc, scale = moments(3, 2, 0.3, 0.8)
    base, action = independent(loc.detach(), scale.detach()), factors(3, 2)
    value = base.sample((1500,))
    haar = rotations._haar
    matrix = torch.eye(2, dtype=torch.float64)

    def still(proposals: Any) -> Tensor:
        draws = len(proposals.form.linear)
        return matrix.expand(draws, rotations.MODES, 2, 2)

    def unturned(shape: Any, device: Any) -> Tensor:
        return matrix.expand(*shape, 2) if len(shape) == 2 else haar(shape, device)

    with monkeypatch.context() as patch:
        patch.setattr(rotations._Proposals, "_starts", still)
        if not turned:
            patch.setattr(rotations, "_haar", unturned)
        found = RotationImportance(2).log_prob(base, action, value)
    excess = averaged(base, value, circle(50)) - found
    return float(_deviations(excess, 0.0))


def test_climbs_from_the_identity_claim_too_much_unless_weights_are_turned(monkeypatch):
    assert nats_claimed_too_many(monkeypatch, turned=False) > 6
    assert nats_claimed_too_many(monkeypatch, turned=True) < 4


def beside_a_layer() -> Action:
    """Two copies of two units that rotate, beside three that permute and flip."""
    places = torch.arange(4)[None]
    rotating = Units("f", 2, (Axis("w", 0, places, 1),), None, 2, ROTATE)
    hidden = Axis("h", 0, torch.arange(3)[None], 1)
    units = [rotating, Units("h", 3, (hidden,), moves=frozenset({"permute", "flip"}))]
    shapes = {"w": torch.Size([4, 3]), "h": torch.Size([3]), "b": torch.Size([2])}
    return Action(Group(units, shapes), ["w", "b", "h"], shapes)


def test_other_units_and_copies_are_averaged_over_as_well():
    torch.manual_seed(4)
    action = beside_a_layer()
    loc, scale = 0.5 * torch.randn(17).double(), 0.5 + torch.rand(17).double()
    base = independent(loc, scale)
    value = base.sample((4,))
    exact = independent(loc[12:14], scale[12:14]).log_prob(value[:, 12:14])
    for copy in range(2):
        place = slice(6 * copy, 6 * copy + 6)
        own = independent(loc[place], scale[place])
        units = value[:, place].unflatten(-1, (2, 3))
        turned = (circle().unsqueeze(1) @ units).flatten(-2)
        exact = exact + own.log_prob(turned).logsumexp(0) - math.log(2000)
    own, orbit = independent(loc[14:], scale[14:]), list[Tensor]()
    for order in itertools.permutations(range(3)):
        for signs in itertools.product([1.0, -1.0], repeat=3):
            moved = value[:, 14:][:, list(order)] * torch.tensor(signs)
            orbit.append(own.log_prob(moved))
    exact = exact + torch.stack(orbit).logsumexp(0) - math.log(48)
    found = RotationImportance(3000).log_prob(base, action, value)
    torch.testing.assert_close(found, exact, atol=0.1, rtol=0)
    assert plan(base, action).group.moves == {"rotate", "permute", "flip"}


def attention(heads: int, temperatures: bool = False) -> Action:
    """Heads that permute, with two sets of two units that rotate in each of them."""
    places = torch.arange(2 * heads)
    along = {"q": 0, "k": 0, "v": 0, "o": 1}
    wholes = [Axis(site, dim, places.view(-1, 2).T) for site, dim in along.items()]
    shapes = dict.fromkeys("qkv", torch.Size([2 * heads, 1]))
    shapes["o"] = torch.Size([1, 2 * heads])
    if temperatures:
        wholes.append(Axis("t", 0, torch.arange(heads)[None]))
        shapes["t"] = torch.Size([heads])
    units = [Units("heads", heads, tuple(wholes), moves=frozenset({"permute"}))]
    for name in ("qk", "vo"):
        axes = tuple(Axis(site, along[site], places[None], 1) for site in name)
        units.append(Units(name, 2, axes, "heads", heads, ROTATE))
    return Action(Group(units, shapes), list(shapes), shapes)


def averaged_over_heads(loc: Tensor, scale: Tensor, value: Tensor) -> Tensor:
    """The log of the mean density over all permutations of heads, and by quadrature
    over the rotations of both sets in each of them.
    """
    heads = len(loc) // 8
    loc, scale, units = (v.unflatten(-1, (4, heads, 2)) for v in (loc, scale, value))
    cells = torch.zeros(len(value), heads, heads, dtype=torch.float64)
    for sites in ([0, 1], [2, 3]):
        turned = torch.einsum("rij,dshj->rdshi", circle(50), units[:, sites])
        base = dist.Normal(loc[sites].unsqueeze(2), scale[sites].unsqueeze(2))
        log_prob = base.log_prob(turned.unsqueeze(3)).sum((2, -1))  # place, source
        cells = cells + log_prob.logsumexp(0) - math.log(100)
    orders = [*itertools.permutations(range(heads))]
    by_order = [cells[:, range(heads), order].sum(-1) for order in orders]
    return torch.stack(by_order).logsumexp(0) - math.log(len(orders))


@pytest.mark.parametrize("heads", [2, 3])
def test_heads_that_rotate_inside_are_averaged_over_their_permutations(heads):
    torch.manual_seed(8)
    loc, scale = moments(8 * heads, 1, 1.0, 0.4)
    base, action = independent(loc, scale), attention(heads)
    value = base.sample((3,)).requires_grad_()
    exact = averaged_over_heads(loc, scale, value)
    found = RotationImportance(2000).log_prob_elsewhere(base, action, value)
    torch.testing.assert_close(found, exact, atol=0.1 * heads, rtol=0)
    leaves = (loc, scale, value)
    gradients = [
        torch.autograd.grad(v.sum(), leaves, retain_graph=True) for v in (found, exact)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).norm() < 0.1 * theirs.norm() + 0.1
    assert plan(base, action).group.names("permute") == ("heads",)


def test_few_proposals_bound_the_density_over_heads_and_have_its_gradient():
    """With four proposals, in the mean over draws of the base."""
    torch.manual_seed(9)
    loc, scale = moments(16, 1, 0.7, 0.4)
    base, action = independent(loc, scale), attention(2)
    estimator, above, ratios, gradients = RotationImportance(4), [], [], []
    for _ in range(24):
        value = base.rsample((25,))
        exact = averaged_over_heads(loc, scale, value)
        excess = estimator.log_prob(base, action, value) - exact
        gradients.append(torch.autograd.grad(excess.mean(), loc, retain_graph=True)[0])
        elsewhere = estimator.log_prob_elsewhere(base, action, value)
        above.append(excess.detach())
        ratios.append((elsewhere - exact).detach().exp())
    # the mean of 1 / estimate is that of 1 / density
    assert abs(_deviations((-torch.cat(above)).exp(), 1.0)) < 4.5
    assert _deviations(torch.cat(above), 0.0) > -4.5
    assert float(torch.cat(above).mean()) < 1.0  # of four rotations
    assert abs(_deviations(torch.cat(ratios), 1.0)) < 4.5
    assert bool((_deviations(torch.stack(gradients), 0.0).abs() < 6).all())


def test_heads_with_weights_that_do_not_rotate_are_permuted_alone():
    action = attention(2, temperatures=True)
    flat = independent(torch.zeros(action.dim), torch.ones(action.dim))
    planned = plan(flat, action)
    assert "hold no weights that don't rotate" in planned.remarks[0]
    assert len(planned.remarks) == 2
    assert planned.parts == ()


def test_sets_that_share_a_site_say_which_group_has_an_average():
    shapes = {"w": torch.Size([2, 1]), "u": torch.Size([3, 2]), "v": torch.Size([1, 3])}
    axes = {"w": ("f", None), "u": ("g", "f"), "v": (None, "g")}
    chain = Group.declare(axes, shapes, "rotate")
    flat = independent(torch.zeros(11), torch.ones(11))
    remarks = plan(flat, Action(chain, list(shapes), shapes)).remarks
    assert len(remarks) == 2
    assert "['g'] move the same sites; group.without(['g'])" in remarks[0]
    alone = Action(chain.without(["g"]), list(shapes), shapes)
    assert len(plan(flat, alone).parts) == 1


def test_entropies_and_draws_are_those_of_all_rotations():
    torch.manual_seed(5)
    loc, scale = moments(4, 2, 1.0, 0.3)
    base, action = independent(loc.detach(), scale.detach()), factors(4, 2)
    orbit = ps.Symmetrized(base, action)
    assert orbit.estimator == RotationImportance(4)
    found = orbit.entropy(1000)
    value = base.sample((4000,))
    exact = -averaged(base, value, circle(50)).mean()
    assert found.bound == "lower"
    assert float(found.value) == pytest.approx(float(exact), abs=0.25)
    draws = orbit.sample((4000,))
    assert not torch.allclose(draws, orbit._drawn(draws).base)
    second = draws.square().mean(0)
    torch.testing.assert_close(second, orbit.variance, atol=0, rtol=0.15)
    first, other = draws.unflatten(-1, (4, 2)).unbind(-1)
    assert (first * other).mean(0).abs().max() < 0.2  # 1 and more before


def test_what_is_not_averaged_over_rotations_is_said():
    torch.manual_seed(6)
    wide = factors(2, 17)
    flat = independent(torch.zeros(34), torch.ones(34))
    assert "17, more than 16" in plan(flat, wide).remarks[0]
    assert isinstance(usual_estimator(flat, wide), SinkhornImportance)
    shapes = {"a": torch.Size([2, 3]), "b": torch.Size([3])}
    axes = {"a": ("f", "g"), "b": ("g",)}
    moves = {"f": ("permute",), "g": ("rotate",)}
    table = Action(Group.declare(axes, shapes, moves), ["a", "b"], shapes)
    flat = independent(torch.zeros(9), torch.ones(9))
    assert "move the same sites" in plan(flat, table).remarks[0]
    assert isinstance(usual_estimator(flat, table), ExactOrbit)
    both = beside_a_layer()
    mixed = dist.MultivariateNormal(torch.zeros(17), torch.eye(17))
    assert "correlates" in plan(mixed, both).remarks[0]
    assert not plan(mixed, both).group.names("rotate")
    student = dist.StudentT(torch.full((6,), 4.0)).to_event(1)
    assert "isn't Gaussian" in plan(student, factors(3, 2)).remarks[0]
    assert plan(flat, factors(9, 1)).remarks == ()  # signs are all that one unit has


def bilinear(data: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
    pyro.sample("y", dist.Normal(w @ w.mT, 2.0).to_event(2), obs=data)


@pytest.mark.parametrize("signal", [0.0, 5.0])
def test_effective_proposals_are_those_of_the_weights(signal):
    """Kish's number, a mean over draws: all, 17 of 17, where turning changes nothing,
    and few where the proposal that is the draw itself outweighs the others.
    """
    torch.manual_seed(0)
    loc = signal * torch.randn(6, dtype=torch.float64)
    base, action = independent(loc, torch.ones(6).double()), factors(3, 2)
    value = base.sample((8,))
    estimator = RotationImportance(16)
    torch.manual_seed(1)
    (line,) = rotation_remarks(estimator, base, action, value)
    torch.manual_seed(1)
    (part,) = plan(base, action).parts
    weights = log_rotation_weights(base, part, value, 16)[..., 0, 0, 0].exp()
    effective = (weights.sum(0).square() / weights.square().sum(0)).mean()
    assert f": {float(effective):.1f} of 17 proposals are effective" in line
    assert (abs(float(effective) - 17) < 1e-6) == (signal == 0.0)


def test_evidence_is_averaged_over_rotations():
    torch.manual_seed(7)
    truth = torch.tensor([[1.5, 0.0], [0.5, 1.0], [-1.0, 0.7]])
    data = truth @ truth.mT
    group = factors(3, 2).group
    guide = ps.AutoSymmetrized(bilinear, group.finite).setup(data)
    with torch.no_grad():
        guide.base.loc.copy_(0.6 * truth.flatten())
        guide.base.scale = torch.full((6,), 0.7)
    found = ps.evidence(guide, data, symmetry=group, num_samples=500)
    base = guide.base.get_posterior()
    value = base.sample((2000,))
    gain = (base.log_prob(value) - averaged(base, value, circle(100))).detach()
    added = found.symmetrized_elbo - found.elbo
    assert added == pytest.approx(float(gain.mean()), abs=0.2)
    assert "averaged over O(2) of 'f'" in str(found)
    assert found.doubts == ()
    prior = torch.randn(100_000, 3, 2)
    log_likelihood = dist.Normal(prior @ prior.mT, 2.0).log_prob(data).sum((-1, -2))
    exact = float(log_mean_exp(log_likelihood))
    assert found.best.log_evidence == pytest.approx(exact, abs=0.2)
    given = ps.AutoSymmetrized(bilinear, group, base=guide.plain)
    assert "not over their rotations" in repr(given)
    assert "rotations" not in repr(guide)
    plain = ps.evidence(guide, data, symmetry=group, estimator=SinkhornImportance(4))
    assert "permutations and signs of ['f']" in str(plain)
