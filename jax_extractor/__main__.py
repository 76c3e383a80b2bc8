"""`python -m jax_extractor` is `jax-extractor`."""

import sys

from jax_extractor.cli import main

sys.exit(main())
