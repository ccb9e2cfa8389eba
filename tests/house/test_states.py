"""What SQL says: states are declared once, nothing lists them by hand, what words them knows them all; in ASCII."""

from __future__ import annotations

import ast
import enum
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import CheckConstraint

from outbox.acts.changes import MessageStatus
from outbox.database.tables import common_tables, consumer_tables, producer_tables
from outbox.delivery.known_group import CALLBACK_OF
from outbox.flow import saga
from outbox.flow.saga import CommandAnswer, CommandKind, SagaStatus
from outbox.flow.tcc import BranchState
from outbox.message.model import DeliveryStatus, Resolution, Status
from outbox.operator.health.rules import IN_ORDER
from outbox.operator.look.inbox_sql import address_sql
from outbox.operator.model import BulkItemState, BulkJobState, HalfStatus, MessageFate
from outbox.reconcile.job import Outcome
from outbox.reconcile.tables import ProducerState

ROOT = Path(__file__).parents[2]
DECLARATIONS: tuple[type[enum.StrEnum], ...] = (
    *(Status, DeliveryStatus, MessageStatus, MessageFate, HalfStatus, Resolution),
    *(BulkItemState, BulkJobState, SagaStatus, CommandKind, CommandAnswer, BranchState),
)
#: States that are worked out, and that no table has.
DERIVED = {"discarded", "unconsumed", "fenced", "compensating", "replaced", "delivered", "unknown"}
WORDS = {str(each) for kind in DECLARATIONS for each in kind} | DERIVED

#: Lists of states that are no property of a state: what each of them says.
BY_HAND = {
    "cli/groups.py: failed skipped": "the items that the end of a bulk job shows",
    "compensate/compensate_pass.py: cancelled skipped": "how an item ends without its compensation",
    "delivery/confirm_pass.py: consumed expired": "a quarantine may be released: for the producer it isn't settled",
    "flow/saga.py: compensated completed": "the two ends",
    "acts/messages.py: compensated compensating replaced rolled_back": "words of a refusal",
    "acts/messages.py: compensated recalled rolled_back": "words of a refusal",
    "operator/look/inbox_sql.py: failed parked": "what an index counts",
    "operator/look/message_sql.py: compensated consumed": "fates that aren't those of one group",
    "operator/look/message_sql.py: consumed left_out": "what all groups have, or don't want",
    "operator/look/message_sql.py: recalled scheduled": "what one table has",
    "operator/look/message.py: consumed discarded expired left_out quarantined": "in which order they are shown",
    "acts/forms.py: done refused": "what an operator answers",
    "acts/changes.py: committed scheduled": "the declaration itself",
    "acts/changes.py: rolled_back undecided": "the declaration itself",
    "reconcile/tables.py: recalled rolled_back": "the declaration itself",
    "reconcile/repair.py: consumed quarantined": "what a repair writes",
}
_LIST = re.compile(r"(?:IN|<@|&&)\s*\(?\s*((?:'\w+'\s*,\s*)+'\w+'|'\{[\w,]+\}')")
_ONE = re.compile(r"\b(?:status|state|resolution|last_answer|quarantined_from) (?:=|<>) '(\w+)'")


def _texts(tree: ast.AST) -> Iterator[str]:
    return (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))


def _lists(tree: ast.AST) -> Iterator[set[str]]:
    for text in _texts(tree):
        yield from (set(re.findall(r"\w+", found)) for found in _LIST.findall(text))
    for node in ast.walk(tree):
        if isinstance(node, ast.Set | ast.Tuple | ast.List):
            plain = {each.value for each in node.elts if isinstance(each, ast.Constant)}
            named = {ast.unparse(each) for each in node.elts if isinstance(each, ast.Attribute)}
            yield {str(each) for each in plain} | {
                name.rpartition(".")[2].lower() for name in named if re.search(r"(Status|State|Fate)\.[A-Z_]+$", name)
            }


def _modules() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted((ROOT / "outbox").rglob("*.py")):
        name = str(path.relative_to(ROOT / "outbox"))
        # What a table accepts is compared with the declarations below.
        if "migrations" not in path.parts and not name.startswith("database/tables/"):
            yield name, ast.parse(path.read_text())


def test_no_list_of_states_by_hand() -> None:
    """Two states in one list, of SQL or of Python, are a property of their declaration, or are justified here."""
    found = {
        f"{name}: {' '.join(sorted(words))}"
        for name, tree in _modules()
        for words in _lists(tree)
        if len(words) > 1 and words <= WORDS and any(len(words & {*map(str, kind)}) > 1 for kind in DECLARATIONS)
    }
    assert found == {*BY_HAND}


def test_sql_asks_for_states_that_there_are() -> None:
    """A state that a statement names is declared."""
    found = {word for _, tree in _modules() for text in _texts(tree) for word in _ONE.findall(text)}
    assert {"failed", "pending", "compensated"} & found
    assert found - WORDS == {"disabled"}  # of PostgreSQL's own sessions


