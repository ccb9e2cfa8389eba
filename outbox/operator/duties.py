"""What the database role of an operator does: look, order, move and delete groups and topics."""

from __future__ import annotations

from outbox.database.duty import COUNTED_CONSUMER, COUNTED_PRODUCER, Duty

DUTIES = (
    Duty(
        "look",
        "Shows what the console shows.",
        f"""
        producer: viewer operator admin
        {COUNTED_PRODUCER}
        SELECT ON audit bulk_job bulk_item worker stats_sample check_history compensation delivery_cursor half_error
        SELECT ON producer_process topic_pause
        consumer: viewer operator admin
        {COUNTED_CONSUMER}
        SELECT ON audit bulk_job bulk_item worker stats_sample attempt_history dead_letter_note reconciliation_finding
        SELECT ON segment_hold consumer_passage reread_message group_control
        """,
    ),
    Duty(
        "order",
        "Writes down what an operator orders.",
        """
        producer: operator admin
        INSERT ON audit half_message op_message
        INSERT UPDATE ON bulk_job bulk_item topic_pause
        USAGE ON op_sequence
        consumer: operator admin
        INSERT ON audit
        INSERT UPDATE ON bulk_job bulk_item group_control
        INSERT UPDATE DELETE ON dead_letter_note
        """,
    ),
    Duty(
        "groups",
        "Moves groups; deletes groups and topics.",
        """
        producer: admin
        DELETE ON message check_history delivery delivery_cursor half_error scheduled_message half_message topic_total
        DELETE ON topic topic_pause
        INSERT ON audit
        SELECT DELETE ON topic_growth
        UPDATE DELETE ON op_message
        consumer: admin
        DELETE ON group_control dead_letter_note consumer_message reread_message segment_hold log_loss
        SELECT DELETE ON rate_grant consumer_start reconciliation_settled reconciliation_mark
        INSERT ON audit
        INSERT UPDATE DELETE ON consumer_offset
        SELECT INSERT DELETE ON consumer_lease
        INSERT DELETE ON consumer_passage
        """,
    ),
)
