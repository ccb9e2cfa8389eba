"""What operators see and do: one service layer under the console's pages, its HTTP endpoints and the command line.

`Admin` is the way in. It works over one or more databases, each the producer's or the consumer's or both, and needs
no code of the application: what does (compensations, checkers) is ordered here and run by a worker.
"""
