"""Rows on other hosts, over Arrow Flight: the client's store, the server, and what travels between them."""
