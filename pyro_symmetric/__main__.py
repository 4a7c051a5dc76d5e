"""``python -m pyro_symmetric`` runs the command line."""

import sys

from pyro_symmetric.cli import main

if __name__ == "__main__":
    sys.exit(main())
