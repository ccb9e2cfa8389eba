"""The report of a reconciliation: a terminal's tables, JSON, an HTML page and Prometheus' text, all of one result.

`text.print_report`, `as_json.as_json`, `html.write_html`, `prometheus.write_prometheus`; what they say of a kind and of
a finding comes from `sentences`, and what they count from `facts`.
"""
