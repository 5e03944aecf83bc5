"""An inspection in plain lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from estr.diagnostics import PowerLawFit
from estr.inspect.checks import CANNOT_TELL
from estr.inspect.inspection import Inspection
from estr.inspect.recipes import Disagreement
from estr.report.decode import CONTROLS
from estr.report.series import number, percent
from estr.report.verdict import GATE_NAMES

SHOWN_RECIPES = 8
SHOWN_EXAMPLES = 6
SPREAD = 4.0


def summary_lines(inspection: Inspection) -> Iterator[str]:
    """Sections with a heading each: findings first, then what δ is made of."""
    yield from _head(inspection)
    yield from _findings(inspection)
    yield from _delta(inspection)
    yield from _staleness(inspection)
    yield from _recipes(inspection)
    yield from _examples(inspection)
    for note in (*inspection.dump.notes, *inspection.verdicts.notes):
        yield f"note: {visible(note)}"


def visible(text: str) -> str:
    """Text from a file with control characters and line breaks made visible, so that it cannot move the cursor."""
    shown = text.translate(CONTROLS).replace("\n", "↵").replace("\t", "→")
    return "".join(c if c.isprintable() or c == "\u00a0" else f"‹U+{ord(c):04X}›" for c in shown)


def _head(inspection: Inspection) -> Iterator[str]:
    dump = inspection.dump
    yield f"{dump.source} ({dump.preset} columns)"
    yield (
        f"{dump.token_count:,} action tokens of {dump.trajectories:,} trajectories, entropy {dump.entropy_kind}, "
        f"learner's log-probability at {inspection.delta.tokens:,}"
    )


def _findings(inspection: Inspection) -> Iterator[str]:
    faults = [finding for finding in inspection.findings if finding.code != CANNOT_TELL]
    untold = [finding for finding in inspection.findings if finding.code == CANNOT_TELL]
    yield ""
    yield "What is wrong" if faults else "Nothing is wrong that could be checked."
    for finding in faults:
        yield f"  {finding.code:<4} {visible(finding.sentence)}"
    if untold:
        yield "Not checked for want of columns"
        for finding in untold:
            yield f"  {finding.evidence['fault']:<4} no {', no '.join(finding.evidence['missing'])}"


def _delta(inspection: Inspection) -> Iterator[str]:
    delta, fit, parts = inspection.delta, inspection.fit, inspection.decomposition
    if not delta.tokens:
        return
    yield ""
    yield "δ = log π − log μ"
    quantiles = ", ".join(f"{100 * float(q):g} % {value:+.3f}" for q, value in delta.quantiles.items())
    yield f"  mean {number(delta.mean)}, standard deviation {number(delta.std)}, mean |δ| {number(delta.absolute)}"
    yield f"  quantiles {quantiles}"
    if fit is not None and spread(fit) < SPREAD:
        yield "  the entropies are too alike to fit how δ grows with H"
    elif fit is not None:
        yield (
            f"  E[δ²] grows as H to the power {number(fit.exponent)} (in proportion: 1), slope {number(fit.slope)}, "
            f"R² {number(fit.r2)}"
        )
    for one in inspection.by_lag:
        fitted = one.fit is not None and spread(one.fit) >= SPREAD
        power = f", exponent {number(one.fit.exponent)}, R² {number(one.fit.r2)}" if fitted and one.fit else ""
        yield f"  lag {one.lag}: {one.tokens:,} tokens, mean δ² {number(one.squared)}{power}"
    yield f"  {shares(inspection)}"
    if parts.zero_lag is not None:
        yield (
            f"  at zero lag, {parts.zero_lag_tokens:,} tokens: mean δ² {number(parts.zero_lag)}, as noise of "
            f"{number(parts.logit_noise)} on every logit would give"
        )


def spread(fit: PowerLawFit) -> float:
    """How many times the mean H of the outer bins differs; a fit over less than SPREAD says little."""
    means = fit.bins.entropy[(fit.bins.count > 0) & (fit.bins.entropy > 0)]
    return float(means.max() / means.min()) if len(means) else 1.0


def shares(inspection: Inspection) -> str:
    """The decomposition in one sentence."""
    parts = inspection.decomposition
    if parts.noise is None or parts.total is None:
        return parts.note
    named = (
        ("engine noise", parts.noise),
        ("inter-trajectory staleness", parts.inter),
        ("intra-trajectory staleness", parts.intra),
        ("unexplained", parts.unexplained),
    )
    words = ", ".join(
        f"{name} {percent(value / parts.total) if value is not None and parts.total else '–'}" for name, value in named
    )
    return f"mean δ² {number(parts.total)}: {words}"


def _staleness(inspection: Inspection) -> Iterator[str]:
    switches = inspection.switches
    if not switches.count:
        return
    yield ""
    yield f"{switches.count:,} version switches inside {switches.trajectories:,} trajectories"
    for name, change in (("H", switches.entropy_change), ("|δ|", switches.delta_change)):
        if change.mean is not None:
            yield f"  {name} after minus before: {change.mean:+.4f} ± {change.error or 0.0:.4f}"


def _recipes(inspection: Inspection) -> Iterator[str]:
    masked = inspection.verdicts.masked
    if not masked:
        return
    yield ""
    yield f"Share of {inspection.verdicts.tokens:,} tokens that recipes drop at their defaults"
    gates = inspection.verdicts.gates
    yield "  " + ", ".join(f"{GATE_NAMES[name]} {percent(share)}" for name, share in gates.items())
    ranked = sorted(masked.items(), key=lambda entry: -entry[1])
    rest = [entry for entry in ranked if entry[0] not in gates and entry[1] > 0]
    for name, share in rest[:SHOWN_RECIPES]:
        yield f"  {name:<32} {percent(share)}"
    silent = sum(share == 0 for share in masked.values())
    left_out = len(inspection.verdicts.left_out)
    yield f"  {silent} recipes drop nothing, {left_out} could not be computed (--json lists all)"


def pair_words(pair: Disagreement) -> str:
    """A kind of disagreement and how common it is."""
    words = f"{GATE_NAMES[pair.kept_by]} keeps, {GATE_NAMES[pair.dropped_by]} stops"
    return f"{words}: {pair.tokens:,} tokens ({percent(pair.share)})"


def _examples(inspection: Inspection) -> Iterator[str]:
    pairs = inspection.verdicts.disagreements
    if not pairs:
        return
    yield ""
    yield "Where gates disagree (the token in [brackets], the largest |δ| of each kind)"
    for pair in pairs[:SHOWN_EXAMPLES]:
        yield f"  {pair_words(pair)}"
        example = inspection.example(pair.examples[0])
        text = visible(f"{example.before[-60:]}[{example.token}]{example.after[:40]}") if example.token else ""
        yield f"    δ {number(example.delta)}, H {number(example.entropy)}, {visible(example.row)}: {text}"
