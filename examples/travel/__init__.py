"""Trips: a saga over four services, each with a database of its own, and a fifth that owns it.

A travel agency books a flight, a hotel and a car, and then has the customer's bank pay for all three. Each of the four
may refuse; then the bookings before are cancelled. At the end all books are compared: each trip is booked and paid
for as a whole, or not at all. Run it in a checkout::

    python -m examples.travel                          # 300 trips
    python -m examples.travel --flows 60 --crash       # and processes are killed while they work
    python -m examples.travel --flows 2000 --crash

Read it in this order:

1. `message`: what the agency asks for.
2. `agency`: the saga, in a few lines, and what the agency writes down of each trip.
3. `vendors`: the airline, the hotels and the cars: plain consumers that answer or refuse.
4. `bank`: the same for money.
5. `books`: the books of all of them at the end, and their faults.
6. `demo`, `processes`, `worker`: the run.
"""
