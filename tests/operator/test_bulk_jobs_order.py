"""Bulk jobs before they run: previewed, bound by a token, ordered once, and only what was shown."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from uuid import UUID

import pytest

from outbox.acts.changes import Actor, MessageStatus, Target
from outbox.embedded import ServerLike
from outbox.errors import ActRefused, BulkJobTooLarge, CompensationRefused, InvalidRequest, NotFound, SelectorChanged
from outbox.message.model import Status, uuid7
from outbox.operator import model
from outbox.operator.bulk import jobs
from outbox.operator.model import (
    MAX_IDS,
    BulkItemFilter,
    BulkJobFilter,
    BulkJobState,
    HalfFilter,
    HalfStatus,
    InboxFilter,
    MessageFilter,
    PageRequest,
    Selector,
)
from tests.operator.acting import ANN, KIND, Desk, open_desk

PARKED = InboxFilter(status=(Status.PARKED,), group="bank-b", topic="transfers")


def bulk_jobs(desk: Desk) -> int:
    """Count the bulk jobs, and see that there is no item without one."""
    lost = "SELECT count(*) FROM outbox.bulk_item WHERE bulk_job_id NOT IN (SELECT id FROM outbox.bulk_job)"
    assert desk.rows(lost) == [0]
    return int(desk.rows("SELECT count(*) FROM outbox.bulk_job")[0])


# --- preview -------------------------------------------------------------------------------------------------


def test_a_preview_tells_what_would_be_done(desk: Desk) -> None:
    """How many match, how many can be acted on, why the others can't, some of them, and all that in words."""
    parked = desk.inbox("parked", 12)
    desk.inbox("discarded", 2)
    desk.inbox("parked", 3, group="other")
    shown = desk.preview("retry", PARKED)
    assert (shown.action, shown.database, shown.matched.value, shown.eligible) == ("retry", "bank", 14, 12)
    assert shown.ineligible == {"it is discarded; restore it first": 2}
    assert shown.sample == [Target(each, "bank-b") for each in sorted(parked, reverse=True)[:5]]
    assert shown.described == f"retry 12 parked messages of group bank-b, topic transfers ({KIND})"
    assert (bulk_jobs(desk), desk.audits()) == (0, 0)


def test_words_say_no_more_than_is_so(desk: Desk) -> None:
    """Several groups, topics, kinds or states aren't named as if they were one."""
    desk.inbox("parked", 2, group="a", topic="x", kind="K")
    desk.inbox("failed", 1, group="b", topic="x", kind="L")
    assert desk.preview("retry", InboxFilter()).described == "retry 3 messages (2 parked, 1 failed) of topic x"
    assert desk.preview("discard", InboxFilter()).described == "discard 2 parked messages of group a, topic x (K)"
    assert desk.preview("restore", InboxFilter()).described == "restore no message"


@pytest.mark.parametrize(
    ("action", "wanted", "said"),
    [
        (
            "resend",
            MessageFilter(topic="t", status=(MessageStatus.DISPATCHED,)),
            "resend 2 dispatched messages of topic t",
        ),
        ("recall", MessageFilter(topic="t"), "recall 1 scheduled message of topic t"),
        ("recall", MessageFilter(status=(MessageStatus.SCHEDULED,)), "recall 1 scheduled message of topic t"),
        ("compensate", MessageFilter(key="k"), "compensate no message"),
        ("check", HalfFilter(topic="t"), "check 2 undecided half messages of topic t"),
        (
            "rollback",
            MessageFilter(status=(MessageStatus.UNDECIDED,)),
            "roll back 2 undecided half messages of topic t",
        ),
        ("commit", HalfFilter(), "commit 1 undecided half message of topic t"),
        ("check", HalfFilter(status=HalfStatus.PARKED), "check no message"),
        ("check", HalfFilter(min_age=3600.0), "check no message"),
    ],
)
def test_selectors_of_the_producers_side(desk: Desk, action: str, wanted: object, said: str) -> None:
    """Messages and halves are selected by the same filters by which they are looked at."""
    for state in ("dispatched", "dispatched", "scheduled", "undecided", "fenced", "rolled_back"):
        desk.half(state, topic="t")
    chosen = Selector(halves=wanted) if isinstance(wanted, HalfFilter) else wanted
    assert desk.preview(action, chosen).described == said


