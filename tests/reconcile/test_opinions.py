"""What a producer's own table believes of the consumer: when that is a difference, and how it is set right."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow.dataset as ds
import pytest

from outbox.cli.output import Code
from outbox.errors import InvalidSettings
from outbox.message.model import uuid7
from outbox.reconcile import repair as repairing
from outbox.reconcile.job import DONE, HEALED, Job, Outcome, Repair, Tier
from outbox.reconcile.record.write import detail_of
from outbox.reconcile.report import as_json, sentence_of, verdict
from outbox.reconcile.rows import Finding, to_findings
from outbox.reconcile.run import reconcile
from outbox.reconcile.source import engine_of
from outbox.reconcile.tables import NO_OPINION, ForeignTable, InboxState, ProducerState
from tests.cli.conftest import run_cli
from tests.kit import stride, wait_until
from tests.reconcile.foreign import IDS, SENT, foreign_job, tell
from tests.reconcile.repair_process import Repairer
from tests.reconcile.test_repair_kill import named, nobody_repairs
from tests.reconcile.town import HOUR, PAIR, Fate, Place, Town, fate, url_of

NONE, CONSUMED, FAILED, PARKED, QUARANTINED = InboxState
SYNC: Mapping[Outcome, Repair] = {Outcome.OPINION_DIFFERS: Repair.SYNC_OPINION}
DIFFERS = Outcome.OPINION_DIFFERS
ROLLED_BACK = ProducerState.ROLLED_BACK

#: What the producer believes, what both sides say besides, and what it comes to.
CASES: dict[str, tuple[Fate, Outcome]] = {
    "the same": (fate(opinion="consumed"), Outcome.CONSUMED),
    "none at all": (fate(), Outcome.CONSUMED),
    "none, by a word": (fate(opinion=NO_OPINION), Outcome.CONSUMED),
    "failed, and consumed since": (fate(opinion="failed"), DIFFERS),
    "not known yet, and consumed": (fate(opinion="none"), DIFFERS),
    "consumed just now": (fate(opinion="none", inbox_age=0.0), Outcome.CONSUMED),
    "changed just now by the producer": (fate(opinion="none", age=0.0, inbox_age=HOUR), Outcome.CONSUMED),
    "skipped, and consumed": (fate(opinion="consumed", skipped=True), Outcome.CONSUMED),
    "consumed, and failed": (fate(opinion="consumed", status=FAILED), DIFFERS),
    "consumed, and parked": (fate(opinion="consumed", status=PARKED), DIFFERS),
    "failed, and failed": (fate(opinion="failed", status=FAILED), Outcome.FAILED),
    "failed, and parked": (fate(opinion="failed", status=PARKED), DIFFERS),
    "parked, and parked": (fate(opinion="parked", status=PARKED), Outcome.PARKED),
    "parked just now": (fate(opinion="failed", status=PARKED, inbox_age=0.0), Outcome.PARKED),
    "failed just now": (fate(opinion="consumed", status=FAILED, inbox_age=0.0), Outcome.IN_FLIGHT),
    "rolled back, never known": (
        fate(opinion="none", status=NONE, state=ROLLED_BACK),
        Outcome.ROLLED_BACK,
    ),
    "rolled back, consumed": (fate(opinion="consumed", status=NONE, state=ROLLED_BACK), DIFFERS),
    "compensated, quarantined": (
        fate(opinion="quarantined", status=QUARANTINED, compensated=True),
        Outcome.ROLLED_BACK,
    ),
    "compensated, parked": (fate(opinion="parked", status=QUARANTINED, compensated=True), DIFFERS),
    "left out, consumed": (fate(opinion="consumed", status=NONE, place=Place.BEFORE), DIFFERS),
    "left out": (fate(opinion="none", status=NONE, place=Place.BEFORE), Outcome.LEFT_OUT),
    # What is graver is told first: the consumer doesn't say what it should, or the producer is wrong about more.
    "missing, and believed to be consumed": (fate(opinion="consumed", status=NONE), Outcome.MISSING),
    "another body": (fate(opinion="failed", same_body=False), Outcome.DIGEST_MISMATCH),
    "rolled back, and consumed": (
        fate(opinion="failed", state=ROLLED_BACK),
        Outcome.CONSUMED_THOUGH_ROLLED_BACK,
    ),
    "undecided": (fate(opinion="consumed", status=NONE, state=ProducerState.UNDECIDED), Outcome.UNDECIDED),
    "never dispatched": (fate(opinion="consumed", status=NONE, state=ProducerState.COMMITTED), Outcome.UNDISPATCHED),
}


@pytest.mark.parametrize("tier", [Tier.FULL, Tier.DIGEST])
@pytest.mark.parametrize("ids", ["uuid", "string"])
def test_each_case_comes_to_what_is_said(village: Town, tier: Tier, ids: str) -> None:
    """All of them among others in sync, by either tier, whatever the ids are."""
    cases = [each for each, _ in CASES.values()]
    planted = village.plant([*cases, *[fate(opinion="consumed")] * 50])
    tell(village, ids=ids)
    result = reconcile(foreign_job(village, "producer", "consumer", tier=tier)).pairs[0]
    found = {each.name.removeprefix("order/"): each.outcome for each in to_findings(result.findings)}
    expected = {name: outcome if outcome.differs else None for name, (_, outcome) in CASES.items()}
    assert {name: found.get(str(id_)) for name, id_ in zip(CASES, planted, strict=False)} == expected
    assert result.counts.total() == len(planted)


@pytest.mark.parametrize("word", [*(each.name.lower() for each in InboxState), NO_OPINION, None])
def test_a_clean_range_with_one_opinion_is_as_strict_as_the_judge(village: Town, word: str | None) -> None:
    """The digest tier finds the one wrong opinion among many, and no difference where there is none."""
    (odd, *_) = village.plant([fate(opinion=word), *[fate(opinion="consumed")] * 60])
    tell(village)
    is_wrong = word not in {"consumed", NO_OPINION, None}
    for part in (("producer",), ("producer", "consumer")):
        result = reconcile(foreign_job(village, *part, tier=Tier.DIGEST)).pairs[0]
        assert {each.id: each.outcome for each in to_findings(result.findings)} == ({odd: DIFFERS} if is_wrong else {})


def test_one_column_may_tell_state_and_opinion(village: Town) -> None:
    """As in many systems written by hand: SENT, CONSUMED, FAILED are one status."""
    village.plant([fate(opinion="failed"), fate(opinion="consumed"), fate(state=ProducerState.UNDECIDED, status=NONE)])
    told(village)
    (finding,) = [each for each in found_in(foreign_job(village, producer_table=ONE)) if each.outcome is DIFFERS]
    assert (finding.state, finding.opinion) == (ProducerState.DISPATCHED, FAILED)


#: A producer's table in which one status tells both.
ONE = ForeignTable(
    table="legacy_msg",
    columns={"id": "msg_id", "at": "changed", "state": "status", "opinion": "status", "topic": "topic"},
    states={"INIT": "undecided", "BACK": "rolled_back"} | dict.fromkeys(("SENT", "DONE", "BAD"), "dispatched"),
    opinions={"INIT": "no_opinion", "BACK": "no_opinion", "SENT": "none", "DONE": "consumed", "BAD": "failed"},
)


def told(village: Town) -> None:
    """Tell what the producer has as one status a message."""
    tell(village)
    village.run("""CREATE TABLE legacy_msg AS
                   SELECT msg_id::text AS msg_id, changed, 't' AS topic,
                          CASE WHEN status = 0 THEN 'INIT' WHEN status = 1 THEN 'BACK'
                               ELSE CASE believed WHEN 'done' THEN 'DONE' WHEN 'trouble' THEN 'BAD' ELSE 'SENT' END END
                          AS status
                     FROM legacy_sent""")


def found_in(job: Job) -> list[Finding]:
    """Compare, and return the differences."""
    return list(to_findings(reconcile(job).pairs[0].findings))


# --- written back ----------------------------------------------------------------------------------------


def syncing(village: Town, *parts: Any, **options: Any) -> Job:
    """Return a job that writes the consumer's word into the producer's table."""
    parts = parts or ("producer",)
    known: dict[str, Any] = {"policy": SYNC, "apply": True, "record": True, "record_in": village.accesses[1]}
    return foreign_job(village, *parts, actor="night", **known | options)


def believes(village: Town, *ids: UUID) -> list[str | None]:
    """Return what the producer's table says of messages."""
    words = dict(village.rows("SELECT msg_id, believed FROM legacy_sent"))
    return [words[id_] for id_ in ids]


