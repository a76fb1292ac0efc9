"""HTTP requests counted by route, method and status. The labels take few values, whatever clients send."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from http import HTTPStatus

from prometheus_client import CollectorRegistry, Counter
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST"})
NO_ROUTE = "none"
OTHER_METHOD = "other"


class RequestCounter:
    """The counter, in a registry of its own.

    `routes` are the application's; they may grow until the first request. Those of `generating` are present at zero from the start: the
    first error then counts as a rise.
    """

    def __init__(self, routes: Sequence[BaseRoute], generating: Iterable[str]) -> None:
        self.registry = CollectorRegistry()
        self._routes = routes
        self._counter = Counter(
            "minedraft_http_requests_total",
            "HTTP requests answered, by route, method and status; 499: the client left.",
            ("route", "method", "status"),
            registry=self.registry,
        )
        for path in sorted(generating):
            for status in (HTTPStatus.OK, HTTPStatus.INTERNAL_SERVER_ERROR):
                self._counter.labels(path, "POST", int(status))

    def count(self, scope: Scope, status: int) -> None:
        """Count a request that was answered with `status`."""
        method = scope["method"] if scope["method"] in _METHODS else OTHER_METHOD
        self._counter.labels(self._route(scope), method, status).inc()

    def _route(self, scope: Scope) -> str:
        """The template of the path, also of a request that was refused before it was routed."""
        return next((_template(route) for route in self._routes if route.matches(scope)[0] is not Match.NONE), NO_ROUTE)


def _template(route: BaseRoute) -> str:
    return str(getattr(route, "path", NO_ROUTE))
