"""Reports for people: the policy table in a terminal, and a self-contained HTML page to send to a colleague."""
