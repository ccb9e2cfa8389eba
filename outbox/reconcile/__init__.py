"""Reconcile the message tables of producer and consumers: compare, classify, repair, report (extra ``reconcile``)."""
