"""Dispatch: turn committed ops into messages, in commit order."""
