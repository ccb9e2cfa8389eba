"""The OpenAPI document: it says what the endpoints do, and no request that can be made up breaks them."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import make_dataclass
from typing import Annotated, Any

import jsonschema_rs
import pytest
import schemathesis
from fastapi import Depends, FastAPI
from fastapi.routing import iter_route_contexts
from fastapi.security import APIKeyHeader
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from outbox.acts.messages import ACTS
from outbox.console import AnyOf, Basic, Principal, create_console_app, create_console_router, hash_password
from outbox.console.api.requests import from_body
from tests.console.web import API, GROUP, Asker, Http, Shop, authorizer, console_of
from tests.kit import tries

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
#: Requests of each operation and each kind; to make one up takes schemathesis longer than the console to answer it.
EXAMPLES = tries(2)
BOUNDED = settings(database=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


class Problem(BaseModel):
    """What an application has of the same name as the console."""

    mine: str


@pytest.fixture(scope="module")
def document(looking: Http) -> dict[str, Any]:
    """The document as it is served."""
    answer = looking.get("/openapi.json")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def test_the_document_is_for_who_is_logged_in(looking: Http) -> None:
    """Nobody else is told what there is."""
    assert looking.as_role(None).get("/openapi.json").status_code == 401


def test_every_endpoint_is_in_the_document(looking: Http, document: dict[str, Any]) -> None:
    """All of the API but the document itself and the place for what isn't there; each with its errors."""
    # The document names a parameter that may have slashes as any other one.
    served = {(method.lower(), str(context.path).replace(":path}", "}"))
              for context in iter_route_contexts(looking.app.routes)
              for method in context.methods or () if str(context.path).startswith(API)}  # fmt: skip
    described = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert served - described == {("get", f"{API}/openapi.json")}
    assert described <= served
    assert document["openapi"] == "3.1.0"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation.get("summary") and operation["tags"], (method, path)
            for status, answer in operation["responses"].items():
                wanted = "application/problem+json" if int(status) >= 400 else None
                assert wanted is None or list(answer["content"]) == [wanted], (method, path, status)


def test_every_act_of_the_table_is_in_the_document(document: dict[str, Any]) -> None:
    """With its summary, its details, and its options as fields of the body: nothing is said of it a second time."""
    for act in ACTS.values():
        place = "/inbox/{group}/{message_id}" if act.noun == "inbox" else "/messages/{message_id}"
        operation = document["paths"][f"{API}{place}/{act.name}"]["post"]
        assert operation["summary"] == act.summary
        assert operation["description"].startswith(act.details)
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        fields = document["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
        assert fields.keys() == {"reason", "database", *(option.name for option in act.options)} | (
            {"token"} if act.as_job else set()
        )


def test_names_are_those_of_a_client(document: dict[str, Any]) -> None:
    """Operations are functions, schemas are classes: each name is there once, can be one, and refers to something."""
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names)) > 40
    schemas = document["components"]["schemas"]
    assert [name for name in [*names, *schemas] if not re.fullmatch(r"[A-Za-z]+(_[a-z]+)*", name)] == []
    assert [name for name, schema in schemas.items() if schema["title"] != name] == []
    assert set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document))) == set(schemas)


def test_two_bodies_of_a_name_are_refused() -> None:
    """A client has one class of a name, so another body of that name would be sent as the first."""
    with pytest.raises(TypeError, match="two different bodies are named ReasonBody"):
        from_body(make_dataclass("ReasonBody", [("other", str)], namespace={"__doc__": "Another."}))


def test_the_document_says_how_to_log_in(museum: Shop, document: dict[str, Any]) -> None:
    """By what its authorizer takes; one of the application's own says it by FastAPI's means."""
    assert document["components"]["securitySchemes"] == {"bearer": {"type": "http", "scheme": "bearer"}}
    assert document["security"] == [{"bearer": []}]
    both = AnyOf(Basic({"ada": (hash_password("x", cost=4), "viewer")}), authorizer())
    console = console_of(museum.outbox, authorizer=both).openapi()
    assert set(console["components"]["securitySchemes"]) == {"basic", "bearer"}
    assert console["security"] == [{"basic": []}, {"bearer": []}]

    async def own(_: Annotated[str, Depends(APIKeyHeader(name="X-Key"))]) -> Principal:
        return Principal.of("eve")

    console = console_of(museum.outbox, authorizer=own).openapi()
    assert console["components"]["securitySchemes"]["APIKeyHeader"]["name"] == "X-Key"
    assert console["paths"][f"{API}/messages"]["get"]["security"] == [{"APIKeyHeader": []}]
    assert "security" not in console


def test_all_problems_have_one_schema(document: dict[str, Any], looking: Http) -> None:
    """Each error refers to it, and it fits what is sent."""
    answers = [
        answer
        for methods in document["paths"].values()
        for operation in methods.values()
        for status, answer in operation["responses"].items()
        if int(status) >= 400
    ]
    assert len(answers) > 100
    one = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    assert [answer["content"] for answer in answers if answer["content"] != one] == []
    jsonschema_rs.validate(document["components"]["schemas"]["Problem"], looking.get("/messages?x=1").json())


