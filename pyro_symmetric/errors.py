"""The base class of the library's errors."""


class Error(Exception):
    """Base class of the library's own errors, so that one ``except`` catches them.

    >>> from pathlib import Path
    >>> _ = ps.Posterior({"w": torch.zeros(1, 3, 2)}, kind="chains").save("kept")
    >>> _ = Path("kept", "checkpoint.safetensors").write_text("no checkpoint")
    >>> try:
    ...     ps.Posterior.load("kept")
    ... except ps.Error as error:
    ...     print(type(error).__name__)
    StoreError

    Its subclasses are ``discovery.UntraceableError``, ``discovery.InconclusiveError`` and ``store.StoreError``, which
    are also ``ValueError``. Invalid arguments raise plain ``TypeError`` or ``ValueError``.
    """
