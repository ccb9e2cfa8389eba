"""Speak the protocol of RocketMQ 5: its own clients send to the tables, and receive from them."""
