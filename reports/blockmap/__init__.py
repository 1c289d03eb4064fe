"""The block map and the block tables of a request."""