def test_producers_acts_on_the_messages_of_an_inbox(server: ServerLike, template: str) -> None:
    """The dead letters of a consumer's database are sent again, or rolled back, where their producer is."""
    with open_desk(server, template, "a", "b") as two:
        sent = [two.half("dispatched") for _ in range(3)]
        two.inbox("parked", ids=sent, database="b")
        two.inbox("parked", database="b")
        shown = two.preview("resend", replace(PARKED, database="b"), database="a")
        assert (shown.database, shown.eligible, shown.matched.value) == ("a", 3, 4)
        with pytest.raises(InvalidRequest, match="name the database of the inbox in its filter: a, b"):
            two.preview("resend", PARKED, database="a")
        row = two.start("resend", replace(PARKED, database="b"), token=shown.token)
        assert [item.message_id for item in two.items(row)] == sent
        two.inbox("consumed", ids=sent[:1], group="c", database="b")
        shown = two.preview("compensate", sent)
        assert shown.eligible == 2
        assert list(shown.ineligible) == [
            "it took effect: a group has consumed it; undo that too, and say so with acknowledge_delivered"
        ]
        assert two.preview("compensate", sent, acknowledge_delivered=True).eligible == 3
        assert two.preview("compensate", replace(PARKED, database="b")).eligible == 2
        shown = two.preview("compensate", MessageFilter(topic="transfers"))
        assert (shown.eligible, shown.described) == (2, "compensate 2 dispatched messages of topic transfers")
        two.half("dispatched")
        row = two.start("compensate", MessageFilter(topic="transfers"), token=shown.token)
        assert [item.message_id for item in two.items(row)] == sent[1:]


