"""Feed-forward networks evaluated by C++ code that this machine's compiler builds once.

*When.* ``engine="auto"`` or ``"native"``, for a :class:`~pyro_symmetric.models.BayesianModel` whose network is a chain
of linear layers and common activations, narrow enough for the cache, in float32 or float64 on the CPU. On such networks
it is 2 to 5 times as fast as PyTorch's operations and as ``torch.compile``
(``benchmarks/performance/sampler_gradients.py``).

*What is built.* ``dense.cpp``, which includes nothing but the standard library, in a few seconds; one line on the
standard error stream says so. The library is kept in a folder that this user alone may enter and write to
(``$XDG_CACHE_HOME/pyro_symmetric``, else ``~/.cache/pyro_symmetric``). Its name tells the source, the compiler and the
processor, and ends with a digest of what the file holds, which is compared before it is loaded. If there is no such
folder, the library is built anew for each process. ``$CXX`` names the compiler, else g++, clang++ or c++.

*What is the same.* A chain's result doesn't depend on the other chains nor on the number of threads, to the last bit.
It rounds differently from PyTorch's operations: on a machine without a compiler the same seed gives other draws, and
:class:`~pyro_symmetric.mcmc.density.Density` warns of that. ``engine="torch"`` gives the same draws on both machines.
"""

from pyro_symmetric.mcmc.density.native.loss import NativeLoss

__all__ = ["NativeLoss"]