def audited(village: Town) -> list[tuple[str, str, Any]]:
    """Return what the audit says: actor, target, result."""
    sql = "SELECT actor, target, result FROM outbox.audit WHERE action = 'sync_opinion' ORDER BY target"
    return [tuple(row) for row in village.rows(sql)]


@pytest.mark.parametrize("parts", [("producer",), ("producer", "consumer")])
def test_the_word_of_the_consumer_is_written_back(village: Town, parts: tuple[Any, ...]) -> None:
    """Each word by its own, once, with an audit; the rest of the table, and all else that differs, stays as it was."""
    fates = [
        fate(opinion="failed"),
        fate(opinion="consumed", status=FAILED),
        fate(opinion="none", status=PARKED),
        fate(opinion="parked", status=QUARANTINED, compensated=True),
        fate(opinion="consumed", status=NONE, place=Place.BEFORE),
        fate(opinion="consumed", status=NONE),
        fate(),
    ]
    ids = village.plant(fates)
    tell(village)
    before = village.rows("SELECT to_jsonb(s) - 'believed' FROM legacy_sent s ORDER BY msg_id")
    result = reconcile(syncing(village, *parts))
    results = {each.id: each.result for each in result.pairs[0].repairs}
    # Of those that the consumer didn't handle the producer knows by now; they are differences all the same.
    written = [f"written, and the message is {word} all the same" for word in ("failed", "parked")]
    assert [results[each] for each in ids[:5]] == [DONE, *written, DONE, DONE]
    assert verdict(result).left == verdict(result).differences - 3
    assert believes(village, *ids) == ["done", "trouble", "dead", "held", "fresh", "done", None]
    assert village.rows("SELECT to_jsonb(s) - 'believed' FROM legacy_sent s ORDER BY msg_id") == before
    assert audited(village)[0] == ("night", f"g/{ids[0]}", {"row": str(ids[0]), "was": "failed", "is": "done"})
    assert len(audited(village)) == 5
    again = reconcile(syncing(village, *parts)).pairs[0]
    assert again.repairs == []
    assert again.counts[DIFFERS] == 0
    assert len(audited(village)) == 5


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("column", ["text", "varchar(20)", "smallint", "mood"])
def test_ids_and_words_of_any_type(village: Town, ids: str, column: str) -> None:
    """A row is found by its own id, and a word is written as the type of its column."""
    parts = ("producer", "consumer") if ids in {"string", "raw"} else ("producer",)
    village.plant([fate(opinion="failed"), fate(opinion="consumed")])
    tell(village, ids=ids)
    village.run("DROP TYPE IF EXISTS mood CASCADE; CREATE TYPE mood AS ENUM ('1', '2')")
    village.run(
        f"""ALTER TABLE legacy_sent ALTER believed TYPE {column}
            USING (CASE believed WHEN 'done' THEN '1' ELSE '2' END)::text::{column}"""
    )
    table = replace(SENT, opinions={"1": "consumed", "2": "failed"})
    result = reconcile(syncing(village, *parts, producer_table=table)).pairs[0]
    assert [each.result for each in result.repairs] == [DONE]
    assert village.rows("SELECT DISTINCT believed::text FROM legacy_sent") == ["1"]


