"""The bank transfer from end to end, on real processes and databases."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, func, select, text, update

from examples.bank_transfer import bank_a, bank_b
from examples.bank_transfer.banks import Banks
from examples.bank_transfer.demo import DemoOptions, run
from examples.bank_transfer.processes import BankProcess
from tests.examples.conftest import ALONE, GOOD_IDS, HEADER, ORDERS_BALANCE, REFUSED, Demo
from tests.kit import sample, tries

#: Of each kind one fault is planted; a message that was lost is sent once more.
RESENT = 1
#: Of a run with half messages: how many orders, and how often a process is killed over them.
ORDERS, KILLS = tries(80), tries(3)


def test_every_transfer_arrives_and_the_sums_are_equal(demo: Demo) -> None:
    """A plain run: as many transfers, messages and inbox rows as orders, nothing in flight, the same money."""
    code, report, out, err = demo(transfers=tries(100))
    assert (code, report["faults"]) == (0, [])
    assert report["orders"] == report["transfers"] == report["messages"] == report["inbox_rows"] == tries(100)
    assert (report["in_flight"], report["parked"], report["kills"], report["refused"]) == (0, [], {}, [])
    before, after = report["money"]["before"], report["money"]["after"]
    assert before["total"] == after["total"] == before["bank_a"]
    assert Decimal(after["bank_b"]) > 0 == Decimal(before["bank_b"])
    # Nothing is told of half messages where there are none.
    assert "The half messages" not in out
    assert "begins with a half message" not in err


def test_bad_rows_are_reported_by_line_and_leave_no_trace(demo: Demo, orders_file: Path, accounts_file: Path) -> None:
    """Each bad row is refused with its reason; neither database has anything of it."""
    traces: list[set[int | None]] = []
    opened: set[str] = set()

    def look(banks: Banks) -> None:
        with banks.a.connect() as a, banks.b.connect() as b:
            traces.append(set(a.scalars(select(bank_a.Transfer.id))))
            traces.append({row["transfer_id"] for row in _bodies(a)})
            traces.append(set(a.scalars(select(bank_a.LedgerEntry.transfer_id))) - {None})
            traces.append(set(b.scalars(select(bank_b.LedgerEntry.transfer_id))))
            opened.update(b.scalars(select(bank_b.Account.id)))

    files: dict[str, Any] = {"orders": orders_file, "accounts": accounts_file}
    # Without the reconciliation only the audit speaks.
    code, report, *_ = demo(look, **files, opening_balance=Decimal(ORDERS_BALANCE), reconcile=False, **ALONE)
    assert (code, report["faults"]) == (0, [])
    assert "reconciliation" not in report
    assert [(row["line"], row["reason"]) for row in report["refused"]] == REFUSED
    assert traces == [GOOD_IDS] * 4
    assert opened == {"AB-71000001", "CD-71000002", "AB-71000003", "EF-71000004"}
    assert report["transfers"] == report["inbox_rows"] == len(GOOD_IDS)


def test_refused_orders_are_told_on_stderr_and_strict_makes_them_an_error(demo: Demo, tmp_path: Path) -> None:
    """The line that an editor could jump to, and exit code 1; bank B is asked before anything is debited."""
    file = tmp_path / "orders.csv"
    file.write_text(f"{HEADER}\n1;1;AB;12;5.00;\n2;1;AB;no such account;7.25;\n3;1;AB;12;nothing;\n")
    code, report, out, err = demo(orders=file, strict=True, **ALONE)
    assert code == 1
    assert f"{file}:4: amount 'nothing' is not a number" in err
    assert f"{file}:3: no account AB-no such account at bank B" in err
    assert "2 orders refused, which --strict makes an error" in err
    assert "Settled: 1 transfer, and not a cent is missing." in out
    assert (report["faults"], report["in_flight"], report["parked"]) == ([], 0, [])
    assert report["states"] == {"refused": 2, "credited": 1, "refunded": 0, "debited": 0}
    assert report["money"]["after"]["bank_b"] == "5.00"


def test_processes_killed_at_random_lose_and_double_nothing(demo: Demo) -> None:
    """SIGKILL of all kinds of processes while they work: the sums are exact, and each transfer has come to its end.

    Accounts are closed between bank A's inquiry and its debit: such transfers are refunded without an operator.
    """
    orders, kills = tries(100), tries(4)
    code, report, out, err = demo(transfers=orders, kills=kills, seed=3)
    assert (code, report["faults"]) == (0, [])
    assert " accounts of bank B closed meanwhile" in err
    states = report["states"]
    assert (states["debited"], report["parked"]) == (0, [])
    assert states["credited"] + states["refunded"] == report["transfers"] == orders - states["refused"]
    assert states["refunded"] == len(report["refunded"]) > 0
    assert all(row["reason"].endswith(" of bank B is closed") for row in report["refused"])
    assert f"{states['refunded']}  refunded  bank B couldn't credit it any more" in out
    assert sum(report["kills"].values()) == kills
    assert sum(report["restarts"].values()) >= kills
    assert report["transfers"] == report["messages"] == report["inbox_rows"]
    assert report["money"]["before"]["total"] == report["money"]["after"]["total"]


@pytest.mark.slow
def test_two_phase_with_kills_every_orphan_is_decided_by_its_fence(demo: Demo) -> None:
    """Kills and stalls aimed at the moments before the decision: the sums are exact, and nothing is undecided."""
    code, report, *_ = demo(transfers=ORDERS, kills=KILLS, seed=2, two_phase=True, faults=True)
    assert (code, report["faults"]) == (0, [])
    refused = {row["line"] for row in report["refused"]}
    assert report["transfers"] == report["messages"] - RESENT == report["inbox_rows"] == ORDERS - len(refused)
    assert report["states"]["debited"] == 0
    assert report["money"]["before"]["total"] == report["money"]["after"]["total"]
    assert sum(report["kills"].values()) == KILLS
    assert sum(report["aimed_kills"].values()) > 0
    halves = report["halves"]
    assert (halves["parked"], halves["undecided"], halves["reservations"]) == (0, 0, {})
    assert halves["committed"] == {"producer": report["transfers"]}
    assert halves["rolled_back"].keys() <= {"fence", "producer"}
    assert halves["written"] == report["transfers"] + sum(halves["rolled_back"].values())
    assert len(halves["orphans"]) == halves["rolled_back"].get("fence", 0)
    # An account may be closed before the order is executed anew.
    assert all(orphan["executed_by_another_half"] or orphan["order"] in refused for orphan in halves["orphans"])
    _are_mended_too(report)


@pytest.mark.slow
def test_tcc_with_kills_confirms_cancels_and_releases(demo: Demo) -> None:
    """Three outcomes: confirmed, cancelled by the compliance desk's objection, abandoned and decided by the checker."""
    code, report, *_ = demo(transfers=ORDERS, kills=KILLS, seed=2, tcc=True, faults=True)
    assert (code, report["faults"]) == (0, [])
    refused = [row for row in report["refused"] if row["reason"].endswith("-1013 is on the watch list")]
    assert refused
    closed = [row for row in report["refused"] if row["reason"].endswith(" of bank B is closed")]
    assert len(refused) + len(closed) == len(report["refused"]) == report["states"]["refused"]
    assert report["states"]["debited"] == 0
    assert report["transfers"] == report["messages"] - RESENT == report["inbox_rows"] == ORDERS - len(report["refused"])
    assert report["money"]["before"]["total"] == report["money"]["after"]["total"]
    assert sum(report["kills"].values()) == KILLS
    assert sum(report["aimed_kills"].values()) > 0
    halves, reservations = report["halves"], report["halves"]["reservations"]
    assert (halves["parked"], halves["undecided"]) == (0, 0)
    assert halves["committed"] == {"producer": reservations["confirmed"]} == {"producer": report["transfers"]}
    assert halves["rolled_back"]["producer"] == reservations["cancelled"] == len(refused)
    assert halves["rolled_back"].get("checker", 0) == reservations.get("abandoned", 0) == len(halves["orphans"])
    assert halves["written"] == sum(reservations.values())
    assert halves["rolled_back"]
    _are_mended_too(report)


