"""Tests of logitd.

OpenMP reads its variables when torch is imported, so they are set here. With the usual spin, torch's
second thread occupies a core that another worker needs: some tests then take ten times as long.
"""

import os

from logitd.model.openmp import spin_variables

os.environ.update(spin_variables(os.environ))
