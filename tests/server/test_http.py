from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import openai
import pytest
from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families
from vllm.exceptions import QueueOverflowError

from server.logs import JsonFormatter
from tests.server.conftest import Start
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_openais_client(fake: FakeEngine, start: Start) -> None:
    running = await start(api_key=["sk-1"])
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="sk-1", max_retries=0) as client:
        whole = await client.completions.create(model="served", prompt="say hello", max_tokens=20)
        assert whole.choices[0].text == "hello"
        stream = await client.completions.create(model="served", prompt="say hello", max_tokens=20, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello"
        assert [model.id async for model in client.models.list()] == ["served", "alias"]
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            await client.completions.create(model="gpt-9", prompt="x")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(model="served", prompt="x", temperature=3)
        fake.tokens_per_step, fake.step_seconds = 1, 0.01
        stream = await client.completions.create(model="served", prompt="go on", max_tokens=100, stream=True)
        await anext(stream)
        fake.die()
        with pytest.raises(openai.APIError, match="engine"):
            [_ async for _ in stream]


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/completions", "/version", "/metrics", "/docs", "/openapi.json", "/nothing", "/health/"]
)
@pytest.mark.parametrize("value", [None, "", "Bearer", "Bearer wrong", "Basic sk-1", "sk-1", "Bearer sk-1x", "Bearer schlüssel2"])
async def test_guarded_paths(guarded_client: httpx.AsyncClient, path: str, value: str | None) -> None:
    headers = [] if value is None else [(b"authorization", value.encode())]
    response = await guarded_client.get(path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["type"] == "authentication_error"
    assert "x-request-id" in response.headers


@pytest.mark.parametrize("value", ["Bearer sk-1", "bearer sk-2", "Bearer schlüssel"])
async def test_keys(guarded_client: httpx.AsyncClient, value: str) -> None:
    response = await guarded_client.get("/v1/models", headers=[(b"authorization", value.encode())])
    assert response.status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_can_be_asked_for_without_a_body(client: httpx.AsyncClient, path: str) -> None:
    response = await client.head(path)
    assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_open_paths(guarded_client: httpx.AsyncClient, path: str) -> None:
    assert (await guarded_client.get(path)).status_code == 200


async def test_metrics_may_be_open(start: Start) -> None:
    client = (await start(api_key=["sk-1"], metrics_open=True)).client
    assert (await client.get("/metrics")).status_code == 200
    assert (await client.get("/version")).status_code == 401


async def test_metrics_of_all_registries(start: Start) -> None:
    registries = CollectorRegistry(), CollectorRegistry()
    Counter("first", "of the first registry", registry=registries[0]).inc()
    Counter("own:second", "of the second registry", registry=registries[1])
    client = (await start(registries=registries)).client
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    values = {sample.name: sample.value for family in text_string_to_metric_families(response.text) for sample in family.samples}
    assert values["first_total"] == 1.0
    assert values["own:second_total"] == 0.0
    for accept in ("application/openmetrics-text; version=1.0.0", "text/plain; version=1.0.0; escaping=allow-utf-8"):
        assert "\nown:second_total 0.0\n" in (await client.get("/metrics", headers={"accept": accept})).text


async def test_models(client: httpx.AsyncClient, engine: Any) -> None:
    body = (await client.get("/v1/models")).json()
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["served", "alias"]
    assert {card["max_model_len"] for card in body["data"]} == {engine.model_config.max_model_len}
    assert (await client.get("/v1/models/alias")).json() == body["data"][1]
    response = await client.get("/v1/models/org/other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_the_models_own_name(start: Start) -> None:
    client = (await start(served_model_name=[])).client
    assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["fake/model"]
    assert (await client.get("/v1/models/fake/model")).status_code == 200


async def test_version(client: httpx.AsyncClient) -> None:
    assert set((await client.get("/version")).json()) == {"version", "vllm"}


async def test_health_of_a_dead_engine(fake: FakeEngine, start: Start) -> None:
    running = await start()
    assert (await running.client.get("/health")).json() == {"status": "ok"}
    running.lifecycle.tick = lambda now: False  # type: ignore[method-assign]
    fake.die()
    for path in ("/health", "/ping"):
        response = await running.client.get(path)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_dead"
    response = await running.client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 503
    assert "retry-after" in response.headers
    del running.lifecycle.tick


@pytest.mark.parametrize("request_id", ["a", "req-1.2:3_4/5+6=7@8", "x" * 128])
async def test_request_id_comes_back(client: httpx.AsyncClient, request_id: str) -> None:
    for path in ("/health", "/nothing"):
        assert (await client.get(path, headers={"x-request-id": request_id})).headers["x-request-id"] == request_id
    response = await client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": request_id})
    assert response.headers["x-request-id"] == request_id
    assert response.json()["id"].startswith(f"cmpl-{request_id}-")


@pytest.mark.parametrize("request_id", ["", "x" * 129, "a b", "a\tb", "ü", "a,b", "{}"])
async def test_bad_request_id(client: httpx.AsyncClient, request_id: str) -> None:
    response = await client.get("/health", headers=[(b"x-request-id", request_id.encode())])
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_request_id"
    assert response.headers["x-request-id"] != request_id


async def test_own_request_id(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"prompt": "x"})
    assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"


async def test_same_request_id_twice_at_once(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    fake.step_seconds = 0.01
    headers = {"x-request-id": "twin"}
    responses = await asyncio.gather(
        *(client.post("/v1/completions", json={"prompt": "say hello", "max_tokens": 20}, headers=headers) for _ in range(4))
    )
    assert {response.json()["choices"][0]["text"] for response in responses} == {"hello"}
    assert len({response.json()["id"] for response in responses}) == 4


async def test_full_queue(fake: FakeEngine, client: httpx.AsyncClient) -> None:
    fake.refusal = QueueOverflowError()
    for streamed in (False, True):
        response = await client.post("/v1/completions", json={"prompt": "x", "n": 2, "stream": streamed})
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        assert response.json()["error"]["code"] == "queue_full"


async def test_cors(start: Start) -> None:
    client = (await start(api_key=["sk-1"], cors_allow_origins=["https://a.example"])).client
    headers = {"origin": "https://a.example", "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    response = await client.options("/v1/completions", headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    response = await client.get("/v1/models", headers={"origin": "https://a.example"})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (401, "https://a.example")
    response = await client.get("/v1/models", headers={"origin": "https://b.example"})
    assert "access-control-allow-origin" not in response.headers


async def test_pages_may_read_every_refusal(fake: FakeEngine, start: Start) -> None:
    router = APIRouter()

    @router.get("/broken")
    async def broken() -> None:
        raise RuntimeError

    running = await start(cors_allow_origins=["https://a.example"], max_body_bytes=100, routers=(router,))

    async def ask(method: str, path: str, **about: Any) -> tuple[int, str]:
        origin = {"origin": "https://a.example"}
        response = await running.client.request(method, path, headers=origin | about.pop("headers", {}), **about)
        assert response.headers["x-request-id"]
        return response.status_code, response.headers["access-control-allow-origin"]

    fake.refusal = QueueOverflowError()
    answers = [
        await ask("GET", "/health", headers={"x-request-id": "a b"}),
        await ask("GET", "/nothing"),
        await ask("DELETE", "/v1/models"),
        await ask("POST", "/v1/completions", content=b"x" * 101),
        await ask("POST", "/v1/completions", json={"prompt": "x"}),
        await ask("GET", "/broken"),
    ]
    assert answers == [(status, "https://a.example") for status in (400, 404, 405, 413, 503, 500)]


@pytest.mark.parametrize(
    ("origin", "asked", "words"),
    [
        ("https://b.example", {"access-control-request-method": "POST"}, "origin"),
        ("https://a.example", {"access-control-request-method": "DELETE"}, "method"),
        (
            "https://b.example",
            {"access-control-request-method": "PUT", "access-control-request-private-network": "true"},
            "origin, method, private",
        ),
    ],
)
async def test_a_refused_preflight_is_an_error_object(start: Start, origin: str, asked: dict[str, str], words: str) -> None:
    client = (await start(cors_allow_origins=["https://a.example"])).client
    response = await client.options("/v1/completions", headers={"origin": origin, **asked})
    assert (response.status_code, response.headers["content-type"]) == (400, "application/json")
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "cors_refused")
    assert f"Disallowed CORS {words}" in error["message"]
    assert "--cors-allow-origins may send GET, POST" in error["message"]
    assert "Origin" in response.headers["vary"]
    assert int(response.headers["content-length"]) == len(response.content)


async def test_openapi(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    for path, name, required in (("completions", "CompletionRequest", ["prompt"]), ("chat/completions", "ChatRequest", ["messages"])):
        post = document["paths"][f"/v1/{path}"]["post"]
        assert post["requestBody"]["content"]["application/json"]["schema"] == {"$ref": f"#/components/schemas/{name}"}
        assert {"200", "400", "401", "404", "413", "415", "429", "500", "503"} <= set(post["responses"])
        schema = document["components"]["schemas"][name]
        assert schema["required"] == required
        assert schema["examples"]
    text = json.dumps(document)
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named <= set(document["components"]["schemas"])


async def test_openapi_describes_everything(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    for name, schema in document["components"]["schemas"].items():
        for field, about in schema.get("properties", {}).items():
            assert about.get("description"), f"{name}.{field}"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["description"], f"{method} {path}"
            for status, response in operation["responses"].items():
                assert response["description"] != "Successful Response" or status == "200"
                for media in response.get("content", {}).values():
                    assert media.get("schema"), f"{method} {path} {status}"
                if int(status) >= 400:
                    assert response["content"]["application/json"]["example"]["error"]["message"], f"{method} {path} {status}"


async def test_examples_of_the_description_work(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    for path, methods in document["paths"].items():
        body = methods.get("post", {}).get("requestBody")
        if body is None:
            continue
        name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for example in document["components"]["schemas"][name]["examples"]:
            assert (await client.post(path, json=example)).status_code == 200, (path, example)


async def test_access_log(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    client = (await start()).client
    with caplog.at_level(logging.INFO, "minedraft.access"):
        await client.post(
            "/v1/completions", json={"prompt": "say a secret", "max_tokens": 30, "stream": True}, headers={"x-request-id": "r1"}
        )
        await client.get("/nothing?key=secret")
    done, missing = (json.loads(JsonFormatter().format(record)) for record in caplog.records if record.name == "minedraft.access")
    assert (done["method"], done["path"], done["status"], done["request_id"]) == ("POST", "/v1/completions", 200, "r1")
    assert done["prompt_tokens"] > 0
    assert done["completion_tokens"] > 0
    assert done["duration_ms"] > 0
    assert missing["status"] == 404
    assert "secret" not in caplog.text


async def test_no_access_log(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    client = (await start(access_log=False)).client
    with caplog.at_level(logging.INFO, "minedraft.access"):
        await client.get("/health")
    assert not [record for record in caplog.records if record.name == "minedraft.access"]


async def test_a_fault_of_the_server(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    router = APIRouter()

    @router.get("/broken")
    async def broken() -> None:
        raise RuntimeError("a detail")

    client = (await start(routers=(router,))).client
    response = await client.get("/broken", headers={"x-request-id": "r2"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "a detail" not in response.text
    assert response.headers["x-request-id"] == "r2"
    assert "a detail" in caplog.text
