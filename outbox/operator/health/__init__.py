"""How things stand and what is wrong: rules that the doctor, the overview, the metrics and the statistics share."""
