"""One run of sklearn-contrib-bde in a process of its own, with its own JAX; called by ``microcanonical.py``.

Reads ``x, y, test_x`` from one NumPy file and settings from a line of JSON, writes the test rows' means and noises of
every draw and the processor time of each phase to another.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from bde import BdeRegressor
from bde.loss import GaussianNLL

SHORT = 10  # steps of a run that compiles as much as a long one: the difference is what steps cost


def main(data: str, result: str, settings: str) -> None:
    arrays = np.load(data)
    regressor = BdeRegressor(loss=GaussianNLL(), **json.loads(settings))
    seconds: dict[str, float] = {}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            found = jax.block_until_ready(call(*args, **kwargs))
            seconds[name] = time.process_time() - began
            return found

        return timed_call

    draw = regressor._draw_samples

    def drawn_twice(*args: Any, **kwargs: Any) -> Any:
        asked, thinning = regressor.n_samples, regressor.n_thinning
        regressor.n_samples, regressor.n_thinning = SHORT, 1
        timed("compiling", draw)(*args, **kwargs)
        regressor.n_samples, regressor.n_thinning = asked, thinning
        return timed("sampling", draw)(*args, **kwargs)

    regressor._draw_samples = drawn_twice
    regressor._warmup_sampler = timed("warmup", regressor._warmup_sampler)
    timed("all", lambda: regressor.fit(arrays["x"], arrays["y"]).positions_eT_)()
    raw = np.asarray(regressor.predict(arrays["test_x"], raw=True))  # (members, draws, rows, 2)
    scale = np.logaddexp(raw[..., 1].astype(float), 0.0) + 1e-6
    seconds["all"] -= seconds["compiling"]  # which was done once more than fit does
    np.savez(result, mean=raw[..., 0], scale=scale, **seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