def test_a_key_of_numbers(village: Town) -> None:
    """As a serial column has it: the digits are the id, and an index finds the row."""
    village.run("""CREATE TABLE sent AS SELECT i AS id, now() - interval '1 hour' AS at, 'failed' AS word
                     FROM generate_series(1, 3) i;
                   CREATE TABLE known AS SELECT id, now() - interval '1 hour' AS at FROM sent""")
    job = syncing(
        village,
        "producer",
        "consumer",
        producer_table=ForeignTable(table="sent", columns={"id": "id", "at": "at", "opinion": "word"}),
        consumer_table=ForeignTable(table="known", columns={"id": "id", "changed_at": "at"}),
    )
    assert [each.result for each in reconcile(job).pairs[0].repairs] == [DONE] * 3
    assert village.rows("SELECT DISTINCT word FROM sent") == ["consumed"]


def test_one_status_is_written_and_keeps_its_state(village: Town) -> None:
    """A word that tells another state, too, is not written over this one."""
    sent, back = village.plant([fate(opinion="failed"), fate(opinion="failed", status=NONE, state=ROLLED_BACK)])
    told(village)
    states, opinions = {**ONE.states, "LOST": "rolled_back"}, {**ONE.opinions, "LOST": "failed"}
    table = replace(ONE, states=states, opinions=opinions)
    village.run("UPDATE legacy_msg SET status = 'LOST' WHERE status = 'BACK'")
    job = syncing(village, producer_table=replace(table, write={"failed": "BAD"}))
    results = {each.id: each.result for each in reconcile(job).pairs[0].repairs}
    assert results == {sent: DONE, back: "refused: the word SENT tells another state of it, too"}
    assert village.rows("SELECT status FROM legacy_msg ORDER BY status") == ["DONE", "LOST"]


