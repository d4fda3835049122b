"""What must not be lost: the record store, SQLite by default. Only the control plane writes here."""