def _are_mended_too(report: dict[str, Any]) -> None:
    """Faults after kills: what was rolled back at bank A, and credited at bank B, is found and taken back as well."""
    done = report["reconciliation"]
    assert done["planted"] == done["found"]
    assert done["left"] == {}
    assert ("consumed_though_rolled_back" in done["planted"]) is bool(report["halves"]["rolled_back"])
    measures = done["reports"]["after"]["measures"]
    assert [(measure["name"], measure["in_sync"]) for measure in measures] == [("debited", True), ("promised", True)]


@pytest.mark.parametrize("mode", ["two_phase", "tcc"])
def test_bad_rows_are_refused_in_every_mode(demo: Demo, orders_file: Path, accounts_file: Path, mode: str) -> None:
    """The same lines with the same reasons; what was refused after its half was prepared is rolled back, and told."""
    files: dict[str, Any] = {"orders": orders_file, "accounts": accounts_file}
    code, report, out, err = demo(**files, opening_balance=Decimal(ORDERS_BALANCE), **{mode: True}, **ALONE)
    assert (code, report["faults"]) == (0, [])
    assert [(row["line"], row["reason"]) for row in report["refused"]] == REFUSED
    assert report["transfers"] == report["inbox_rows"] == report["halves"]["committed"]["producer"] == len(GOOD_IDS)
    # A try that fails has prepared nothing; the other mode prepares first, when all but the amount was looked at.
    without_funds = sum(reason.startswith("insufficient funds") for _, reason in REFUSED)
    expected = {"producer": without_funds} if mode == "two_phase" else {}
    assert report["halves"]["rolled_back"] == expected
    assert "The half messages" in out
    assert "0  undecided" in out
    assert ("begins with a half message" in err) is (mode == "two_phase")


