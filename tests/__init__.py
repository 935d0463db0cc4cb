"""Tests of logitd.

OpenMP reads its environment variables when torch is imported, so this module sets them. With
OpenMP's default, the second thread of torch spins on a core that another worker needs, and some
tests take ten times as long.
"""

import os

from logitd.model.openmp import spin_variables

os.environ.update(spin_variables(os.environ))
