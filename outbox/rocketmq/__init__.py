"""RocketMQ's client protocol (apache.rocketmq.v2) over our tables."""