@pytest.mark.parametrize("mode", sample(["two_phase", "tcc"], 1))
def test_an_op_that_is_gone_and_a_cent_too_much_make_the_exit_code_1(demo: Demo, mode: str) -> None:
    """The check can fail: what was taken or made between the last transfer and the audit is found, and told."""

    def steal(banks: Banks) -> None:
        with banks.a.begin() as a:
            a.execute(
                text("DELETE FROM outbox.op_message WHERE half_id = (SELECT half_id FROM outbox.op_message LIMIT 1)")
            )
        with banks.b.begin() as b:
            one = select(func.max(bank_b.Account.id)).scalar_subquery()
            more = bank_b.Account.balance + Decimal("0.01")
            b.execute(update(bank_b.Account).where(bank_b.Account.id == one).values(balance=more))

    code, report, *_ = demo(steal, transfers=30, **{mode: True}, **ALONE)
    faults = report["faults"]
    assert (code, report["ok"], report["halves"]["undecided"]) == (1, False, 1)
    assert report["verdict"] == f"Not settled: {len(faults)} faults."
    assert "1 half message undecided" in faults
    assert faults[0].startswith("0.01 is too much: ")


def test_faults_are_found_repaired_and_mended_to_the_cent(demo: Demo, tmp_path: Path) -> None:
    """Some of each kind: all found as such, some repaired, the rest mended by hand, and nothing is left."""
    page = tmp_path / "report.html"
    code, report, out, err = demo(transfers=80, faults=True, report=page, **ALONE)
    assert (code, report["faults"]) == (0, [])
    done = report["reconciliation"]
    kinds = {"missing", "unrecorded", "status_mismatch", "undispatched"}
    by_hand = {"parked", "digest_mismatch", "duplicate_effect", "phantom"}
    assert done["planted"] == done["found"] == dict.fromkeys(kinds | by_hand, 1)
    assert done["repaired"] == dict.fromkeys(kinds, 1)
    assert {hand["kind"] for hand in done["by_hand"]} == by_hand
    assert done["left"] == {}
    assert report["transfers"] == report["inbox_rows"] == 80
    assert report["messages"] == 80 + RESENT
    assert report["money"]["before"]["total"] == report["money"]["after"]["total"]
    in_sync = {name: told["in_sync"] for name, told in done["reports"].items()}
    assert in_sync == {"found": False, "repaired": False, "after": True}
    assert "digest_mismatch" in page.read_text()
    _is_told_in_tables(out, err)


def _is_told_in_tables(out: str, err: str) -> None:
    """For people: the differences by kind, what was done by hand, and the sums of both banks."""
    assert "8 faults planted" in err
    lines = [line.replace("│", " ").split() for line in out.splitlines()]
    assert ["all", "8", "8", "4", "4", "0"] in lines
    assert ["missing", "1", "1", "1"] in lines
    assert ["phantom", "1", "1", "1"] in lines
    for part in ("By hand", "bank B's digest agrees", "The sums: debited"):
        assert part in out
    sums = {line[0] + line[1]: line[-2:] for line in lines if line[:1] == ["bank"] and len(line) == 6}
    assert sums["bankA"] == sums["bankB"]
    assert sums["bankA"][0] == "80"
    assert "unexplained" in {line[0]: line for line in lines if line[-2:] == ["0", "0.00"]}
    assert "Settled: 80 transfers, and not a cent is missing, in spite of 8 faults." in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"producers": 0}, "producers = 0 must be between 1 and 64"),
        ({"transfers": 0}, "transfers = 0"),
        ({"kills": -1}, "kills = -1"),
        ({"opening_balance": Decimal("0.001")}, "at most 2 decimals"),
        ({"opening_balance": Decimal("NaN")}, "opening_balance = NaN"),
        ({"two_phase": True, "tcc": True}, "two_phase and tcc are two modes"),
        ({"faults": True, "reconcile": False}, "faults and report need the reconciliation"),
        ({"report": Path("report.html"), "reconcile": False}, "faults and report need the reconciliation"),
        ({"report": Path("/no/such/folder/report.html")}, "in a folder that isn't there"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    """One error that names the option and its bounds."""
    with pytest.raises(ValueError, match=message):
        DemoOptions(**options)


def test_an_orders_file_of_no_use_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one line, before any database is started."""
    assert run(DemoOptions(orders=tmp_path / "none.csv")) == 2
    assert capsys.readouterr().err == f"orders file {tmp_path / 'none.csv'}: No such file or directory\n"


def _bodies(connection: Connection) -> list[dict[str, Any]]:
    rows = connection.scalars(text("SELECT convert_from(body, 'UTF8')::json FROM outbox.half_message"))
    return list(rows)


def test_leave_comes_too_late_for_a_process_that_has_ended() -> None:
    """Whoever plans the next kill may do so just after a teller has ended: there is nobody to tell, and no failure."""
    ended = BankProcess("teller", "states", [], {})
    ended.reap()
    ended.allow(7)
    assert not ended.running
