"""A model as the learner calls it: a packed micro-batch in, values of its action tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from estr.learner.packing import MicroBatch
from estr.models.forward import head_of, packed_hidden
from estr.models.head import HeadValues, linear_polarity


class Policy(nn.Module):
    """``model`` at a sampling temperature.

    All that a pass reads of the weights it reads inside these methods, where FSDP has them gathered.
    """

    def __init__(self, model: nn.Module, temperature: float, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.model, self.temperature, self.autocast = model, temperature, autocast

    if TYPE_CHECKING:

        def __call__(self, microbatch: MicroBatch, topk: bool = False) -> HeadValues: ...

    def forward(self, microbatch: MicroBatch, topk: bool = False) -> HeadValues:
        """log π and entropy ``[N]`` of the action tokens, and with ``topk`` log π ``[N, K]`` of the sampler's most
        likely tokens; float32, of the distribution after temperature over the support the tokens were drawn from."""
        return head_of(self.model).values(
            self._hidden(microbatch),
            microbatch.target,
            self.temperature,
            support=microbatch.support,
            others=microbatch.topk_ids if topk else None,
        )

    def polarity(self, microbatch: MicroBatch) -> Tensor:
        """Σ_v p_v² (log p_v + H) at each action token, ``[N]``, without graph; see ``linear_polarity``."""
        with torch.no_grad():
            hidden = self._hidden(microbatch)
            return linear_polarity(hidden, head_of(self.model), self.temperature, support=microbatch.support)

    def _hidden(self, microbatch: MicroBatch) -> Tensor:
        m = microbatch
        return packed_hidden(self.model, m.tokens, m.cu_seqlens, self.autocast, m.read).index_select(0, m.predict)
