"""Two banks, a database each: money that leaves the one arrives in the other exactly once.

Bank A takes payment orders. A transfer debits the sender and informs bank B, which credits the receiver, or can't: then
the sender gets the money back. There is no transaction across the two databases, and every process may die at any
moment. Run it::

    python -m examples.bank_transfer                # in a checkout; or: outbox demo
    python -m examples.bank_transfer --crash        # processes are killed at random, accounts are closed in between
    python -m examples.bank_transfer --crash --two-phase    # half messages first; orphans are decided by a fence
    python -m examples.bank_transfer --crash --tcc          # try, confirm or cancel; a checker decides orphans
    python -m examples.bank_transfer --crash --faults       # tables damaged on purpose: all is found and mended
    python -m examples.bank_transfer --crash --via nats     # a broker between the banks, which is killed as well

At the end the tables of both banks are reconciled, by Spark if it is installed; ``--engine local`` does without a JVM.

Read it in this order:

1. `message`: what bank A announces to bank B.
2. `bank_a`: the producer. One decorated function debits the sender and sends the message, both or neither; another
   prepares the message first. `bank_a_tables` has the tables, and what it takes to book a transfer.
3. `bank_a_tcc`: the same by try, confirm or cancel, and the checker which decides halves left undecided.
4. `bank_b`: the consumer. One handler credits the receiver, once.
5. `bank_b_desk` and `bank_a_inquiry`: what bank A asks bank B before it debits. `bank_a_settlement`: how each transfer
   ends, as credited or refunded, without an operator.
6. `via`, `bank_a_via`, `bank_b_via` and `endpoint`: the same where neither bank can reach the other's database, by
   Kafka, RabbitMQ, NATS, Redis or webhooks. `exchange`, `brokers`, `destinations` and `proxy` run what is between them.
7. `teller` and `worker`: the two kinds of processes of which there are several, a few lines each.
8. `comparison` and `reconciliation`: what the two banks must agree on, declared; and how it is compared, repaired and
   compared again. `faults` has what may go wrong, `back_office` what only an operator can mend.
9. `audit`, `audit_via`, `states`, `halves` and `reservations`: how to prove that not a cent is missing, that every
   transfer ended as its state says, and that every half message was decided rightly. The audit trusts no other module,
   the reconciliation least of all.

The rest makes a demo of it: `orders`, `source` and `banks` say which orders there are and what the accounts begin with;
`workday`, `processes`, `lifeline` and `monkey` start, watch, kill and restart the processes; `report`, `report_halves`,
`report_via` and `report_reconciliation` print what came out; `demo` runs it all.
"""
