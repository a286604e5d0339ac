"""`python -m lockstep`: the same as the `lockstep` command."""

import sys

from .cli import main

sys.exit(main())
