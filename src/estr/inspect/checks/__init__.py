"""Checks for faults that asynchronous RL software really has; the codes are rows of FAULTS.md.

The order matters: a fault that explains the traces of another stands before it.
"""

from __future__ import annotations

from estr.inspect.checks.base import CANNOT_TELL, Check, Finding
from estr.inspect.checks.entropies import (
    entropy_before_temperature,
    entropy_of_part,
    entropy_one_off,
    entropy_over_vocabulary,
)
from estr.inspect.checks.ratios import (
    draft_logprobs,
    logprobs_divided_by_temperature,
    raw_logprobs,
    support_differs,
)
from estr.inspect.checks.rows import wrong_rewards, wrong_rows
from estr.inspect.checks.tokens import engine_noise, missing_logprobs, repetition_penalty
from estr.inspect.dump import Dump

_BOTH = ("logprob", "learner_logprob")
_ENTROPY = (("entropy", "logprob"), ("learner_entropy", "learner_logprob"))
_RATIO = ("A1", "A2", "A3", "A20")
_PLACE = ("A10", "A12")

CHECKS: tuple[Check, ...] = (
    Check("A5", "action tokens without a log-probability", (("logprob",),), missing_logprobs),
    Check(
        "A1",
        "log-probabilities divided by the temperature",
        ((*_BOTH, "temperature"),),
        logprobs_divided_by_temperature,
    ),
    Check("A2", "raw log-probabilities on one side", ((*_BOTH, "temperature"),), raw_logprobs, ("A1",)),
    Check("A3", "different supports", (_BOTH,), support_differs, ("A1", "A2")),
    Check("A20", "log-probabilities of a draft or a wrong position", (_BOTH,), draft_logprobs, ("A1", "A2", "A3")),
    Check("A4", "a hidden repetition penalty", ((*_BOTH, "tokens"),), repetition_penalty, _RATIO),
    Check("A10", "entropy one position off", _ENTROPY, entropy_one_off, _RATIO),
    Check("A12", "entropies attached to the wrong rows", _ENTROPY, wrong_rows, ("A10", *_RATIO)),
    Check("A12", "rewards attached to the wrong rows", (("reward", "row_advantage", "group_id"),), wrong_rewards),
    Check(
        "A15",
        "entropy before temperature",
        tuple((*columns, "temperature") for columns in _ENTROPY),
        entropy_before_temperature,
        (*_RATIO, *_PLACE),
    ),
    Check("A3", "entropy over another support", _ENTROPY, entropy_over_vocabulary, (*_RATIO, *_PLACE, "A15")),
    Check("A13", "entropy of a part of the distribution", _ENTROPY, entropy_of_part, (*_RATIO, *_PLACE, "A15")),
    Check(
        "A17",
        "noise between engine and learner",
        ((*_BOTH, "version", "target_version"),),
        engine_noise,
        (*_RATIO, "A4"),
    ),
)


def run_checks(dump: Dump) -> list[Finding]:
    """All findings: faults first, then one ``cannot-tell`` for each fault of which no check had the columns it needs.

    Empty where nothing is wrong and everything could be checked. A check that has its columns but too few tokens, or
    whose fault cannot occur (no temperature other than 1, no truncated sampling), is silent. Rows that an exploring
    sampler drew from another distribution than the one log μ belongs to are left out.
    """
    if not dump.standard.all():
        dump = dump.select(dump.standard)
    faults: list[Finding] = []
    untold: dict[str, Finding] = {}
    told: set[str] = set()
    for check in CHECKS:
        if not {finding.code for finding in faults}.isdisjoint(check.explained_by):
            told.add(check.code)
            continue
        finding = check.run(dump)
        if finding is not None and finding.code == CANNOT_TELL:
            untold.setdefault(check.code, finding)
            continue
        told.add(check.code)
        if finding is not None:
            faults.append(finding)
    return faults + [finding for code, finding in untold.items() if code not in told]


__all__ = ["CANNOT_TELL", "CHECKS", "Check", "Finding", "run_checks"]
