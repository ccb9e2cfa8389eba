"""Every order of two flows on a real PostgreSQL, with a kill and a lost connection at each point.

- `stepping`: a connection that stops before each statement that another flow could notice, and a flow in a thread.
- `explore`: all orders of the steps of some flows, without those that differ in nothing.
- `world`: the tables from which each order starts, and the passes that a system makes until nothing is left to do.
- `flows`: what may meet: send, prepare, decide, check, dispatch, consume, and so on.
- `oracle`: what must be true after any order.
- `weaver`: a world and an explorer on one database.
- `mutants`: rules taken out of the package one by one, each of which the exploration (or a test) must notice.

``python -m tests.interleave`` explores, ``python -m tests.interleave.mutants`` takes the rules out.
"""
