"""Faults on purpose: what breaks an exchange with the store, and the ledger that must hold all the same."""
