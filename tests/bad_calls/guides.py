"""Bad calls of guides, of what is made of them and of what they are judged by."""

import torch
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal

import pyro_symmetric as ps
from pyro_symmetric.guides.layout import layout_of

from .table import (
    ARRAY,
    COUNTS,
    DEVICES,
    FLAGS,
    INF,
    NAN,
    POSITIVE,
    THINGS,
    Calls,
    Made,
    changed,
    data,
    group,
    guide,
    model,
    network,
    posterior,
    unused_guide,
    weights,
)

SHAPES = (3, "34", 1.5, (1.5,), (-1,), None)
NO_GUIDE = (*THINGS, ARRAY, {}, AutoDiagonalNormal, Made("unused", unused_guide))
NO_GROUP = (*THINGS, ARRAY, {}, Made("network", network))
NO_ELEMENT = (*THINGS, ARRAY, Made("group", group), Made("batch", lambda: group().identity((2,))))


def symmetrized(**options):
    """A set-up symmetrised guide of the model."""
    result = ps.AutoSymmetrized(model(), group(), **options)
    result.setup(*data())
    return result


def log_joint(weights):
    """The model's, of all data."""
    return model().log_joint(weights, *data())


def delta():
    """A point, which has no density."""
    result = AutoDelta(model())
    result(*data())
    return result


def blocks():
    """A set-up guide of unit blocks."""
    return ps.AutoUnitBlocks(model(), group()).setup(*data())


def gaussian(words=None, **moments):
    """Calls of a Gaussian guide's constructor; each moment with bad values of it."""
    good = {
        "loc": torch.zeros(17),
        "scale": torch.ones(17),
        "cov_factor": torch.zeros(17, 2),
        "scale_tril": torch.eye(17),
    }
    return Calls(
        "AutoGaussian",
        ps.AutoGaussian,
        lambda: {"layout": layout_of(guide()), **{name: good[name] for name in moments}},
        {"layout": (*THINGS, (), layout_of), **moments},
        words=words or {},
    )


LOCS = (torch.zeros(16), torch.zeros(2, 17), torch.full((17,), NAN))
SCALES = (torch.ones(16), torch.zeros(17), -torch.ones(17), torch.full((17,), NAN))
NO_PATH = (None, 3, "", "missing/folder/guide")

