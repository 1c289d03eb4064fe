"""Who holds which slot."""
