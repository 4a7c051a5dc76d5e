"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("pyro-symmetric")
except PackageNotFoundError:  # a source tree that isn't installed
    __version__ = "0+unknown"
