"""The command ``estr``: arguments, exit statuses, one-sentence errors."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from estr.cli.stopping import leave_on_signals, say, signals_stop, silence
from estr.errors import EstrError, MissingExtraError, nearest

_OVERLONG = re.compile(r"[^\s/]{200,}")
Command = Callable[[argparse.Namespace], None]


class Parser(argparse.ArgumentParser):
    """Usage errors in one sentence that names the nearest valid word; exit status 2."""

    def error(self, message: str) -> NoReturn:
        if "invalid choice" in message and self._subparsers is not None:
            given = message.split("'")[1] if "'" in message else ""
            message = f"there is no command {given!r}{nearest(given, COMMANDS)}"
        self.exit(2, f"estr: {message} (see: {self.prog} --help)\n")


def _train(arguments: argparse.Namespace) -> None:
    from estr.cli.train import train

    train(arguments.config, arguments.output, arguments.set, dry_run=arguments.dry_run)


def _resume(arguments: argparse.Namespace) -> None:
    from estr.cli.train import resume

    resume(arguments.directory, accept_changes=arguments.accept_changes)


def _eval(arguments: argparse.Namespace) -> None:
    from estr.cli.evaluate import evaluate

    evaluate(arguments.model, arguments.set, samples=arguments.samples, as_json=arguments.json)


def _inspect(arguments: argparse.Namespace) -> None:
    from estr.cli.inspecting import inspect

    inspect(
        arguments.source,
        as_json=arguments.json,
        html=arguments.html,
        preset=arguments.preset,
        mapping=arguments.map,
        tokenizer=arguments.tokenizer,
        recipes=arguments.recipe,
    )


def _calibrate(arguments: argparse.Namespace) -> None:
    from estr.cli.calibrate import calibrate_command

    calibrate_command(
        arguments.source,
        arguments.set,
        share=arguments.share,
        steps=arguments.steps,
        output=arguments.output,
        as_json=arguments.json,
    )


def _replay(arguments: argparse.Namespace) -> None:
    from estr.cli.replaying import replay_command

    replay_command(arguments.directory, arguments.recipe, arguments.set, as_json=arguments.json)


def _plan(arguments: argparse.Namespace) -> None:
    from estr.cli.planning import plan

    plan(arguments.source, arguments.set, as_json=arguments.json, html=arguments.html)


def _compare(arguments: argparse.Namespace) -> None:
    from estr.cli.comparing import Options, compare

    options = Options(
        recipes=arguments.recipes,
        seeds=arguments.seeds,
        sets=arguments.set,
        output=arguments.output,
        workers=arguments.workers,
        match=arguments.match,
        tune=arguments.tune,
        report_only=arguments.report_only,
        dry_run=arguments.dry_run,
        as_json=arguments.json,
    )
    compare(arguments.config, options)


def _report(arguments: argparse.Namespace) -> None:
    from estr.cli.reporting import report

    report(arguments.runs, arguments.html)


def _recipes(arguments: argparse.Namespace) -> None:
    from estr.cli.listing import show_recipe, show_recipes

    show_recipe(arguments.name) if arguments.name else show_recipes()


def _tasks(arguments: argparse.Namespace) -> None:
    from estr.cli.listing import show_tasks

    show_tasks()


def _config(arguments: argparse.Namespace) -> None:
    from estr.cli.keys import show_keys

    show_keys(arguments.key, as_json=arguments.json)


def _runs(arguments: argparse.Namespace) -> None:
    from estr.cli.runs import show_runs

    show_runs(arguments.directory, as_json=arguments.json)


COMMANDS: dict[str, Command] = {
    "train": _train,
    "resume": _resume,
    "runs": _runs,
    "eval": _eval,
    "inspect": _inspect,
    "calibrate": _calibrate,
    "replay": _replay,
    "compare": _compare,
    "plan": _plan,
    "report": _report,
    "recipes": _recipes,
    "tasks": _tasks,
    "config": _config,
}


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(prog="estr", description="Asynchronous RL for language models with entropy-scaled trust regions.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    sets = {"action": "append", "default": [], "metavar": "SECTION.KEY=VALUE"}

    train = commands.add_parser("train", help="a whole run")
    train.add_argument("config", help="TOML file")
    train.add_argument("--output", metavar="DIR", help="run directory; must not exist")
    train.add_argument("--set", **sets, help="override a key of the file (repeatable)")  # type: ignore[arg-type]
    train.add_argument("--dry-run", action="store_true", help="check and print the resolved configuration, then stop")

    resume = commands.add_parser("resume", help="go on from the last checkpoint of a run")
    resume.add_argument("directory", help="run directory")
    resume.add_argument(
        "--accept-changes", action="store_true", help="go on although configuration, task or model have changed"
    )

    runs = commands.add_parser("runs", help="the runs in a directory: state, step, reward, size")
    runs.add_argument("directory", nargs="?", default="runs", metavar="DIR", help="default: runs")
    runs.add_argument("--json", action="store_true", help="one JSON array on standard output")

    evaluate = commands.add_parser("eval", help="score a model or a run's last checkpoint on held-out problems")
    evaluate.add_argument("model", metavar="MODEL_OR_RUN", help="model directory, hub name, builtin:… or run directory")
    evaluate.add_argument("--set", **sets, help="configuration, for example task.name=gsm8k")  # type: ignore[arg-type]
    evaluate.add_argument("--samples", type=_positive, default=1, metavar="K", help="samples a problem (default 1)")
    evaluate.add_argument("--json", action="store_true", help="one JSON object on standard output")

    _add_inspect(commands)
    _add_calibrate(commands, sets)
    _add_replay(commands, sets)
    _add_compare(commands, sets)
    _add_plan(commands, sets)

    report = commands.add_parser("report", help="the HTML report of one or more runs")
    report.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    report.add_argument("--html", metavar="OUT", help="where to write it (default: report.html in the run)")

    recipes = commands.add_parser("recipes", help="methods there are, of all families, with sources")
    recipes.add_argument("name", nargs="?", help="show one in full")

    commands.add_parser("tasks", help="tasks there are, with options")
    config = commands.add_parser("config", help="the keys of a configuration: type, default, allowed values, meaning")
    config.add_argument("key", nargs="?", metavar="SECTION[.KEY]", help="one section or one key (default: all)")
    config.add_argument("--json", action="store_true", help="one JSON array on standard output")
    for command in commands.choices.values():
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser("inspect", help="what the off-policy ratios of stored rollouts are made of")
    inspect.add_argument(
        "source", metavar="FILE_OR_RUN", help="run directory, Parquet or JSONL file, or a directory of them"
    )
    inspect.add_argument("--json", action="store_true", help="one JSON object on standard output")
    inspect.add_argument("--html", metavar="OUT", help="a page for people")
    inspect.add_argument(
        "--preset", help="whose columns: estr, trl, verl, prime-rl, slime (default: seen from the file)"
    )
    inspect.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="OURS=THEIRS",
        help="a column's name in the file, for example logprob=rollout_log_probs (repeatable)",
    )
    inspect.add_argument(
        "--recipe",
        action="append",
        default=[],
        metavar="MODULE:NAME",
        help="a recipe of your own to try beside the built-in ones (repeatable)",
    )
    inspect.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json, or a directory with one, to show text")


def _add_calibrate(commands: Any, sets: dict[str, Any]) -> None:
    calibrate = commands.add_parser(
        "calibrate", help="noise between engine and learner at learning rate 0, and tau and eps from it"
    )
    calibrate.add_argument("source", metavar="CONFIG_OR_RUN", help="TOML file, or a run (its last checkpoint is used)")
    calibrate.add_argument("--set", **sets, help="override a key (repeatable)")
    calibrate.add_argument(
        "--share", type=float, default=0.999, help="share of tokens without staleness to keep (default 0.999)"
    )
    calibrate.add_argument("--steps", type=_positive, default=8, metavar="N", help="rollout batches (default 8)")
    calibrate.add_argument("--output", metavar="FILE", help="default: calibration.json here, or in the run")
    calibrate.add_argument("--json", action="store_true", help="one JSON object on standard output")


def _add_replay(commands: Any, sets: dict[str, Any]) -> None:
    replay = commands.add_parser("replay", help="stored optimizer steps of a run under another recipe")
    replay.add_argument("directory", metavar="RUN", help="run directory")
    replay.add_argument("--recipe", metavar="X", help="objective to replay (default: the run's own)")
    replay.add_argument("--set", **sets, help="override a key, for example objective.tau=0.5 (repeatable)")
    replay.add_argument("--json", action="store_true", help="one JSON object on standard output")


def _add_plan(commands: Any, sets: dict[str, Any]) -> None:
    plan = commands.add_parser(
        "plan", help="simulate a cluster: engines for each learner rank, max_staleness, throughput, idle time"
    )
    plan.add_argument("source", metavar="PLAN_OR_RUN", help="TOML file of a plan, or a run whose parameters are taken")
    plan.add_argument("--set", **sets, help="override a key, for example cluster.engines=4 (repeatable)")
    plan.add_argument("--json", action="store_true", help="one JSON object on standard output")
    plan.add_argument("--html", metavar="OUT", help="a page for people")


def _add_compare(commands: Any, sets: dict[str, Any]) -> None:
    compare = commands.add_parser("compare", help="the same run for several recipes and seeds; table, plots, intervals")
    compare.add_argument("config", help="TOML file: a configuration, with or without [compare]")
    compare.add_argument("--recipes", metavar="A,B", help="recipes or variants (default: those of the file)")
    compare.add_argument("--seeds", metavar="0,1", help="seeds that are reported (default: 0,1,2,3,4)")
    compare.add_argument("--output", metavar="DIR", help="directory of the study (default: runs/<name of the file>)")
    compare.add_argument("--workers", type=_positive, metavar="N", help="runs at once (default: one per core)")
    compare.add_argument("--set", **sets, help="override a key for every run (repeatable)")
    compare.add_argument("--match", metavar="masked_fraction", help="choose thresholds so that all drop the same share")
    compare.add_argument("--tune", action="store_true", help="choose each recipe's best of its grid, on other seeds")
    compare.add_argument("--report-only", action="store_true", help="train nothing: the result of what has ended")
    compare.add_argument("--dry-run", action="store_true", help="check and name the runs, then stop")
    compare.add_argument("--json", action="store_true", help="the result as one JSON object on standard output")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _version() -> str:
    from estr import __version__

    return f"estr {__version__}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    with signals_stop():
        try:
            status = _run(argv)
        except KeyboardInterrupt:
            status = _fail("interrupted", 130)
    if argv is None:
        leave_on_signals(status)
    return status


def _run(argv: Sequence[str] | None) -> int:
    arguments = build_parser().parse_args(argv)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    debug = arguments.debug or bool(os.environ.get("ESTR_DEBUG"))
    try:
        COMMANDS[arguments.command](arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except EstrError as error:
        if debug:
            raise
        return _fail(str(error), error.exit_status)
    except ModuleNotFoundError as error:
        if debug:
            raise
        return _fail(str(MissingExtraError(error.name or "?", "train")), 2)
    except BrokenPipeError:
        silence(sys.stdout)
        return 0
    except Exception as error:
        if debug:
            raise
        return _fail(
            f"{type(error).__name__}: {error} (this should have been a better sentence; --debug shows more)", 1
        )
    return 0


def _fail(sentence: str, status: int) -> int:
    say(f"estr: {one_line(sentence)}")
    return status


def one_line(sentence: str) -> str:
    """Without line breaks and other control characters, and of overlong words only the beginning."""
    line = " ".join(sentence.split())
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
    return _OVERLONG.sub(lambda word: word[0][:60] + "…", line)


if __name__ == "__main__":
    sys.exit(main())
