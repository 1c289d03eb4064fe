"""Stories: small runs, word by word and block by block, as a page and as text."""
