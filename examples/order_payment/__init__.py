"""Orders and accounts: a user pays in one service; in another the order is marked as paid and the enterprise credited.

The account service and the order service have a database each. Paying debits the user and tells the order service.
Each minute a scheduler asks the order service, by HTTP, what became of the messages: it brings its own states to those
of the other side, sends lost messages again, and gives up after a while. A payment that can't be settled is rolled
back: by itself when it is parked, by an operator when it was given up; the user has the money back. Run it in a
checkout::

    python -m examples.order_payment                    # minutes of one second
    python -m examples.order_payment --minute 5 --log   # slower, and both services say what fails
    python -m examples.order_payment --engine spark     # compared by Spark at the end

It prints the states of all messages over time. Read it in this order:

1. `message`: what the account service tells the order service.
2. `account_service`: the producer. One decorated function debits the user and sends the message, both or neither; one
   is told that a message was consumed, another gives the money back.
3. `order_service`: the consumer. One handler settles the order, once; its inbox is asked by HTTP.
4. `accidents`: how the order service loses messages.
5. `timeline`: the states of both sides, as their tables have them.
6. `comparison`: the reconciliation of the two services, declared.
7. `demo`: from end to end.
"""
