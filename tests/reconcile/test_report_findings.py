"""The differences of a run as a table and as Parquet files by day."""

from __future__ import annotations

import datetime as dt
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from outbox.reconcile.job import KINDS, Outcome, Pair, Repair
from outbox.reconcile.report import FINDINGS, findings_of, write_findings
from outbox.reconcile.rows import JobResult, to_findings
from outbox.reconcile.run import reconcile
from outbox.reconcile.tables import InboxState
from tests.reconcile.report_samples import NOW, RUN, every_kind, job, pair_result, whole
from tests.reconcile.town import IN_SYNC, Town, fate


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a data set, as any reader of Hive's layout has them."""
    table = ds.dataset(folder, partitioning="hive").to_table()
    rows: list[dict[str, Any]] = table.sort_by([("run", "ascending"), ("message_id", "ascending")]).to_pylist()
    return rows


def run_of(number: int, *rows: dict[str, Any], day: int = 0) -> JobResult:
    """Return the result of a run of its own, which began so many days after `NOW`."""
    result = pair_result(rows)
    return job([replace(result, run_id=UUID(int=RUN.int + number), begun_at=NOW + dt.timedelta(days=day))])


def test_numbers_have_names() -> None:
    """Each kind is there with what either side says of it, in words; what came of a repair too."""
    result = whole()
    table = findings_of(result)
    assert table.schema == FINDINGS
    rows = table.to_pylist()
    found = list(to_findings(result.pairs[0].findings))
    assert [row["message_id"] for row in rows] == [str(each.id) for each in found]
    assert [row["kind"] for row in rows] == [each.outcome.label for each in found]
    for name in ("state", "status", "torn"):
        numbers = [getattr(each, name) for each in found]
        assert [row[name] for row in rows] == [None if number is None else number.name.lower() for number in numbers]
    for name in ("sends", "queue", "position", "at", "effects", "attempts", "changed_at"):
        assert [row[name] for row in rows] == [getattr(each, name) for each in found]
    missing = [(row["action"], row["result"]) for row in rows if row["kind"] == "missing"]
    assert sorted(missing) == [("resend", "done"), ("resend", "healed"), ("resend", "somebody else holds its row")]
    assert {row["result"] for row in rows if row["kind"] == "phantom"} == {None}
    assert {(row["topic"], row["group"], row["run"]) for row in rows} == {("orders", "billing", str(RUN))}


def test_the_policy_is_that_of_the_run() -> None:
    """``action`` is what this run does about a kind."""
    result = replace(run_of(0, *every_kind()), policy={Outcome.PARKED: Repair.RETRY})
    actions = {row["kind"]: row["action"] for row in findings_of(result).to_pylist()}
    assert actions == {kind.label: kind.repair(result.policy).value for kind in KINDS}


def test_runs_are_files_of_their_day(tmp_path: Path) -> None:
    """Several nights and pairs make one data set; one that found nothing is there too; a rerun replaces its own."""
    rows = every_kind()
    for result in (run_of(1, *rows), run_of(2, rows[0], day=1), run_of(3, day=1), run_of(1, *rows[:2])):
        write_findings(tmp_path / "lake", result)
    files = sorted(str(path.relative_to(tmp_path / "lake")) for path in tmp_path.rglob("*.parquet"))
    assert files == [
        f"day={day}/{UUID(int=RUN.int + number)}.parquet"
        for day, number in (("2026-03-14", 1), ("2026-03-15", 2), ("2026-03-15", 3))
    ]
    assert [(row["run"][-4:], str(row["day"])) for row in read(tmp_path / "lake")] == [
        (str(UUID(int=RUN.int + 1))[-4:], "2026-03-14"),
        (str(UUID(int=RUN.int + 1))[-4:], "2026-03-14"),
        (str(UUID(int=RUN.int + 2))[-4:], "2026-03-15"),
    ]
    empty = pq.read_table(tmp_path / "lake" / files[2], partitioning=None)
    assert empty.schema.remove_metadata() == FINDINGS
    assert empty.num_rows == 0


def test_a_file_says_what_it_leaves_out(tmp_path: Path) -> None:
    """What ``max_findings`` doesn't let be listed is counted in the file."""
    result = run_of(1, *every_kind())
    result.pairs[0].left_out = 17
    write_findings(tmp_path, result)
    (path,) = tmp_path.rglob("*.parquet")
    facts = json.loads(pq.read_schema(path).metadata[b"outbox"])
    assert facts["left_out"] == 17
    assert facts["counts"]["torn"] == 1
    assert facts["since"] == "2026-03-13T02:00:00+00:00"


def test_nothing_half_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a write breaks off, the file of before is there, or none, and nothing beside it."""
    write_findings(tmp_path, run_of(1, *every_kind()))
    before = read(tmp_path)

    def full(file: int) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for number in (1, 2):
            with pytest.raises(OSError, match="No space"):
                write_findings(tmp_path, run_of(number))
    assert read(tmp_path) == before
    assert [path.name for path in tmp_path.rglob(".*")] == []


def test_a_real_run(town: Town, tmp_path: Path) -> None:
    """What is planted comes out, before and after its repair."""
    _, missing = town.plant([IN_SYNC, fate(status=InboxState.NONE)])
    town.plant([IN_SYNC], topic="u")
    result = reconcile(town.job(Pair("t", "g"), Pair("u", "g"), apply=True))
    write_findings(tmp_path, result)
    (row,) = read(tmp_path)
    assert (row["message_id"], row["kind"], row["action"], row["result"]) == (str(missing), "missing", "resend", "done")
    assert str(row["day"]) == str(result.begun_at.date())
    assert len(list(tmp_path.rglob("*.parquet"))) == 2
