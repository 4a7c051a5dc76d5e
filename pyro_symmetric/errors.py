"""The base class of the library's errors."""


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
