"""The doctor: says in sentences what is wrong with an outbox and its database, and how to mend it.

::

    from outbox import doctor

    report = doctor.examine(outbox.engine, outbox.settings, outbox.checkers)
    for finding in report.findings:
        print(finding.sentence, finding.mend)

It only reads, looks at a bounded part of everything, gives each statement little time, and works through a transaction
pooler; so it may be asked at any time. A look that fails or isn't permitted says so and stops no other.
"""

from outbox.operator.health.doctor.examine import examine, read_settings
from outbox.operator.health.doctor.patient import Limits
from outbox.operator.health.doctor.report import Finding, Looked, Outcome, Report, Severity

__all__ = ["Finding", "Limits", "Looked", "Outcome", "Report", "Severity", "examine", "read_settings"]
