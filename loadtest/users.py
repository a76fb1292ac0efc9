"""Locust's users: completions and chat, in a closed loop and in an open one."""

from __future__ import annotations

import random
import time
from typing import Any, ClassVar

import gevent
from gevent.pool import Group
from locust import User, task
from locust.env import Environment
from locust.exception import StopTest

from loadtest.client import Client
from loadtest.clock import Clock
from loadtest.plan import Endpoint, Plan
from loadtest.prompts import dealt
from loadtest.recorder import Recorder
from loadtest.requests import Requests
from loadtest.sample import Outcome
from minedraft_core.config import ConfigError

_MANY = 1 << 16
_PAUSE = 0.1


class Session:
    """What all users share."""

    def __init__(self, plan: Plan, prompts: list[str], key: str | None, recorder: Recorder, clock: Clock) -> None:
        self.plan = plan
        self.recorder = recorder
        self._prompts = prompts
        self._key = key
        self._clock = clock
        self._model = plan.model
        self._requests: Requests | None = None

    def meet(self, host: str) -> None:
        """See that the server answers and has a model. Raises ConfigError otherwise."""
        client = self.client(host, 1, lasting=False)
        self._model = self._model or client.first_model()
        client.close()

    def client(self, host: str, connections: int, *, lasting: bool) -> Client:
        """Connections for one user."""
        return Client(self._clock, host, self._key, self.plan.timeout, connections, lasting=lasting, insecure=self.plan.insecure)

    def requests(self, client: Client) -> Requests:
        """The requests of a test; its first user asks the server for the model where none is named."""
        if self._requests is None:
            self._model = self._model or client.first_model()
            self._requests = Requests(self.plan, self._model, dealt(self._prompts, self.plan.seed))
        return self._requests

    def begin(self, **_: Any) -> None:
        """A new test: the same requests again."""
        self._requests = None


class LoadUser(User):
    """A user of one endpoint. `endpoint` and `session` are set by the class made for a test."""

    abstract = True
    host: str = "http://127.0.0.1:8000"
    endpoint: ClassVar[Endpoint]
    session: ClassVar[Session]
    connections: ClassVar[int]
    lasting: ClassVar[bool]

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        try:
            self._client = self.session.client(self.host, self.connections, lasting=self.lasting)
            self._requests = self.session.requests(self._client)
        except ConfigError as error:
            raise StopTest(str(error)) from None

    def one(self) -> Outcome:
        """Send one request and record it; how it ended."""
        sample, fault = self._client.send(self._requests.make(self.endpoint))
        self.session.recorder.add(sample)
        if isinstance(fault, gevent.GreenletExit):
            raise fault
        return sample.outcome

    def on_stop(self) -> None:
        """Close the connections."""
        self._client.close()


class ClosedLoopUser(LoadUser):
    """Sends its next request when the last one has ended, over one connection."""

    abstract = True
    connections = 1
    lasting = True

    @task
    def ask(self) -> None:
        """One request."""
        if self.one() is Outcome.FAILED:
            # A server that refuses at once is not flooded.
            gevent.sleep(_PAUSE)


class OpenLoopUser(LoadUser):
    """A Poisson source: sends requests at random moments, whether or not earlier ones have ended.

    Every request has a connection of its own: a server closes those that are idle for some seconds, which would look like failures.
    """

    abstract = True
    connections = _MANY
    lasting = False

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._running = Group()
        self._draws = random.Random(self._requests.draw_seed())
        self._due = time.perf_counter()

    def wait_time(self) -> float:
        """Seconds until the next request; counted from when the last one was due, so that the rate does not drift."""
        self._due += self._draws.expovariate(self.session.plan.rate)
        return max(0.0, self._due - time.perf_counter())

    def on_start(self) -> None:
        """Wait for the first request to be due."""
        self.wait()

    @task
    def ask(self) -> None:
        """Let one request go its way."""
        self._running.spawn(self.one)

    def on_stop(self) -> None:
        """Let what runs end, as long as Locust waits for its users; then cut it short."""
        try:
            self._running.join(timeout=self.environment.stop_timeout)
        finally:
            self._running.kill()
            super().on_stop()


def users_of(session: Session) -> list[type[User]]:
    """The classes of users that a plan asks for, each with its part of the users."""
    base = ClosedLoopUser if session.plan.arrivals == "closed" else OpenLoopUser
    return [
        type(
            f"{base.__name__.removesuffix('User')}{endpoint.capitalize()}",
            (base,),
            {"abstract": False, "endpoint": endpoint, "session": session},
        )
        for endpoint in session.plan.endpoints
    ]
