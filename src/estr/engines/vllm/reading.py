"""From the log-probabilities that vLLM returns with a token to what the learner has to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estr.engines.interval import entropy_interval
from estr.engines.vllm.rows import SampledToken

_TIES = 8  # tokens as likely as the k-th that top-k sampling may keep beside it


@dataclass(frozen=True)
class Reading:
    """What is asked for with every token, and how it is read.

    ``stamped``: the plugin gives H and the version with every token. ``exact``: H is the plugin's; else it is an
    interval from ``entropy_topk`` log-probabilities.
    ``top_k``, ``top_p`` and ``min_p`` are those of the sampler: with them the support is recorded. ``record``: most
    likely tokens recorded with their log μ.
    """

    vocabulary: int
    exact: bool = True
    stamped: bool = True
    entropy_topk: int = 64
    top_k: int = 0
    record: int = 0

    @property
    def likely(self) -> int:
        """Most likely tokens whose log-probabilities are asked for."""
        wanted = max(self.record, 0 if self.exact else self.entropy_topk, self.top_k + _TIES if self.top_k else 0)
        return min(wanted, self.vocabulary)

    @property
    def logprobs(self) -> int:
        """What SamplingParams.logprobs has to be; the stamp counts as one."""
        return self.likely + self.stamped

    def read(self, ids: Sequence[int], logprobs: Sequence[float], version: int) -> SampledToken:
        """One position: the sampled token first, then its stamp (if ``stamped``), then the most likely tokens.

        ``version`` is that of the weights where there is no stamp.
        """
        first = 1 + self.stamped
        top_ids = np.array(ids[first : first + self.likely], np.int32)
        top = np.array(logprobs[first : first + self.likely], np.float32)
        low, high = self._entropy(logprobs, top)
        logprob, support = logprobs[0], None
        if self.top_k:
            support = np.sort(top_ids[np.isfinite(top)])
            if len(support) == self.likely < self.vocabulary:
                # More tokens are tied for the last place than were asked for: what was kept is not known, and the
                # learner leaves out a token without a log-probability.
                logprob = float("nan")
        return SampledToken(
            token=ids[0],
            logprob=logprob,
            entropy=low,
            version=ids[1] - self.vocabulary if self.stamped else version,
            entropy_upper=high,
            support=support,
            topk=(top_ids[: self.record], top[: self.record]) if self.record else None,
        )

    def _entropy(self, logprobs: Sequence[float], top: NDArray[np.float32]) -> tuple[float, float | None]:
        if self.exact:
            return logprobs[1], None
        low, high = entropy_interval(top[None, : self.entropy_topk], self.vocabulary)
        return float(low[0]), float(high[0])
