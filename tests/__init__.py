"""Tests of logitd.

OpenMP reads its variables when torch is imported, so they are set here. With the usual spin, the
second thread of torch occupies a core that another worker needs, for up to ten times as long.
"""

import os

from logitd.model.openmp import spin_variables

os.environ.update(spin_variables(os.environ))
