"""Ranges cut by ranges, and tables of a side put together."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from outbox.reconcile.model import Range
from outbox.reconcile.rows import fixed_ids


def clipped(each: Range, within: Range) -> Range | None:
    """Return the part of a range that lies within another; None if there is none."""
    first = max(each.first, within.first)
    ends = [end for end in (each.end, within.end) if end is not None]
    end = min(ends, default=None)
    return Range(first, end) if end is None or first < end else None


def merged(counts: pa.Table, other: pa.Table) -> pa.Table:
    """Return the rows of two tables of a side, sorted by id; of an id that both have, the row of the first counts."""
    if not other.num_rows:
        return counts
    new = other.filter(pa.array(~np.isin(fixed_ids(other), fixed_ids(counts))))
    return pa.concat_tables([counts, new]).sort_by("id") if new.num_rows else counts
