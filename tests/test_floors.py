"""The floors of the package: a room imports only from rooms on the floors below it.

Every module and every package at the top of ``pyro_symmetric`` is a room and stands on
one floor. Rooms of one floor don't know each other. An import counts wherever it
stands: at the top of a module, inside a function, or under ``TYPE_CHECKING``.
"""

import grimp
import pytest

GRAPH = grimp.build_graph("pyro_symmetric", cache_dir=None)

# From below. What knows no symmetry comes first, the samplers included.
FLOORS = [
    ["_process", "errors"],
    ["_version", "arguments", "networks", "plots"],
    ["store", "weights"],
    ["models"],
    ["density"],
    ["posterior"],
    ["mcmc", "references"],
    ["datasets", "groups", "infer"],
    ["discovery"],
    ["canonical"],
    ["distributions"],
    ["alignment"],
    ["compare"],
    ["ensembles", "guides"],
    ["study"],
    ["cli"],
    ["__main__"],
]
# Floors inside a room, likewise.
INSIDE = {
    "density": [
        ["graphs", "site_checks", "special_functions", "stand_ins"],
        ["enumeration"],
        ["traced"],
        ["eager"],
        ["lanes", "layers"],
        ["compiled"],
        ["density"],
    ],
    "mcmc": [
        ["digest", "kernels", "stopping"],
        ["settings", "starts"],
        ["resume"],
        ["run"],
        ["tasks"],
        ["sample"],
    ],
    "posterior": [
        ["statistics"],
        ["diagnostics", "predict"],
        ["tables"],
        ["summaries"],
        ["posterior"],
        ["checkpoints"],
    ],
    "discovery": [
        ["registry", "rotations"],
        ["symmetry"],
        ["integer_algebra", "reads", "trace"],
        ["flow", "linear_twin"],
        ["verify"],
        ["cells", "model_density", "propagate", "rules", "trials"],
        ["repeats", "whole_sites"],
        ["exponents"],
        [
            *("alike", "completeness", "conservation_law", "members", "model_check"),
            *("valid_sets", "wholes"),
        ],
        ["model_likelihood", "model_permutations"],
        ["model_signs"],
        ["model_group"],
        ["model_symmetry"],
        ["find"],
        ["model_carried"],
    ],
    "alignment": [
        ["assignment", "elements", "moments", "terms"],
        ["barrier", "covers", "relabel", "scale_fit"],
        ["descent", "nearest"],
        ["pairwise"],
        ["many"],
    ],
}


@pytest.mark.parametrize(
    ("inside", "floors"), [("", FLOORS), *INSIDE.items()], ids=["package", *INSIDE]
)
def test_rooms_import_only_from_the_floors_below(inside, floors):
    whole = ".".join(filter(None, ["pyro_symmetric", inside]))
    rooms = {name.removeprefix(f"{whole}.") for name in GRAPH.find_children(whole)}
    assert sorted(room for floor in floors for room in floor) == sorted(rooms)
    layers = [set(floor) for floor in reversed(floors)]
    assert (
        GRAPH.find_illegal_dependencies_for_layers(layers=layers, containers={whole})
        == set()
    )