def found_and_left(village: Town, *fates: Fate) -> tuple[list[UUID], Job, list[Finding]]:
    """Plant messages, and compare; return what is to be repaired."""
    ids = village.plant(fates)
    tell(village)
    job = syncing(village)
    return ids, job, found_in(replace(job, apply=False))


def repaired(village: Town, job: Job, found: list[Finding]) -> dict[UUID, str]:
    """Repair, and return the result of each."""
    engines = engine_of(job.producer), engine_of(job.consumer)
    return {each.id: each.result for each in repairing.repair(job, PAIR, uuid7(), found, *engines)}


def test_what_has_changed_meanwhile_is_left_alone(village: Town) -> None:
    """A row that says something else by now, is gone, or right; and what the consumer says another word of."""
    ids, job, found = found_and_left(village, *[fate(opinion="failed")] * 6)
    other, gone, right, rolled_back, retried, done = ids
    village.run("UPDATE legacy_sent SET believed = 'dead' WHERE msg_id = :id", id=other)
    village.run("DELETE FROM legacy_sent WHERE msg_id = :id", id=gone)
    village.run("UPDATE legacy_sent SET believed = 'done' WHERE msg_id = :id", id=right)
    village.run("UPDATE legacy_sent SET status = 1 WHERE msg_id = :id", id=rolled_back)
    village.set_inbox(PARKED, retried)
    assert repaired(village, job, found) == {
        other: "refused: the producer has changed it meanwhile; run the reconciliation again",
        gone: "refused: the producer has no row of it any more",
        right: HEALED,
        rolled_back: "refused: the producer has changed it meanwhile; run the reconciliation again",
        retried: "refused: the consumer says parked by now; run the reconciliation again",
        done: DONE,
    }
    assert believes(village, other, right, rolled_back, retried, done) == ["dead", "done", "trouble", "trouble", "done"]
    assert [target for _, target, _ in audited(village)] == [f"g/{done}"]


