"""Imported by the process that engine processes are forked from: it ends with the learner, whatever its children do.

Without this a stopped or endless engine would keep that process, and so itself, alive after a SIGKILL of the learner.
"""

from __future__ import annotations

from estr.runtime.kernel import end_with_parent

end_with_parent()
