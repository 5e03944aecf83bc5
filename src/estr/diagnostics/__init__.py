"""What stored tokens say: δ against entropy, staleness, and what each gate would keep. Pure numpy."""

from estr.diagnostics.entropy import EntropyBins, PowerLawFit, delta_by_entropy, fit_power_law
from estr.diagnostics.keep import (
    DEFAULTS,
    delta_score,
    estr_keep,
    icepop_keep,
    keep_mask,
    keep_masks,
    kpop_keep,
    ppo_keep,
)
from estr.diagnostics.staleness import Staleness, integer_histogram, multi_version_share, trajectory_staleness

__all__ = [
    "DEFAULTS",
    "EntropyBins",
    "PowerLawFit",
    "Staleness",
    "delta_by_entropy",
    "delta_score",
    "estr_keep",
    "fit_power_law",
    "icepop_keep",
    "integer_histogram",
    "keep_mask",
    "keep_masks",
    "kpop_keep",
    "multi_version_share",
    "ppo_keep",
    "trajectory_staleness",
]
