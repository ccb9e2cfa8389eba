"""The official Python client behind JSON lines, so that one set of checks can drive clients of four languages.

A request is ``{"n": 1, "op": "send", "on": "p", ...}``; its answer ``{"n": 1, "ok": ...}`` or ``{"n": 1, "error":
{...}}``. The client's own questions are ``{"call": 1, "on": "c", "what": "message" | "check", "message": {...}}`` and
are answered with ``{"call": 1, "answer": "SUCCESS" | "FAILURE" | "COMMIT" | "ROLLBACK" | "UNKNOWN" | "RAISE"}``.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)
from rocketmq.grpc_protocol import FilterType

Request = Mapping[str, Any]

_OUT = os.fdopen(os.dup(1), "w", buffering=1)
_LOCK = threading.Lock()
_NUMBERS = itertools.count(1)
_THINGS: dict[str, Any] = {}
_MESSAGES: dict[int, Any] = {}
_CALLS: dict[int, queue.Queue[str]] = {}
_ANSWERS = {
    "COMMIT": TransactionResolution.COMMIT,
    "ROLLBACK": TransactionResolution.ROLLBACK,
    "UNKNOWN": TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED,
    "SUCCESS": ConsumeResult.SUCCESS,
    "FAILURE": ConsumeResult.FAILURE,
}


def _say(record: object) -> None:
    with _LOCK:
        _OUT.write(json.dumps(record) + "\n")


def _ask(name: str, what: str, message: Any) -> Any:
    number = next(_NUMBERS)
    answers = _CALLS[number] = queue.Queue()
    _say({"call": number, "on": name, "what": what, "message": _view(message)})
    answer = answers.get()
    del _CALLS[number]
    if answer == "RAISE":
        raise RuntimeError("as asked")
    return _ANSWERS[answer]


def _view(message: Any) -> dict[str, Any]:
    ref = next(_NUMBERS)
    _MESSAGES[ref] = message
    return {
        "ref": ref,
        "id": message.message_id,
        "topic": message.topic,
        "tag": message.tag,
        "body": base64.b64encode(message.body).decode(),
        "keys": sorted(message.keys),
        "props": message.properties,
        "group": message.message_group,
        "attempt": message.delivery_attempt,
        "handle": message.receipt_handle,
        "at": message.delivery_timestamp,
        "corrupted": message.corrupted,
    }


class _Listener(MessageListener):  # type: ignore[misc]  # it has no types
    def __init__(self, name: str) -> None:
        self._name = name

    def consume(self, message: Any) -> Any:
        return _ask(self._name, "message", message)


class _Checker(TransactionChecker):  # type: ignore[misc]  # it has no types
    def __init__(self, name: str) -> None:
        self._name = name

    def check(self, message: Any) -> Any:
        return _ask(self._name, "check", message)


def _configuration(r: Request) -> Any:
    keys = Credentials(r.get("ak"), r.get("sk"))
    return ClientConfiguration(r["endpoints"], keys, request_timeout=r.get("timeout", 10))


def _filter(text: str) -> Any:
    return FilterExpression(text[4:], FilterType.SQL) if text.startswith("SQL:") else FilterExpression(text)


def _filters(r: Request) -> dict[str, Any]:
    return {topic: _filter(text) for topic, text in r["subs"].items()}


def _started(r: Request, thing: Any) -> dict[str, Any]:
    thing.startup()
    _THINGS[r["as"]] = thing
    return {"client_id": thing.client_id}


def _producer(r: Request) -> dict[str, Any]:
    checker = _Checker(r["as"]) if r.get("check") else None
    return _started(r, Producer(_configuration(r), tuple(r["topics"]), checker, tls_enable=r.get("tls", False)))


def _simple(r: Request) -> dict[str, Any]:
    await_, tls = r.get("await", 5), r.get("tls", False)
    return _started(
        r, SimpleConsumer(_configuration(r), r["group"], _filters(r), await_duration=await_, tls_enable=tls)
    )


def _push(r: Request) -> dict[str, Any]:
    listener, tls = _Listener(r["as"]), r.get("tls", False)
    return _started(r, PushConsumer(_configuration(r), r["group"], listener, _filters(r), tls_enable=tls))


def _message(r: Request) -> Any:
    it = Message()
    it.topic = r["topic"]
    it.body = b"x" * r["size"] if "size" in r else r["body"].encode()
    if r.get("tag") is not None:
        it.tag = r["tag"]
    for key in r.get("keys", ()):
        it.keys = key
    for name, value in r.get("props", {}).items():
        it.add_property(name, value)
    if r.get("group"):
        it.message_group = r["group"]
    if r.get("at"):
        it.delivery_timestamp = int(r["at"])
    return it


def _send(r: Request) -> dict[str, Any]:
    receipt = _THINGS[r["on"]].send(_message(r), *([_THINGS[r["tx"]]] if "tx" in r else []))
    return {"id": receipt.message_id, "tx": receipt.transaction_id, "recall": receipt.recall_handle}


def _begin(r: Request) -> None:
    _THINGS[r["as"]] = _THINGS[r["on"]].begin_transaction()


def _recall(r: Request) -> dict[str, Any]:
    return {"id": _THINGS[r["on"]].recall_message(r["topic"], r["handle"])}


def _receive(r: Request) -> list[dict[str, Any]]:
    return [_view(each) for each in _THINGS[r["on"]].receive(r.get("max", 16), r.get("invisible", 30))]


def _change(r: Request) -> dict[str, Any]:
    message = _MESSAGES[r["ref"]]
    _THINGS[r["on"]].change_invisible_duration(message, r["seconds"])
    return {"handle": message.receipt_handle}


def _subscribe(r: Request) -> None:
    for topic, filter_ in _filters(r).items():
        _THINGS[r["on"]].subscribe(topic, filter_)


_OPS: dict[str, Callable[[Request], Any]] = {
    "producer": _producer,
    "simple": _simple,
    "push": _push,
    "send": _send,
    "begin": _begin,
    "commit": lambda r: _THINGS[r["on"]].commit() and None,
    "rollback": lambda r: _THINGS[r["on"]].rollback() and None,
    "recall": _recall,
    "receive": _receive,
    "ack": lambda r: _THINGS[r["on"]].ack(_MESSAGES[r["ref"]]) and None,
    "change": _change,
    "subscribe": _subscribe,
    "unsubscribe": lambda r: _THINGS[r["on"]].unsubscribe(r["topic"]),
    "close": lambda r: _THINGS.pop(r["on"]).shutdown(),
}


def _serve(r: Request) -> None:
    try:
        _say({"n": r["n"], "ok": _OPS[r["op"]](r)})
    except Exception as error:  # what a check asks for
        code = getattr(error, "code", None)
        known = code if isinstance(code, int) else None
        _say({"n": r["n"], "error": {"type": type(error).__name__, "code": known, "text": str(error)[:300]}})


def main() -> None:
    """Carry out what comes as lines, each in a thread, until there are no more."""
    for line in sys.stdin:
        request = json.loads(line)
        if "call" in request:
            _CALLS[request["call"]].put(request["answer"])
        else:
            threading.Thread(target=_serve, args=(request,), daemon=True).start()
    os._exit(0)


if __name__ == "__main__":
    main()
