"""Requests that schemathesis makes of the OpenAPI document: such as it allows, and such as it does not.

Its checks are made with every reply, and `oracle`'s, which know more: a stream's end, an error's shape. A
reply has `BOUND_S` to be complete; one that is not hangs. Some values are steered, as by chance hardly any
request would name an agent, a model or a turn that there is.
"""

from __future__ import annotations

import json
import random
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from orchestrator.gateway.openapi import document
from tests.fuzz.oracle import SSE, problem_of
from tests.fuzz.stage import AGENTS, CLASSES, MODELS
from tests.fuzz.tally import Tally

BOUND_S = 15.0
CHECKS = [
    content_type_conformance,
    status_code_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
KNOWN_TURNS = 50
SETTINGS = settings(
    deadline=None, database=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck)
)


class SchemaFuzz:
    """Requests to one service, one after the other."""

    def __init__(self, url: str, tally: Tally) -> None:
        self._url = url
        self._tally = tally
        self._client = httpx.Client(trust_env=False, timeout=BOUND_S)
        self._turns: deque[str] = deque(maxlen=KNOWN_TURNS)
        schema = schemathesis.openapi.from_dict(document())
        operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
        self._strategies = {
            (operation.label, mode): operation.as_strategy(generation_mode=mode)
            for mode in GenerationMode
            for operation in operations
        }

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def rounds(self, first_seed: int, examples: int) -> Iterator[str]:
        """So many requests of each kind to each operation, again and again; yields after each lot of them."""
        number = first_seed
        while True:
            kinds = list(self._strategies)
            random.Random(number).shuffle(kinds)
            for label, mode in kinds:
                try:
                    self._some(label, mode, number, examples)
                except Unsatisfiable:  # nothing about this operation can be wrong
                    del self._strategies[label, mode]
                yield f"{label} {mode.value} seed {number}"
            number += 1

    def _some(self, label: str, mode: GenerationMode, number: int, examples: int) -> None:
        @seed(number)
        @settings(SETTINGS, max_examples=examples)
        @given(case=self._strategies[label, mode], steer=st.integers(0, 255))
        def run(case: Case[Any], steer: int) -> None:
            self._steer(case, steer)
            self._ask(label, case)

        run()

    def _steer(self, case: Case[Any], steer: int) -> None:
        """By its bits: names that there are, in three cases of four."""
        if steer & 3:
            if "X-Swarm-Agent" in case.headers:
                case.headers["X-Swarm-Agent"] = AGENTS[steer % len(AGENTS)]
            if "X-Swarm-Priority" in case.headers:
                case.headers["X-Swarm-Priority"] = CLASSES[steer % len(CLASSES)]
        if steer & 12 and isinstance(case.body, dict):
            bulk = case.path.endswith(("embeddings", "rerank"))
            if bulk or isinstance(case.body.get("model"), str):
                case.body["model"] = MODELS[bulk != (steer & 240 == 0)]
        if steer & 12 and "/models/" in case.path:
            case.path_parameters["id"] = MODELS[steer % len(MODELS)]
        if steer & 48 and "/turns/" in case.path and self._turns:
            case.path_parameters["id"] = self._turns[steer % len(self._turns)]

    def _ask(self, label: str, case: Case[Any]) -> None:
        kwargs = case.as_transport_kwargs(base_url=self._url)
        content = kwargs.get("data")
        if "json" in kwargs:
            content = json.dumps(kwargs["json"]).encode()
        try:
            request = self._client.build_request(
                case.method,
                kwargs["url"],
                params=kwargs.get("params") or None,
                headers=[
                    (name.encode(), str(value).encode("latin-1")) for name, value in kwargs["headers"].items()
                ],
                content=content,
            )
        except (UnicodeEncodeError, TypeError, httpx.InvalidURL):
            return  # no client can send it
        began = time.monotonic()
        try:
            response = self._send(request, began)
        except httpx.LocalProtocolError:
            return
        except (TimeoutError, httpx.TimeoutException):
            self._tally.reply(label, 0, time.monotonic() - began)
            self._tally.problem("hung", (label, case, content))
            return
        except httpx.HTTPError as error:
            self._tally.reply(label, 0, time.monotonic() - began)
            self._tally.problem(f"broken off: {type(error).__name__}", (label, case, content))
            return
        self._tally.reply(label, response.status_code, time.monotonic() - began)
        self._check(label, case, response, content)

    def _send(self, request: httpx.Request, began: float) -> httpx.Response:
        """The whole reply. Raises TimeoutError when that takes longer than the bound."""
        response = self._client.send(request, stream=True)
        body = b""
        try:
            for piece in response.iter_raw():
                body += piece
                if time.monotonic() - began > BOUND_S:
                    raise TimeoutError
        finally:
            response.close()
        whole = httpx.Response(response.status_code, headers=response.headers, content=body, request=request)
        whole.elapsed = timedelta(seconds=time.monotonic() - began)
        return whole

    def _check(self, label: str, case: Case[Any], response: httpx.Response, content: bytes | None) -> None:
        turn = response.headers.get("x-swarm-turn")
        if turn is not None:
            self._turns.append(turn)
        path = response.request.url.path
        wrong = problem_of(path, response.status_code, response.headers, response.content, case.method)
        if wrong is not None:
            self._tally.problem(wrong, (label, case, content, response.content[:300]))
            return
        checks = CHECKS if SSE not in response.headers["content-type"] else CHECKS[:-1]
        try:
            case.validate_response(response, checks=checks)
        except FailureGroup as group:
            for failure in group.exceptions:
                assert isinstance(failure, Failure)
                what = f"{type(failure).__name__}: {failure.title}"
                self._tally.problem(what, (label, response.status_code, failure.message, content))