def test_sql_is_written_in_ascii() -> None:
    """A database or a client with another encoding than UTF-8 takes each statement, and each pattern in one."""
    sql = re.compile(r"\b(?:SELECT [^`]* FROM|CASE WHEN|UPDATE [^`]* SET|INSERT INTO|DELETE FROM|WHERE)\b")
    formed = (node for _, tree in _modules() for node in ast.walk(tree) if isinstance(node, ast.JoinedStr))
    texts = [*("".join(_texts(node)) for node in formed), *(text for _, tree in _modules() for text in _texts(tree))]
    assert not [text for text in texts if sql.search(text) and not text.isascii()]
    assert address_sql().isascii()


def test_tables_accept_what_is_declared() -> None:
    """The CHECK of each column that has a state accepts the states of its declaration, and no others."""
    declared: dict[str, set[str]] = {
        "consumer_message.status": {*Status},
        "consumer_message.quarantined_from": {"unconsumed", *(each for each in Status if each.open)},
        "attempt_history.status": {each for each in Status if each.tried},
        "reread_message.status": {each for each in Status if each.tried},
        "delivery.status": {*DeliveryStatus},
        "op_message.resolution": {*Resolution} - {Resolution.UNKNOWN},
        "half_check.last_answer": {*Resolution},
        "check_history.answer": {*Resolution},
        "check_history.asked": {"checker", "fence"},
        "op_message.decided_by": {"producer", "check", "operator"},
        "bulk_item.state": {*BulkItemState},
        "saga.status": {*SagaStatus},
        "saga_command.kind": {*CommandKind},
        "saga_command.answer": {*CommandAnswer},
        "tcc_branch.state": {*BranchState},
    }
    accepted = {
        f"{table.name}.{column}": set(re.findall(r"'(\w+)'", listed))
        for tables in (common_tables(), consumer_tables(), producer_tables())
        for table in tables.tables.values()
        for check in table.constraints
        if isinstance(check, CheckConstraint)
        for column, listed in re.findall(r"^(\w+) IN \((.+)\)$", str(check.sqltext))
    }
    assert accepted == {column: set(map(str, states)) for column, states in declared.items()}


def test_what_is_kept_apart_agrees() -> None:
    """Where layers keep a module from importing a declaration, the two say the same."""
    assert {outcome.label for outcome in Outcome if not outcome.differs} == IN_ORDER
    assert {each.name.lower() for each in ProducerState} == {*MessageStatus}
    undeliverable = {status for status, callback in CALLBACK_OF.items() if callback == "undeliverable"}
    assert {*saga._UNDELIVERABLE} == undeliverable


_HELD = """
import importlib, sys
from outbox.message.model import Status
sys.path.insert(0, {root!r})
unknowing = set()
from outbox.console.pages.view import _CHIPS
from outbox.acts.changes import STATES
from outbox.operator.look.message import _IN_INBOX
for name, words in (("_CHIPS", _CHIPS), ("STATES", STATES), ("_IN_INBOX", _IN_INBOX)):
    unknowing |= {{name}} if [each for each in Status if each not in words] else set()
try:
    import outbox.reconcile.sql
except KeyError as error:
    unknowing |= {{f"InboxState: {{error}}"}}
from outbox.consumer.sql import HOLDS_KEY, keep_earlier, lock_earlier
from outbox.database.sql import open_rows
from outbox.database.tables import consumer_tables
from outbox.operator.look import inbox_sql, unconsumed
from outbox.prune.sql import _SETTLED
tables = consumer_tables().tables["outbox.consumer_message"]
checks = " ".join(str(each.sqltext) for each in tables.constraints if hasattr(each, "sqltext"))
index = next(each for each in tables.indexes if each.name == "ix_consumer_message_held")
knowing = HOLDS_KEY, lock_earlier.sql, open_rows("true"), checks, str(index.dialect_options["postgresql"]["where"])
print(sorted(unknowing), all("held" in sql for sql in (*knowing, inbox_sql.met.sql)), "held" in unconsumed._UNFINISHED,
      any("'held'" in sql for sql in (_SETTLED,)), keep_earlier.sql.count("held"))
"""


def test_a_status_more(tmp_path: Path) -> None:
    """A status that is added is in each list that goes by its properties; what has words for each is found wanting."""
    shutil.copytree(ROOT / "outbox", tmp_path / "outbox", ignore=shutil.ignore_patterns("__pycache__"))
    model = tmp_path / "outbox/message/model.py"
    line = '    PARKED = "parked", "open", "tried"\n'
    assert line in model.read_text()
    model.write_text(model.read_text().replace(line, line + '    HELD = "held", "open", "alone"\n', 1))

    def say(folder: Path) -> str:
        code = _HELD.format(root=str(folder))
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False,
                              env={"PYTHONPATH": str(folder), "PATH": ""})  # fmt: skip
        return done.stdout.strip() + done.stderr[-2000:]

    assert say(tmp_path) == """["InboxState: 'HELD'", 'STATES', '_CHIPS', '_IN_INBOX'] True True False 1"""
    assert say(ROOT) == "[] False False False 0"
