"""Order a bulk job, so that what was previewed is what is done; and cancel what is left of one."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.database.execute import Row, execute
from outbox.database.sql import audit, plan_by_index
from outbox.errors import ActRefused, CompensationRefused, InvalidRequest, SelectorChanged
from outbox.message.model import uuid7
from outbox.operator.acts import STATES, Deed, check_said, deed_of, refusal, states_for
from outbox.operator.bulk import choose_sql, show, sql
from outbox.operator.bulk.preview import choose_database, look_elsewhere, matched_by
from outbox.operator.bulk.selection import Asked, Summary
from outbox.operator.bulk.show import described
from outbox.operator.look import paging
from outbox.operator.model import Action, Actor, BulkJob, Selector
from outbox.text import storable

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import Databases

_LONGEST_KEY = 255
_AGAIN = "look at the preview again"


def start(
    databases: Databases,
    action: Action,
    selector: Selector,
    *,
    actor: Actor,
    reason: str,
    token: str | None,
    database: str | None,
    options: Mapping[str, Any],
    rate: float | None,
    idempotency_key: str | None,
) -> BulkJob:
    """Order a bulk job, which workers carry out; see `outbox.operator.service.Admin.start`.

    Of messages that are named, those that can't be acted on become items that are skipped; a filter leaves them out.

    Raises:
        SelectorChanged: the preview showed something else, or the key was used for something else.
        ActRefused: nothing of what is selected can be acted on.
        CompensationRefused: (a compensation of one message) it can't be compensated.
        BulkJobTooLarge: too many messages.
        InvalidRequest, MessageNotFound: as of the preview; a filter without a token, a rate or key that isn't one.
    """
    deed = deed_of(action, actor, reason, options)
    asked = Asked(action, selector, options)
    asked.check()
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise InvalidRequest(f"rate = {rate} must be a number of items a second above 0", field="rate")
    if idempotency_key is not None:
        if not 0 < len(idempotency_key) <= _LONGEST_KEY or storable(idempotency_key) != idempotency_key:
            raise InvalidRequest(f"an idempotency key has 1 to {_LONGEST_KEY} characters", field="idempotency_key")
        if earlier := _by_key(databases, idempotency_key, deed, asked, rate):
            return earlier
    if token is None and not asked.by_name:
        raise InvalidRequest("give the token of a preview: a filter may match something else by now", field="token")
    shown = None if token is None else _read(token, asked, database)
    if shown is not None and shown["database"] in databases:
        chosen = databases[shown["database"]]
    else:
        chosen, _ = choose_database(databases, asked, database)
    edge = shown["edge"] if shown else None
    elsewhere = look_elsewhere(databases, chosen, asked, edge)
    new = choose_sql.NewBulkJob(
        uuid7(), action, deed.actor, deed.reason, deed.options, selector_json(selector), rate, idempotency_key,
        deed.origin,
    )  # fmt: skip
    try:
        with chosen.acting() as connection:
            matched = matched_by(connection, chosen, asked, elsewhere, edge)
            rows = _insert(connection, chosen.schema, new, matched, asked)
            found = asked.summary_of([row[:-2] for row in rows], elsewhere.edge)
            _check_found(asked, found, rows, shown["digest"] if shown else None)
            _record(connection, chosen.schema, new, asked, found)
    except _KeyTaken:
        earlier = _by_key(databases, idempotency_key or "", deed, asked, rate)
        if earlier is None:
            raise SelectorChanged(f"the order with this idempotency key was withdrawn; {_AGAIN}") from None
        return earlier
    return show.bulk_job(databases, new.id)


def cancel(databases: Databases, bulk_job_id: UUID, *, actor: Actor, reason: str) -> BulkJob:
    """Cancel what is left of a bulk job; what was done stays done. A worker withdraws a compensation that has begun.

    Raises:
        BulkJobNotFound: no registered database has it.
        ActRefused: it has finished, or was cancelled before.
        InvalidRequest: an actor without a name, or a reason that can't be stored.
    """
    check_said(actor, reason)
    database = show.find(databases, bulk_job_id)
    schema = database.schema
    with database.acting() as connection:
        (((finished_at, cancelled_at),),) = execute(connection, sql.lock(schema, bulk_job_id))
        if finished_at is not None or cancelled_at is not None:
            what = "was cancelled before" if cancelled_at else f"has finished at {finished_at.isoformat()}"
            raise ActRefused(f"bulk job {bulk_job_id} can't be cancelled: it {what}")
        cancelled, _ = execute(connection, sql.cancel(schema, bulk_job_id, actor.name), sql.finish(schema, bulk_job_id))
        told = {"did": "cancel", "cancelled": len(cancelled)}
        execute(connection, audit(schema, actor.name, "bulk", str(bulk_job_id), reason, told, actor.origin))
    return show.bulk_job(databases, bulk_job_id)


class _KeyTaken(Exception):
    """Somebody has ordered with the same key at this moment."""


def _insert(
    connection: Connection, schema: str, new: choose_sql.NewBulkJob, matched: choose_sql.Matched, asked: Asked
) -> list[Row]:
    wanted = states_for(asked.action, asked.options)
    whys = {state: refusal(asked.action, state) for state in STATES - wanted}
    _, rows = execute(
        connection,
        plan_by_index(),
        choose_sql.start(schema, matched, new, sorted(wanted), whys, all_of_them=asked.by_name),
    )
    if _left_out(rows) and new.key is not None and execute(connection, sql.by_key(schema, new.key))[0]:
        raise _KeyTaken
    return rows


def _left_out(rows: list[Row]) -> int:
    chosen, written = rows[0][-2:] if rows else (0, 0)
    return int(chosen - written)


def _check_found(asked: Asked, found: Summary, rows: list[Row], digest: list[list[Any]] | None) -> None:
    wanted = states_for(asked.action, asked.options)
    able = found.able(wanted)
    if digest is not None and found.digest(wanted) != digest:
        number = sum(each.count for each in able)
        raise SelectorChanged(f"what can be acted on has changed since the preview: now {number}; {_AGAIN}")
    if not able:
        raise _nothing(asked, found)
    if _left_out(rows):
        raise SelectorChanged(f"some of these are being rolled back by a bulk job ordered just now; {_AGAIN}")


def _record(connection: Connection, schema: str, new: choose_sql.NewBulkJob, asked: Asked, found: Summary) -> None:
    able = found.able(states_for(asked.action, asked.options))
    items = found.matched if asked.by_name else sum(each.count for each in able)
    told = {"did": "start", "action": asked.action, "items": items}
    execute(
        connection,
        choose_sql.describe(schema, new.id, described(asked.action, able)),
        audit(schema, new.actor, "bulk", str(new.id), new.reason, told, new.origin),
    )


def _nothing(asked: Asked, found: Summary) -> ActRefused | CompensationRefused:
    whys = "; ".join(f"{each.count}: {refusal(asked.action, each.state)}" for each in found.kept)
    if asked.action is Action.COMPENSATE and found.matched == 1 and asked.selector.targets:
        message_id = asked.selector.targets[0].message_id
        why = refusal(asked.action, found.kept[0].state)
        return CompensationRefused(f"the local transaction of message {message_id} can't be compensated: {why}")
    return ActRefused(f"there is nothing to {asked.action}: {whys or 'the filter matches no message'}")


def _read(token: str, asked: Asked, database: str | None) -> dict[str, Any]:
    """Return what a token says.

    Raises:
        SelectorChanged: it isn't that of a preview of this order.
    """
    kind = dt.datetime if asked.selector.inbox is not None else UUID
    try:
        shown = paging.read(token, asked.context) or {}
        edge = paging.decode(shown["edge"], (kind,))
        if database not in {None, shown["database"]}:
            raise KeyError("database")
        return {"database": shown["database"], "edge": edge and edge[0], "digest": shown["digest"]}
    except (InvalidRequest, KeyError):
        raise SelectorChanged(
            f"the token isn't one of a preview of this action, selection, options and database; {_AGAIN}"
        ) from None


def _by_key(databases: Databases, key: str, deed: Deed, asked: Asked, rate: float | None) -> BulkJob | None:
    """Return the bulk job that was ordered with a key before.

    Raises:
        SelectorChanged: something else was ordered.
    """
    for database in databases.values():
        with database.looking() as connection:
            (rows,) = execute(connection, sql.by_key(database.schema, key))
        if rows:
            _same(rows[0], key, deed, asked, rate)
            return show.bulk_job(databases, rows[0][0])
    return None


def _same(row: Row, key: str, deed: Deed, asked: Asked, rate: float | None) -> None:
    bulk_job_id, action, actor, reason, options, selector, earlier_rate = row
    before = {name: value for name, value in json.loads(selector).items() if name not in {"described", "counts"}}
    now = json.loads(json.dumps(selector_json(asked.selector)))
    if (action, actor, reason, json.loads(options), before, earlier_rate) != (
        str(deed.action), deed.actor, deed.reason, dict(deed.options), now, rate,
    ):  # fmt: skip
        raise SelectorChanged(
            f"idempotency key {key!r} was used for something else (bulk job {bulk_job_id}); use another key"
        )


def selector_json(selector: Selector) -> dict[str, Any]:
    """Return a selector as JSON can hold it, without what looks at all."""
    if selector.targets is not None:
        return {"targets": [[str(each.message_id), each.group] for each in selector.targets]}
    wanted = selector.messages or selector.inbox or selector.halves
    kind = next(name for name in ("messages", "inbox", "halves") if getattr(selector, name) is not None)
    given = {} if wanted is None else dataclasses.asdict(wanted)
    return {kind: {name: _plain(value) for name, value in given.items() if value not in (None, ())}}


def _plain(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC).isoformat()
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, UUID) else value
