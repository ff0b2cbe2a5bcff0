"""One loss curve: combinations of all features, generated from the capability table, against one process."""
