"""Recorders of draws: to memory, or to a folder from which a broken run resumes and everybody reads at any time.

The folder of a run::

    draws-0000.safetensors    all draws, each site (chains, room, *site_shape), in place from the beginning
    checkpoint.safetensors    how many draws there are, what they are worth checking against, the state to resume from
    .pyro_symmetric.lock      held by the process that writes

A file of draws has its full size before the first draw is written, so a full disk is told then. Chains are contiguous
in it, so the draws of a finished run are mapped as they are: ``get_samples()`` copies nothing, and any program that
reads safetensors can do the same. Only what a checkpoint counts is there; it is replaced whole at every commit, after
the draws that it counts have reached the disk. If more draws are asked for than a file has room for, a larger one,
``draws-0001.safetensors``, takes its place.
"""

from pyro_symmetric.store.blocks import Blocks
from pyro_symmetric.store.files import Checkpoint, Contents, read_store
from pyro_symmetric.store.recorders import FolderRecorder, MemoryRecorder, Recorder
from pyro_symmetric.store.tasks import joint_metadata, read_folder

__all__ = [
    "Blocks",
    "Checkpoint",
    "Contents",
    "FolderRecorder",
    "MemoryRecorder",
    "Recorder",
    "joint_metadata",
    "read_folder",
    "read_store",
]
