"""The reconciliation that never ends: it follows the log pass by pass, and tells what differs and what is mended."""