def test_a_row_that_another_session_has_is_not_waited_for(village: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is busy, and the others are written at once, not one by one; when that session has ended, it is looked at."""
    ids, job, found = found_and_left(village, *[fate(opinion="failed")] * 3)
    batches: list[int] = []

    def counted(work: repairing.Work, batch: Sequence[Finding]) -> dict[UUID, str]:
        batches.append(len(batch))
        return repairing.sync_opinion(work, batch)

    monkeypatch.setitem(repairing._ACTS, Repair.SYNC_OPINION, counted)
    with village.producer.connect() as other:
        other.exec_driver_sql(f"UPDATE legacy_sent SET believed = 'dead' WHERE msg_id = '{ids[1]}'")
        results = repaired(village, job, found)
        other.commit()
    assert [results[each] for each in ids] == [DONE, repairing.BUSY, DONE]
    changed = "refused: the producer has changed it meanwhile; run the reconciliation again"
    again = repaired(village, job, found)
    assert [again[each] for each in ids] == [HEALED, changed, HEALED]
    assert batches == [3, 3]
    assert believes(village, *ids) == ["done", "dead", "done"]


@pytest.mark.slow
def test_killed_after_each_round_trip(village: Town) -> None:
    """No write is without its audit at any moment; run again, all is done, and nothing twice."""
    ids, job, found = found_and_left(
        village, *[fate(opinion="failed")] * 5, *[fate(opinion="consumed", status=PARKED)] * 5
    )
    repairer = Repairer()
    try:
        for after in itertools.count(1, stride(1)):
            said, pid = repairer.start((named(job), uuid7(), found, 3, after))
            if said == "ended":
                repairer.wait()
                break
            assert repairer.kill(pid)
            wait_until(lambda: nobody_repairs(village), "the server has noticed the end")
            told = {target for _, target, _ in audited(village)}
            written = [id_ for id_ in ids if believes(village, id_) != ["trouble" if id_ in ids[:5] else "done"]]
            assert {f"g/{id_}" for id_ in written} <= told
        assert after > 10, "a repair has more round trips than that"
    finally:
        repairer.close()
    assert believes(village, *ids) == ["done"] * 5 + ["dead"] * 5
    assert {target for _, target, _ in audited(village)} == {f"g/{id_}" for id_ in ids}
    assert set(repaired(village, job, found).values()) == {HEALED}


def test_no_write_without_its_audit(village: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the audit can't be written nothing is; run again, all is done, and told."""
    (one,), job, found = found_and_left(village, fate(opinion="failed"))
    village.run("ALTER TABLE outbox.audit RENAME TO audits")
    with pytest.raises(Exception, match="audit"):
        repaired(village, job, found)
    assert believes(village, one) == ["trouble"]
    village.run("ALTER TABLE outbox.audits RENAME TO audit")
    assert repaired(village, job, found) == {one: DONE}
    assert len(audited(village)) == 1


def test_a_role_that_may_not_write_is_told(village: Town) -> None:
    """A refusal of the server's is the result of each message, and ends nothing."""
    (one,), job, found = found_and_left(village, fate(opinion="failed"))
    village.run("""CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''hands off''; END';
                   CREATE TRIGGER no BEFORE UPDATE ON legacy_sent EXECUTE FUNCTION no()""")
    assert "hands off" in repaired(village, job, found)[one]
    assert audited(village) == []


def test_a_word_that_the_table_has_not(village: Town) -> None:
    """It can't be said, so that it is refused, with the mend."""
    village.plant([fate(opinion="consumed", status=PARKED)])
    tell(village)
    table = replace(SENT, opinions={"done": "consumed", "trouble": "failed"})
    (result,) = reconcile(syncing(village, producer_table=table)).pairs[0].repairs
    assert result.result == "refused: opinions has no word that stands for parked; give it one"


# --- asked before, shown, recorded -----------------------------------------------------------------------


FILE = """
[producer]
url_env = "VILLAGE"

[producer.tables]
table = "legacy_sent"
columns = { id = "msg_id", at = "changed", opinion = "believed" }
opinions = { done = "consumed", trouble = "failed" }

[consumer]
url_env = "VILLAGE"

[[pair]]
topic = "t"
group = "g"
"""


def test_by_the_command_it_is_previewed_asked_and_recorded(
    village: Town, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --apply the report names the policy; what was done, and what is left, is in report and record."""
    village.plant([fate(opinion="failed"), fate(status=PARKED)])
    tell(village)
    (tmp_path / "night.toml").write_text(FILE)
    monkeypatch.setenv("VILLAGE", url_of(village.producer))
    arguments = ["reconcile", "--config", str(tmp_path / "night.toml")]
    shown = run_cli(*arguments)
    assert shown.code == Code.PROBLEMS, shown.err
    assert "the policy opinion_differs = sync_opinion writes what the consumer says into the producer's" in shown.out
    assert "holds it for failed" in shown.out
    assert "apply: nothing can be repaired in tables that aren't ours" in run_cli(*arguments, "--apply", "--yes").err
    arguments += ["--policy", "opinion_differs=sync_opinion", "--policy", "parked=retry"]
    assert "--apply: sync_opinion" in run_cli(*arguments).out
    assert "not repairing" in run_cli(*arguments, "--apply").err
    assert audited(village) == []
    done = run_cli(*arguments, "--apply", "--yes", "--findings", str(tmp_path / "findings"))
    assert "1 repaired (sync_opinion)" in done.out
    # Nothing is done about the other, whatever the policy says, and record and data don't say so.
    expected = [("opinion_differs", "sync_opinion", "done"), ("parked", "alert", None)]
    found = ds.dataset(tmp_path / "findings", partitioning="hive").to_table().sort_by("kind").to_pylist()
    assert [(each["kind"], each["action"], each["result"]) for each in found] == expected
    assert [each["opinion"] for each in found] == ["failed", None]
    (run,) = village.rows("SELECT id FROM outbox.reconciliation_run WHERE applied")
    recorded = "SELECT kind, action, result FROM outbox.reconciliation_finding WHERE run_id = :run ORDER BY kind"
    assert [tuple(row) for row in village.rows(recorded, run=run)] == expected


BY_HAND = Path(__file__).parents[2] / "examples" / "order_payment" / "by_hand.toml"


def test_the_order_balance_systems_own_tables_agree(village: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the example: the consumer's word comes back into the status of producer_msg, and of no other row."""
    village.run(
        """CREATE TABLE producer_msg (msg_id text PRIMARY KEY, status varchar(32), send_times int,
                                      update_time timestamp);
           CREATE TABLE consumer_msg (msg_id text PRIMARY KEY, status varchar(16), retry_times int,
                                      create_time timestamp, update_time timestamp);
           INSERT INTO producer_msg
           SELECT word, word, 1, timezone('UTC', now() - interval '1 hour')
             FROM unnest(ARRAY['PREPARED', 'SENT', 'CONSUMED', 'CONSUME_FAILED', 'OVER_CONSUME_RETRY',
                               'ROLLED_BACK']) word;
           INSERT INTO consumer_msg
           SELECT word, said, 1, timezone('UTC', now() - interval '1 hour'), timezone('UTC', now() - interval '1 hour')
             FROM (VALUES ('SENT', 'DONE'), ('CONSUMED', 'DONE'), ('CONSUME_FAILED', 'DEAD'),
                          ('OVER_CONSUME_RETRY', 'RETRY')) v (word, said)"""
    )
    for name in ("ACCOUNT_URL", "ORDER_URL", "RECORD_URL"):
        monkeypatch.setenv(name, url_of(village.producer))
    done = run_cli("reconcile", "--config", str(BY_HAND), "--apply", "--yes")
    assert done.code == Code.PROBLEMS, done.err
    assert "3 differences left, 1 of 4 repaired" in done.out
    assert "1 repaired (sync_opinion), 2 refused: written, and the message is parked all the same" in done.out
    assert dict(village.rows("SELECT msg_id, status FROM producer_msg")) == {
        "PREPARED": "PREPARED",
        "SENT": "CONSUMED",
        "CONSUMED": "CONSUMED",
        "CONSUME_FAILED": "OVER_CONSUME_RETRY",
        "OVER_CONSUME_RETRY": "CONSUME_FAILED",
        "ROLLED_BACK": "ROLLED_BACK",
    }
    assert "opinion_differs" not in run_cli("reconcile", "--config", str(BY_HAND)).out


def test_what_a_finding_says(village: Town) -> None:
    """In a sentence, as JSON, and in the record; that the consumer doesn't know it is an opinion, too."""
    village.plant([fate(opinion="none")])
    tell(village)
    result = reconcile(foreign_job(village, "producer"))
    (finding,) = to_findings(result.pairs[0].findings)
    assert "holds it for unknown to the consumer" in sentence_of(finding, result.begun_at)
    assert detail_of(finding)["opinion"] == "none"
    (shown,) = as_json(result)["pairs"][0]["findings"]
    assert (shown["kind"], shown["opinion"], shown["status"]) == ("opinion_differs", "none", "consumed")


def test_a_foreign_pair_names_the_mend_where_it_has_it() -> None:
    """Of a producer's table that can be written; of others, and of a producer of ours, nothing is done."""
    assert DIFFERS.repair(SYNC, ["producer"]) is DIFFERS.repair(SYNC, ["producer", "consumer"]) is Repair.SYNC_OPINION
    assert DIFFERS.repair(SYNC, ["consumer"]) is DIFFERS.repair(SYNC) is Repair.ALERT
    assert "the policy" not in DIFFERS.mend({}, ["producer"])
    assert "the policy opinion_differs = sync_opinion" in DIFFERS.mend({}, ["producer"], writable=True)
    assert "--apply writes what the consumer says" in DIFFERS.mend(SYNC, ["producer"], writable=True)


# --- what a job can't be ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"opinions": {"done": "handled"}}, "opinions.done = 'handled' must be one of: no_opinion, none, consumed"),
        (
            {"columns": {"id": "a", "at": "b"}, "states": {}},
            "opinions are those of the column opinion, which columns doesn't name",
        ),
        ({"write": {"consumed": "trouble"}}, "write.consumed = 'trouble' must be one of the words that opinions calls"),
        (
            {"opinions": {"done": "consumed", "ok": "consumed"}},
            "opinions.consumed is written as done or ok: say which, as in write.consumed = 'done'",
        ),
        ({"table": None, "query": "SELECT 1"}, "can be written into a table of PostgreSQL's alone"),
        (
            {"columns": {"id": "a", "at": "b"}, "states": {}, "opinions": {}},
            "columns names no opinion that could be written",
        ),
        (
            {"columns": {"id": "a", "at": "b", "state": "c", "opinion": "c"}, "opinions": {"yes": "consumed"}},
            "states lacks yes, which would be written: the column has both",
        ),
    ],
)
def test_a_table_that_cant_be_written(village: Town, changes: dict[str, Any], said: str) -> None:
    """It is refused as the job is described, with what is ambiguous or missing, and the mend."""
    with pytest.raises(InvalidSettings, match=re.escape(said)):
        syncing(village, producer_table=replace(SENT, **changes))


