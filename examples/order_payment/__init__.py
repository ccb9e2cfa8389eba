"""Orders and balances: an order is placed in one service, its price moves from balance to balance in another.

The order service and the balance service have a database each. Placing an order tells the balance service to debit the
user's balance and credit the enterprise's. At the end both sides are compared: what was lost is resent, what
was only forgotten is written down again, and the sums are equal to the cent. Run it in a checkout::

    python -m examples.order_payment                    # compared in this process
    python -m examples.order_payment --engine spark     # compared by Spark
    python -m examples.order_payment --orders 2000 --seed 7

Read it in this order:

1. `message`: what the order service tells the balance service.
2. `order_service`: the producer. One decorated function places the order and sends the message, both or neither.
3. `balance_service`: the consumer. One handler moves the money, once; an order that the user can't pay is parked.
4. `accidents`: what may happen to tables in a bad night.
5. `comparison`: the reconciliation of the two services, declared; and what an operator does about the rest.
6. `demo`: the day from end to end.
"""
