"""What Locust loads: `locust -f loadtest/locustfile.py`, or `minedraft loadtest run`, which finds this file."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import gevent
from locust import User, events, stats, task
from locust.env import Environment
from locust.runners import LocalRunner, Runner

from loadtest import shapes
from loadtest.arguments import Parser, add_arguments, prompts_of, read_key, read_plan
from loadtest.clock import Clock
from loadtest.figures import faults, summarise
from loadtest.plan import Plan
from loadtest.prompts import load_prompts
from loadtest.recorder import Recorder
from loadtest.results import lines_of, make_results, write_samples
from loadtest.users import LoadUser, Session, users_of
from minedraft_core.config import ConfigError
from minedraft_core.errors import USAGE_ERROR, error_line

_LOG = logging.getLogger("minedraft.loadtest")
_MISSED = 1
_SPAWN_RATE = 100.0


class PlannedUser(User):
    """Stands for the users that the plan asks for: Locust wants a class before it reads the flags."""

    @task
    def wait_for_the_plan(self) -> None:
        """Never runs: the classes of the plan replace this one."""
        raise NotImplementedError


def three_digits(value: float) -> float:
    """A time as Locust's tables keep it: to three digits, because the two of Locust's own are off by up to 5 %."""
    return float(f"{value:.3g}")


class Outputs:
    """Empties the files when a test begins, writes what it found when it has ended, and sets the exit code."""

    def __init__(self, environment: Environment, options: Namespace, plan: Plan, recorder: Recorder) -> None:
        self._environment = environment
        self._files = [Path(name) for name in (options.results, options.samples) if name is not None]
        self._options = options
        self._plan = plan
        self._recorder = recorder

    def check(self) -> None:
        """Raise OSError for a file that cannot be written; what it holds stays until a test begins."""
        for path in self._files:
            path.open("ab").close()

    def empty(self, **_: Any) -> None:
        """Leave nothing of an earlier test, so that its figures are not taken for those of a test that was killed."""
        for path in self._files:
            path.write_bytes(b"")

    def stop(self, **_: Any) -> None:
        """Stop the test if it still runs."""
        runner = self._environment.runner
        assert runner is not None
        runner.stop()

    def write(self, **_: Any) -> None:
        """Write the files and the lines on the terminal."""
        plan, recorder = self._plan, self._recorder
        if not recorder.started:
            return
        figures = summarise(recorder.samples, plan.limits, plan.gpus)
        missed = faults(figures, plan.demands)
        host = self._environment.host or LoadUser.host
        results = make_results(plan, host, recorder.most_users, figures, missed, overloaded=recorder.overloaded)
        self._environment.process_exit_code = _MISSED if missed else 0
        for line in lines_of(results):
            _LOG.info(line)
        try:
            if self._options.results is not None:
                results.write(Path(self._options.results))
            if self._options.samples is not None:
                write_samples(Path(self._options.samples), recorder.samples)
        except OSError as error:
            _LOG.error("%s cannot be written: %s", error.filename, error.strerror)
            self._environment.process_exit_code = USAGE_ERROR
        if self._options.csv_prefix:
            # Locust writes its tables once a second, and not at the end.
            gevent.sleep(1.2 * stats.CSV_STATS_INTERVAL_SEC)


@events.init_command_line_parser.add_listener
def declare(parser: Parser, **_: Any) -> None:
    """Add the flags."""
    add_arguments(parser)


@events.init.add_listener
def prepare(environment: Environment, **_: Any) -> None:
    """Read the flags and put the plan's users and shape into the environment."""
    options, runner = environment.parsed_options, environment.runner
    assert options is not None
    try:
        _check_runner(runner)
        plan, key = read_plan(options), read_key(options)
        prompts = [] if plan.input_tokens is not None else load_prompts(prompts_of(options))
        clock = Clock()
        recorder = Recorder(environment, plan, clock)
        session = Session(plan, prompts, key, recorder, clock)
        if options.headless:
            session.meet(environment.host or LoadUser.host)
        outputs = Outputs(environment, options, plan, recorder)
        outputs.check()
    except (ConfigError, OSError) as error:
        _LOG.error(error_line(error))
        sys.exit(USAGE_ERROR)
    environment.user_classes = users_of(session)
    if plan.stages:
        environment.shape_class = shapes.StagedShape(plan.stages, options.spawn_rate or _SPAWN_RATE)
        environment.shape_class.runner = runner
    environment.events.test_start.add_listener(outputs.empty)
    environment.events.test_start.add_listener(session.begin)
    environment.events.test_stop.add_listener(outputs.write)
    # A test that a signal ends has to stop before Locust reads the exit code.
    environment.events.quitting.add_listener(outputs.stop)


def _check_runner(runner: Runner | None) -> None:
    if not isinstance(runner, LocalRunner):
        raise ConfigError("--processes, --master and --worker: one process measures; for more load start several load tests")


# Locust's documented way of setting how finely its tables keep times.
stats.bucket_response_time = three_digits  # type: ignore[assignment]