CALLS = (
    gaussian(loc=LOCS, scale=SCALES),
    gaussian(loc=LOCS, scale=SCALES, cov_factor=(torch.ones(17), torch.ones(16, 2))),
    gaussian(
        loc=LOCS,
        scale_tril=(torch.eye(16), -torch.eye(17), torch.ones(17), torch.ones(17, 17)),
    ),
    Calls(
        "AutoUnitBlocks",
        ps.AutoUnitBlocks,
        lambda: {"model": model(), "group": group()},
        {
            "model": (*THINGS, ARRAY),
            "group": NO_GROUP,
            "init_loc_fn": (3, "banana"),
            "init_scale": (*POSITIVE, None),
        },
        words={"group": ""},
    ),
    Calls("AutoUnitBlocks.get_posterior", lambda **o: blocks().get_posterior(**o), dict, {}, misspelt=False),
    Calls("AutoGaussian.get_posterior", lambda **o: guide().get_posterior(**o), dict, {}, misspelt=False),
    Calls(
        "AutoSymmetrized",
        ps.AutoSymmetrized,
        lambda: {"model": model(), "group": group()},
        {
            "model": (*THINGS, ARRAY),
            "group": NO_GROUP,
            "base": (*THINGS, AutoDelta, torch.nn.Linear),
            "estimator": (3, "InfoNCE", ps.InfoNCE),
            "sticking_the_landing": FLAGS,
            "init_loc_fn": (3, "banana"),
        },
        words={"group": ""},
    ),
    Calls(
        "symmetrize",
        ps.symmetrize,
        lambda: {"guide": lambda: None, "group": group()},
        {"guide": THINGS, "group": NO_GROUP, "estimator": (3, "InfoNCE", ps.InfoNCE)},
        words={"group": ""},
    ),
    Calls(
        "AutoSymmetrized.sample_posterior",
        lambda **o: symmetrized().sample_posterior(**o),
        dict,
        {"sample_shape": SHAPES, "orbit": FLAGS},
    ),
    *(
        Calls(
            f"AutoSymmetrized.{name}",
            lambda name=name, **o: getattr(symmetrized(), name)(**o),
            dict,
            {},
            misspelt=False,
        )
        for name in ("get_posterior", "sample_latent", "median")
    ),
    Calls(
        "push_forward",
        ps.push_forward,
        lambda: {"guide": guide(), "element": group().identity()},
        {"guide": NO_GUIDE, "element": NO_ELEMENT},
        words={"guide": ""},
    ),
    Calls(
        "sample_posterior",
        ps.guides.sample_posterior,
        lambda: {"guide": guide()},
        {"guide": NO_GUIDE, "sample_shape": SHAPES},
        words={"guide": ""},
    ),
    Calls(
        "sample_posterior",
        lambda **o: guide().pack(**o),
        lambda: {"weights": weights(4)},
        {
            "weights": (
                *(*THINGS, ARRAY, {}, {"0.weight": ARRAY}, {"0.weight": torch.zeros(3, 2)}),
                Made("transposed", lambda: changed("0.weight", lambda v: v.mT)),
                Made("array", lambda: changed("0.weight", lambda v: v.numpy())),
                Made("batches", lambda: changed("0.weight", lambda v: v.expand(4, 3, 2))),
            )
        },
        misspelt=False,
    ),
    Calls(
        "sample_posterior",
        lambda **o: guide().unpack(**o),
        lambda: {"latent": torch.zeros(4, 17)},
        {"latent": (*THINGS, ARRAY, torch.zeros(16), torch.tensor(0.0))},
        misspelt=False,
    ),
    Calls(
        "evidence",
        lambda guide, **options: ps.evidence(guide, *data(), **options),
        lambda: {"guide": ps.AutoSymmetrized(model(), group(), base=guide()).setup(*data()), "num_samples": 4},
        {
            "guide": (*NO_GUIDE, Made("delta", delta), Made("not symmetrised", guide)),
            "estimator": (3, "InfoNCE", ps.InfoNCE),
            "posterior": (3, ARRAY, {}, Made("network", network)),
            "num_samples": (*COUNTS, 1, None),
            "chunk": (*COUNTS, None),
        },
        words={"guide": ""},
        misspelt=False,
    ),
    Calls(
        "interpolate",
        ps.interpolate,
        lambda: {"guide_0": guide(), "guide_1": guide(), "t": 0.5},
        {
            "guide_0": (*NO_GUIDE, Made("weights", weights)),
            "guide_1": THINGS,
            "t": (-0.1, 1.1, NAN, "0.5", None, True),
        },
        words={"guide_0": "", "guide_1": ""},
    ),
    Calls(
        "barycentre",
        ps.barycentre,
        lambda: {"guides": [guide(), guide()]},
        {
            "guides": (*THINGS, [], [3], Made("one", guide), Made("mixed", lambda: [guide(), weights()])),
            "weights": ([1.0], [-1.0, 2.0], [0.0, 0.0], [NAN, 1.0], [INF, 1.0], 3),
        },
        words={"guides": ""},
    ),
    Calls(
        "save_guide",
        ps.save_guide,
        lambda: {"guide": guide(), "path": "guide.safetensors"},
        {"guide": (*NO_GUIDE, Made("delta", delta)), "path": NO_PATH},
        words={"guide": "", "path": ""},
    ),
    Calls(
        "load_guide",
        lambda **o: (
            ps.save_guide(guide(), "guide"),
            posterior().save("posterior"),
            ps.load_guide(**{"path": "guide", **o}),
        ),
        dict,
        {"path": (*NO_PATH, "posterior", "."), "device": DEVICES},
        words={"path": ""},
    ),
)
