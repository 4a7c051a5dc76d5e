"""The base of the library's own errors."""


class Error(Exception):
    """Base class of the errors that only this library raises, so that one ``except`` catches them.

    >>> from pathlib import Path
    >>> _ = ps.Posterior({"w": torch.zeros(1, 3, 2)}, kind="chains").save("kept")
    >>> _ = Path("kept", "checkpoint.safetensors").write_text("no checkpoint")
    >>> try:
    ...     ps.Posterior.load("kept")
    ... except ps.Error as error:
    ...     print(type(error).__name__)
    StoreError

    They are ``ValueError`` at the same time: ``discovery.UntraceableError``, ``discovery.InconclusiveError`` and
    ``store.StoreError``. Arguments that can't be right raise plain ``TypeError`` or ``ValueError``.
    """
