"""Stories: small runs described in TOML files, with words for tokens."""