@pytest.mark.parametrize(
    ("action", "chosen", "field"),
    [
        ("retry", Selector(), "selector"),
        ("retry", Selector(targets=(), inbox=PARKED), "selector"),
        ("retry", Selector(targets=()), "selector"),
        ("retry", Selector(messages=MessageFilter()), "selector"),
        ("resend", Selector(halves=HalfFilter()), "selector"),
        ("check", Selector(inbox=PARKED), "selector"),
        ("retry", Selector(targets=(Target(UUID(int=1)),)), "group"),
        ("resend", Selector(targets=(Target(UUID(int=1), "g"),)), "group"),
        ("resend", Selector(messages=MessageFilter(body=("a", "b"))), "body"),
        ("resend", Selector(messages=MessageFilter(status=("lost",))), "status"),  # type: ignore[arg-type]
        ("retry", Selector(inbox=InboxFilter(status=("lost",))), "status"),  # type: ignore[arg-type]
        ("check", Selector(halves=HalfFilter(status="lost")), "status"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_selector(desk: Desk, action: str, chosen: Selector, field: str) -> None:
    """A selector that isn't one, or doesn't fit the act, is refused by the name of what is wrong."""
    with pytest.raises(InvalidRequest) as refused:
        desk.preview(action, chosen)
    assert refused.value.field == field


def test_too_many(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """More names than can be named, and more matches than a bulk job may have, are refused with the mend."""
    with pytest.raises(BulkJobTooLarge, match="1001 messages are named; at most 1000 can be, or use a filter"):
        desk.preview("retry", [(uuid7(), "bank-b") for _ in range(MAX_IDS + 1)])
    desk.inbox("parked", 6)
    monkeypatch.setattr(jobs, "MAX_ITEMS", 5)
    token = desk.preview("retry", PARKED).token
    with pytest.raises(BulkJobTooLarge, match="more than 5 messages are matched; narrow the filter"):
        desk.start("retry", PARKED, token=token)
    assert bulk_jobs(desk) == 0


def test_a_preview_counts_so_many_and_no_more(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond that it says "at least"; the job takes all that fitted at that moment, and nothing that came since."""
    monkeypatch.setattr(model, "PREVIEWED", 3)
    desk.inbox("parked", 5)
    shown = desk.preview("retry", PARKED)
    assert (shown.matched, shown.eligible) == (model.Total(3, "gte"), 3)
    assert shown.described == f"retry at least 3 parked messages of group bank-b, topic transfers ({KIND})"
    desk.inbox("parked", 2)
    assert desk.start("retry", PARKED, token=shown.token).total == 5


def test_what_is_counted_may_be_all_that_cannot_be_done(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of what was counted can be acted on, and of the others some may be."""
    monkeypatch.setattr(model, "PREVIEWED", 3)
    desk.inbox("discarded", 4)
    shown = desk.preview("retry", PARKED)
    assert (shown.eligible, shown.described) == (0, "retry those that can be of more than 3 messages")
    with pytest.raises(ActRefused, match="there is nothing to retry"):
        desk.start("retry", PARKED, token=shown.token)


@pytest.mark.parametrize("action", ["resend", "compensate"])
def test_a_preview_of_messages_counts_so_many_too(action: str, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the producer's side as well, and those whose fate other databases know; later ones stay out."""
    monkeypatch.setattr(model, "PREVIEWED", 2)
    sent = MessageFilter(topic="t", status=(MessageStatus.DISPATCHED,))
    for _ in range(4):
        desk.half("dispatched", topic="t")
    shown = desk.preview(action, sent)
    assert (shown.matched, shown.eligible) == (model.Total(2, "gte"), 2)
    desk.half("dispatched", topic="t")
    assert desk.start(action, sent, token=shown.token).total == 4


def test_names_that_nobody_knows(desk: Desk) -> None:
    """All unknown: not found. Some unknown: they are counted, and the others can be acted on."""
    with pytest.raises(NotFound, match=r"no registered database .bank. knows any of these messages"):
        desk.preview("retry", [(uuid7(), "bank-b")])
    (known,) = desk.inbox("parked")
    shown = desk.preview("retry", [(known, "bank-b"), (uuid7(), "bank-b")])
    assert (shown.matched.value, shown.eligible, sum(shown.ineligible.values())) == (2, 1, 1)


def test_which_database(server: ServerLike, template: str) -> None:
    """The only one that has such messages is found; of several, one has to be named."""
    with open_desk(server, template, "a", "b") as two:
        two.inbox("parked", 2, database="b")
        assert two.preview("retry", PARKED).database == "b"
        two.inbox("parked", 3, database="a")
        with pytest.raises(InvalidRequest, match="several databases have such messages; name one of: a, b"):
            two.preview("retry", PARKED)
        assert two.preview("retry", replace(PARKED, database="a")).eligible == 3
        row = two.start("retry", PARKED, database="b")
        assert (row.database, row.total) == ("b", 2)
        with pytest.raises(SelectorChanged, match="the token isn't one of a preview of this"):
            two.start("retry", PARKED, token=two.preview("retry", PARKED, database="a").token, database="b")


# --- start ---------------------------------------------------------------------------------------------------


def test_an_order_is_what_was_shown(desk: Desk) -> None:
    """The bulk job, its items in the order of the messages, and who ordered it, in one transaction."""
    parked = desk.inbox("parked", 7)
    desk.inbox("discarded", 2)
    shown = desk.preview("retry", PARKED)
    row = desk.start("retry", PARKED, token=shown.token, rate=5.0)
    assert (row.state, row.total, row.pending, row.described) == ("waiting", 7, 7, shown.described)
    assert (row.requested_by, row.reason, row.rate, row.started_at) == ("ann", "because", 5.0, None)
    assert [(item.number, item.message_id, item.group) for item in desk.items(row)] == [
        (number, message_id, "bank-b") for number, message_id in enumerate(sorted(parked), 1)
    ]
    told = {"did": "start", "action": "retry", "items": 7}
    assert desk.audited(row.id) == [("ann", "bulk", "because", told, dict(ANN.origin))]


def test_the_token_holds_off_what_came_later(desk: Desk) -> None:
    """What came after the preview isn't part of it, and doesn't hold it up; for inboxes that goes by time."""
    desk.inbox("parked", 3)
    early = uuid7()
    token = desk.preview("retry", PARKED).token
    desk.inbox("parked", ids=[early])
    desk.inbox("parked", 2)
    assert desk.start("retry", PARKED, token=token).total == 3
    sent = MessageFilter(status=(MessageStatus.DISPATCHED,))
    desk.half("dispatched")
    token = desk.preview("resend", sent).token
    desk.half("dispatched")
    assert desk.start("resend", sent, token=token).total == 1


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE outbox.consumer_message SET discarded_at = now() WHERE position = 1",
        "UPDATE outbox.consumer_message SET status = 'consumed' WHERE position = 1",
        "DELETE FROM outbox.consumer_message WHERE position = 1",
        "UPDATE outbox.consumer_message SET message_id = gen_random_uuid() WHERE position = 1",
    ],
)
def test_an_outdated_token(desk: Desk, change: str) -> None:
    """When anything that was shown has changed, even one for another, the order is refused and nothing written."""
    desk.inbox("parked", 5)
    token = desk.preview("retry", PARKED).token
    desk.run(change)
    with pytest.raises(SelectorChanged, match="the messages to act on have changed since the preview"):
        desk.start("retry", PARKED, token=token)
    assert (bulk_jobs(desk), desk.audits()) == (0, 0)


def test_a_token_for_something_else(desk: Desk) -> None:
    """A token is good for its action, selection and options only, and not when somebody has changed it."""
    desk.inbox("parked", 2)
    token = desk.preview("retry", PARKED).token
    changed = token[:20] + ("A" if token[20] != "A" else "B") + token[21:]
    for action, wanted, given in (
        ("discard", PARKED, token),
        ("retry", replace(PARKED, topic=None), token),
        ("retry", PARKED, changed),
        ("retry", PARKED, "nonsense"),
        ("retry", PARKED, ""),
    ):
        with pytest.raises(SelectorChanged, match="the token isn't one of a preview"):
            desk.start(action, wanted, token=given)
    with pytest.raises(InvalidRequest, match="give the token of a preview") as refused:
        _start_without_token(desk)
    assert refused.value.field == "token"
    assert bulk_jobs(desk) == 0


def _start_without_token(desk: Desk) -> None:
    desk.operator.start(
        "retry", Selector(inbox=PARKED), by=ANN, why="", token=None, database=None,
        options={}, rate=None, idempotency_key=None,
    )  # fmt: skip


def test_named_messages_that_cannot_be_acted_on(desk: Desk) -> None:
    """They become items that are skipped, with the reason: nobody wonders where they are."""
    (parked,), (consumed,) = desk.inbox("parked"), desk.inbox("consumed")
    row = desk.start("retry", [(consumed, "bank-b"), (parked, "bank-b"), (parked, "bank-b")])
    assert (row.total, row.pending, row.skipped) == (2, 1, 1)
    assert [(item.message_id, item.state, item.outcome) for item in desk.items(row)] == [
        (consumed, "skipped", "it is consumed: it took effect in this group; there is nothing to retry"),
        (parked, "pending", None),
    ]


def test_nothing_to_do(desk: Desk) -> None:
    """An order of which nothing could be done is refused; of one rollback, by the error that says so."""
    (consumed,) = desk.inbox("consumed")
    with pytest.raises(ActRefused, match="there is nothing to retry: 1: it is consumed"):
        desk.start("retry", [(consumed, "bank-b")])
    with pytest.raises(ActRefused, match="there is nothing to retry: the filter matches no message"):
        desk.start("retry", PARKED)
    done = desk.half("compensated")
    with pytest.raises(CompensationRefused, match="can't be compensated: its local transaction was compensated"):
        desk.start("compensate", done)
    assert bulk_jobs(desk) == 0


def test_one_message_is_rolled_back_by_one_bulk_job(desk: Desk) -> None:
    """While one is at it, another isn't ordered; also when both are ordered at the same moment."""
    half_id = desk.half("dispatched")
    with ThreadPoolExecutor(6) as threads:
        futures = [threads.submit(desk.start, "compensate", half_id) for _ in range(6)]
    errors = [future.exception() for future in futures]
    assert errors.count(None) == 1
    assert {type(error) for error in errors if error} <= {CompensationRefused, SelectorChanged}
    with pytest.raises(CompensationRefused, match="wait for that bulk job, or cancel it"):
        desk.start("compensate", half_id)
    assert bulk_jobs(desk) == 1


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_rate(desk: Desk, rate: float) -> None:
    """A rate is a number of items a second above 0."""
    with pytest.raises(InvalidRequest, match="must be a number of items a second above 0"):
        desk.start("retry", [(uuid7(), "bank-b")], rate=rate)


# --- the same order twice ------------------------------------------------------------------------------------


def test_the_same_key_is_the_same_bulk_job(desk: Desk) -> None:
    """A repeated order returns the first one, also when it has been carried out; another content is refused."""
    desk.inbox("parked", 4)
    token = desk.preview("retry", PARKED).token
    first = desk.start("retry", PARKED, token=token, idempotency_key="k")
    assert desk.start("retry", PARKED, token=token, idempotency_key="k") == first
    desk.work()
    again = desk.start("retry", PARKED, token=token, idempotency_key="k")
    assert (again.id, again.state, again.done) == (first.id, "done", 4)
    assert (bulk_jobs(desk), [row[3]["did"] for row in desk.audited(first.id)]) == (1, ["start", "end"])
    for change in ({"why": "other"}, {"rate": 2.0}, {"by": Actor("bob")}):
        with pytest.raises(SelectorChanged, match=f"was used for something else .bulk job {first.id}."):
            desk.start("retry", PARKED, token=token, idempotency_key="k", **change)
    with pytest.raises(SelectorChanged, match="use another key"):
        desk.start("retry", replace(PARKED, topic="other"), token=token, idempotency_key="k")


def test_the_same_key_at_the_same_time(desk: Desk) -> None:
    """Eight orders with one key make one bulk job, and all of them return it."""
    desk.inbox("parked", 20)
    token = desk.preview("retry", PARKED).token
    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(desk.start, "retry", PARKED, token=token, idempotency_key="k") for _ in range(8)]
    assert len({future.result().id for future in futures}) == 1
    assert bulk_jobs(desk) == 1
    assert desk.rows("SELECT count(*) FROM outbox.bulk_item") == [20]


def test_what_is_no_key(desk: Desk) -> None:
    """A key is a short text."""
    for key in ("", "x" * 256, "nul \0"):
        with pytest.raises(InvalidRequest) as refused:
            desk.start("retry", [(uuid7(), "bank-b")], idempotency_key=key)
        assert refused.value.field == "idempotency_key"


# --- shown ---------------------------------------------------------------------------------------------------


def test_bulk_jobs_are_listed(desk: Desk) -> None:
    """The newest first, page by page, and by their state."""
    ids = []
    for _ in range(5):
        (message_id,) = desk.inbox("parked")
        ids.append(desk.start("retry", [(message_id, "bank-b")]).id)
    page = desk.operator.bulk_jobs(BulkJobFilter(), PageRequest(3))
    rest = desk.operator.bulk_jobs(BulkJobFilter(database="bank"), PageRequest(3, page.next_page_token))
    assert [row.id for row in page.items + rest.items] == ids[::-1]
    assert rest.next_page_token is None
    desk.work()
    states = {
        state: len(desk.operator.bulk_jobs(BulkJobFilter(state=state), PageRequest()).items) for state in BulkJobState
    }
    assert states == {"waiting": 0, "running": 0, "done": 5, "partly": 0, "cancelled": 0}
    for bad in (lambda: desk.operator.bulk_jobs(BulkJobFilter(state="lost"), PageRequest()),  # type: ignore[arg-type]
                lambda: desk.operator.bulk_items(ids[0], BulkItemFilter(state="lost"), PageRequest())):  # type: ignore[arg-type]  # fmt: skip
        with pytest.raises(InvalidRequest, match=r"state .*'lost' must be one of"):
            bad()
    with pytest.raises(NotFound, match=r"no registered database .bank. has bulk job"):
        desk.operator.bulk_job(uuid7())
