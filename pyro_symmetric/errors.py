"""The base class of the library's errors, and the first line of any error."""


class Error(Exception):
    """Base class of the library's own errors, so that one ``except`` catches them.

    >>> (
    ...     issubclass(ps.store.StoreError, ps.Error),
    ...     issubclass(ps.store.StoreError, ValueError),
    ... )
    (True, True)

    Its subclasses are ``discovery.UntraceableError``, ``discovery.InconclusiveError``
    and ``store.StoreError``, which are also ``ValueError``. Invalid arguments raise
    plain ``TypeError`` or ``ValueError``.
    """


def first_line(error: object) -> str:
    """Return the first line of an error's message, or its name and arguments."""
    return (str(error).strip() or repr(error)).splitlines()[0]
