"""The rules that mutants take out: where each stands, what stands in its place, and who has to notice.

``by`` is either meetings of `tests.interleave` (``send,dispatch:commit,check@undecided``) or test files.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """A text of a module, and what stands in its place without the rule."""

    rule: str
    module: str
    text: str
    replacement: str
    by: str


MUTANTS: tuple[Mutant, ...] = (
    # --- decisions -------------------------------------------------------------------------------------------
    Mutant(
        "decide: the first writer of an op wins, the second isn't an error",
        "database/decision.py",
        "    ON CONFLICT (half_id) DO NOTHING\n    RETURNING half_id, decided_at",
        "    RETURNING half_id, decided_at",
        "commit,rollback",
    ),
    Mutant(
        "decide: whoever decides locks the half's check first",
        "database/decision.py",
        "WHERE half_id = %(id)s FOR UPDATE\n",
        "WHERE half_id = %(id)s\n",
        "commit,refuse",
    ),
    Mutant(
        "decide: a decision ends the check",
        "database/decision.py",
        "WHERE half_id IN (SELECT half_id FROM decided)",
        "WHERE half_id IN (SELECT half_id FROM decided) AND false",
        "tests/producer/test_decide.py",
    ),
    Mutant(
        "decide within: the same decision made before is refused",
        "database/decision.py",
        "    if not decision.first:\n        raise already(decision)",
        "    if decision.resolution is not resolution:\n        raise already(decision)",
        "commit_within,commit_within",
    ),
    Mutant(
        "decide alone: the loser is told",
        "producer/producer.py",
        "        if decision.resolution is not resolution:\n            raise already(decision)",
        "        if False:\n            raise already(decision)",
        "commit,rollback",
    ),
    Mutant(
        "two-phase: the commit at the end must be the first decision",
        "producer/producer.py",
        "            decide_first(connection, intent.sender.schema, intent.half_id, intent.resolution)",
        "            decide(connection, intent.sender.schema, intent.half_id, intent.resolution)",
        "commit_within,rollback",
    ),
    Mutant(
        "an operator's act locks the half's check",
        "acts/changes.py",
        "WHERE half_id = ANY (%(ids)s::uuid[]) ORDER BY half_id FOR UPDATE",
        "WHERE half_id = ANY (%(ids)s::uuid[]) ORDER BY half_id",
        "resend,prune@settled",
    ),
    Mutant(
        "decide: a half that an old snapshot hides is asked of the index",
        "database/decision.py",
        "        yield statement(schema, _ASK_INDEX, {}, id=str(half_id))\n",
        '        yield statement(schema, "SELECT 1", {})\n',
        "commit_repeatable,make_segment",
    ),
    Mutant(
        "check: what an old snapshot has left of a decided half goes",
        "check/sql.py",
        "     WHERE half_id IN (SELECT half_id FROM found) AND half_id NOT IN (SELECT half_id FROM due)\n",
        "     WHERE false\n",
        "commit_repeatable,rewrite",
    ),
    Mutant(
        "saga: what it sends again has the same id",
        "flow/saga.py",
        "message_id = derived_id(flow.id, self.saga.name, step.name, kind.value, earlier)",
        'message_id = __import__("uuid").uuid4()',
        "advance,fall_back@booked",
    ),
    # --- the check -------------------------------------------------------------------------------------------
    Mutant(
        "fence: taken as the business transaction's first statement",
        "producer/decorators.py",
        "take_lock(fence_key(schema, half_id))",
        "take_lock(0)",
        "tests/check/test_fence.py",
    ),
    Mutant(
        "fence: a half whose fence is held isn't decided",
        "check/sql.py",
        "SELECT half_id, 'rollback', 'check' FROM tried WHERE free",
        "SELECT half_id, 'rollback', 'check' FROM tried",
        "two_phase,check",
    ),
    Mutant(
        "fence: tried, not taken for granted",
        "check/sql.py",
        "pg_try_advisory_xact_lock(key) AS free",
        "coalesce(key = key, true) AS free",
        "tests/check/test_fence.py",
    ),
    Mutant(
        "check: a half that somebody leases isn't leased",
        "check/sql.py",
        "     ORDER BY next_check_at LIMIT %(limit)s\n       FOR UPDATE SKIP LOCKED",
        "     ORDER BY next_check_at LIMIT %(limit)s",
        "check,check@undecided",
    ),
    Mutant(
        "check: an answer that lost isn't recorded as the decision",
        "check/asker.py",
        "        if not decision.first:\n            error",
        "        if False:\n            error",
        "rollback,check@undecided",
    ),
    # --- dispatch --------------------------------------------------------------------------------------------
    Mutant(
        "dispatch: one at a time",
        "dispatch/sql.py",
        "_TURN = \"current_setting('outbox.dispatching', true) = 'true'\"",
        '_TURN = "true"',
        "tests/dispatch/test_rivals.py",
    ),
    Mutant(
        "dispatch: a cursor that was read before the lock is still the newest",
        "dispatch/sql.py",
        "            WHERE c.id = %(cursor)s AND {LOG} = %(log)s))",
        "            WHERE {LOG} = %(log)s))",
        "tests/dispatch/test_rivals.py",
    ),
    Mutant(
        "release: one at a time, and not beside a dispatch",
        "dispatch/sql.py",
        "deliver_at <= statement_timestamp() AND {_TURN} AND {_NOT_PAUSED}\n",
        "deliver_at <= statement_timestamp() AND {_NOT_PAUSED}\n",
        "release,release@due:recall,release@due",
    ),
    Mutant(
        "dispatch: transactions in flight are remembered",
        "dispatch/sql.py",
        "%(in_flight)s::xid8[] ELSE ARRAY(SELECT pg_snapshot_xip(pg_current_snapshot())) END,",
        "%(in_flight)s::xid8[] ELSE '{}'::xid8[] END,",
        "send,dispatch@committed",
    ),
    Mutant(
        "dispatch: ops of transactions that were in flight are looked up",
        "dispatch/sql.py",
        "         WHERE xid = ANY (%(in_flight)s::xid8[]) AND {_TURN}\n    ) fresh",
        "         WHERE xid = ANY (%(in_flight)s::xid8[]) AND false\n    ) fresh",
        "send,dispatch@committed",
    ),
    Mutant(
        "dispatch: an idle pass looks for ops of transactions that were in flight",
        "dispatch/sql.py",
        "       OR EXISTS (SELECT FROM {{s}}.op_message o WHERE o.xid = ANY (c.in_flight))\n",
        "",
        "send,dispatch@committed",
    ),
    Mutant(
        "dispatch: the next batch begins behind the snapshot, not behind its oldest transaction",
        "dispatch/sql.py",
        "           CASE WHEN cut THEN %(next_xid)s::xid8 ELSE pg_snapshot_xmax(pg_current_snapshot()) END,",
        "           CASE WHEN cut THEN %(next_xid)s::xid8 ELSE pg_snapshot_xmin(pg_current_snapshot()) END,",
        "tests/dispatch/test_order.py",
    ),
    Mutant(
        "dispatch: in the order of the ops' sequence",
        "dispatch/sql.py",
        "row_number() OVER (PARTITION BY topic, queue ORDER BY sequence) AS number",
        "row_number() OVER (PARTITION BY topic, queue ORDER BY sequence DESC) AS number",
        "send,dispatch@committed",
    ),
    Mutant(
        "dispatch: a backlog is cut by sequence",
        "dispatch/sql.py",
        "    ) fresh ORDER BY sequence LIMIT %(limit)s",
        "    ) fresh ORDER BY sequence DESC LIMIT %(limit)s",
        "tests/dispatch/test_order.py",
    ),
    Mutant(
        "dispatch: what is rolled back is no message",
        "dispatch/sql.py",
        "     WHERE b.resolution = 'commit'\n",
        "     WHERE b.resolution IS NOT NULL\n",
        "rollback,dispatch",
    ),
    Mutant(
        "dispatch: what was recalled before its dispatch stays recalled",
        "dispatch/sql.py",
        "(SELECT d.half_id FROM {{s}}.scheduled_message d WHERE d.half_id = h.id) IS NULL)",
        "true)",
        "recall,dispatch@delayed",
    ),
    Mutant(
        "release: what was recalled stays recalled",
        "dispatch/sql.py",
        "            WHERE recalled_at IS NULL AND deliver_at <= statement_timestamp() AND {_TURN} AND {_NOT_PAUSED}\n"
        "            ORDER BY deliver_at, half_id LIMIT %(limit)s))\n"
        "       AND recalled_at IS NULL",
        "            WHERE deliver_at <= statement_timestamp() AND {_TURN} AND {_NOT_PAUSED}\n"
        "            ORDER BY deliver_at, half_id LIMIT %(limit)s))",
        "recall,release@due",
    ),
    Mutant(
        "release: what isn't due waits",
        "dispatch/sql.py",
        "            WHERE recalled_at IS NULL AND deliver_at <= statement_timestamp()",
        "            WHERE recalled_at IS NULL",
        "tests/dispatch/test_delay.py",
    ),
    Mutant(
        "acts on messages: not beside a dispatch",
        "acts/changes.py",
        "    locks = [take_lock(dispatch.dispatch_lock(schema))] if of_message else []",
        "    locks = []",
        "recall,release@due:recall,dispatch@delayed",
    ),
    Mutant(
        "placing what dispatch has passed: not beside a dispatch",
        "dispatch/dispatch_pass.py",
        "    _, cursors = execute(connection, take_lock(dispatch_lock(settings.schema)), "
        "sql.newest_cursor(settings.schema))",
        "    (cursors,) = execute(connection, sql.newest_cursor(settings.schema))",
        "place,place@passed",
    ),
    Mutant(
        "placing what dispatch has passed: what it will come to is left to it",
        "dispatch/sql.py",
        "d.half_id IS NULL AND o.xid < %(next_xid)s::xid8 AND o.xid <> ALL (%(in_flight)s::xid8[])",
        "d.half_id IS NULL AND (o.xid < %(next_xid)s::xid8 OR o.xid <> ALL (%(in_flight)s::xid8[]))",
        "dispatch,place@committed",
    ),
    # --- consumers -------------------------------------------------------------------------------------------
    Mutant(
        "consume: a queue of a group has one consumer at a time",
        "consumer/consumer.py",
        "        if is_held or not locked[0][0]:\n            self._drop_ahead()",
        "        if is_held:\n            self._drop_ahead()",
        "consume,consume@dispatched",
    ),
    Mutant(
        "by key: a message whose key is held back waits",
        "consumer/consumer.py",
        "(waiting if held and entry.key in held else todo).setdefault",
        "todo.setdefault",
        "tests/consumer/test_by_key.py",
    ),
    Mutant(
        "by key: whoever retries has the first of a key due, and none behind it",
        "consumer/key_order.py",
        "         ORDER BY turn, position, message_id LIMIT 1) f",
        "         ORDER BY turn DESC, position, message_id LIMIT 1) f",
        "tests/consumer/test_by_key.py",
    ),
    Mutant(
        "growth: nothing is read behind a growth that isn't known to be passed",
        "consumer/sql.py",
        "                           AND position <= greatest(%(position)s, {_BEFORE_GROWTH})\n",
        "",
        "tests/consumer/test_growth.py",
    ),
    Mutant(
        "consume: an inbox row that came in between undoes the handler",
        "consumer/sql.py",
        " WHERE {MARKED_TRANSACTION}\n",
        " WHERE {MARKED_TRANSACTION}\nON CONFLICT DO NOTHING\n",
        "consume,compensate@dispatched",
    ),
    Mutant(
        "consume: a failure is written over a failed row only",
        "consumer/sql.py",
        "error_kind = excluded.error_kind, starts = 0, changed_at = clock_timestamp()\n WHERE c.status = 'failed' AND",
        "error_kind = excluded.error_kind, starts = 0, changed_at = clock_timestamp(), "
        "quarantined_by = NULL, quarantined_from = NULL\n WHERE",
        "consume,compensate@failing",
    ),
    Mutant(
        "consume: a late failure takes no attempt back",
        "consumer/sql.py",
        " AND c.attempts <= excluded.attempts",
        "",
        "tests/consumer/test_rivals.py",
    ),
    Mutant(
        "handlers: what fails in a pipeline is done again without one, also where it was alone",
        "consumer/consumer.py",
        "            if not failed.is_of_entry:\n",
        "            if failed.together > 1:\n",
        "tests/consumer/test_pipeline.py",
    ),
    Mutant(
        "handlers: a connection that carries their changes can't be committed",
        "database/at_commit.py",
        '        _refuse_held(connection, "connection.commit()")\n        _close(connection)\n',
        "        _close(connection)\n",
        "tests/producer/test_held.py tests/consumer/test_carriers.py",
    ),
    Mutant(
        "held transactions: a cursor of the driver's own can't end one",
        "database/session.py",
        "            if ending:\n                hold.refuse(ending)\n",
        "",
        "tests/producer/test_held.py",
    ),
    Mutant(
        "held transactions: a session can't commit one",
        "database/at_commit.py",
        '        hold.refuse("session.commit()")\n',
        "        pass\n",
        "tests/producer/test_held.py",
    ),
    Mutant(
        "consume: what was read ahead is used only if the offset is still there",
        "consumer/consumer.py",
        "        if position != self._position or not candidates:",
        "        if not candidates:",
        "tests/consumer/test_rivals.py",
    ),
    Mutant(
        "consume: a failure isn't recorded if another worker went on",
        "consumer/consumer.py",
        "            if not locked[0][0] or is_held or position != self._position:",
        "            if not locked[0][0] or is_held:",
        "tests/consumer/test_rivals.py",
    ),
    Mutant(
        "consume: the newest offset counts",
        "consumer/sql.py",
        " ORDER BY position DESC, starts DESC LIMIT 1\n",
        " ORDER BY position, starts DESC LIMIT 1\n",
        "consume,send@dispatched",
    ),
    Mutant(
        "consume: in the order of positions",
        "consumer/sql.py",
        "ORDER BY position LIMIT %(limit)s + ",
        "ORDER BY position DESC LIMIT %(limit)s + ",
        "tests/consumer/test_what_is_read.py",
    ),
    Mutant(
        "retry: the row is locked while its handler runs",
        "consumer/sql.py",
        '{is_held("c")} IS NOT TRUE\n   FOR UPDATE SKIP LOCKED\n',
        '{is_held("c")} IS NOT TRUE\n',
        "tests/consumer/test_rivals.py",
    ),
    Mutant(
        "retry: only what is still failed and due is run",
        "consumer/sql.py",
        "AND message_id = %s AND status = 'failed' AND next_attempt_at <= clock_timestamp()\n",
        "AND message_id = %s\n",
        "park,retry@failed",
    ),
    Mutant(
        "consume: a resent message whose retry runs is left alone",
        "consumer/sql.py",
        "           AND discarded_at IS NULL FOR UPDATE SKIP LOCKED) f",
        "           AND discarded_at IS NULL) f",
        "retry,consume@resent",
    ),
    Mutant(
        "operator: an inbox row is locked while it is changed",
        "acts/changes.py",
        "\n                        FOR UPDATE {{skip}}) l ON true",
        " /* {{skip}} */) l ON true",
        "park,retry@failed",
    ),
    # --- compensation ----------------------------------------------------------------------------------------
    Mutant(
        "quarantine: a row that is there already is looked at, not an error",
        "compensate/sql.py",
        " ORDER BY consumer_group, id\nON CONFLICT (consumer_group, message_id) DO NOTHING\n",
        " ORDER BY consumer_group, id\n",
        "consume,compensate@dispatched",
    ),
    Mutant(
        "quarantine: waits for a handler that runs the failed message",
        "compensate/quarantine.py",
        "sql.inboxes(schema, order.topic, order.message_id, lock=True)",
        "sql.inboxes(schema, order.topic, order.message_id)",
        "retry,compensate@failed",
    ),
    Mutant(
        "compensate: a consumer that was faster than the quarantine is believed",
        "compensate/compensate_pass.py",
        "            if consumed and not knowingly:\n                # A consumer",
        "            if False:\n                # A consumer",
        "consume,compensate@dispatched",
    ),
    # --- deliveries ------------------------------------------------------------------------------------------
    Mutant(
        "confirm: of two workers that have learnt the same, one writes it",
        "delivery/sql.py",
        " ORDER BY half_id\nON CONFLICT DO NOTHING\n",
        " ORDER BY half_id\n",
        "confirm,confirm@dispatched",
    ),
    Mutant(
        "confirm: what isn't settled is asked about again",
        "delivery/confirm_pass.py",
        "        self._ask_again()\n        try:",
        "        try:",
        "confirm_again,give_back@parked",
    ),
    Mutant(
        "confirm: what a group has yet to read isn't lost",
        "delivery/confirm_pass.py",
        "    if send is None or not send.passed or (send.taken and not send.grace_over):",
        "    if send is None or (send.taken and not send.grace_over):",
        "confirm_again,consume@missing",
    ),
    Mutant(
        "confirm: the offset is asked first, then the inbox",
        "delivery/confirm_pass.py",
        "            progress = self._progress.get(queue, QueueProgress(queue, 0, 0))",
        "            progress = {each.queue: each for each in self._inbox.progress()}.get(\n"
        "                queue, QueueProgress(queue, 0, 0))",
        "confirm_again,consume@missing",
    ),
    Mutant(
        "confirm: a quarantine is settled when its compensation is written",
        "delivery/confirm_pass.py",
        "inbox.status in {Status.CONSUMED, Status.EXPIRED} or (send is not None and send.compensated)",
        "inbox.status in {Status.CONSUMED, Status.EXPIRED, Status.QUARANTINED}",
        "tests/delivery/test_confirm.py",
    ),
    Mutant(
        "confirm: nothing is written of a message that prune has deleted",
        "delivery/sql.py",
        " CROSS JOIN LATERAL (SELECT FROM {s}.message m WHERE m.half_id = r.half_id LIMIT 1) m\n",
        "",
        "tests/delivery/test_confirm.py",
    ),
    Mutant(
        "prune: a delivery that slipped in behind its message goes",
        "prune/segments.py",
        "            execute(connection, sql.left_over(schema, first=_next(after), "
        "end=_next(last) if full else end))\n",
        "",
        "tests/delivery/test_pruned.py",
    ),
    Mutant(
        "prune: row by row, what a known group has yet to consume stays",
        "prune/segments_sql.py",
        '_WAITS = f"""({_MAY_WAIT}',
        '_WAITS = f"""({_MAY_WAIT} AND false',
        "tests/delivery/test_pruned.py",
    ),
    Mutant(
        "prune: with its segment, too, what a known group has yet to consume stays",
        "prune/segments.py",
        "for id_ in {*(keep or ()), *undelivered}",
        "for id_ in keep or ()",
        "tests/delivery/test_pruned.py",
    ),
    # --- prune -----------------------------------------------------------------------------------------------
    Mutant(
        "prune: what somebody sends again is left alone",
        "prune/segments_sql.py",
        "WHERE half_id IN (SELECT id FROM settled) FOR UPDATE SKIP LOCKED",
        "WHERE half_id IN (SELECT id FROM settled)",
        "prune,resend@settled",
    ),
    Mutant(
        "prune: the newest message of a queue stays",
        "prune/segments_sql.py",
        "                   OR NOT EXISTS (SELECT FROM {s}.message n\n"
        "                                   WHERE n.topic = m.topic AND n.queue = m.queue "
        "AND n.position > m.position)))",
        "))",
        "tests/prune/test_segments.py",
    ),
    Mutant(
        "prune: an inbox row outlives its message",
        "prune/inbox.py",
        "gone = [message_id for message_id in old if message_id not in existing]",
        "gone = old",
        "prune,resend@settled",
    ),
    Mutant(
        "prune: with its segment, too, an inbox row outlives its message",
        "prune/sql.py",
        " AND k.message_id IS NULL) IS NOT TRUE",
        ") IS NOT TRUE",
        "tests/prune/test_inbox_segments.py",
    ),
    Mutant(
        "prune: what was consumed after the producer was asked stays",
        "prune/sql.py",
        "greatest(changed_at, discarded_at) < h.asked_at",
        "h.asked_at IS NOT NULL",
        "tests/prune/test_inbox_segments.py",
    ),
    Mutant(
        "prune: what came into a segment of the inbox since its survey stays",
        "prune/sql.py",
        "FROM {{s}}.{leaf} WHERE changed_at >= '{since}'",
        "FROM {{s}}.{leaf} WHERE changed_at >= '{since}' AND false",
        "tests/prune/test_inbox_segments.py",
    ),
    Mutant(
        "prune: what was sent again lately stays",
        "prune/segments_sql.py",
        "m.visible_at >= clock_timestamp() - make_interval(secs => %(retention)s)\n",
        "false\n",
        "tests/prune/test_prune.py",
    ),
    Mutant(
        "prune: the newest offset stays",
        "prune/sql.py",
        "   AND ({ours}) < (SELECT",
        "   AND ({ours}) <= (SELECT",
        "tests/prune/test_rewrite.py",
    ),
    Mutant(
        "prune: what wasn't dispatched survives its segment",
        "prune/segments_sql.py",
        "            AND (o.resolution = 'rollback' OR d.recalled_at IS NOT NULL OR m.half_id IS NOT NULL)\n",
        "",
        "tests/prune/test_segments.py",
    ),
    Mutant(
        "prune: the newest message of a queue survives its segment",
        "prune/segments_sql.py",
        "SELECT newest FROM ends WHERE newest >= %(first)s AND newest < %(end)s",
        "SELECT newest FROM ends WHERE false",
        "tests/prune/test_segments.py",
    ),
    Mutant(
        "prune: what came into a segment since its survey survives",
        "prune/segments.py",
        "keep = sorted({*survey.keep, *((group, id_) for group, id_ in changed)})",
        "keep = sorted(survey.keep)",
        "tests/prune/test_segments.py",
    ),
    Mutant(
        "prune: who reads while a segment is made waits for it, and plans after that",
        "prune/segments.py",
        'tables = [*(f"ONLY {_name(schema, table)}" for table in side.tables), *(',
        "tables = [*(",
        "tests/prune/test_segments.py",
    ),
    Mutant(
        "prune: no ids are refused that anybody could send soon",
        "prune/ahead.py",
        "math.ceil((now / 1000 + lead) / length)",
        "math.ceil(now / 1000 / length)",
        "tests/prune/test_ahead.py",
    ),
    Mutant(
        "prune: a large table is read before a segment is attached, not under the lock",
        "prune/ahead.py",
        "for table in refusal.unproven:",
        "for table in ():",
        "tests/prune/test_ahead.py",
    ),
    Mutant(
        "prune: ids are let in again before their time comes",
        "prune/ahead.py",
        "    if left > 0:",
        "    if True:",
        "tests/prune/test_ahead.py",
    ),
    Mutant(
        "prune: ids that are there aren't refused",
        "prune/ahead.py",
        "if each.first not in taken]",
        "if taken is not None]",
        "tests/prune/test_ahead.py",
    ),
    Mutant(
        "prune: a table is rewritten only where all that counts is put back",
        "prune/rewrite.py",
        "CASE WHEN count(*) > %(few)s THEN",
        "CASE WHEN false THEN",
        "tests/prune/test_rewrite.py",
    ),
    Mutant(
        "prune: whoever reads a table that is rewritten waits",
        "prune/rewrite.py",
        "(_LOCK, {}),",
        '("SELECT 1", {}),',
        "tests/prune/test_rewrite.py",
    ),
    # --- repairs ---------------------------------------------------------------------------------------------
    Mutant(
        "repair: only the newest send that was found is followed by another",
        "reconcile/repair.py",
        "            elif sent != finding.sends:",
        "            elif False:",
        "repair,repair@missing",
    ),
)
