"""Relays and intakes, on real servers.

Ways in which other outboxes, brokers and clients broke, and what holds each of them here: one resent behind later ones
of its key (`test_targets`: the order of keys, killed and back); one that takes its batch along (`test_kafka`: too
large); keys of another message (`test_targets`: what a message says); a publish that hangs, or times out and is stored
(`test_targets`: frozen, killed); no stream or no queue that looks like an outage (`test_targets`: nothing listens,
`test_rabbit`); a client that is of no use any more (`test_targets`: closed it opens again, `test_kafka`: killed); keys
elsewhere than other clients put them, and empty ones (`test_kafka`: keys go where other clients put them); unroutable
and lost (`test_rabbit`); dropped after some attempts, acknowledged late, or passed by the next acknowledgement
(`test_intake`: store first, an error comes behind what was taken); a duplicate that freezes a partition (`test_intake`:
what comes again is stored once); no id (`test_intake`: without ids); entries that a dead worker took (`test_intake`,
`test_via`); settled though the publish failed, or published by two (`test_via`); requests into one's own network
(`test_webhook`).
"""
