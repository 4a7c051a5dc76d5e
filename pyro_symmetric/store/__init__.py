"""Draws on disk: written as they are made, readable meanwhile, whole after any interruption.

A store is a folder::

    checkpoint.safetensors    how far it is, and all that is needed to resume; replaced whole at every commit
    samples/0000.<site>.bin   a site's draws, end to end, each (chains, *site_shape)
    statistics/....bin        likewise, each (chains,)
    chunks.bin                for every commit that brought draws: how many there were then, each file's CRC-32, and
                              that of this list so far, which the checkpoint repeats
    .pyro_symmetric.lock      held by the process that writes

Files only grow, by whole draws, so a store may hold far more than memory does. Only what a commit has named counts: it
syncs the draws first and the checkpoint last, so what follows the last commit, half-written draws included, is cut off
when the writing resumes. Readers map the files. Whatever is read is compared with its checksum first, by default.

A folder with ``tasks.json`` holds one store for each group of chains, in folders ``task-0000`` and so on, and once all
are done one of all chains side by side, ``joined``, which is what readers map; so it takes twice the room. That copy is
made anew if it is damaged.
"""

from pyro_symmetric.store.layout import Column, Draws
from pyro_symmetric.store.reader import join, read_store, read_tasks
from pyro_symmetric.store.writer import DrawStore, Mark

__all__ = ["Column", "DrawStore", "Draws", "Mark", "join", "read_store", "read_tasks"]
