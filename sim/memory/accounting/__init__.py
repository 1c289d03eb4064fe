"""The ledger: every slot in one bucket at every moment, and exact integrals over it."""
