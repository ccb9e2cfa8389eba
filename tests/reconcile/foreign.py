"""The facts of a town, told once more in tables that aren't ours: a producer's and a consumer's, with other words."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Engine, text

from outbox.reconcile.job import Job, Pair, Part
from outbox.reconcile.tables import ForeignTable
from tests.reconcile.town import PAIR, Town

#: An id of a town as a table may have it.
IDS: Mapping[str, str] = {
    "uuid": "{id}",
    "text": "{id}::text",
    "bytea": "uuid_send({id})",
    "string": "'order/' || {id}::text",
    "raw": "convert_to({id}::text, 'UTF8')",
}

_SENT = """
CREATE TABLE legacy_sent AS
SELECT {id} AS msg_id, CASE WHEN o.half_id IS NULL THEN '0' WHEN o.resolution = 'rollback' THEN '1'
                            WHEN m.half_id IS NOT NULL THEN '5' WHEN d.recalled_at IS NOT NULL THEN '4'
                            WHEN d.half_id IS NOT NULL THEN '3' ELSE '2' END::int AS status,
       coalesce(m.visible_at, d.recalled_at, d.deliver_at, o.decided_at, h.born_at) AT TIME ZONE 'UTC' AS changed,
       coalesce(m.send_number, 0) AS tries, coalesce(m.queue, 0) AS part, coalesce(m.position, 0) AS place,
       CAST(:opinions AS jsonb) ->> h.id::text AS believed,
       {h.body_digest} AS checksum, c.half_id IS NOT NULL AS undone, h.topic AS "to%",
       (CAST(:tags AS text[]) IS NULL OR coalesce(h.tag = ANY (CAST(:tags AS text[])), false))
       AND NOT coalesce(m.position <= (SELECT max(position) FROM outbox.consumer_start s WHERE s.queue = m.queue),
                        false) AS meant
  FROM outbox.half_message h
  LEFT JOIN outbox.op_message o ON o.half_id = h.id
  LEFT JOIN (SELECT DISTINCT ON (half_id) * FROM outbox.message ORDER BY half_id, send_number DESC) m
         ON m.half_id = h.id
  LEFT JOIN outbox.scheduled_message d ON d.half_id = h.id
  LEFT JOIN outbox.compensation c ON c.half_id = h.id
"""

_KNOWN = """
CREATE TABLE legacy_known AS
SELECT {id} AS "msg ""id", coalesce(c.status, 'effect only') AS state, c.attempts AS tries, c.received_at AS came,
       c.changed_at AS changed, {c.body_digest} AS checksum, c.topic AS "from", c.consumer_group AS "by",
       CASE WHEN c.last_error IS NOT NULL AND c.status = 'consumed' THEN 1 ELSE 0 END AS passed_over,
       CASE WHEN :effects THEN coalesce(e.n, 0) ELSE -1 END AS effects
  FROM outbox.consumer_message c
  FULL JOIN (SELECT message_id AS id, count(*) AS n FROM ledger WHERE :effects GROUP BY 1) e ON e.id = c.message_id
"""

SENT = ForeignTable(
    table="legacy_sent",
    columns={
        "id": "msg_id",
        "at": "changed",
        "state": "status",
        "sends": "tries",
        "queue": "part",
        "position": "place",
        "digest": "checksum",
        "compensated": "undone",
        "opinion": "believed",
        "addressed": "meant",
        "topic": "to%",
    },
    states={
        "0": "undecided",
        "1": "rolled_back",
        "2": "committed",
        "3": "scheduled",
        "4": "recalled",
        "5": "dispatched",
    },
    opinions={
        "done": "consumed",
        "trouble": "failed",
        "dead": "parked",
        "held": "quarantined",
        "fresh": "none",
        "?": "no_opinion",
    },
)
KNOWN = ForeignTable(
    query='SELECT * FROM legacy_known -- where "100%" of it is\n',
    columns={
        "id": 'msg "id',
        "status": "state",
        "attempts": "tries",
        "received_at": "came",
        "changed_at": "changed",
        "digest": "checksum",
        "skipped": "passed_over",
        "effects": "effects",
    },
    states={"effect only": "none", **{each: each for each in ("consumed", "failed", "parked", "quarantined")}},
)
_BELIEVED = {word: own for own, word in SENT.opinions.items()}
TABLES: Mapping[Part, ForeignTable] = {"producer": SENT, "consumer": KNOWN}


def tell(town: Town, pair: Pair = PAIR, ids: str = "uuid", *, hex_digests: bool = False) -> None:
    """Write what both sides of a town (in one database) say into foreign tables, in place of those that are there.

    With ``hex_digests`` they aren't those of our tables any more.
    """
    values: dict[str, Any] = {
        "tags": None if pair.tags is None else sorted(pair.tags),
        "effects": pair.effect is not None,
        "opinions": json.dumps({str(id_): _BELIEVED[word] for id_, word in town.opinions.items()}),
    }
    expression = IDS[ids]
    for name, sql, id_ in (("legacy_sent", _SENT, "h.id"), ("legacy_known", _KNOWN, "coalesce(c.message_id, e.id)")):
        town.run(f"DROP TABLE IF EXISTS {name}")
        named = {each: value for each, value in values.items() if f":{each}" in sql}
        digest = r"encode(\1, 'hex')" if hex_digests else r"\1"
        written = re.sub(r"{(\w\.body_digest)}", digest, sql)
        town.run(written.replace("{id}", expression.format(id=f"({id_})")), **named)


def foreign_job(town: Town, *parts: Part, pairs: tuple[Pair, ...] = (PAIR,), **options: Any) -> Job:
    """Return a job whose sides, or one of them, are foreign tables."""
    tables = {f"{part}_table": TABLES[part] for part in parts}
    return town.job(*pairs, **{"record": False} | tables | options)


def run(engine: Engine, *statements: str) -> None:
    """Run statements as they are."""
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
