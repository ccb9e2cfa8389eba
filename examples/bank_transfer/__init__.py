"""Two banks, a database each: money that leaves the one arrives in the other exactly once.

Bank A takes payment orders. A transfer debits the sender and tells bank B, which credits the receiver. There
is no transaction across the two databases, and every process may die at any moment. Run it::

    python -m examples.bank_transfer                # in a checkout; or: outbox demo
    python -m examples.bank_transfer --crash        # the same, with processes killed at random

Read it in this order:

1. `message`: what bank A tells bank B.
2. `bank_a`: the producer. One decorated function debits the sender and sends the message, both or neither.
3. `bank_b`: the consumer. One handler credits the receiver, once.
4. `teller` and `worker`: the two kinds of processes, a few lines each.
5. `audit`: how to prove that not a cent is missing.

The rest makes a demo of it: `orders`, `source` and `opening` say which orders there are and what the accounts
begin with; `workday`, `staff`, `lifeline` and `monkey` start, watch, kill and restart the processes; `report`
prints what came out; `demo` is the table of contents.
"""
