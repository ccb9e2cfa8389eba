"""Where reports go: paths and URLs, at once and whole, and without a secret in what names them."""

from __future__ import annotations

import re
from pathlib import Path

import fsspec
import pyarrow.dataset as ds
import pytest
from pyarrow import fs

from outbox.cli.output import Code
from outbox.destination import Destination, Remote, destination, whole_at
from outbox.errors import InvalidSettings
from outbox.reconcile.report import write_findings
from outbox.reconcile.report.html import write_html
from outbox.reconcile.report.prometheus import write_prometheus
from tests.cli.conftest import run_cli
from tests.reconcile.report_samples import job, whole


@pytest.fixture(params=["path", "file", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Destination:
    """A folder that isn't there yet: of this host by its path and by a URL, and of one that fsspec alone knows."""
    if request.param == "memory":
        return destination(f"memory://{tmp_path.name}/reports")
    return destination(str(tmp_path / "reports") if request.param == "path" else f"file://{tmp_path}/reports")


def found(folder: Destination) -> list[str]:
    """Return the names of the files in a folder."""
    if isinstance(folder, Path):
        return sorted(each.name for each in folder.rglob("*") if each.is_file())
    system, path = folder.opened()
    return sorted(
        each.base_name for each in system.get_file_info(fs.FileSelector(path, recursive=True)) if each.is_file
    )


def test_all_forms_are_written(folder: Destination) -> None:
    """A page, gauges and findings; what is there is replaced."""
    result = job(whole().pairs[:1])
    for _ in range(2):
        write_html(folder / "page.html", result)
        write_prometheus(folder / "run.prom", result)
        write_findings(folder / "findings", result)
    names = found(folder)
    assert {"page.html", "run.prom"} <= set(names)
    assert len(names) == 3
    base, system = (str(folder), None) if isinstance(folder, Path) else folder.opened()[::-1]
    rows = ds.dataset(f"{base}/findings", filesystem=system, partitioning="hive").to_table()
    assert rows.num_rows == result.pairs[0].findings.num_rows > 0


def test_nothing_half_written_is_there(folder: Destination) -> None:
    """A writer that breaks off leaves the file of before, and nothing beside it."""
    with whole_at(folder / "a") as file:
        file.write(b"before")
    with pytest.raises(RuntimeError, match="broke off"), whole_at(folder / "a") as file:
        file.write(b"half")
        raise RuntimeError("broke off")
    assert found(folder) == ["a"]
    if isinstance(folder, Path):
        assert (folder / "a").read_bytes() == b"before"
    else:
        with fsspec.open(str(folder / "a")) as stream:
            assert stream.read() == b"before"


def test_a_name_goes_before_what_follows_a_question_mark() -> None:
    """pyarrow takes options of a store there."""
    found = Remote("s3://lake/nights/?region=eu-central-1") / "a.html"
    assert found.url == "s3://lake/nights/a.html?region=eu-central-1"
    assert str(found) == "s3://lake/nights/a.html"


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("nowhere://lake/x", "nowhere://lake/x: pyarrow can't write there, nor can fsspec: .*; mend: install fsspec"),
        ("s3://lake/x?secret_key=hush", r"^s3://lake/x: .*; write it as FileSystem\.from_uri of pyarrow reads it"),
    ],
)
def test_what_cannot_be_written_is_refused(url: str, error: str) -> None:
    """The error names the URL and the mend, without what may be a secret in it."""
    with pytest.raises(InvalidSettings, match=error) as raised:
        Remote(url).opened()
    assert "hush" not in str(raised.value)


def test_the_command_takes_urls() -> None:
    """What can't be written is told before anything is compared; a password is never shown."""
    databases = ("--producer", "postgresql:///a", "--consumer", "postgresql:///b")
    options = ("reconcile", *databases, "--topic", "t", "--group", "g")
    secret = run_cli(*options, "--html", "ftp://u:s3cret@host/x.html")
    assert secret.code == Code.USAGE
    assert "a URL without a password" in secret.err
    assert "s3cret" not in secret.out + secret.err
    nowhere = run_cli(*options, "--findings", "nowhere://lake/x")
    assert nowhere.code == Code.CONFIG, nowhere.err
    assert "mend: install fsspec" in re.sub(r"\s+", " ", nowhere.err)
