"""The server's hard state: tasks, sessions, attempts, nodes and undelivered callbacks, in SQL."""
