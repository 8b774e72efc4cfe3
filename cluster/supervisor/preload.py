"""Ray imports this module in each process of a local Ray as the process starts, see spare_imports."""

from cluster.supervisor.spare_imports import import_if_requested

import_if_requested()