def test_the_document_of_the_application_is_its_own(museum: Shop) -> None:
    """Nothing of the console is in it, unless it is asked for: no path, no schema, no way to log in."""
    app = FastAPI()
    alone = app.openapi()
    app = FastAPI()
    app.include_router(create_console_router(museum.outbox, authorizer=authorizer()), prefix="/outbox")
    assert app.openapi() == alone


def test_an_application_may_describe_its_consoles(museum: Shop, document: dict[str, Any], ask: Asker) -> None:
    """Each below its prefix, with names of their own beside what the application has of the same name."""
    app = FastAPI()

    @app.get("/problems")
    def problems() -> Problem:
        raise NotImplementedError

    alone = copy.deepcopy(app.openapi())
    for prefix in ("/one", "/{tenant}/two"):
        router = create_console_router(museum.outbox, authorizer=authorizer(), documented_in=app)
        app.include_router(router, prefix=prefix)
    whole = ask(app).ask("GET", "/openapi.json").json()
    assert whole == app.openapi()

    paths = {f"{prefix}{path}" for prefix in ("/one", "/{tenant}/two") for path in document["paths"]}
    assert whole["paths"].keys() == {"/problems"} | paths
    assert whole["paths"]["/problems"] == alone["paths"]["/problems"]
    schemas = whole["components"]["schemas"]
    assert schemas["Problem"] == alone["components"]["schemas"]["Problem"]
    assert schemas.keys() == {"Problem"} | {f"Outbox{name}" for name in document["components"]["schemas"]}
    assert set(re.findall(r"#/components/schemas/(\w+)", json.dumps(whole))) == set(schemas)
    assert "security" not in whole
    operation = whole["paths"][f"/{{tenant}}/two{API}/meta"]["get"]
    assert operation["operationId"] == "tenant_two_meta"
    assert operation["security"] == [{"tenant_two_bearer": []}]
    assert [each["name"] for each in operation["parameters"]] == ["tenant"]
    assert set(whole["components"]["securitySchemes"]) == {"one_bearer", "tenant_two_bearer"}
    assert create_console_app(museum.outbox, authorizer=authorizer()).openapi()["paths"] == document["paths"]


def test_a_router_without_a_schema_is_not_described(museum: Shop) -> None:
    """What FastAPI is told of the router counts: it is included without a schema."""
    app = FastAPI()
    alone = app.openapi()
    app = FastAPI()
    router = create_console_router(museum.outbox, authorizer=authorizer(), documented_in=app)
    app.include_router(router, prefix="/outbox", include_in_schema=False)
    assert app.openapi() == alone


def test_conditions_are_in_the_document(document: dict[str, Any]) -> None:
    """If-Match where there is a version, Idempotency-Key where something is ordered."""

    def headers(path: str) -> set[str]:
        return {each["name"] for each in document["paths"][API + path]["post"]["parameters"] if each["in"] == "header"}

    assert headers("/messages/{message_id}/resend") == headers("/inbox/{group}/{message_id}/retry") == {"if-match"}
    assert headers("/bulk-jobs") == headers("/messages/reSend") == headers("/messages/rollback") == {"idempotency-key"}
    assert headers("/messages/{message_id}/compensate") == {"if-match", "idempotency-key"}


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_nothing_that_is_sent_breaks_an_endpoint(
    shop: Shop, acting: Http, document: dict[str, Any], mode: GenerationMode
) -> None:
    """Requests that fit the document and requests that don't: no 5xx, and every answer is one of the document."""
    ids = [str(each) for each in (*shop.parked(1, 2), shop.half(3), shop.order(4))]
    schema = schemathesis.openapi.from_dict(document)
    asked = 0
    for found in schema.get_all_operations():
        operation = found.ok()  # type: ignore[union-attr]
        if mode is GenerationMode.NEGATIVE and not [*operation.iter_parameters(), *operation.body]:
            continue
        known = {"message_id": ids[0], "group": GROUP}
        fixed = {name: known[name] for name in known if f"{{{name}}}" in operation.path}
        strategy = operation.as_strategy(mode)
        if fixed and mode is GenerationMode.POSITIVE:
            strategy = st.one_of(strategy, operation.as_strategy(mode, path_parameters=fixed))

        @settings(BOUNDED, max_examples=EXAMPLES)
        @given(case=strategy)
        def ask(case: Case[Any]) -> None:
            nonlocal asked
            asked += 1
            answer = send(acting, case)
            case.validate_response(answer, checks=CHECKS)

        ask()
    assert asked > 100


def send(http: Http, case: Case[Any]) -> Any:
    """Send a request that was made up."""
    options = case.as_transport_kwargs(base_url="http://localhost")
    sent = {name: value for name, value in options.items() if name in {"params", "json"} and value is not None}
    data = options.get("data")
    if data is not None:
        sent["content"] = data if isinstance(data, bytes | str) else str(data)
    headers = {name: str(value) for name, value in (options.get("headers") or {}).items()}
    return http.ask(options["method"], options["url"], headers=headers, **sent)
