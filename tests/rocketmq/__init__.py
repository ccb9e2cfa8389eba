"""RocketMQ's clients: the official ones, unmodified, against our server and, where asked for, the real one."""
