"""`python -m tacit`: the command, where it is not on the path."""

import sys

from tacit.cli import main

sys.exit(main())