def test_several_words_of_which_one_is_written(village: Town) -> None:
    """The table has two words for one thing; the job says which is written, and reads both."""
    ids = village.plant([fate(opinion="failed"), fate(opinion="consumed"), fate(opinion="parked")])
    tell(village)
    words = {"done": "consumed", "dead": "consumed", "trouble": "failed"}
    result = reconcile(syncing(village, producer_table=replace(SENT, opinions=words, write={"consumed": "dead"})))
    assert [each.id for each in result.pairs[0].repairs] == ids[:1]
    assert believes(village, *ids) == ["dead", "done", "dead"]


def test_jobs_that_write_nothing_back(village: Town) -> None:
    """Our own tables have no opinion, and what is written must be audited somewhere."""
    with pytest.raises(InvalidSettings, match="the outbox's own are told by the duty confirm"):
        village.job(policy=SYNC)
    for options in ({"record_in": None}, {"record": False}):
        with pytest.raises(InvalidSettings, match="audited where the run is recorded; name a database for the record"):
            syncing(village, "producer", "consumer", **options)


@pytest.mark.parametrize("tier", [Tier.FULL, Tier.DIGEST])
def test_a_word_that_is_not_known(village: Town, tier: Tier) -> None:
    """Nothing is guessed: the word, those that there are, and the mend are told."""
    village.plant([fate(opinion="consumed")])
    tell(village)
    village.run("UPDATE legacy_sent SET believed = 'odd'")
    with pytest.raises(
        InvalidSettings, match=r"opinion = odd of .* must be one of: done, .*; say in opinions what it is"
    ):
        reconcile(foreign_job(village, "producer", tier=tier))
