"""The conformance suite: what RocketMQ's clients, of four languages and by hand, see of a server.

The checks are in `checks`; ``python -m tests.rocketmq.conformance.table`` writes docs/rocketmq-conformance.md.
"""
