"""The base of the library's own errors."""


class Error(Exception):
    """Base class of the errors that only this library raises, so that one ``except`` catches them.

    >>> from pathlib import Path
    >>> _ = Path("broken.safetensors").write_text("no posterior")
    >>> try:
    ...     ps.Posterior.load("broken.safetensors")
    ... except ps.Error as error:
    ...     print(type(error).__name__)
    StoreError

    They are ``ValueError`` at the same time: ``discovery.UntraceableError``, ``discovery.InconclusiveError``,
    ``storage.StoreError`` and ``mcmc.OtherRun``. Arguments that can't be right raise plain ``TypeError`` or
    ``ValueError``.
    """
