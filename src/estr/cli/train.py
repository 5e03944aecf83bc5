"""``estr train`` and ``estr resume``."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from estr.cli.checking import check_model
from estr.cli.live import LineReporter, make_reporter
from estr.cli.stopping import say
from estr.config import Config
from estr.config.load import dump_config, load_config
from estr.config.validate import validate_config
from estr.errors import EstrError, RunError, UsageError
from estr.runtime.builders import build_task, default_output
from estr.runtime.divergence import Divergence, Rollbacks
from estr.runtime.interrupts import Interrupted, Interrupts
from estr.runtime.reporter import Reporter, Summary
from estr.runtime.run import Run
from estr.runtime.setup import prepared
from estr.storage.checkpoints import Checkpoint, checkpoint_steps, latest_checkpoint
from estr.storage.metrics import read_metrics
from estr.storage.run_directory import RunDirectory
from estr.storage.run_record import Ending, RunRecord

_STOPPING = "note: stopping after this step, with a checkpoint; interrupt once more to stop now"


def train(config_path: str, output: str | None, sets: list[str], *, dry_run: bool = False) -> None:
    """A whole run from a configuration file."""
    config, notices = load_config(config_path, sets)
    notices += validate_config(config)
    build_task(config)
    notices += check_model(config.model) if dry_run else []
    for notice in notices:
        say(f"note: {notice}")
    if dry_run:
        print(dump_config(config), end="")
        return
    target = Path(output or config.run.output or default_output(config, time.strftime("%Y%m%d-%H%M%S")))
    with RunDirectory.create(target, config) as directory:
        try:
            _run(config, directory, None)
        except UsageError:
            _remove_unused(directory)
            raise


def resume(path: str, *, accept_changes: bool = False) -> None:
    """Go on with a run from its last checkpoint, or from the start where there is none yet.

    One that has all its steps and was killed before it could end properly is ended properly.
    """
    with RunDirectory.open(path, lock=True) as directory:
        config = directory.config()
        validate_config(config)
        latest = latest_checkpoint(directory)
        for notice in latest.notices:
            say(f"note: {notice}")
        if latest.checkpoint is not None and latest.checkpoint.step > config.run.steps:
            raise UsageError(
                f"run.steps = {config.run.steps} in {directory.config_path} is less than the {latest.checkpoint.step} "
                "steps that are done; raise it to go on, or to that number to leave it as it is"
            )
        complete = latest.checkpoint is not None and latest.checkpoint.step >= config.run.steps
        record = RunRecord(directory)
        if latest.checkpoint is not None and complete and (record.ending == "finished" or not record.begun):
            print(f"{path} is finished: {latest.checkpoint.step} of {config.run.steps} steps are done")
            _write_missing_report(directory)
            return
        _run(config, directory, latest.checkpoint, accept_changes=accept_changes)


def _remove_unused(directory: RunDirectory) -> None:
    """What could not even begin leaves no run directory in the way of the next attempt."""
    if not read_metrics(directory) and not checkpoint_steps(directory):
        shutil.rmtree(directory.path, ignore_errors=True)


def _run(
    config: Config, directory: RunDirectory, checkpoint: Checkpoint | None, *, accept_changes: bool = False
) -> None:
    reporter = make_reporter()
    try:
        summary = _drive(config, directory, checkpoint, reporter, accept_changes)
    except Interrupted:
        reporter.close()
        _ended(directory, "interrupted")
        with contextlib.suppress(KeyboardInterrupt):
            _write_report(directory.path, reporter)
        raise Interrupted(f"interrupted; go on with: estr resume {directory.path}") from None
    except KeyboardInterrupt:
        reporter.close()
        _ended(directory, "interrupted")
        raise Interrupted(f"stopped at once; go on with: estr resume {directory.path}") from None
    except Divergence as error:
        reporter.close()
        _ended(directory, "diverged", str(error))
        raise RunError(
            f"{error}; lower learner.learning_rate or learner.max_grad_norm in {directory.config_path} and go on with: "
            f"estr resume {directory.path} --accept-changes"
        ) from error
    except OSError as error:
        reporter.close()
        _ended(directory, "failed", str(error))
        raise RunError(f"{error.strerror or error} ({error.filename or directory.path})") from error
    except EstrError as error:
        reporter.close()
        if error.exit_status == RunError.exit_status:
            _ended(directory, "failed", str(error))
            raise RunError(f"{error}; what was reached is in {directory.path}") from error
        raise
    reporter.close()
    _ended(directory, "finished")
    try:
        report = _write_report(directory.path, reporter)
    except KeyboardInterrupt:
        raise Interrupted(f"the run is finished; write its report with: estr report {directory.path}") from None
    _print_summary(summary, report)


def _write_missing_report(directory: RunDirectory) -> None:
    if not directory.report_path.exists() and (report := _write_report(directory.path, LineReporter())) is not None:
        print(f"report {report}")


def _ended(directory: RunDirectory, ending: Ending, reason: str = "") -> None:
    """Note how the run ended; on a disk that refuses, its lock and its checkpoints still say that it did."""
    with contextlib.suppress(EstrError):
        RunRecord(directory).end(ending, reason)


def _drive(
    config: Config, directory: RunDirectory, checkpoint: Checkpoint | None, reporter: Reporter, accept_changes: bool
) -> Summary:
    """The run to its end; from its last good checkpoint again where it diverges and may go back."""
    rollbacks = Rollbacks(directory, config)
    with Interrupts(_STOPPING) as interrupts:
        while True:
            slowed = rollbacks.slowed(config)
            try:
                with prepared(
                    slowed, directory, reporter, interrupts, checkpoint, accept_changes=accept_changes
                ) as parts:
                    return Run(parts, interrupts).go()
            except Divergence as diagnosis:
                checkpoint = rollbacks.go_back(diagnosis)
                place = f"step {checkpoint.step}" if checkpoint is not None else "the start"
                rate = config.learner.learning_rate * rollbacks.factor
                reporter.notice(f"going back to {place} with learning rate {rate:.3g}: {diagnosis}")


def _write_report(path: Path, reporter: Reporter) -> Path | None:
    """The report, or a notice: whatever is wrong with a picture of a run, the run itself has not failed."""
    from estr.report import write_report

    try:
        return write_report([path], path / "report.html")
    except Exception as error:
        reporter.notice(f"the report could not be written, try again with: estr report {path} ({error})")
        return None


def _print_summary(summary: Summary, report: Path | None) -> None:
    print(f"steps {summary.steps}, {summary.seconds:.0f} s")
    if summary.last_eval is not None and summary.first_eval is not None:
        print(
            f"held-out reward {summary.first_eval:.3f} at the start, {summary.last_eval:.3f} at the end, "
            f"{summary.best_eval:.3f} at best"
        )
    if summary.spanning_share is not None:
        print(
            f"trained trajectories that span two or more weight versions (after step 10): {summary.spanning_share:.1%}"
        )
    if summary.dropped or summary.skipped_steps:
        print(f"groups dropped {summary.dropped}, steps skipped {summary.skipped_steps}")
    print(f"run directory {summary.directory}")
    if report is not None:
        print(f"report {report}")
