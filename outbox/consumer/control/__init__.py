"""What holds a group back while it runs: a pause, a rate over all workers, and a breaker."""
